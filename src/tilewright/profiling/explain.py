"""Why a workload runs the way it does: the choice, the candidates, their limits, the records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from tilewright.build import Resources
from tilewright.compile.cache import cached
from tilewright.device import DEVICES, DeviceSpec, current_device
from tilewright.dispatch.dumps import Occupancy, dump, kernels
from tilewright.dispatch.evidence import records_in
from tilewright.dispatch.selection import Choice, as_promised, choose, unbuilt, unfit_records
from tilewright.environment import environment
from tilewright.errors import CacheError, CompileError, InvalidArgument, NoImplementation
from tilewright.impl import IMPLS, OWN_BACKENDS, Implementation, implementations
from tilewright.measure.ceilings import hard_limit_us, measure_ceilings
from tilewright.op import Workload
from tilewright.profiling.knobs import as_declared
from tilewright.record import BESIDE, Record, as_dict
from tilewright.space import config_dict
from tilewright.store import Store
from tilewright.tune.progress import Progress
from tilewright.tune.rows import FLOOR, fights_of, floor_us_of


@dataclass(frozen=True)
class CandidateFacts:
    """One implementation of the operator on this device.

    Attributes:
        unsupported: why it cannot serve the workload, or was not compiled.
        configs: how many value combinations its space has before constraints.
        config: the chosen config for the chosen implementation, else the heuristic's.
        resources: of our own kernels, where the compiler tells; of several, the most any takes.
        occupancy: of each of them in turn.
    """

    implementation: str
    backend: str
    unsupported: str | None
    configs: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    resources: Resources | None = None
    occupancy: list[Occupancy | None] = field(default_factory=list)


@dataclass(frozen=True)
class Explanation:
    """Everything that `tilewright explain` says of a workload.

    Attributes:
        floor_us: of the latest duel, else by ceilings measured coarsely now; None without either.
        hard_limit_us: from the datasheet; 0 where it is unknown.
        records: rows of the store for this workload and device; duels first, then the fastest.
        forecasts: what the heuristic's config of an implementation amounts to, what those do that
            it finds promising, and those recorded: by the time its model expects, None without
            one, with the time measured, if any, and the registers of what was compiled.
        unfit: winners of duels of this very workload that do not serve it any more, each with the
            `reason`.
        disturbed: of the latest duel, as its `Row` has it.
    """

    workload: str
    device: str
    chosen: str
    source: str
    reason: str
    read_bytes: int
    written_bytes: int
    flops: int
    floor_us: float | None
    hard_limit_us: float
    candidates: list[CandidateFacts]
    records: list[dict[str, Any]]
    forecasts: list[dict[str, Any]]
    unfit: list[dict[str, Any]]
    disturbed: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    w: Workload,
    device: str | None = None,
    device_spec: str | None = None,
    store_url: str | None = None,
    implementation: str | None = None,
    config: Mapping[str, Any] | None = None,
    measure: bool = True,
    progress: Progress | None = None,
) -> Explanation:
    """The choice for `w` and what speaks for it.

    Args:
        device: of this machine, as for `current_device`.
        device_spec: a known device that need not be here, instead of `device`; it has no records
            here, so the choice is the heuristic of the first own implementation.
        implementation, config: look at this candidate instead of the choice; knobs that the config
            leaves out are the heuristic's.
        measure: whether to measure ceilings coarsely (seconds) for the floor.
        progress: told when they are measured.

    Raises:
        InvalidArgument: no such device, or the named candidate does not fit.
    """
    name, spec = _device(device, device_spec)
    records = _records(w, name, spec, store_url) if name else []
    with records_in(store_url):
        choice = _as_built(_choice(w, name, spec, implementation, config), w, spec)
        unfit = [
            {**as_dict(as_declared(record, w, spec)), "reason": reason}
            for record, reason in (unfit_records(w, torch.device(name)) if name else ())
        ]
    floor_us, disturbed, forecasts = None, None, []
    if name:
        last = next((r.duel for r in records if r.implementation == FLOOR.implementation), None)
        if last is not None:
            fought = [r for r in records if r.duel == last]
            floor_us, disturbed = floor_us_of(fought, w, spec), fights_of(fought).disturbed
        elif measure:
            method = "cpu" if spec.kind == "cpu" else "events"
            (progress or Progress()).phase("ceilings")
            ceilings = measure_ceilings(torch.device(name), method, quick=True)
            floor_us = ceilings.floor_us(w, spec)
    read_bytes, written_bytes = w.bytes
    candidates = [_facts(impl, w, spec, choice) for impl in implementations(w)]
    for impl in implementations(w):
        forecasts += _forecasts(impl, w, spec, records)
    return Explanation(
        workload=str(w),
        device=spec.name,
        chosen=choice.implementation,
        source=choice.source,
        reason=choice.reason,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        flops=w.flops,
        floor_us=floor_us,
        hard_limit_us=hard_limit_us(w, spec),
        candidates=candidates,
        records=[as_dict(r) for r in _fastest_first(records)],
        forecasts=sorted(forecasts, key=lambda f: f["predicted_us"] or math.inf),
        unfit=unfit,
        disturbed=disturbed,
    )


def _device(device: str | None, device_spec: str | None) -> tuple[str | None, DeviceSpec]:
    if device and device_spec:
        raise InvalidArgument(
            f"--device {device} is of this machine, --device-spec {device_spec} need not be here; "
            "give one of them"
        )
    return (None, DEVICES[device_spec]) if device_spec else current_device(device)


def _choice(
    w: Workload,
    name: str | None,
    spec: DeviceSpec,
    implementation: str | None,
    config: Mapping[str, Any] | None,
) -> Choice:
    """What runs on the device `name`, or what would on a device that is not here (None)."""
    if implementation is None and config is None:
        return choose(w, name) if name else _untuned(w, spec)
    impl = IMPLS[implementation or _untuned(w, spec).implementation]
    if impl not in implementations(w):
        raise InvalidArgument(f"{impl.name} serves {impl.op}, not {w.op}")
    if reason := impl.unsupported(w, spec):
        raise NoImplementation(f"{impl.name} does not support {w} on {spec.name}: {reason}")
    if not config:
        untuned = impl.heuristic(w, spec)
        return Choice(impl.name, untuned, "explicit", "asked for, untuned", untuned=True)
    return Choice(impl.name, impl.completed(config, w, spec), "explicit", "asked for")


def _untuned(w: Workload, spec: DeviceSpec) -> Choice:
    """What a promise is kept by; else the best of our own by their models, the first of those
    without one."""
    away = f"{spec.name} is not measured here"
    if (promised := as_promised(w, torch.device(spec.kind), spec)) is not None:
        return replace(promised, reason=f"{away}; untuned: {promised.reason}")
    ours = [i for i in implementations(w) if i.backend in OWN_BACKENDS]
    able = [(i, i.heuristic(w, spec)) for i in ours if i.unsupported(w, spec) is None]
    if not able:
        reason = f"no own implementation supports it on {spec.name}"
        return replace(unbuilt(w, torch.device(spec.kind), spec), reason=reason)
    expected = [i.forecast(config, w, spec).get("predicted_us", math.inf) for i, config in able]
    impl, config = able[expected.index(min(expected))]
    reason = f"{away}: the heuristic's config is shown"
    return Choice(impl.name, config, "heuristic", reason, untuned=True)


def _as_built(choice: Choice, w: Workload, spec: DeviceSpec) -> Choice:
    """The choice with the config of what a call builds, as far as a compiler is at hand."""
    if not choice.untuned or choice.slices or choice.copied:
        return choice
    try:
        config = IMPLS[choice.implementation].untuned(w, spec)
    except (CompileError, CacheError):
        return choice
    if config == choice.config:
        return choice
    reason = f"{choice.reason}; the heuristic's first schedule spills registers"
    return replace(choice, config=config, reason=reason)


def _records(w: Workload, device: str, spec: DeviceSpec, store_url: str | None) -> list[Record]:
    key, _, _ = environment(device)
    with Store(store_url) as store:
        found = store.query(workload=str(w), device=key)
    return [as_declared(record, w, spec) for record in found if record.program == w.program]


def _fastest_first(records: list[Record]) -> list[Record]:
    """Candidates only; those of duels before those of searches."""
    candidates = [r for r in records if r.status not in BESIDE]
    return sorted(candidates, key=lambda r: (not r.final, r.median_us is None, r.median_us or 0.0))


def _forecasts(
    impl: Implementation, w: Workload, spec: DeviceSpec, records: list[Record]
) -> list[dict[str, Any]]:
    if impl.unsupported(w, spec):
        return []
    space = impl.space(w, spec)
    measured: dict[Any, Record] = {}
    for record in reversed(_fastest_first(records)):
        if record.implementation == impl.name and set(record.config) == set(space.values):
            measured[space.config(record.config)] = record
    found = []
    for config in dict.fromkeys([impl.heuristic(w, spec), *impl.promising(w, spec), *measured]):
        if not (expected := impl.forecast(config, w, spec)):
            return []
        known = measured.get(config)
        found.append(
            {
                "implementation": impl.name,
                "config": config_dict(config),
                **{"predicted_us": None, **expected},
                "measured_us": known and known.median_us,
                "registers": _registers(impl, config, w, spec, known),
            }
        )
    return found


def _registers(
    impl: Implementation, config: Any, w: Workload, spec: DeviceSpec, known: Record | None
) -> int | None:
    """As recorded, or of a binary that was compiled before: to compile all of them takes long."""
    if known and known.resources:
        return known.resources.get("registers")
    task = impl.task(config, w, spec)
    found = cached(task) if task else None
    resources = found and (found.resources or impl.resources(config, found.log))
    return resources.registers if resources else None


def _facts(impl: Implementation, w: Workload, spec: DeviceSpec, choice: Choice) -> CandidateFacts:
    if reason := impl.unsupported(w, spec):
        return CandidateFacts(impl.name, impl.backend, reason)
    chosen = choice.implementation == impl.name
    config = choice.config if chosen else impl.heuristic(w, spec)
    facts = CandidateFacts(
        impl.name,
        impl.backend,
        None,
        impl.space(w, spec).size_unconstrained,
        config_dict(config),
    )
    if impl.backend not in OWN_BACKENDS:
        return facts
    try:
        executable = impl.build(config, w, spec)
    except (CompileError, CacheError) as error:
        return replace(facts, unsupported=str(error).partition("\n")[0])
    stages = kernels(executable, impl.tasks(config, w, spec), spec)
    of_each = [kernel.occupancy for stage in stages for kernel in stage]
    return replace(facts, resources=executable.resources, occupancy=of_each)


# --- one candidate in full ---------------------------------------------------------------------


def show(
    w: Workload,
    what: str,
    device: str | None = None,
    device_spec: str | None = None,
    implementation: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_registers: int | None = None,
    store_url: str | None = None,
) -> str:
    """The source, PTX, SASS, resources or schedule of one candidate as text.

    Args:
        what: one of SHOWN.
        implementation, config: the candidate; by default what is chosen on `device`, or what of our
            own runs untuned.
        max_registers: compile a CUDA kernel with at most so many registers a thread.
        store_url: records to choose by; by default those of the settings.

    Raises:
        InvalidArgument: the config does not fit, or there is no such thing for the candidate.
        CompileError: the compiler refused, or is missing.
    """
    name, spec = _device(device, device_spec)
    with records_in(store_url):
        choice = _choice(w, name, spec, implementation, config)
    if implementation is None and IMPLS[choice.implementation].backend not in OWN_BACKENDS:
        choice = _untuned(w, spec)
    choice = _as_built(choice, w, spec)
    first = choice.slices[0][0].workload if choice.slices else None
    impl, run = IMPLS[choice.implementation], first or choice.copied or w
    return dump(what, impl, choice.config, run, spec, max_registers)
