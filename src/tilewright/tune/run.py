"""Tuning, benchmarking and verifying: what the command line and programs call."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.pool import CompilePool
from tilewright.device import DeviceSpec
from tilewright.errors import (
    CompileError,
    InvalidArgument,
    NoImplementation,
    StoreError,
    known_names,
)
from tilewright.impl import (
    IMPLS,
    LIBRARY_BACKENDS,
    OWN_BACKENDS,
    Implementation,
    implementations,
)
from tilewright.measure.candidate import AsCalled, Candidate
from tilewright.measure.runner import Isolated, Runner
from tilewright.measure.verify import Verdict
from tilewright.op import Workload
from tilewright.report import Report, Row
from tilewright.search import STRATEGIES, Budget, run_search
from tilewright.space import ConfigSpace
from tilewright.store import Store
from tilewright.text import duration_text
from tilewright.tune.choice import candidate_of, is_of_ours
from tilewright.tune.duel import VENDOR_STATUSES, duel
from tilewright.tune.progress import Progress
from tilewright.tune.rows import recorded_config, recorded_row
from tilewright.tune.session import Options, Session
from tilewright.tune.trial import Entry, Trial

SEARCH_SHARE = 0.65
"""Of a workload's budget; the rest is for thinning out the candidates and for the duel."""
FINALISTS = 3
"""Of each implementation, that fight the duel."""
HOPELESS = 2.0
"""Where several implementations serve a workload, those of ours whose heuristic's config takes this
many times as long as the best one's are not searched, and the row says so. Libraries always are: a
yardstick is what it can do, not what it does untuned."""
CHUNK = {"cpu": 8, "cuda": 128}
"""Configs compiled and verified at once. On a GPU compilers run beside the device and should never
wait; on a CPU the budget is looked at between chunks."""
STRATEGY = {"cpu": "hill_climb", "cuda": "evolve"}
"""By default; a CPU's budget allows some tens of configs, so it starts beside the heuristic's."""

NEIGHBOURS = 6
"""Recorded workloads whose winners a search starts from."""


def tune(
    workloads: Sequence[Workload],
    *,
    device: str | None = None,
    store: Store | None = None,
    strategy: str | None = None,
    budget_s: float | None = None,
    budget_configs: int | None = None,
    jobs: int | None = None,
    implementations: Collection[str] | None = None,
    params: Mapping[str, Sequence[Any]] | None = None,
    baselines: Collection[str] | None = None,
    method: str | None = None,
    seed: int = 0,
    force: bool = False,
    spilled: bool = False,
    progress: Progress | None = None,
    runner: Runner | None = None,
) -> Report:
    """Search, verify, measure and record; one row per workload.

    A workload whose latest duel still stands (same device, versions, method and code, and nothing
    left out of its search that would take part now) is not searched again. Ctrl-C ends the run with
    the rows so far; what was measured is recorded.

    Args:
        device: "cpu", "cuda", "cuda:1"; None for the GPU if there is one.
        store: None opens the one of the settings.
        strategy: a name in `search.STRATEGIES`.
        budget_s: seconds for all workloads together, compiling the baselines not counted.
        budget_configs: configs per workload and implementation.
        jobs: compilers at once; None for one per CPU.
        implementations: of our own, by name; None for all. Libraries with configs, such as CUTLASS,
            are baselines.
        params: knob -> the only values to try.
        baselines: besides aten, by name; None for all.
        method: "events" or "graph" on a GPU.
        seed: of examples and of the search.
        force: search again whatever is recorded.
        spilled: time configs that spill registers like all others.
        runner: None measures in an isolated process on `device`.

    Raises:
        InvalidArgument: an unknown device, strategy, implementation or knob; a baseline among the
            implementations; a workload that draws and has no seed.
        StoreError: the records cannot be read or written.
        CacheError: compiled code cannot be kept.
    """
    if strategy is not None:
        STRATEGIES[strategy]  # names an unknown one before anything starts
    options = Options(
        strategy,
        budget_s,
        budget_configs,
        implementations,
        baselines,
        params or {},
        seed,
        force,
        spilled,
    )
    return _run(tune_one, workloads, options, device, store, jobs, method, progress, runner)


def bench(
    workloads: Sequence[Workload],
    *,
    device: str | None = None,
    store: Store | None = None,
    budget_s: float | None = None,
    jobs: int | None = None,
    implementations: Collection[str] | None = None,
    baselines: Collection[str] | None = None,
    method: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    runner: Runner | None = None,
    as_called: AsCalled | None = None,
) -> Report:
    """Measure what selection takes, the heuristics' configs and every baseline; no search.

    Nothing is recorded: a bench looks at the records' choice, it does not make one. Arguments as
    in `tune`.

    Args:
        as_called: gives calls of a public operator: "public" in `host_us` and `eager_us`.
    """
    options = Options(
        budget_s=budget_s,
        implementations=implementations,
        baselines=baselines,
        seed=seed,
        recording=False,
        as_called=as_called,
    )
    return _run(bench_one, workloads, options, device, store, jobs, method, progress, runner)


