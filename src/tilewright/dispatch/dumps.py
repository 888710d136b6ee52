"""One candidate in full, as text: for `tilewright explain`, and at run time for TILEWRIGHT_SHOW."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewright.build import CompileTask, Resources
from tilewright.compile.cache import compiled
from tilewright.compile.nvrtc import capped
from tilewright.compile.resources import parse_ptxas, ptx, sass
from tilewright.device import DeviceSpec
from tilewright.errors import CacheError, CompileError, InvalidArgument, TilewrightError
from tilewright.fusion.staged import stage
from tilewright.impl import (
    OWN_BACKENDS,
    Executable,
    Implementation,
    Launched,
    Work,
    implementations,
)
from tilewright.op import Workload
from tilewright.ops._training import halves
from tilewright.settings import SHOWN, settings
from tilewright.space import config_dict

_log = logging.getLogger("tilewright.show")


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks of a kernel on one SM, and what allows no more."""

    blocks_per_sm: int
    limiter: str
    warps_fraction: float
    """Resident warps over the most an SM holds."""


@dataclass(frozen=True)
class KernelFacts:
    """One kernel of a call: how it is launched, what the compiler gave it, and how many of its
    blocks an SM holds; None where those are unknown."""

    launched: Launched
    resources: Resources
    occupancy: Occupancy | None


def kernels(
    executable: Executable, tasks: Sequence[CompileTask], spec: DeviceSpec
) -> list[list[KernelFacts]]:
    """Every kernel of each stage of a call in turn; none where the compiler tells nothing.

    Args:
        tasks: what was compiled for the stages, if that is known.
    """
    stages = zip(executable.executables or [executable], tasks or (None,), strict=True)
    return [_kernels(stage, task, spec) for stage, task in stages]


def _kernels(
    executable: Executable, task: CompileTask | None, spec: DeviceSpec
) -> list[KernelFacts]:
    found = compiled(task) if task else None
    entry = task.entry if task else ""
    threads, shared_bytes = executable.block_threads, executable.shared_bytes
    first = Launched(entry, threads, shared_bytes, executable.work)
    if found is None or found.resources is None:
        return [_facts(first, executable.resources, spec)] if executable.resources else []
    every = (first, *executable.later)
    return [_facts(each, parse_ptxas(found.log, each.entry), spec) for each in every]


def _facts(launched: Launched, r: Resources, spec: DeviceSpec) -> KernelFacts:
    if not launched.block_threads:
        return KernelFacts(launched, r, None)
    threads, shared_bytes = launched.block_threads, r.shared_bytes + launched.shared_bytes
    blocks, limiter = spec.occupancy(threads, r.registers, shared_bytes)
    held = Occupancy(blocks, limiter, blocks * threads / spec.threads_per_sm)
    return KernelFacts(launched, r, held)


def dump(
    what: str,
    impl: Implementation,
    config: Any,
    w: Workload,
    spec: DeviceSpec,
    max_registers: int | None = None,
) -> str:
    """What TILEWRIGHT_SHOW and `explain --show` name, of one candidate.

    Args:
        what: one of SHOWN.
        max_registers: compile a CUDA kernel with at most so many registers a thread.

    Raises:
        InvalidArgument: `what` is unknown, or the candidate has no such thing.
        CompileError: the compiler refused, or is missing.
    """
    if what not in SHOWN:
        raise InvalidArgument(f"cannot show {what!r}; use one of {', '.join(SHOWN)}")
    _compile_others(impl, config, w, spec)
    if what == "schedule":
        lines = [f"{name} = {value}" for name, value in config_dict(config).items()]
        lines += impl.describe(config, w, spec)
        return "\n".join(lines) or f"{impl.name} has no knobs, and so no schedule of its own"
    tasks = impl.tasks(config, w, spec)
    if not tasks:
        own = [i for i in implementations(w) if i.backend in OWN_BACKENDS]
        able = [i for i in own if i.unsupported(w, spec) is None]
        named = [i.name for i in able if i.task(i.heuristic(w, spec), w, spec) is not None]
        remedy = f"--impl names one that does: {', '.join(named)}" if named else "nor does another"
        if w.operator.training_of is not None:
            remedy = f"ask for {' or '.join(h.op for h in halves(w))}, whose kernels it calls"
        raise InvalidArgument(f"{impl.name} generates no source of its own; {remedy}")
    if max_registers is not None:
        if any(task.compiler != "nvrtc" for task in tasks):
            raise InvalidArgument("registers are capped for CUDA kernels only")
        tasks = tuple(replace(t, source=capped(t.source, max_registers)) for t in tasks)
    if what == "resources":
        found = kernels(impl.build(config, w, spec), tasks, spec)
        return _by_stage([_resources(own, spec) for own in found])
    if what == "source":
        return _by_stage([task.source for task in tasks])
    return _by_stage([_machine_code(task, what) for task in tasks])


