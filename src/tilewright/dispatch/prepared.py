"""What was prepared for calls that come again: keys of calls -> built implementations.

A key that is met for the first time is validated, a choice is made, the choice is built, and the
result is kept under the key. Threads that meet the same one wait until it is built; all other calls
run meanwhile. Nothing is built during CUDA graph capture, and what cannot be built or launched is
replaced by PyTorch's own kernel, with one warning.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_tracing

from tilewright.compile.cache import cached
from tilewright.dispatch import evidence, selection
from tilewright.dispatch.copies import of_copies
from tilewright.dispatch.deterministic import ByMode, races
from tilewright.dispatch.dumps import dump_built
from tilewright.dispatch.in_tuples import in_tuples
from tilewright.dispatch.keyed_locks import KeyedLocks
from tilewright.dispatch.pytorch import as_pytorch, with_own_memory
from tilewright.dispatch.ranges import in_range_after, in_range_first
from tilewright.dispatch.recent import Recent
from tilewright.dispatch.seeding import drawing, seeded
from tilewright.dispatch.selection import Choice, Forced
from tilewright.dispatch.slices import of_slices
from tilewright.errors import (
    CacheError,
    CompileError,
    IndexOutOfRange,
    InvalidArgument,
    SharedMemory,
    TilewrightError,
)
from tilewright.impl import IMPLS
from tilewright.impls._in_place import apart
from tilewright.impls._vendor import vendor
from tilewright.impls.indices._any_index import of_any_index
from tilewright.op import OPS, Op, Workload
from tilewright.settings import settings

MAX_KEYS = 4096
"""Prepared calls that an operator keeps; beyond, it starts afresh."""
HOT_CALLS = 3
"""Calls of a workload without a record of its own before anything is built for it: shapes that
appear once must not cost a compilation."""
FREE_COMPILATIONS = 32
"""Untuned binaries that an operator compiles on a device at first calls. Beyond, new shapes that
need another wait for HOT_CALLS, too, or take a kernel whose binaries serve any shape."""

Run = Callable[..., Any]
Built = tuple[Run, Choice]
Place = torch.device | tuple[torch.device, int]


def place_of(device: torch.device) -> Place:
    """Where a choice holds: records of a CPU are of a number of threads."""
    return (device, torch.get_num_threads()) if device.type == "cpu" else device


class State:
    """What is shared by every operator and thread; changes hold `lock`, which nobody holds for
    long: prepared calls take it, too.

    Attributes:
        building: what a thread chooses and builds, by the keys of `built`.
        generation: how often everything was forgotten. What was begun before is not kept.
        prepared: operator -> key of a call -> what runs it.
        recent: operator -> the same for calls that come again and again.
        built: what was built for a workload at a place; kept beside `prepared`, since many keys
            share one.
        calls: how often a workload without a record of its own came.
        given_up: workloads whose choice could not be built or launched.
        compiled: how many binaries first calls of an operator have compiled on a device.
        slowed: those of them that a person was told of.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.building = KeyedLocks()
        self.enabled = settings().enabled
        self.generation = 0
        self.prepared: dict[str, dict[tuple, Run]] = {}
        self.recent: dict[str, Recent] = {}
        self.built: dict[tuple[Workload, Place, Forced | None], Built] = {}
        self.calls: Counter[tuple] = Counter()
        self.given_up: set[tuple] = set()
        self.compiled: Counter[tuple[str, torch.device]] = Counter()
        self.slowed: set[tuple[str, torch.device]] = set()
        self.warned_of_capture = False

    def keep(self, op: str, prepared: dict[tuple, Run], generation: int) -> None:
        """Unless everything was forgotten since `generation`."""
        with self.lock:
            if generation == self.generation:
                if len(self.prepared[op]) >= MAX_KEYS:
                    self.prepared[op].clear()
                self.prepared[op].update(prepared)

    def keep_built(
        self, w: Workload, place: Place, forced: Forced | None, built: Built, since: int
    ) -> None:
        """Unless everything was forgotten since that generation."""
        with self.lock:
            if since == self.generation:
                if len(self.built) >= MAX_KEYS:
                    self.built.clear()
                self.built[w, place, forced] = built

    def count_call(self, where: tuple) -> int:
        """How often it came, this time included."""
        with self.lock:
            if len(self.calls) >= MAX_KEYS:
                self.calls.clear()
            self.calls[where] += 1
            return self.calls[where]

    def disown(self, op: str) -> None:
        """Leave an operator's prepared calls, which `forget` empties, to the function that has
        them: another one will be made under its name."""
        with self.lock:
            self.generation += 1
            self.prepared.pop(op, {}).clear()
            if op in self.recent:
                self.recent.pop(op).clear()
            for of in [of for of in self.compiled if of[0] == op]:
                del self.compiled[of]
                self.slowed.discard(of)

    def forget(self) -> None:
        with self.lock:
            self.generation += 1
            for prepared in self.prepared.values():
                prepared.clear()
            for recent in self.recent.values():
                recent.clear()
            self.built.clear()
            self.calls.clear()
            self.given_up.clear()


