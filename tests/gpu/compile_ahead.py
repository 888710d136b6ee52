"""Kernels of many configs compiled at once, before tests build one after the other."""

import fcntl
from collections.abc import Iterable

from tilewright.build import CompileTask
from tilewright.compile.pool import CompilePool
from tilewright.device import spec_of
from tilewright.settings import settings


def compile_ahead(impl, cases):
    """`cases`: (workload, config); what does not compile is left for its test to meet."""
    compile_all({impl.compile_key(c, w): impl.task(c, w, spec_of(0)) for w, c in cases}.values())


def compile_all(tasks: Iterable[CompileTask]):
    """By one of the processes that run tests side by side, whose work the others then find."""
    folder = settings().cache_dir
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compile_ahead.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with CompilePool() as pool:
            for _ in pool.compile(tasks):
                pass
