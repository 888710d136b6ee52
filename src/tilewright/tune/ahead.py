"""Compiling ahead: binaries of the next candidates appear while earlier ones are verified."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import Compiled
from tilewright.compile.pool import CompilePool
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError
from tilewright.impl import Implementation
from tilewright.measure.candidate import Candidate
from tilewright.op import Workload

Built = tuple[Candidate, Compiled | CompileError | None]
"""A candidate and its binary; None where it compiles nothing beforehand."""

GROUP = 32
"""At most so many candidates are verified and timed in one request."""


def needed(
    implementation: Implementation, config: Any, w: Workload, device: DeviceSpec
) -> list[CompileTask]:
    """What is compiled of a config, then what runs before and after it."""
    own = implementation.task(config, w, device)
    return [own, *(t for t in implementation.tasks(config, w, device) if t != own)] if own else []


def code_of(binaries: Sequence[Compiled]) -> str:
    """The `code_hash` of what is measured: a binary's key, or a digest of several."""
    keys = [binary.key for binary in binaries]
    return keys[0] if len(keys) == 1 else hashlib.sha256(" ".join(keys).encode()).hexdigest()


def built(
    pool: CompilePool,
    candidates: Sequence[Candidate],
    tasks_of: Callable[[Candidate], Sequence[CompileTask]],
) -> Generator[Built, None, None]:
    """Each candidate once, as its compilation completes; equal tasks are compiled once.

    Args:
        tasks_of: all that a candidate needs; its binary is the first's, by the code of all.
    """
    known: dict[CompileTask, Compiled | CompileError] = {}
    waiting: dict[Candidate, Sequence[CompileTask]] = {}
    done: deque[Built] = deque()

    def tasks() -> Iterator[CompileTask]:
        for candidate in candidates:
            try:
                waiting[candidate] = tasks_of(candidate)
            except CompileError as error:
                done.append((candidate, error))
                continue
            yield from waiting[candidate]

    def complete() -> Iterator[Built]:
        for candidate, awaited in [*waiting.items()]:
            if all(task in known for task in awaited):
                del waiting[candidate]
                results = [known[task] for task in awaited]
                failed = [r for r in results if isinstance(r, CompileError)]
                binaries = [r for r in results if not isinstance(r, CompileError)]
                whole = replace(binaries[0], key=code_of(binaries)) if binaries else None
                yield candidate, failed[0] if failed else whole
        while done:
            yield done.popleft()

    for task, result in pool.compile(tasks()):
        known[task] = result
        yield from complete()
    yield from complete()


def grouped(items: Generator[Built, None, None], overlap: bool) -> Iterator[list[Built]]:
    """The items in groups, each as large as what is ready by then.

    Args:
        overlap: compile in the background while the caller uses a group. On a CPU that would
            time kernels against compilers, so there everything is compiled first.
    """
    if not overlap:
        everything = list(items)
        for i in range(0, len(everything), GROUP):
            yield everything[i : i + GROUP]
        return
    ready: queue.SimpleQueue[Built | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def drain() -> None:
        try:
            for item in items:
                ready.put(item)
                if stop.is_set():
                    break
            items.close()
            ready.put(None)
        except BaseException as error:  # handed over to the thread that asked
            ready.put(error)

    thread = threading.Thread(target=drain, name="tilewright-compile", daemon=True)
    thread.start()
    try:
        finished = False
        while not finished:
            group: list[Built] = []
            while not group or (len(group) < GROUP and not ready.empty()):
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    finished = True
                    break
                group.append(item)
            if group:
                yield group
    finally:
        stop.set()
        thread.join()