state = State()
OPS.when_removed(state.disown)


def enable() -> None:
    """Let operators run what the records speak for (the default, unless TILEWRIGHT_ENABLED=0)."""
    state.enabled = True
    state.forget()


def disable() -> None:
    """Let every operator of this package run PyTorch's own kernels, in this process."""
    state.enabled = False
    state.forget()


def reload_records(store: str | None = None) -> None:
    """Read the records again, as after tuning in another process.

    Args:
        store: SQLAlchemy URL, from now on; None for that of the settings.
    """
    evidence.forget_records(store)
    state.forget()


# --- the first call of a key -----------------------------------------------------------------


def first_call(
    op: Op,
    key: tuple | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    given: list[Tensor],
    forced: Forced | None,
) -> Any:
    """Validate, choose, build, run, and keep what was built for the next call with this key."""
    if not state.enabled or is_tracing():
        return as_pytorch(op, args, kwargs)
    if op.scalars and key is not None:
        rebound = state.prepared[op.name].get(_without_scalars(key))
        if rebound is not None:
            return rebound(args, kwargs, given, [k for k in key if type(k) is float])
    op.still_itself()
    generation = state.generation
    try:
        w, tensors = op.workload_of(*args, **kwargs)
        device = tensors[0].device
        if device.type not in ("cpu", "cuda"):
            return as_pytorch(op, args, kwargs)
        run, choice = _runnable(w, device, forced)
    except InvalidArgument:
        if op.fallback or (op.fused and not all(t.numel() for t in given)):
            return as_pytorch(op, args, kwargs)  # fake tensors refuse some that are empty
        raise
    op.still_itself()  # else another function may have been built in its place
    try:
        out = run(*tensors)
    except (IndexOutOfRange, SharedMemory):  # the caller's fault, not the kernel's
        raise
    except TilewrightError as error:
        if _ours_only(w, forced):
            raise
        run, choice = _give_up(w, device, error, generation)
        out = run(*tensors)
    if choice is not None and key is not None:
        names = [*op.parameters][: len(args)] + [op.aliases.get(n, n) for n in kwargs]
        by_name = dict(zip(names, (*args, *kwargs.values()), strict=True))
        state.keep(op.name, _prepare(w, device, key, by_name, run, choice), generation)
    return out


def _runnable(
    w: Workload, device: torch.device, forced: Forced | None
) -> tuple[Run, Choice | None]:
    """What to run now, and the choice behind it; None if the next call must choose again."""
    where = w, place_of(device), forced
    if (built := state.built.get(where)) is not None:
        return built
    with state.building.holding(where):
        built = state.built.get(where)  # maybe by whom we waited for
        return built or _chosen(w, device, forced)


