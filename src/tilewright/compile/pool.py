"""Compiling many tasks at once, in processes that hold neither torch nor the caller's script."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tilewright.build import CompileTask, Effort
from tilewright.compile import together
from tilewright.compile.cache import Compiled, cached, compiled_together
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
_LINGER_S = 5.0
"""So long may NVRTC finish what nobody waits for any more. It mostly takes less than a second, and
a worker that is killed takes longer to start anew; its binary is in the cache for who asks next."""
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Else glibc gives memory back after each kernel, and the next one spends 3% on page faults."""


class CompilePool:
    """Worker processes that compile into the cache. A context manager; used by one thread.

    Workers start when there is something to compile and live until the pool closes. They are not
    forked and do not import the caller's main module, so a script needs no `__main__` guard.

    Args:
        jobs: compilers running at once; None for one per CPU that this process may run on.

    Attributes:
        effort: by compiler, of all that was asked for.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self.effort: dict[str, Effort] = {}
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Job] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop(list(self._busy.values()))
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
        queue = _Distinct(tasks)
        results: deque[Result] = deque()
        try:
            while True:
                results.extend(self._collect(queue, block=not results))
                results.extend(self._start(queue, room=self.jobs - len(results)))
                if results:
                    yield results.popleft()
                elif queue.first() is None and not any(j.wanted for j in self._busy.values()):
                    return
        finally:
            self._leave()

    def ahead(self, tasks: Iterable[CompileTask]) -> None:
        """Have free workers compile what `compile` will be asked for soon; returns at once.

        Only tasks of NVRTC, as many as there are workers: nothing else ends soon by itself.
        """
        queue = _Distinct(tasks)
        self._collect(queue, block=False)
        while len(self._busy) < self.jobs and (task := queue.take()):
            if task.compiler == "nvrtc" and not self._job_of(task) and not cached(task):
                self._give([task]).leave()

    def _start(self, queue: _Distinct, room: int) -> list[Result]:
        """Give free workers something to do; tasks found in the cache, at most about `room`."""
        found: list[Result] = []
        while len(found) <= room and (task := queue.first()):
            if job := self._job_of(task):
                job.want(task)
                queue.take()
            elif hit := cached(task):
                found.append((task, hit))
                queue.take()
            elif len(self._busy) < self.jobs:
                self._give(self._share(queue))
            else:
                break
        return found

    def _share(self, queue: _Distinct) -> list[CompileTask]:
        """What a free worker does next: one task, or several that are made in one go.

        The more were given out before, the more they are: whoever waits for the first has them
        soon. And no more than leave the other workers as much to do.
        """
        most = min(together.MOST, 1 + queue.given // self.jobs)
        waiting = queue.ahead(most * self.jobs)
        first, *others = waiting[: math.ceil(len(waiting) / self.jobs)]
        tasks = [first]
        if first not in queue.alone:
            joining = (task for task in others if together.may_join(first, task))
            tasks += [task for task in joining if not self._job_of(task) and not cached(task)]
        queue.give(tasks)
        return tasks

    def _job_of(self, task: CompileTask) -> _Job | None:
        return next((job for job in self._busy.values() if task in job.tasks), None)

    def _give(self, tasks: Sequence[CompileTask]) -> _Job:
        """Have a worker that is free, or a new one, begin some tasks."""
        worker = self._idle.pop() if self._idle else _Worker()
        try:
            worker.connection.send(tasks)
        except OSError:  # it died while idle
            _stop([worker])
            worker = _Worker()
            worker.connection.send(tasks)
        job = self._busy[worker.connection] = _Job(worker, tasks, set(tasks))
        return job

    def _collect(self, queue: _Distinct, block: bool) -> list[Result]:
        """What workers have finished; tasks of one that died in company come back to the queue."""
        results: list[Result] = []
        for connection in self._ready(block):
            assert isinstance(connection, Connection)
            job = self._busy.pop(connection)
            try:
                found, cpu_s = connection.recv()
            except (EOFError, OSError):
                cause = job.worker.cause_of_death(job.tasks[0])
                if len(job.tasks) > 1:  # any of them may be to blame
                    queue.put_back([task for task in job.tasks if task in job.wanted])
                    continue
                found = [cause]
            else:
                self._idle.append(job.worker)
                effort = self.effort.setdefault(job.compiler, Effort())
                effort.kernels += sum(isinstance(result, Compiled) for result in found)
                effort.cpu_s += cpu_s
            for task, result in zip(job.tasks, found, strict=True):
                if task not in job.wanted:
                    continue
                if not isinstance(result, Compiled | CompileError):
                    raise result
                results.append((task, result))
        return results

    def _ready(self, block: bool) -> list[Any]:
        """Workers that have answered; those whose time to linger is over are stopped."""
        if not self._busy:
            return []
        deadlines = [j.deadline_s for j in self._busy.values() if j.deadline_s is not None]
        left_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait(list(self._busy), left_s if block else 0)
        now_s = time.monotonic()
        self._stop([j for c, j in self._busy.items() if c not in ready and j.is_late(now_s)])
        return ready

    def _leave(self) -> None:
        """Nobody waits any more for what is under way."""
        others = []
        for job in self._busy.values():
            if job.compiler == "nvrtc":
                job.leave()
            else:
                others.append(job)
        self._stop(others)

    def _stop(self, jobs: list[_Job]) -> None:
        for job in jobs:
            del self._busy[job.worker.connection]
            if job.compiler == "nvrtc":  # deaf to SIGTERM, and without processes of its own
                job.worker.process.kill()
        _stop([job.worker for job in jobs])


@dataclass
class _Job:
    """What a worker does, and what of it somebody waits for: if nothing, until a deadline."""

    worker: _Worker
    tasks: Sequence[CompileTask]
    wanted: set[CompileTask]
    deadline_s: float | None = None

    @property
    def compiler(self) -> str:
        return self.tasks[0].compiler

    def want(self, task: CompileTask) -> None:
        self.wanted.add(task)
        self.deadline_s = None

    def leave(self) -> None:
        if self.wanted:
            self.wanted.clear()
            self.deadline_s = time.monotonic() + _LINGER_S

    def is_late(self, now_s: float) -> bool:
        return self.deadline_s is not None and now_s >= self.deadline_s


class _Worker:
    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(descriptor), json.dumps(list(map(str, sys.path)))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env={**os.environ, **_KEEP_MEMORY},
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


class _Distinct:
    """Each task once, in order; those to come can be looked at before they are given out.

    Attributes:
        given: how many were.
        alone: those that must not be made with others.
    """

    def __init__(self, tasks: Iterable[CompileTask]) -> None:
        self.given = 0
        self.alone: set[CompileTask] = set()
        self._rest = _distinct(tasks)
        self._ahead: deque[CompileTask] = deque()

    def ahead(self, most: int) -> list[CompileTask]:
        """The next ones, at most so many."""
        self._ahead.extend(itertools.islice(self._rest, max(most - len(self._ahead), 0)))
        return list(itertools.islice(self._ahead, most))

    def first(self) -> CompileTask | None:
        return next(iter(self.ahead(1)), None)

    def take(self) -> CompileTask | None:
        found = self.first()
        if found is not None:
            self._ahead.popleft()
        return found

    def give(self, tasks: Sequence[CompileTask]) -> None:
        self.given += len(tasks)
        self._ahead = deque(task for task in self._ahead if task not in tasks)

    def put_back(self, tasks: Sequence[CompileTask]) -> None:
        self.alone.update(tasks)
        self._ahead.extendleft(reversed(tasks))


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
            tasks = connection.recv()
        except (EOFError, OSError):
            return
        # The alarm's default action ends this process even while NVRTC holds it.
        limit_s = settings().compile_timeout_s * len(tasks)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
        before_s = _cpu_s()
        found: Sequence[Compiled | TilewrightError]
        try:
            found = compiled_together(tasks)
        except TilewrightError as error:
            found = [error] * len(tasks)
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send((found, _cpu_s() - before_s))
        except OSError:
            return


def _cpu_s() -> float:
    """Of this process and of the compilers that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)
