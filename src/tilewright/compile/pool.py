"""Compiling many tasks at once, in processes that hold neither torch nor the caller's script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait

from tilewright.build import CompileTask
from tilewright.compile.cache import Compiled, cached, compiled
from tilewright.errors import CompileError, CompileTimeout, TilewrightError
from tilewright.settings import settings

Result = tuple[CompileTask, Compiled | CompileError]

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tilewright.compile.pool import serve
serve(int(sys.argv[1]))
"""
_GRACE_S = 1.0
"""A compiler that is a process of its own is killed and reported by its worker before this ends."""


class CompilePool:
    """Worker processes that compile into the cache. A context manager; used by one thread.

    Workers start when there is something to compile and live until the pool closes. They are not
    forked and do not import the caller's main module, so a script needs no `__main__` guard.

    Args:
        jobs: compilers running at once; None for one per CPU that this process may run on.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, CompileTask]] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_busy()
        _stop(self._idle)
        self._idle.clear()

    def compile(self, tasks: Iterable[CompileTask]) -> Iterator[Result]:
        """Each distinct task with its result, as they complete; `tasks` may be a generator.

        Workers go on compiling while the caller uses a result. A task that the compiler rejects,
        that outlasts `settings().compile_timeout_s` (CompileTimeout), or that crashes its worker
        comes back with its CompileError; the rest are not affected.

        Raises:
            CacheError: the cache folder cannot be written.
        """
        queue = _distinct(tasks)
        results: deque[Result] = deque()
        try:
            while True:
                results.extend(self._collect(block=not results))
                results.extend(self._start(queue, room=self.jobs - len(results)))
                if results:
                    yield results.popleft()
                elif not self._busy:
                    return
        finally:
            self._stop_busy()

    def _start(self, queue: Iterator[CompileTask], room: int) -> list[Result]:
        """Give every free worker a task; tasks found in the cache, at most about `room`."""
        found: list[Result] = []
        while len(self._busy) < self.jobs and len(found) <= room:
            task = next(queue, None)
            if task is None:
                break
            if hit := cached(task):
                found.append((task, hit))
                continue
            worker = self._idle.pop() if self._idle else _Worker()
            try:
                worker.connection.send(task)
            except OSError:  # it died while idle
                _stop([worker])
                worker = _Worker()
                worker.connection.send(task)
            self._busy[worker.connection] = worker, task
        return found

    def _collect(self, block: bool) -> list[Result]:
        results: list[Result] = []
        ready = wait(list(self._busy), None if block else 0) if self._busy else []
        for connection in ready:
            assert isinstance(connection, Connection)
            worker, task = self._busy.pop(connection)
            try:
                result: Compiled | TilewrightError = connection.recv()
            except (EOFError, OSError):
                result = worker.cause_of_death(task)
            else:
                self._idle.append(worker)
            if isinstance(result, TilewrightError) and not isinstance(result, CompileError):
                raise result
            results.append((task, result))
        return results

    def _stop_busy(self) -> None:
        for worker, task in self._busy.values():
            if task.compiler == "nvrtc":  # deaf to SIGTERM, and without processes of its own
                worker.process.kill()
        _stop([worker for worker, _ in self._busy.values()])
        self._busy.clear()


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(descriptor), json.dumps(list(map(str, sys.path)))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the caller, who stops its workers
        )
        theirs.close()

    def cause_of_death(self, task: CompileTask) -> CompileError:
        self.connection.close()
        code = self.process.wait()
        if code == -signal.SIGALRM:
            return CompileTimeout(
                f"{task.compiler} was still compiling {task.entry} after "
                f"{settings().compile_timeout_s:g} s and was killed; "
                "TILEWRIGHT_COMPILE_TIMEOUT sets the limit in seconds"
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return CompileError(f"{task.compiler} crashed compiling {task.entry}: {how}")


def _stop(workers: Iterable[_Worker]) -> None:
    workers = list(workers)
    for worker in workers:
        worker.process.terminate()
        worker.connection.close()
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # deep inside NVRTC, where no signal handler runs
            worker.process.kill()
            worker.process.wait()


def _distinct(tasks: Iterable[CompileTask]) -> Iterator[CompileTask]:
    seen: set[CompileTask] = set()
    for task in tasks:
        if task not in seen:
            seen.add(task)
            yield task


def serve(descriptor: int) -> None:
    """What a worker process does: compile the tasks that arrive, until the caller is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    connection = Connection(descriptor)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        # The alarm's default action ends this process even while NVRTC holds it.
        signal.setitimer(signal.ITIMER_REAL, settings().compile_timeout_s + _GRACE_S)
        result: Compiled | TilewrightError
        try:
            result = compiled(task)
        except TilewrightError as error:
            result = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(result)
        except OSError:
            return
