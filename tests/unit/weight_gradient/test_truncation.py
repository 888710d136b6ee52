"""The table of truncated sums says by how much results fall short of the truth."""

import pytest
import torch
from click.testing import CliRunner
from convolutions import weight_grad

import truncation
from tilewright.errors import InvalidArgument

LAYER = weight_grad("4,16,14,14", "4,32,14,14", "kernel_size=1")


def test_a_result_cut_off_falls_half_an_ulp_short_and_one_rounded_falls_nowhere():
    def rounded(*tensors):
        (truth,) = LAYER.operator.truth(LAYER, tensors)
        return truth.half()

    def cut_off(*tensors):
        found, (truth,) = rounded(*tensors), LAYER.operator.truth(LAYER, tensors)
        return torch.where(found > truth, torch.nextafter(found, torch.zeros_like(found)), found)

    short, even = truncation.shortfall([cut_off, rounded], LAYER, torch.device("cpu"))
    assert short[1] == pytest.approx(0.5, abs=0.1)
    assert abs(even[1]) < 0.1
    assert 2**-12 < short[0] < 2**-10


def test_a_row_has_both_results_as_parts_of_the_sum_and_in_ulps():
    done = CliRunner().invoke(truncation.main, ["--impl", "conv2d_weight_grad_f32", str(LAYER)])
    assert done.exit_code == 0, done.output
    header, _, row = (
        [c.strip() for c in line.split("|")[1:-1]] for line in done.output.splitlines()
    )
    assert header == ["workload", "own", "own, ulp", "PyTorch", "PyTorch, ulp"]
    assert row[0] == str(LAYER)
    assert all(abs(float(ulp)) < 0.5 for ulp in (row[2], row[4]))


def test_sums_that_the_dtype_does_not_hold_are_refused():
    large = weight_grad("32,1,64,64", "32,1,64,64", "kernel_size=1")
    with pytest.raises(InvalidArgument, match=r"float16 ends at 65504; take fewer pixels"):
        truncation.shortfall([], large, torch.device("cpu"))
