"""Random functions of up to fifteen steps, fused for the CPU, against fp64."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given

from random_graphs import (
    KINDS_OF_STEPS,
    MANY_MOVES,
    MANY_VIEWS,
    MISFIT,
    RARE_STEPS,
    SMOOTH,
    Program,
    assert_empty_ones_right,
    both,
    forget,
    gradient_workload,
    gradients,
    is_misfit,
    programs,
    run_examples,
    workload,
)
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.errors import NoImplementation
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.tensor_spec import TensorSpec

DEVICE = dataclasses.replace(DEVICES["cpu"], threads=2)

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def verdict(program, workload=workload):
    w = workload(program)
    fused = IMPLS["fused"]
    assert fused.unsupported(w, DEVICE) is None, fused.unsupported(w, DEVICE)
    built = fused.build(fused.heuristic(w, DEVICE), w, DEVICE)
    return Verifier(w, torch.device("cpu")).check(built)


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget()


@pytest.mark.parametrize("kinds", [KINDS_OF_STEPS, MANY_MOVES, RARE_STEPS])
def test_random_graphs_give_what_fp64_gives(kinds):
    @given(programs(kinds=kinds))
    def check(program):
        found = verdict(program)
        assert found.ok, found.message

    run_examples(check, 25)


def test_random_graphs_with_views_give_what_fp64_gives():
    taken = 0

    @given(programs(kinds=MANY_VIEWS, most_steps=8))
    def check(program):
        nonlocal taken
        if is_misfit(IMPLS["fused"].unsupported(workload(program), DEVICE)):
            return
        found = verdict(program)
        assert found.ok, found.message
        taken += 1

    run_examples(check, 40)
    assert taken > 30


def test_gradients_of_random_views_are_autograds():
    taken = 0

    @given(programs(dtypes=("f64",), most_steps=5, kinds=MANY_VIEWS))
    def check(program):
        nonlocal taken
        w = workload(program)
        tensors = [t.requires_grad_() for t in w.operator.examples(w, "random", 0)]
        try:
            own, right = both(program, tensors)
            found = list(gradients(own, right, tensors))
        except NoImplementation as refused:
            if not re.search(rf"{MISFIT}|not used again|is empty", str(refused)):
                raise
            return
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)
        taken += 1

    run_examples(check, 25)
    assert taken > 15


def test_a_result_that_pytorch_lays_out_as_an_operand_is_right():
    across, along = TensorSpec("f32", (1, 2, 2), strides=(1, 1, 2)), TensorSpec("f32", (1, 1, 2))
    found = verdict(Program((along, across), (("lerp", (0, 1), ()),), (2, 0)))
    assert found.ok, found.message


def test_a_dim_that_others_are_dropped_or_kept_by_is_no_batch(caplog):
    squeezed = ("squeeze", (0,), (0,))
    found = verdict(Program((TensorSpec("f32", (2, 3, 3)),), (squeezed, ("mul", (1, 0), ())), (2,)))
    assert found.ok, found.message
    assert not caplog.records  # of what was tried in vain


def test_random_graphs_of_empty_tensors_give_what_pytorch_gives():
    assert_empty_ones_right(MANY_MOVES, "cpu", 60)


def test_random_graphs_with_rare_steps_of_empty_tensors_give_what_pytorch_gives():
    assert_empty_ones_right((*MANY_MOVES, "rare reduce", "rare binary"), "cpu", 60)


def test_what_an_earlier_kernel_left_of_rows_is_reduced_by_a_later_one():
    summed, spread = ("sum", (0,), (1,)), ("std", (1,), (0, 1))
    found = verdict(Program((TensorSpec("f32", (37, 17)),), (summed, spread), (2,)))
    assert found.ok, found.message


def test_gradients_of_random_graphs_are_autograds():
    @given(programs(dtypes=("f64",), most_steps=8, kinds=MANY_MOVES))
    def check(program):
        w = workload(program)
        tensors = [t.requires_grad_() for t in w.operator.examples(w, "random", 0)]
        own, right = both(program, tensors)
        for mine, theirs in zip(*gradients(own, right, tensors), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)

    run_examples(check, 12)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_gradients_of_random_graphs_are_as_good_as_pytorchs(dtype):
    @given(programs(dtypes=(dtype,), most_steps=8, kinds=MANY_MOVES, steps=SMOOTH))
    def check(program):
        found = verdict(program, gradient_workload)
        assert found.ok, found.message

    run_examples(check, 12)
