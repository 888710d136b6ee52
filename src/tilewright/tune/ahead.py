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
    tasks_of: Callable[[Candidate], Sequence[CompileTask]],
) -> Generator[Built, None, None]:
    """Each candidate once, as its compilation completes; equal tasks are compiled once.

    Args:
        tasks_of: all that a candidate needs; its binary is the first's.
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
        for candidate, needed in [*waiting.items()]:
            if all(task in known for task in needed):
                del waiting[candidate]
                results = [known[task] for task in needed]
                failed = (r for r in results if isinstance(r, CompileError))
                yield candidate, next(failed, results[0] if results else None)
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
