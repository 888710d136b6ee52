"""Kernels, copies and sets that the profiler counts on a GPU."""

from dataclasses import replace

import pytest
import torch

from tilewright.measure.activity import Activity, activities_of
from tilewright.measure.timing import eager

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_kernels_copies_and_sets_are_told_apart():
    x = torch.randn(1000, 1000, device="cuda")

    def call(t):
        copied = torch.empty_like(t)
        copied.copy_(t)
        return copied, torch.empty_like(t).zero_(), t.relu()

    (found,) = activities_of([call], [x])
    assert found.memcpys == 1
    assert found.kernels + found.memsets == 2  # zero_ is either
    assert found.allocations == 3


def test_a_copy_is_named_with_the_operator_that_launched_it():
    x = torch.randn(1000, 1000, device="cuda")

    def call(t):
        copied = torch.empty_like(t)
        with torch.profiler.record_function("a range of the program"):
            copied.copy_(t)
        return copied.relu()

    (found,) = activities_of([call], [x])
    assert (found.kernels, found.memcpys, found.memsets) == (1, 1, 0)
    copy, _ = found.names
    assert copy.startswith("Memcpy DtoD")
    assert copy.endswith(", aten::copy_")


def test_calls_that_share_a_profile_are_told_apart():
    x = torch.randn(1000, 1000, device="cuda")
    calls = [torch.relu, lambda t: t.clone(), lambda t: t.view(-1), lambda t: t.relu().neg()]
    found = [replace(a, names={}) for a in activities_of(calls, [x])]
    assert found == [
        Activity(1, 0, 0, 1),
        Activity(0, 1, 0, 1),
        Activity(0, 0, 0, 0),
        Activity(2, 0, 0, 2),
    ]


def test_calls_cost_the_host_no_more_after_one_was_profiled():
    x = torch.randn(1000, device="cuda")
    before = eager([lambda: torch.relu(x)], x.device).host_us
    activities_of([torch.relu], [x])
    assert eager([lambda: torch.relu(x)], x.device).host_us < 1.2 * before