def verify_all(
    workload: Workload,
    implementation: str | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    device: str | None = None,
    runner: Runner | None = None,
) -> list[tuple[str, dict[str, Any], Verdict]]:
    """Numerics of every implementation that supports the workload, or of one; no timing.

    Args:
        config: of `implementation`; knobs that it leaves out are the heuristic's.

    Returns:
        (implementation, config, verdict).

    Raises:
        InvalidArgument: an unknown implementation or knob, a config without implementation, or a
            workload that draws and has no seed.
        NoImplementation: the one asked for does not support the workload, or none does.
    """
    _refuse_unseeded(workload)
    if config and not implementation:
        raise InvalidArgument("a config belongs to one implementation: name it (--impl)")
    with contextlib.ExitStack() as stack:
        runner = runner or stack.enter_context(Isolated(device))
        spec = runner.describe().spec
        asked = [IMPLS[implementation]] if implementation else implementations(workload)
        reasons = unsupporting(asked, workload, spec)
        supported = [i for i in asked if i.name not in reasons]
        if not supported:
            lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
            raise NoImplementation(f"no implementation of {workload} on {spec.name}:{lines}")
        candidates = [
            Candidate.of(i.name, i.completed(config or {}, workload, spec)) for i in supported
        ]
        found = []
        for candidate, outcome in runner.verify(workload, candidates, seed=seed):
            verdict = outcome.verdict or Verdict.not_run(outcome.message)
            found.append((candidate.implementation, candidate.values, verdict))
        return found


def unsupporting(asked: Iterable[Implementation], w: Workload, spec: DeviceSpec) -> dict[str, str]:
    """Those that cannot be verified on a workload, with the reason in words."""
    reasons = {i.name: _why_not(i, w, spec) for i in asked}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _refuse_unseeded(w: Workload) -> None:
    """Raises InvalidArgument for what draws and has no seed: its masks could not be verified."""
    if w.operator.draws(w):
        raise InvalidArgument(
            f"{w}: it draws masks, which follow from a seed where they are verified; "
            f"write {w.with_seed()}"
        )


def _why_not(implementation: Implementation, w: Workload, spec: DeviceSpec) -> str | None:
    if not implementation.serves(w.op):
        return f"it computes {', '.join(implementation.operators or ())}"
    if w.seed is not None and implementation.backend not in OWN_BACKENDS:
        return "its masks come from PyTorch's generator, not from the seed"
    return implementation.unsupported(w, spec)


def _run(
    one: Callable[[Session, Workload], Row],
    workloads: Sequence[Workload],
    options: Options,
    device: str | None,
    store: Store | None,
    jobs: int | None,
    method: str | None,
    progress: Progress | None,
    runner: Runner | None,
) -> Report:
    for w in workloads:  # before anything starts
        _refuse_unseeded(w)
    for name in options.implementations or ():
        if IMPLS[name].backend not in (*OWN_BACKENDS, *LIBRARY_BACKENDS):
            raise InvalidArgument(
                f"{name} is a baseline, without kernels of ours: name implementations of our own "
                "(--impl), and what to compare with apart (--baseline)"
            )
    for name in options.baselines or ():
        if IMPLS[name].backend in OWN_BACKENDS:
            raise InvalidArgument(
                f"{name} is no baseline but an implementation of our own: name it by --impl, and "
                "what to compare with by --baseline"
            )
    with contextlib.ExitStack() as stack:
        runner = runner or stack.enter_context(Isolated(device))
        store = store or stack.enter_context(Store())
        pool = stack.enter_context(CompilePool(jobs))
        session = Session(runner, pool, store, options, method, progress or Progress())
        _check_params(session, workloads)
        return session.run(workloads, one)


def tune_one(session: Session, w: Workload) -> Row:
    """One workload: from the records if they still stand, else search and duel."""
    if not session.options.force and (row := recorded_row(session, w)):
        return row
    if session.overlap and session.runner.compiles:
        session.pool.ahead(_first_tasks(session, w))
    trial = Trial(session, w)
    supporting = _supporting(trial)
    finalists = _hopeless(trial, supporting)
    budget = session.share()  # from here on: what a device's first use costs is no search
    searched = [
        i for i in supporting if i.name not in {e.candidate.implementation for e in finalists}
    ]
    for i, implementation in enumerate(searched):
        share_s = None
        if budget.seconds is not None:
            left_s = budget.left_s - (1 - SEARCH_SHARE) * budget.seconds
            share_s = max(left_s / (len(searched) - i), 0.1)
        share = Budget(share_s, session.options.budget_configs, clock=session.clock.seconds)
        finalists += _search(trial, implementation, share, budget)
    return _with_activity(trial, duel(trial, finalists, budget))


