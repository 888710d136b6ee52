"""Who shares zeroed words: calls on a stream, and the launches that a capture has on a stream."""

import contextlib

import pytest
import torch

from tilewright.compile import cuda
from tilewright.compile.counters import COUNTERS, Counters
from tilewright.errors import LaunchError

A, B = 0x10, 0x20
"""Streams."""


class Device:
    """What of a GPU counters ask for, with memory of the host."""

    capture: int | None = None


@pytest.fixture
def device(monkeypatch):
    zeros = torch.zeros

    class Side:
        def __init__(self, device):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(Device, "capture", None)
    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *sizes, dtype, device: zeros(*sizes, dtype=dtype))
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: bool(Device.capture), raising=False
    )
    monkeypatch.setattr(cuda, "capture_id", lambda stream: Device.capture)
    return Device


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.setattr(Counters, "SLAB", 4 * COUNTERS)
    return Counters()


def words(address, count):
    return range(address, address + 4 * count, 4)


def test_launches_of_a_capture_on_one_stream_share_their_words_for_good(device, counters):
    called = counters.address(0, A, 8)
    assert counters.address(0, A, COUNTERS) == called
    found = {}
    for device.capture in (1, 2):
        for stream in (A, B):
            first = counters.address(0, stream, 3)
            assert all(counters.address(0, stream, n) == first for n in (1, 8, 8, 3))
            found[device.capture, stream] = set(words(first, 8))
    found["called"] = set(words(called, COUNTERS))
    assert len(set().union(*found.values())) == sum(map(len, found.values()))


def test_a_launch_that_counts_with_more_words_has_as_many(device, counters):
    counters.address(0, A, 1)
    device.capture = 1
    few, many = counters.address(0, A, 8), counters.address(0, A, 64)
    assert not set(words(few, 8)) & set(words(many, 64))
    assert counters.address(0, A, 8) == many


def test_captures_use_up_what_a_call_outside_refills(device, counters):
    counters.address(0, A, 1)
    for device.capture in (1, 2, 3):
        counters.address(0, A, COUNTERS)
    device.capture = 4
    with pytest.raises(LaunchError, match="call the operator once outside of capture"):
        counters.address(0, A, COUNTERS)
    device.capture = None
    counters.address(0, A, 1)
    device.capture = 9
    assert counters.address(0, A, COUNTERS)


def test_before_any_call_there_is_nothing_to_share(device, counters):
    device.capture = 1
    with pytest.raises(LaunchError, match="no zeroed counters are left"):
        counters.address(0, A, 8)
