"""What a reference and its bound say of results, where that is not plain."""

import pytest
import torch

import tilewright as tw
from tilewright.measure.verify import Verifier
from tilewright.op import OPS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.new_zeros(x.shape),
        torch.ones_like,
        lambda x: torch.full_like(x, 2),
        lambda x: torch.full(x.shape, 3, dtype=x.dtype),
    ],
)
def test_floats_written_over_whole_numbers_keep_their_fractions(fill, forgets_functions):
    def over(x):
        y = fill(x)
        y[:, 1:] = x[:, :-1].sin()
        return y

    tw.fuse(over, name="over")
    w, _ = OPS["over"].workload_of(torch.zeros(64, 100))
    verifier = Verifier(w, CPU)
    assert verifier.bound_ulp < 16
    assert verifier.check(over).ok
    assert "exceeds" in verifier.check(lambda x: over(x).trunc()).message


def test_what_follows_from_anything_is_anything(forgets_functions):
    """A table is asked at 5, give or take a rounding."""

    def looked_up(x, y):
        place = ((x.nan_to_num(0.0, 0.0, 0.0) * 0).sigmoid() * 10).floor().long()[:, :1]
        return 2 * y.gather(1, place)

    tw.fuse(looked_up, name="looked_up")
    w, _ = OPS["looked_up"].workload_of(torch.zeros(50, 10), torch.zeros(50, 10))
    assert Verifier(w, CPU).check(lambda x, y: 2 * y[:, 4:5]).message == ""


@pytest.mark.parametrize(
    "turned",
    [
        lambda x, y: torch.copysign(y, (x * 0.1) * 10 - x),
        lambda x, y: torch.atan2((x * 0.1) * 10 - x, -y.abs()),
    ],
)
def test_a_sign_that_rounding_decides_may_be_that_of_fp64(turned, forgets_functions):
    tw.fuse(turned, name="turned")
    w, _ = OPS["turned"].workload_of(torch.zeros(64, 51), torch.zeros(64, 51))
    in_fp64 = Verifier(w, CPU).check(lambda x, y: turned(x.double(), y.double()).float())
    assert in_fp64.message == ""


def test_rounding_may_turn_a_sign_that_decides(forgets_functions):
    def turned(x, y):
        return torch.copysign(y, (x * 0.1) * 10 - x)

    tw.fuse(turned, name="turned")
    w, _ = OPS["turned"].workload_of(torch.zeros(64, 51), torch.zeros(64, 51))

    def other_way(x, y):
        """With the sign that rounding of the opposite would give; where there is any rounding."""
        found = turned(x, y)
        return torch.where(x.isfinite() & (x != 0) & y.isfinite(), -found, found)

    assert Verifier(w, CPU).check(other_way).message == ""


def test_variances_of_fp32_need_not_be_as_good_as_those_pytorch_finds_in_fp64(forgets_functions):
    tw.fuse(lambda x: x.var(0), name="spread")
    w, _ = OPS["spread"].workload_of(torch.zeros(128, 64))
    verifier = Verifier(w, CPU)

    def in_fp32(x):
        return (x - x.mean(0)).square().cumsum(0)[-1] / 127

    assert verifier.check(in_fp32).message == ""
    assert "exceeds" in verifier.check(lambda x: in_fp32(x) * (1 + 2**-18)).message


@pytest.mark.parametrize("seed", range(3))
def test_errors_that_rows_share_count_against_pytorchs_largest_of_several_draws(
    seed, forgets_functions
):
    tw.fuse(lambda x: x / x.sum().abs(), name="shares")
    w, _ = OPS["shares"].workload_of(torch.zeros(37, 120))

    def by_columns(x):
        return x / x.sum(0).sum().abs()

    assert Verifier(w, CPU, seed).check(by_columns).message == ""
