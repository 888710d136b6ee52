"""The process that touches the device: it builds, verifies and times candidates when told to."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from tilewright.device import current_device
from tilewright.environment import environment
from tilewright.errors import LaunchError, TilewrightError
from tilewright.impl import IMPLS, OWN_BACKENDS, Executable
from tilewright.measure.activity import Activity, activities_of
from tilewright.measure.candidate import COPY, AsCalled, Candidate, Description, Limits, Outcome
from tilewright.measure.ceilings import Ceilings, hard_limit_us, measure_ceilings
from tilewright.measure.timing import (
    HOST_BESIDE_S,
    HOST_BRIEFLY_S,
    Eager,
    Timing,
    eager,
    inputs_for,
    time_interleaved,
    with_host,
)
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.registry import import_source
from tilewright.tensor_spec import HALVES

OPENED, BUILDING, RUNNING = "opened", "building", "running"
"""Events of a streamed answer: what the worker does from now on, so that a hang can be told."""

T = TypeVar("T")
EXECUTABLES_KEPT = 512
"""Built ones of a workload, of which each holds a loaded module of the device."""
DRAWS_OTHERWISE = "its masks come from PyTorch's generator, not from the seed: they are not ours"


class Workbench:
    """One device, and everything kept for the workload on it: inputs, truth, built executables.

    Methods that run candidates are generators of events; their last item is the answer.
    """

    def __init__(self, device: str | None = None):
        self._name, self.spec = current_device(device)
        self.device = torch.device(self._name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True
        self._ceilings: dict[str, Ceilings] = {}
        self._w: Workload | None = None
        self._inputs: dict[str, list[list[torch.Tensor]]] = {}
        self._verifiers: dict[int, Verifier] = {}
        self._executables: OrderedDict[Candidate, Executable] = OrderedDict()

    def describe(self) -> Description:
        return Description(self._name, self.spec, *environment(self.device))

    def ceilings(self, method: str) -> Ceilings:
        if method not in self._ceilings:
            quick = self.device.type == "cpu"
            self._ceilings[method] = measure_ceilings(self.device, method, quick=quick)
        return self._ceilings[method]

    def prepare(self, w: Workload, method: str, seed: int) -> Limits:
        """Make what every candidate of the workload needs: inputs, truth, ceilings."""
        self._open(w)
        self._verifier(seed)
        self._argument_sets(method)
        floor_us = self.ceilings(method).floor_us(w, self.spec)
        return Limits(floor_us, hard_limit_us(w, self.spec))

    def verify(
        self, w: Workload, candidates: Sequence[Candidate], seed: int, budget_s: float
    ) -> Iterator[str | Outcome]:
        """An Outcome for each candidate in order; none is begun once the budget is spent."""
        self._open(w)
        verifier = self._verifier(seed)
        deadline = time.monotonic() + budget_s
        yield OPENED
        for candidate in candidates:
            if time.monotonic() > deadline:
                return
            yield BUILDING
            start = time.perf_counter()
            try:
                executable = self._build(candidate)
                build_s = time.perf_counter() - start
                yield RUNNING
                if self._draws_otherwise(candidate):
                    yield Outcome("wrong_result", DRAWS_OTHERWISE, build_s=build_s)
                    continue
                verdict = verifier.check(executable, may_race=self._may_race(candidate))
                self._synchronize()
            except Exception as error:
                # Candidates are foreign code: whatever they raise is their outcome.
                self._executables.pop(candidate, None)
                yield Outcome.of_error(error, fatal=self._context_lost())
                continue
            yield Outcome(
                "ok" if verdict.ok else "wrong_result",
                verdict.message,
                verdict,
                executable.resources,
                executable.workspace_bytes,
                build_s,
            )

    def time(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        target: float,
        budget_s: float,
        min_rounds: int,
    ) -> Iterator[str | dict[Candidate, Timing]]:
        """Timings of all candidates, taken in interleaved rounds; by method "events", which is of
        eager calls, with the host's part beside them."""
        self._open(w)
        inputs = self._argument_sets(method)
        yield OPENED
        calls = {}
        for candidate in candidates:
            yield BUILDING
            calls[str(candidate)] = self._call(candidate)
        yield RUNNING
        timings = time_interleaved(
            calls,
            inputs,
            self.device,
            method,
            target=target,
            budget_s=budget_s,
            min_rounds=min_rounds,
        )
        if method == "events":
            for_s = HOST_BESIDE_S if budget_s else HOST_BRIEFLY_S
            for name, timing in timings.items():
                call = functools.partial(calls[name], *inputs[0])
                timings[name] = with_host(timing, call, self.device, for_s)
        yield {c: timings[str(c)] for c in candidates}

    def eager(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> Iterator[str | dict[Candidate, Eager]]:
        """What one eager call of each candidate takes.

        On a CPU that is what was timed: the answer is empty.
        """
        if self.device.type == "cpu":
            yield {}
            return
        device = self.device
        yield from self._of_all(
            w,
            candidates,
            method,
            lambda calls, sets: [
                eager([functools.partial(call, *tensors) for tensors in sets], device)
                for call in calls
            ],
        )

    def public_eager(
        self, w: Workload, as_called: AsCalled, method: str
    ) -> Iterator[str | Eager | None]:
        """What one call of the public operator takes; None on a CPU."""
        if self.device.type == "cpu":
            yield None
            return
        self._open(w)
        sets = self._argument_sets(method)
        yield OPENED
        yield BUILDING
        calls = as_called(w, sets)
        for _ in range(5):  # the first ones choose and build
            calls[0]()
        yield RUNNING
        yield eager(calls, self.device)

    def activity(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> Iterator[str | dict[Candidate, Activity]]:
        """What one call of each candidate makes the device do."""
        yield from self._of_all(
            w, candidates, method, lambda calls, sets: activities_of(calls, sets[0])
        )

    def _of_all(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        measured: Callable[[list[Callable[..., Any]], list[list[torch.Tensor]]], list[T]],
    ) -> Iterator[str | dict[Candidate, T]]:
        """What `measured` tells of the candidates' calls and their argument sets."""
        self._open(w)
        sets = self._argument_sets(method)
        yield OPENED
        calls = []
        for candidate in candidates:
            yield BUILDING
            calls.append(self._call(candidate))
        yield RUNNING
        yield dict(zip(candidates, measured(calls, sets), strict=True))

    def _open(self, w: Workload) -> None:
        if w == self._w:
            return
        self._w = w
        self._inputs.clear()
        self._verifiers.clear()
        self._executables.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            # TF32 has all bits of a half, whose fp32 result PyTorch computes from widened operands.
            tf32 = w.main.dtype in HALVES or dict(w.args).get("allow_tf32")
            torch.backends.cudnn.allow_tf32 = bool(tf32)

    def _argument_sets(self, method: str) -> list[list[torch.Tensor]]:
        assert self._w is not None
        if method not in self._inputs:
            self._inputs.clear()  # large workloads leave no room for two of them
            self._inputs[method] = inputs_for(self._w, self.device, method)
        return self._inputs[method]

    def _verifier(self, seed: int) -> Verifier:
        assert self._w is not None
        if seed not in self._verifiers:
            aten, vendor = IMPLS["aten"], None
            seeded = self._w.seed is not None  # then aten draws other masks
            if not seeded and aten.unsupported(self._w, self.spec) is None:
                vendor = self._build(Candidate.of("aten", aten.heuristic(self._w, self.spec)))
            self._verifiers.clear()
            self._verifiers[seed] = Verifier(self._w, self.device, seed, vendor=vendor)
        return self._verifiers[seed]

    def _build(self, candidate: Candidate) -> Executable:
        assert self._w is not None
        if candidate not in self._executables:
            config = candidate.resolve(self._w, self.spec)
            built = IMPLS[candidate.implementation].build(config, self._w, self.spec)
            self._executables[candidate] = built
            if len(self._executables) > EXECUTABLES_KEPT:
                self._executables.popitem(last=False)
        self._executables.move_to_end(candidate)
        return self._executables[candidate]

    def _draws_otherwise(self, candidate: Candidate) -> bool:
        assert self._w is not None
        own = IMPLS[candidate.implementation].backend in OWN_BACKENDS
        return self._w.seed is not None and not own

    def _may_race(self, candidate: Candidate) -> bool:
        """PyTorch's own kernels, whose bits users have today: those for repeated indices, and of
        other operators aten's, unless torch's flag asks for the same bits each time."""
        assert self._w is not None
        indexed = self._w.operator.indexed
        if indexed is None:
            asked = torch.are_deterministic_algorithms_enabled()
            return candidate.implementation == "aten" and not asked
        own = IMPLS[candidate.implementation].backend in OWN_BACKENDS
        return indexed.races and not own

    def _call(self, candidate: Candidate) -> Callable[..., Any]:
        return _copy_main if candidate == COPY else self._build(candidate)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _context_lost(self) -> bool:
        try:
            self._synchronize()
        except RuntimeError:
            return True
        return False


def _copy_main(main: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(main).copy_(main)


def serve(descriptor: int, device: str | None, sources: Sequence[str] = ()) -> None:
    """Answer requests (method of Workbench, arguments) from a connection until it closes.

    A person's `sources` (registry.import_source) are imported first: requests may name what they
    fuse.

    Each answer is a stream of ("event", item), then ("done", value) or ("error", exception).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    for source in sources:
        import_source(source)
    bench: Workbench | None = None
    # A parent that is gone leaves nobody to answer.
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = connection.recv()
            try:
                bench = bench or Workbench(device)
                answer = getattr(bench, method)(**arguments)
                if isinstance(answer, Iterator):
                    for item in answer:
                        connection.send(("event", item))
                    answer = None
            except TilewrightError as error:
                connection.send(("error", error))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                # A candidate's own fault while it was timed; the runner finds out whose.
                connection.send(("error", LaunchError(f"{type(error).__name__}: {error}")))
            else:
                connection.send(("done", answer))
