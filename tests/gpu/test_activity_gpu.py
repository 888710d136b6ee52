"""Kernels, copies and sets that the profiler counts on a GPU."""

import pytest
import torch

from tilewright.measure.activity import activity_of

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
