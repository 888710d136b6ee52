"""Running a reference for what it returns, not for the values."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_DYNAMO = "torch._dynamo.convert_frame"
_importing = threading.RLock()


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
    with fake_tensors():
        yield "cpu"


def fake_tensors(symbols: ShapeEnv | None = None) -> FakeTensorMode:
    """Inside, tensors that are made have no memory; their sizes may be of these symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _dynamo()
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)


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
    with _dynamo().compile_lock:
        yield


def without_compiled_autograd() -> contextlib.AbstractContextManager[None]:
    """Inside, gradients are taken by autograd itself: a trace is nothing for its compiler."""
    compiler = sys.modules.get(_COMPILED_AUTOGRAD)
    return contextlib.nullcontext() if compiler is None else compiler._disable()


def traces_here() -> bool:
    """Whether this thread holds that lock, here or within torch.compile."""
    lock = getattr(sys.modules.get(_DYNAMO), "compile_lock", None)  # it may be half imported
    return lock is not None and lock._is_owned()


def _dynamo() -> ModuleType:
    """The module with that lock, which fake tensors import, too: by one thread at a time, since its
    modules import one another, and two threads may get each other's half."""
    with _importing:
        return importlib.import_module(_DYNAMO)
