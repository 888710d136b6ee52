"""Running a reference for what it returns, not for the values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_memory(fake: bool) -> Iterator[str]:
    """Inside, tensors on the device that is given have no memory.

    Args:
        fake: as fake tensors on a CPU, whose first use imports torch._dynamo: 2 s; else as tensors
            on the device "meta".
    """
    if not fake:
        yield "meta"
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield "cpu"


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Inside, autograd saves tensors as they are: a trace is nothing that activation checkpointing,
    whose hooks they are, should know of. Nor has it values in which anomaly detection could look
    for NaN."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def tracing_lock() -> Iterator[None]:
    """Inside, no other thread traces: make_fx and Dynamo replace global functions while they run.

    It is the lock of torch.compile, which a thread may take again.
    """
    from torch._dynamo.convert_frame import compile_lock  # as fake tensors import it anyway

    with compile_lock:
        yield


def traces_here() -> bool:
    """Whether this thread holds that lock, here or within torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and dynamo.compile_lock._is_owned()