def _chosen(w: Workload, device: torch.device, forced: Forced | None) -> tuple[Run, Choice | None]:
    generation = state.generation
    by_name = forced.implementation if forced else None
    given = None if by_name == "aten" else seeded(w, device)
    if given is not None:
        run, chosen = _runnable(given, device, forced)
        return drawing(run, given, device), chosen
    choice = selection.choose(w, device, forced)
    if choice.implementation == "aten":
        return _vendor(w, device), choice
    where = (evidence.same(w), device)
    if forced is None and where in state.given_up:
        return _unbuilt(w, device)
    waits, asked = selection.waits(w, device, choice), choice.source == "asked"
    at_once = asked or (choice.source == "ordered" and not waits)
    compiles = at_once and _compiles(w, device, choice)
    too_many = compiles and state.compiled[w.op, device] >= FREE_COMPILATIONS
    if too_many and asked:
        _warn_of_compilations(w, device)
    elif too_many:
        other = selection.of_any_shape(choice.copied or w, device)
        choice = replace(other, copied=choice.copied) if other else choice
    if (waits or (too_many and asked)) and state.count_call(where) < HOT_CALLS:
        return _unbuilt(w, device)[0], None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _warn_of_capture(w, choice)
        return _unbuilt(w, device)[0], None
    try:
        built = in_tuples(w, _build(w, device, choice)), choice
    except (TilewrightError, OSError) as error:
        if _ours_only(w, forced):
            raise
        return _give_up(w, device, error, generation)
    with state.lock:
        state.compiled[w.op, device] += compiles
    state.keep_built(w, place_of(device), forced, built, generation)
    return built


def _ours_only(w: Workload, forced: Forced | None) -> bool:
    """Whether a kernel that cannot be built or launched is an error, not a reason for PyTorch's."""
    return forced is not None or (w.operator.fused and not w.operator.fallback)


def _compiles(w: Workload, device: torch.device, choice: Choice) -> bool:
    """Whether building the choice runs a compiler: one binary serves many numbers of rows."""
    if choice.slices:
        return any(_compiles(s.workload, device, of_slice) for s, of_slice in choice.slices)
    spec, implementation = selection.device_spec_of(device), IMPLS[choice.implementation]
    try:
        tasks = implementation.tasks(choice.config, choice.copied or w, spec)
    except (CompileError, CacheError):
        return True
    return any(cached(task) is None for task in tasks)


def _build(w: Workload, device: torch.device, choice: Choice) -> Run:
    if choice.slices:
        runs = [_build(s.workload, device, of_slice) for s, of_slice in choice.slices]
        return of_slices(w, [s for s, _ in choice.slices], runs)
    if choice.copied is not None:
        run = _build(choice.copied, device, replace(choice, copied=None))
        return apart(w, of_copies(w, choice.copied, run))
    spec, implementation = selection.device_spec_of(device), IMPLS[choice.implementation]
    config = implementation.untuned(w, spec) if choice.untuned else choice.config
    if settings().show:
        dump_built(implementation, config, w, spec)
    if device.type == "cpu":
        run = implementation.build(config, w, spec)
        if implementation.keeps_promises:
            return run
        run = apart(w, run)
        if w.operator.indexed is None:
            return run
        return in_range_first(w, run)  # PyTorch's other kernels may read -1 as the last
    if implementation.races and choice.source != "explicit":
        asked = _build(w, device, replace(choice, source="explicit"))
        return _by_mode(w, device, asked, _unbuilt(w, device)[0], selection.choose, 0)
    with torch.cuda.device(device):
        executable = implementation.build(config, w, spec)
    run = executable if implementation.keeps_promises else apart(w, executable)
    if torch.cuda.device_count() == 1 or executable.any_device_current:
        return run

    def on_its_device(*tensors: Tensor, **scalars: Any) -> Any:
        if torch._C._cuda_getDevice() == device.index:
            return run(*tensors, **scalars)
        with torch.cuda.device(device):
            return run(*tensors, **scalars)

    return on_its_device


def _give_up(w: Workload, device: torch.device, error: Exception, since: int) -> Built:
    """Remember that the vendor runs this workload from now on, and say why.

    Args:
        since: the generation in which it was chosen.
    """
    warnings.warn(
        f"PyTorch's own kernel runs {w} on {device} from now on: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=6,
    )
    with state.lock:
        if since == state.generation:
            state.given_up.add((evidence.same(w), device))
            state.built.pop((w, place_of(device), None), None)
    return _unbuilt(w, device)


def _unbuilt(w: Workload, device: torch.device) -> Built:
    choice = selection.unbuilt(w, device)
    own = choice.implementation != "aten"
    if own:
        return in_tuples(w, _build(w, device, choice)), choice
    composed = w.operator.composed(w)
    return _with_own_memory(w, composed) if composed else _vendor(w, device), choice


