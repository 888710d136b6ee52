"""Moments of parts of columns that blocks find, and what joins them, on a GPU."""

import random
from dataclasses import replace

import pytest

from moments_of_parts import (
    EQUAL_VALUES,
    FAR_COLUMNS,
    ROWS,
    assert_equal_values_right,
    assert_far_columns_right,
    assert_found_as_by_pytorch,
    deviations,
    extreme_columns,
    following_workloads,
    moments,
    workload,
)
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.tensor_spec import TensorSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgets_functions")]
FUSED = IMPLS["fused"]
ADDERS, MOST = 64, 14
"""Threads to each column, at least: one that adds up many in turn is less exact than PyTorch's. And
schedules to try."""


def in_parts(w, device):
    """By the first of the schedules by which blocks find moments of parts."""
    spec = spec_of(device.index)
    found = FUSED.promising(w, spec)
    config = next(c for c in found if c.splits > 1 and c.combine == "kernel")
    return config, FUSED.build(config, w, spec)


@pytest.mark.parametrize(("dtype", "centre", "spread"), FAR_COLUMNS)
def test_huge_means_cost_variances_nothing(dtype, centre, spread, device):
    w = workload(moments, TensorSpec(dtype, (ROWS, 40)))
    assert_far_columns_right(in_parts(w, device)[1], w, centre, spread, device)


@pytest.mark.parametrize("value", EQUAL_VALUES)
def test_deviations_of_equal_values_are_never_the_root_of_less_than_nothing(value, device):
    w = workload(deviations, TensorSpec("f32", (ROWS, 8)))
    assert_equal_values_right(in_parts(w, device)[1], value, device)


def test_infinities_and_squares_that_overflow_are_found_as_by_pytorch(device):
    x = extreme_columns()
    assert_found_as_by_pytorch(in_parts(workload(moments, TensorSpec.of(x)), device)[1], x, device)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_what_follows_from_moments_of_parts_is_verified(dtype, device):
    spec = spec_of(device.index)
    for w in following_workloads(dtype):
        config, executable = in_parts(w, device)
        verifier, space = Verifier(w, device), FUSED.space(w, spec)
        assert verifier.check(executable).ok
        others = [replace(config, splits=2**k) for k in range(1, 10)]
        others += space.sample(random.Random(dtype), 60)
        for c in [c for c in others if c in space and c.splits * c.shares >= ADDERS][:MOST]:
            found = verifier.check(FUSED.build(c, w, spec))
            assert found.ok, (c, found.message)
