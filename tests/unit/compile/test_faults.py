"""An index out of range is told once, whatever was enqueued before; tests play the kernels."""

import contextlib
import ctypes

import pytest
import torch

import tilewright as tw
from tilewright.compile import cuda, faults
from tilewright.errors import IndexOutOfRange

BAD, GOOD = torch.tensor([False, True]), torch.tensor([False, False])


class Stream:
    capturing = False


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    """No fault was ever looked for; nothing is pinned."""
    monkeypatch.setattr(faults, "_words", None)
    monkeypatch.setattr(faults, "_captured", ctypes.c_int())
    monkeypatch.setattr(faults, "_called", ctypes.c_int())
    monkeypatch.setattr(faults, "_turn", 1)
    monkeypatch.setattr(faults, "_reported", {})
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Stream, "capturing", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Stream.capturing)
    monkeypatch.setattr(cuda, "capture_elsewhere_unharmed", contextlib.nullcontext)
    return Stream


def kernel_finds(address):
    ctypes.c_int.from_address(address).value = 1


def test_blocks_of_a_call_that_run_after_it_was_told_tell_nothing_more():
    first = faults.fault_address()
    kernel_finds(first)
    with pytest.raises(IndexOutOfRange, match="its write was skipped"):
        tw.check()
    kernel_finds(first)
    tw.check()
    second = faults.fault_address()
    assert second != first
    kernel_finds(second)
    with pytest.raises(IndexOutOfRange):
        faults.raise_fault()
    tw.check()


def test_words_are_taken_in_turn_and_are_clear_when_taken():
    addresses = []
    for _ in range(faults.WORDS):
        addresses.append(faults.fault_address())
        kernel_finds(addresses[-1])
        with pytest.raises(IndexOutOfRange):
            tw.check()
        for earlier in addresses:
            if earlier != faults.fault_address():
                kernel_finds(earlier)  # late
        tw.check()
    assert len(set(addresses)) == faults.WORDS - 1
    assert addresses[-1] == addresses[0]


def test_a_captured_launch_keeps_its_word_and_tells_at_each_replay(stream):
    stream.capturing = True
    captured = faults.fault_address()
    stream.capturing = False
    called = faults.fault_address()
    assert captured != called
    for address in (captured, called, captured, captured):
        kernel_finds(address)
        with pytest.raises(IndexOutOfRange):
            tw.check()
        tw.check()


def test_the_first_call_of_all_may_be_captured(stream, monkeypatch):
    relaxed = []

    @contextlib.contextmanager
    def relaxing():
        relaxed.append(True)
        yield
        relaxed.append(False)

    monkeypatch.setattr(cuda, "capture_elsewhere_unharmed", relaxing)
    stream.capturing = True
    faults.fault_address()
    assert relaxed == [True, False]


class Late:
    """The copies to host memory of reports, made when the test says so, as a stream does."""

    def __init__(self, monkeypatch):
        self.waiting = []
        copy = torch.Tensor.copy_
        monkeypatch.setattr(
            torch.Tensor,
            "copy_",
            lambda here, there, non_blocking=False: (
                self.waiting.append((here, there.clone())) if non_blocking else copy(here, there)
            ),
        )
        self._copy = copy

    def run(self, which=0):
        self._copy(*self.waiting.pop(which))


def test_what_pytorchs_operators_found_is_told_once_though_good_calls_came_between(monkeypatch):
    late = Late(monkeypatch)
    for outside in (GOOD, BAD, GOOD, GOOD):
        faults.report(outside)
    late.run()
    faults.raise_fault()
    late.run()
    with pytest.raises(IndexOutOfRange):
        faults.raise_fault()
    for _ in range(2):  # of good calls that were on their way
        late.run()
        faults.raise_fault()
    faults.report(BAD)
    faults.report(GOOD)
    late.run(1)
    with pytest.raises(IndexOutOfRange):
        faults.raise_fault()
    late.run()
    faults.raise_fault()


def test_a_copy_that_comes_late_hides_nothing_from_a_caller_who_waits(monkeypatch):
    late = Late(monkeypatch)
    faults.report(GOOD)
    faults.report(BAD)
    late.run(1)
    late.run()  # of the call before, on another stream
    faults.raise_fault()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(IndexOutOfRange):
        tw.check()
    tw.check()


def test_each_call_that_finds_one_is_told():
    for _ in range(3):
        faults.report(BAD)
        with pytest.raises(IndexOutOfRange):
            tw.check()
        tw.check()
