"""Compiling ahead: binaries of the next candidates appear while earlier ones are verified."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from tilewright.build import CompileTask
from tilewright.compile.cache import Compiled
from tilewright.compile.pool import CompilePool
from tilewright.errors import CompileError
from tilewright.measure.candidate import Candidate

Built = tuple[Candidate, Compiled | CompileError | None]
"""A candidate and its binary; None where it compiles nothing beforehand."""

GROUP = 32
"""At most so many candidates are verified and timed in one request."""


def built(
    pool: CompilePool,
    candidates: Sequence[Candidate],
    task_of: Callable[[Candidate], CompileTask | None],
) -> Generator[Built, None, None]:
    """Each candidate once, as its compilation completes; equal tasks are compiled once."""
    known: dict[CompileTask, Compiled | CompileError] = {}
    waiting: dict[CompileTask, list[Candidate]] = {}
    done: deque[Built] = deque()

    def tasks() -> Iterator[CompileTask]:
        for candidate in candidates:
            try:
                task = task_of(candidate)
            except CompileError as error:
                done.append((candidate, error))
                continue
            if task is None or task in known:
                done.append((candidate, known[task] if task else None))
                continue
            waiting.setdefault(task, []).append(candidate)
            yield task

    for task, result in pool.compile(tasks()):
        known[task] = result
        yield from [(candidate, result) for candidate in waiting.pop(task)]
        while done:
            yield done.popleft()
    yield from done


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
