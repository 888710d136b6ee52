"""Kernels of many configs compiled at once, before tests build one after the other."""

import os

from tilewright.compile.pool import CompilePool
from tilewright.device import spec_of


def compile_ahead(impl, cases):
    """`cases`: (workload, config); what does not compile is left for its test to meet."""
    tasks = {impl.compile_key(c, w): impl.task(c, w, spec_of(0)) for w, c in cases}
    with CompilePool(min(len(tasks), len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.compile(tasks.values()):
            pass