def bench_one(session: Session, w: Workload) -> Row:
    """One workload: the recorded choice, the heuristics' configs and the baselines."""
    trial, budget = Trial(session, w), session.share()
    supporting = _supporting(trial)
    all_of_them = Budget(clock=session.clock.seconds)  # none is left out: no search
    trial.assess([_heuristic(trial, i) for i in supporting], all_of_them)
    candidates = [_untuned(trial, i) for i in supporting]
    best = session.store.best(str(w), session.device.key, session.device.versions, w.program)
    serving = {i.name: i for i in supporting}
    if (
        best
        and (implementation := serving.get(best.implementation))
        and recorded_config(implementation.space(w, session.spec), best)
    ):
        candidates.insert(0, candidate_of(best))
    trial.assess(candidates, all_of_them)
    trial.assess_spilled(candidates, all_of_them)  # calls run them, too
    entries = [trial.entries[c] for c in dict.fromkeys(candidates) if c in trial.entries]
    row = duel(trial, [e for e in entries if e.verified], budget)
    return _with_activity(trial, _with_public_cost(session, w, row))


def _with_public_cost(session: Session, w: Workload, row: Row) -> Row:
    """The row with what a call of the public operator takes, its choice included."""
    as_called = session.options.as_called
    if as_called is None or any(not flag.startswith("indices=") for flag in w.flags):
        return row  # what a flag asks for is not what a plain call does
    call = session.runner.public_eager(w, as_called, session.method)
    if call is None:
        return row
    host_us, eager_us = {**row.host_us, "public": call.host_us}, {**row.eager_us, "public": call.us}
    return replace(row, host_us=host_us, eager_us=eager_us)


def _with_activity(trial: Trial, row: Row) -> Row:
    """The row with what one call of the best of ours and of each baseline makes the device do."""
    session, named = trial.session, dict[str, Candidate]()
    runs = [e for e in trial.entries.values() if e.outcome and e.outcome.status in VENDOR_STATUSES]
    for entry in sorted(runs, key=lambda e: e.us):
        if entry.candidate.implementation in row.baselines:
            named.setdefault(entry.candidate.implementation, entry.candidate)
    if row.own:
        named["own"] = Candidate.of(row.own.implementation, row.own.config)
    found = session.runner.activity(trial.w, list(named.values()), session.method)
    return replace(row, activity={name: found[c] for name, c in named.items() if c in found})


def _first_tasks(session: Session, w: Workload) -> Iterator[CompileTask]:
    """What a search will compile first, so that compilers begin while the device makes inputs and
    truth: the heuristics' configs, then the promising ones."""
    spec = session.spec
    able = _able(session, w)
    spaces = {i: session.space(i, w) for i in able}
    untuned = ((i, config) for i in able for config in [i.heuristic(w, spec)])
    promising = ((i, config) for i in able for config in i.promising(w, spec))
    for implementation, config in itertools.chain(untuned, promising):
        if config in spaces[implementation]:
            with contextlib.suppress(CompileError):  # the search will tell
                yield from implementation.tasks(config, w, spec)


def _able(session: Session, w: Workload) -> list[Implementation]:
    """Implementations with configs that support the workload."""
    return [i for i in session.searched(w) if i.unsupported(w, session.spec) is None]


def _supporting(trial: Trial) -> list[Implementation]:
    """The same; the others' reasons are recorded."""
    supporting = []
    for implementation in trial.session.searched(trial.w):
        reason = implementation.unsupported(trial.w, trial.session.spec)
        if reason is None:
            supporting.append(implementation)
        else:
            trial.refuse(implementation.name, reason)
    return supporting


def _hopeless(trial: Trial, supporting: Sequence[Implementation]) -> list[Entry]:
    """The configs of heuristics, all assessed now, that are not worth a search: see HOPELESS."""
    fitting = [
        i
        for i in supporting
        if i.heuristic(trial.w, trial.session.spec) in trial.session.space(i, trial.w)
    ]
    trial.session.progress.phase("heuristics")
    unlimited = Budget(clock=trial.session.clock.seconds)
    trial.assess([_heuristic(trial, i) for i in fitting], unlimited)
    untuned = [_untuned(trial, i) for i in fitting]
    trial.assess(untuned, unlimited)
    entries = [e for c in untuned if (e := trial.entries.get(c)) and e.verified]
    best_us = min((e.us for e in entries), default=math.inf)
    hopeless = [
        e
        for e in entries
        if HOPELESS * best_us < e.us < math.inf and is_of_ours(e.candidate.implementation)
    ]
    trial.unsearched |= {
        e.candidate.implementation: "not searched: its untuned config takes "
        f"{duration_text(e.us)}, {e.us / best_us:.1f} times as long as the best untuned one"
        for e in hopeless
    }
    return hopeless