def _vendor(w: Workload, device: torch.device) -> Run:
    """PyTorch's kernel, but one of ours where its deterministic mode asks for it."""
    if w.operator.indexed is None:
        return apart(w, _with_own_memory(w, vendor(w)))
    run = of_any_index(w) if w.operator.outlives_indices(device.type) else vendor(w)
    run = apart(w, run)
    if races(w, device):
        run = _by_mode(w, device, run, run, selection.deterministic, HOT_CALLS - 1)
    written = w.operator.destinations(w) and w.main.numel  # of an empty one there is nothing
    late = bool(written) or w.operator.indexed.unchecked
    if device.type == "cpu":
        return in_range_first(w, run) if late else in_range_after(w, run)
    return in_range_first(w, run) if settings().check_indices else run


def _with_own_memory(w: Workload, run: Run) -> Run:
    if not w.operator.fused:
        return run
    return lambda *tensors: with_own_memory(w.operator, tensors, run(*tensors))


def _by_mode(
    w: Workload,
    device: torch.device,
    run: Run,
    cold: Run,
    choose: Callable[[Workload, torch.device], Choice | None],
    cold_calls: int,
) -> Run:
    """`run`, but what `choose` finds under PyTorch's deterministic mode."""
    generation = state.generation

    def build() -> Run | None:
        choice = choose(w, device)
        try:
            if choice is None or choice.implementation == "aten":
                return None
            return _build(w, device, choice)
        except (TilewrightError, OSError) as error:
            _give_up(w, device, error, generation)
            return None

    return ByMode(run, cold, build, cold_calls)


def _warn_of_compilations(w: Workload, device: torch.device) -> None:
    with state.lock:
        told = (w.op, device) in state.slowed
        state.slowed.add((w.op, device))
    if not told:
        warnings.warn(
            f"{FREE_COMPILATIONS} kernels were compiled for calls of {w.op} on {device}: from now "
            f"on PyTorch runs each shape that needs another until it has come {HOT_CALLS} times, "
            f"as does {w}. Tune the shapes that matter (tilewright tune --import FILE), pad sizes "
            "to a few, or name numbers that change in tw.fuse(..., scalars=[...])",
            RuntimeWarning,
            stacklevel=6,
        )


def _warn_of_capture(w: Workload, choice: Choice) -> None:
    with state.lock:
        told, state.warned_of_capture = state.warned_of_capture, True
    if not told:
        warnings.warn(
            f"PyTorch's own kernel is captured for {w}: {choice.implementation} is not built yet, "
            "and nothing is built during CUDA graph capture; call it once before capturing",
            RuntimeWarning,
            stacklevel=6,
        )


def _prepare(
    w: Workload,
    device: torch.device,
    key: tuple,
    given: dict[str, Any],
    run: Run,
    choice: Choice,
) -> dict[tuple, Run]:
    """What to run for this key, on tensors in the caller's order, safe for all calls that have it.

    Where only numbers differ that kernels take at run time, a second, looser key serves.
    """
    is_vendor = choice.implementation == "aten"
    tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
    order = [[*tensors].index(n) for n in w.tensors]
    own = _reordered(run, order)
    prepared = {key: own}
    floats = [n for n, v in given.items() if type(v) is float]
    if w.scalars and floats == [*w.scalars]:
        if not is_vendor and IMPLS[choice.implementation].takes_scalars:
            prepared[_without_scalars(key)] = _with_scalars(w.operator, own)
        elif choice.source == "default" and not evidence.depends_on_scalars(w, device):
            prepared[_without_scalars(key)] = _with_scalars(w.operator, None)
    return prepared


def _reordered(run: Run, order: list[int]) -> Run:
    if order == sorted(order):
        return run
    return lambda *tensors, **scalars: run(*(tensors[i] for i in order), **scalars)


def _without_scalars(key: tuple) -> tuple:
    """The key of all calls that differ only in numbers; operators with `scalars` have no others."""
    return tuple(float if type(k) is float else k for k in key)


def _with_scalars(op: Op, own: Run | None) -> Run:
    """For another number of the same call: a kernel that takes it at run time, or PyTorch."""

    def call(
        args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor], scalars: list[float]
    ) -> Any:
        if own is None:
            return as_pytorch(op, args, kwargs)
        return own(*tensors, scalars=tuple(scalars))

    return call
