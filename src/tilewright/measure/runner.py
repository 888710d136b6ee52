"""Runners: who executes candidates, this process or an isolated one (from records: replay.py)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from typing import IO, Any, Protocol

from tilewright.errors import InvalidMeasurement, LaunchError, TilewrightError, WorkerDied
from tilewright.measure.activity import Activity
from tilewright.measure.candidate import (
    AsCalled,
    Candidate,
    Description,
    Limits,
    Outcome,
    WorkerHung,
)
from tilewright.measure.ceilings import Ceilings
from tilewright.measure.timing import Eager, Timing
from tilewright.measure.worker import BUILDING, OPENED, RUNNING, Workbench
from tilewright.op import Workload
from tilewright.registry import imported

OPEN_LIMIT_S = 600.0
"""Making inputs and the fp64 truth, or measuring the ceilings: slow, but no candidate's doing."""
BUILD_LIMIT_S = 900.0
"""Room for torch.compile's max-autotune; own compilers have settings().compile_timeout_s."""
RUN_LIMIT_S = 60.0
"""Verifying one candidate: several calls and comparisons of every element."""
_ATTRIBUTED = (LaunchError, InvalidMeasurement)
"""Failures while several candidates were timed together, of which one is to blame."""


class Runner(Protocol):
    """Executes requests about candidates of a workload on one device.

    Attributes:
        compiles: candidates are really built, so compiling them beforehand pays.
    """

    compiles: bool

    def describe(self) -> Description: ...

    def ceilings(self, method: str) -> Ceilings | None:
        """Measured rates of the device; None where nothing can be measured."""

    def prepare(self, w: Workload, method: str, seed: int = 0) -> Limits:
        """Make the workload's inputs and truth, and say what physics allows.

        Raises:
            LaunchError: the workload itself cannot be run here.
        """

    def verify(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        *,
        seed: int = 0,
        budget_s: float = math.inf,
    ) -> Iterator[tuple[Candidate, Outcome]]:
        """Build and verify each candidate in turn; those not begun within the budget are left out.

        Raises:
            WorkerDied: the workload itself (its inputs, the truth, the vendor) cannot be run.
        """

    def time(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        *,
        target: float = 0.01,
        budget_s: float = 2.0,
        min_rounds: int = 5,
    ) -> dict[Candidate, Timing | Outcome]:
        """Time the candidates in interleaved rounds; an Outcome stands for one that failed."""

    def eager(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Eager]:
        """What one eager call of each takes; empty where that is what was timed."""

    def public_eager(self, w: Workload, as_called: AsCalled, method: str) -> Eager | None:
        """What one call of the public operator takes; None where that is what was timed."""

    def activity(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Activity]:
        """Kernels, copies, sets and allocations of one call of each."""

    def close(self) -> None: ...


class _Device:
    """What the in-process and the isolated runner share: whose fault a failure was."""

    compiles = True

    def __init__(self, run_limit_s: float = RUN_LIMIT_S):
        self.run_limit_s = run_limit_s
        self._description: Description | None = None

    def _events(self, request: str, run_limit_s: float, **arguments: Any) -> Iterator[Any]:
        """Events of one request. Raises LaunchError; WorkerDied if the process is gone."""
        raise NotImplementedError

    def _ask(self, request: str, **arguments: Any) -> Any:
        raise NotImplementedError

    def _replace(self) -> None:
        """Give up the present process: it can run no further candidate."""

    def close(self) -> None:
        self._replace()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def describe(self) -> Description:
        if self._description is None:
            self._description = self._ask("describe")
        return self._description

    def ceilings(self, method: str) -> Ceilings | None:
        return self._ask("ceilings", method=method)

    def prepare(self, w: Workload, method: str, seed: int = 0) -> Limits:
        return self._ask("prepare", w=w, method=method, seed=seed)

    def verify(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        *,
        seed: int = 0,
        budget_s: float = math.inf,
    ) -> Iterator[tuple[Candidate, Outcome]]:
        pending = list(candidates)
        deadline = time.monotonic() + budget_s
        deaths_while_opening = 0
        while pending and (left_s := deadline - time.monotonic()) > 0:
            opened = False
            arguments = {"w": w, "candidates": tuple(pending), "seed": seed, "budget_s": left_s}
            try:
                for event in self._events("verify", self.run_limit_s, **arguments):
                    opened = opened or event == OPENED
                    if isinstance(event, Outcome):
                        yield pending.pop(0), event
                        if event.fatal:
                            self._replace()
                            break
                else:
                    return
            except WorkerDied as died:
                if opened:
                    yield pending.pop(0), Outcome.of_error(died)
                    continue
                deaths_while_opening += 1
                if deaths_while_opening == 2:
                    raise

    def time(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        *,
        target: float = 0.01,
        budget_s: float = 2.0,
        min_rounds: int = 5,
    ) -> dict[Candidate, Timing | Outcome]:
        found: dict[Candidate, Timing | Outcome] = {}
        if not candidates:
            return found
        try:
            found.update(self._time(w, candidates, method, target, budget_s, min_rounds))
        except _ATTRIBUTED as error:
            self._replace()
            guilty = self._guilty(w, candidates, method, error)
            middle = len(candidates) // 2
            rest = [[c for c in candidates if c not in guilty]]
            if not guilty:  # they fail only together: memory, most likely
                rest = [list(candidates[:middle]), list(candidates[middle:])]
            found.update(guilty)
            for part in rest:
                again = self.time(
                    w, part, method, target=target, budget_s=budget_s, min_rounds=min_rounds
                )
                found.update(again)
        return found

    def _guilty(
        self, w: Workload, candidates: Sequence[Candidate], method: str, error: TilewrightError
    ) -> dict[Candidate, Outcome]:
        """Which of the candidates that failed together fails, by bisection."""
        if len(candidates) == 1:
            return {candidates[0]: Outcome.of_error(error)}
        guilty: dict[Candidate, Outcome] = {}
        middle = len(candidates) // 2
        for half in (candidates[:middle], candidates[middle:]):
            try:
                self._time(w, half, method, target=1.0, budget_s=0.1, min_rounds=2)
            except _ATTRIBUTED as again:
                self._replace()
                guilty.update(self._guilty(w, half, method, again))
        return guilty

    def _time(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        target: float,
        budget_s: float,
        min_rounds: int,
    ) -> dict[Candidate, Timing]:
        *_, timings = self._events(
            "time",
            self.run_limit_s + 4 * budget_s,
            w=w,
            candidates=tuple(candidates),
            method=method,
            target=target,
            budget_s=budget_s,
            min_rounds=min_rounds,
        )
        return timings

    def eager(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Eager]:
        *_, found = self._events(
            "eager", self.run_limit_s, w=w, candidates=tuple(candidates), method=method
        )
        return found

    def public_eager(self, w: Workload, as_called: AsCalled, method: str) -> Eager | None:
        *_, found = self._events(
            "public_eager", self.run_limit_s, w=w, as_called=as_called, method=method
        )
        return found

    def activity(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Activity]:
        *_, found = self._events(
            "activity", self.run_limit_s, w=w, candidates=tuple(candidates), method=method
        )
        return found


