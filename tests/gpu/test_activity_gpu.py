"""Kernels, copies and sets that the profiler counts on a GPU."""

import pytest
import torch

from tilewright.measure.activity import activity_of
from tilewright.measure.timing import host_us

pytestmark = pytest.mark.gpu


def test_kernels_copies_and_sets_are_told_apart():
    x = torch.randn(1000, 1000, device="cuda")

    def call(t):
        copied = torch.empty_like(t)
        copied.copy_(t)
        return copied, torch.empty_like(t).zero_(), t.relu()

    found = activity_of(call, [x])
    assert found.memcpys == 1
    assert found.kernels + found.memsets == 2  # zero_ is either
    assert found.allocations == 3


def test_calls_cost_the_host_no_more_after_one_was_profiled():
    x = torch.randn(1000, device="cuda")
    before = host_us(torch.relu, [x], x.device)
    activity_of(torch.relu, [x])
    assert host_us(torch.relu, [x], x.device) < 1.2 * before
