"""Rows that hold NaN or infinity, or that do not vary, on both targets: CUDA kernels emulated."""

import pytest

from extreme_rows import (
    NORMS,
    ON_ROWS,
    assert_constant_rows_right,
    assert_least_probabilities_right,
    workload,
)
from extreme_rows import assert_rows_stay_by_themselves as assert_apart
from on_targets import TARGETS, executable
from tilewright.compile import cxx

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ON_ROWS)
def test_rows_of_nan_and_infinity_stay_by_themselves(name, target, dtype):
    w = workload(name, dtype)
    assert_apart(w, executable(target, w), "cpu")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NORMS)
def test_rows_that_do_not_vary_are_right(name, target, dtype):
    w = workload(name, dtype)
    assert_constant_rows_right(w, executable(target, w), "cpu")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("target", TARGETS)
def test_probabilities_that_are_no_normal_numbers_are_right(target, dtype):
    w = workload("softmax", dtype)
    assert_least_probabilities_right(w, executable(target, w), "cpu")