def _recorded(trial: Trial, implementation: str, space: ConfigSpace[Any]) -> list[Any]:
    """Configs that won before: good places to start from.

    This workload's own, perhaps under other versions, then those of its operator's workloads that
    are nearest in size. Knobs that came since have their defaults.
    """
    session, w = trial.session, trial.w
    winners = session.store.load_device(session.device.key, session.device.versions)
    near = []
    for op, text, program in winners:
        if op == w.op:
            with contextlib.suppress(InvalidArgument):  # of another version of the operator
                far = abs(math.log(max(Workload.parse(text).main.numel, 1) / w.main.numel))
                near.append((far, (text, program) != (str(w), w.program), (op, text, program)))
    records = []
    for _, _, key in sorted(near)[:NEIGHBOURS]:
        with contextlib.suppress(StoreError):  # a damaged row, which calls warn of
            records.append(winners[key])
    return [
        space.config(r.config)
        for r in records
        if r.implementation == implementation and set(r.config) <= set(space.values)
    ]


def _check_params(session: Session, workloads: Sequence[Workload]) -> None:
    """Each knob to restrict belongs to an implementation that takes part, and some config of some
    workload has such values."""
    asked = session.options.params
    restricted = []
    for w in workloads if asked else ():
        spaces = {i: session.space(i, w) for i in _able(session, w)}
        knobs = {name for space in spaces.values() for name in space.values}
        for name in asked:
            if spaces and name not in knobs:
                raise InvalidArgument(
                    f"unknown knob {name!r} for {w}; {known_names(name, sorted(knobs))}"
                )
        restricted += [
            (i, w, s) for i, s in spaces.items() if not asked.keys().isdisjoint(s.values)
        ]
    if restricted and not any(_has_config(session, *each) for each in restricted):
        implementation, w, _ = restricted[0]
        listed = implementation.space(w, session.spec).values
        told = "; ".join(
            f"{name} is one of {', '.join(map(str, listed[name]))}"
            for name in asked
            if name in listed
        )
        values = ", ".join(f"{name}={','.join(map(str, given))}" for name, given in asked.items())
        raise InvalidArgument(f"no config of {implementation.name} for {w} has {values}; {told}")


def _has_config(
    session: Session, implementation: Implementation, w: Workload, space: ConfigSpace[Any]
) -> bool:
    """Whether a search would find one to try."""
    untuned = implementation.heuristic(w, session.spec)
    return (
        space.nearest(untuned) is not None
        or any(config in space for config in implementation.promising(w, session.spec))
        or bool(space.sample(random.Random(session.options.seed), 1))
    )


def _heuristic(trial: Trial, implementation: Implementation) -> Candidate:
    return Candidate.of(implementation.name, implementation.heuristic(trial.w, trial.session.spec))


def _untuned(trial: Trial, implementation: Implementation) -> Candidate:
    """What a call runs untuned, once the heuristic's config has been assessed."""
    first = _heuristic(trial, implementation)
    if not trial.spills(first):
        return first
    config = implementation.untuned(trial.w, trial.session.spec)
    return Candidate.of(implementation.name, config)


def _search(
    trial: Trial, implementation: Implementation, share: Budget, budget: Budget
) -> list[Entry]:
    """Search one implementation's space; its finalists, the heuristic's config among them."""
    session, name = trial.session, implementation.name
    session.progress.phase(f"search {name}")
    space = session.space(implementation, trial.w)
    strategy = STRATEGIES[session.options.strategy or STRATEGY[session.spec.kind]]
    first = _untuned(trial, implementation)
    untuned = first.resolve(trial.w, session.spec)

    def evaluate(configs: list[Any]) -> list[float]:
        if name in trial.refused:  # its compiler is missing
            return [float("inf")] * len(configs)
        return trial.assess([Candidate.of(name, c) for c in configs], share)

    tried = run_search(
        strategy,
        space,
        random.Random(session.options.seed),
        evaluate,
        share,
        starts=[
            space.nearest(untuned) or untuned,
            *_recorded(trial, name, space),
            *implementation.promising(trial.w, session.spec),
        ],
        chunk=CHUNK[session.spec.kind],
    )
    candidates = [Candidate.of(name, config) for config, _ in tried]
    if not any(c in trial.entries and trial.entries[c].us < float("inf") for c in candidates):
        trial.assess_spilled(candidates, budget)
    session.progress.phase(f"thin out {name}")
    finalists = trial.thin(candidates, FINALISTS, budget)
    entry = trial.entries.get(first)
    if entry and entry.verified and entry not in finalists:
        finalists.append(entry)
    return finalists