def _compile_others(impl: Implementation, config: Any, w: Workload, spec: DeviceSpec) -> None:
    """The stages that are not of the config, as far as a compiler is at hand: only then is it known
    whether they spill, and give way to others."""
    with contextlib.suppress(CompileError, CacheError):
        own = impl.task(config, w, spec)
        for task in impl.tasks(config, w, spec):
            if task != own:
                compiled(task)


def _by_stage(texts: Sequence[str]) -> str:
    if len(texts) == 1:
        return texts[0]
    heads = [f"// {stage(k, len(texts))}" for k in range(len(texts))]
    return "\n".join(f"{head}\n{text}" for head, text in zip(heads, texts, strict=True))


def dump_built(impl: Implementation, config: Any, w: Workload, spec: DeviceSpec) -> None:
    """Log what TILEWRIGHT_SHOW asks for of a kernel that has just been built for a call."""
    for what in settings().show:
        try:
            text = dump(what, impl, config, w, spec)
        except TilewrightError as error:
            text = f"{type(error).__name__}: {error}"
        _log.warning("%s of %s on %s, for %s:\n%s", what, impl.name, spec.name, w, text)


def _resources(found: Sequence[KernelFacts], spec: DeviceSpec) -> str:
    """Of each kernel of a stage."""
    if not found:
        return "the compiler reports no resources for this target"
    lines = []
    for k, kernel in enumerate(found):
        told = _told(kernel, spec)
        work = kernel.launched.work
        if work and work.estimated_registers:
            told.insert(1, f"estimated_registers = {work.estimated_registers}")
        if len(found) > 1:
            told.insert(0, f"launch {k}: {kernel.launched.entry}")
        lines += told
    return "\n".join(lines)


def _told(kernel: KernelFacts, spec: DeviceSpec) -> list[str]:
    lines = [f"{name} = {value}" for name, value in asdict(kernel.resources).items()]
    if held := kernel.occupancy:
        lines += [
            f"block_threads = {kernel.launched.block_threads}",
            f"launch_shared_bytes = {kernel.launched.shared_bytes}",
            f"occupancy = {held.blocks_per_sm} blocks per SM, limited by {held.limiter}, "
            f"{held.warps_fraction:.0%} of its warps",
        ]
        if work := kernel.launched.work:
            lines += _eligible(work, held, kernel.launched.block_threads, spec)
    return lines


def _eligible(work: Work, held: Occupancy, block_threads: int, spec: DeviceSpec) -> list[str]:
    """The grid, and what a full SM has to choose from: warps, and loads that are on their way."""
    resident = held.blocks_per_sm
    if work.persistent:
        resident = min(resident, work.most_per_sm or resident)
    resident = min(resident, math.ceil(work.blocks / spec.sms))
    blocks = work.blocks
    if work.persistent:
        step = work.multiple * work.cluster
        wanted = math.ceil(min(blocks, work.most_blocks or blocks) / step)
        blocks = min(wanted, max(resident * spec.sms // step, 1)) * step
        resident = min(resident, math.ceil(blocks / spec.sms))
    waves = (
        "persistent" if work.persistent else f"{blocks / (held.blocks_per_sm * spec.sms):.1f} waves"
    )
    clusters = f", in clusters of {work.cluster}" if work.cluster > 1 else ""
    warps = resident * block_threads / spec.warp / spec.schedulers_per_sm
    eligible = f"eligible_work = at most {warps:g} warps for each scheduler"
    if work.loads_bytes is not None:
        eligible += f", {resident * work.loads_bytes:,} bytes of loads on their way to an SM"
    return [f"blocks = {blocks}, {waves}{clusters}", eligible]


def _machine_code(task: CompileTask, what: str) -> str:
    if task.compiler != "nvrtc":
        raise InvalidArgument(
            f"--show {what} is for CUDA kernels; name a GPU, such as --device-spec h200"
        )
    return ptx(task) if what == "ptx" else sass(task)