class InProcess(_Device):
    """Runs candidates in this process, for tests: quick to start, and a crash of theirs is ours."""

    def __init__(self, device: str | None = None):
        super().__init__()
        self._bench = Workbench(device)

    def _events(self, request: str, run_limit_s: float, **arguments: Any) -> Iterator[Any]:
        try:
            yield from getattr(self._bench, request)(**arguments)
        except TilewrightError:
            raise
        except Exception as error:  # a candidate's own fault
            raise LaunchError(f"{type(error).__name__}: {error}") from error

    def _ask(self, request: str, **arguments: Any) -> Any:
        return getattr(self._bench, request)(**arguments)


class Isolated(_Device):
    """Runs candidates in a process of their own, replaced whenever it crashes or hangs.

    The process starts at the first request, so this one needs no CUDA context.

    Args:
        device: as `device.current_device` takes it.
        run_limit_s: a candidate that verifies or a round of timing that takes longer has hung.
    """

    def __init__(self, device: str | None = None, run_limit_s: float = RUN_LIMIT_S):
        super().__init__(run_limit_s)
        self._device = device
        self._process: subprocess.Popen | None = None
        self._log: IO[bytes] | None = None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _replace
        # Not multiprocessing's spawn: that would run the caller's main module a second time.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tilewright.measure.worker import serve; "
            f"serve({theirs.fileno()}, {self._device!r}, {imported!r})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )

    def _replace(self) -> None:
        if self._process is None:
            return
        assert self._log is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._log.close()
        self._process = None

    def _events(self, request: str, run_limit_s: float, **arguments: Any) -> Iterator[Any]:
        stage, limits = OPENED, {OPENED: OPEN_LIMIT_S, BUILDING: BUILD_LIMIT_S}
        self._send(request, arguments)
        finished = False
        try:
            while not finished:
                kind, item = self._receive(limits.get(stage, run_limit_s))
                finished = kind != "event"
                if kind == "error":
                    raise item
                if kind == "event":
                    stage = item if item in (BUILDING, RUNNING) else stage
                    yield item
        finally:
            if not finished:  # a half-read answer: nothing else can be asked on this connection
                self._replace()

    def _ask(self, request: str, **arguments: Any) -> Any:
        self._send(request, arguments)
        try:
            kind, item = self._receive(OPEN_LIMIT_S)
        except BaseException:
            self._replace()
            raise
        if kind == "error":
            raise item
        return item

    def _send(self, request: str, arguments: dict[str, Any]) -> None:
        if self._process is None:
            self._start()
        with contextlib.suppress(BrokenPipeError):  # _receive says how the process ended
            self._connection.send((request, arguments))

    def _receive(self, limit_s: float) -> tuple[str, Any]:
        assert self._process is not None
        deadline = time.monotonic() + limit_s
        # A crashed worker's own children may hold the pipe open, so its exit is looked for too.
        while not self._connection.poll(0.1):
            if self._process.poll() is not None and not self._connection.poll():
                raise WorkerDied(self._obituary())
            if time.monotonic() > deadline:
                raise WorkerHung(f"no answer within {limit_s:.0f} s; the process was killed")
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerDied(self._obituary()) from None

    def _obituary(self) -> str:
        assert self._process is not None
        assert self._log is not None
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the measuring process ended with {how}" + (f": {said[-1]}" if said else "")
