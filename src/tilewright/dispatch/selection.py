"""Which implementation runs a workload. The order of choice is the order of `choose`.

1. explicit: `use(...)` around the call;
2. the record of this workload on this kind of device, before it that of `!nondeterministic` where
   settings allow sums to differ from run to run and PyTorch's deterministic mode is off; and so
   for 3 and 4;
3. the record of the nearest workload in its bucket, if its config fits here too;
4. the heuristic of an implementation that the records show to win for this operator;
5. a generated kernel, for what tw.fuse was asked to fuse;
6. what keeps a promise that PyTorch's own kernels do not keep: where an index repeats, on a GPU
   which of several writes to one place wins, and the same bits of a sum in every run, on a CPU that
   a sum of halves is rounded once; and a process that outlives an index out of range on a GPU; if
   it must, of contiguous copies or by slices;
7. aten. Without evidence the vendor runs.

Nothing is measured here; what the records know is evidence.py's.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.device import DeviceSpec, spec_of
from tilewright.dispatch import evidence
from tilewright.dispatch.evidence import OperatorRecords, bucket, family, same, sizes_of, spread
from tilewright.dispatch.slices import LARGE, Slice, slices_of
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.impl import IMPLS, OWN_BACKENDS, Implementation, implementations
from tilewright.impls.fused import EMPTY
from tilewright.op import OPS, Workload
from tilewright.record import Record
from tilewright.settings import nondeterministic
from tilewright.space import NoConfig, config_dict, lent
from tilewright.tensor_spec import TensorSpec
from tilewright.text import duration_text

MIN_EVIDENCE = 3
"""Winners that an implementation needs, all of them its own, before its heuristic is trusted. A
policy, not a measurement."""


@dataclass(frozen=True)
class Choice:
    """What runs a workload, and why.

    Attributes:
        source: "explicit", "record", "nearest", "heuristic", "asked", "ordered" or "default".
        reason: one line for people.
        copied: what it runs in place of the workload: the same on contiguous copies of tensors.
        untuned: whether the config is a heuristic's: `Implementation.untuned` tells, once something
            is built, which one runs.
        slices: what runs each slice of the workload, in order, where all of it is too large.
    """

    implementation: str
    config: Any
    source: str
    reason: str
    copied: Workload | None = None
    untuned: bool = False
    slices: tuple[tuple[Slice, Choice], ...] = ()


VENDOR_WITHOUT_EVIDENCE = Choice(
    "aten", NoConfig(), "default", "no record speaks for another: the vendor runs"
)


@dataclass(frozen=True)
class Forced:
    """An implementation that the caller named; `config` is None for the recorded one."""

    implementation: str
    config: tuple[tuple[str, Any], ...] | None


Asked = Mapping[str | None, Forced] | None
"""What holds in a thread, by operator; None as a key for all of them."""
_forced: contextvars.ContextVar[Asked] = contextvars.ContextVar("forced", default=None)
any_forced = _forced.get


def forced_for(op: str) -> Forced | None:
    """What the innermost `use` that covers the operator asks for."""
    context = any_forced() or {}
    return context.get(op) or context.get(None)


@contextlib.contextmanager
def as_asked(asked: Asked) -> Iterator[None]:
    """Inside, what `use` asked for where `any_forced` gave this, maybe in another thread."""
    token = _forced.set(asked)
    try:
        yield
    finally:
        _forced.reset(token)


def as_before(asked: Asked, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` under what `use` asked for around a forward, whose backward may have a thread of
    autograd's; where it asked for nothing, under what it asks for now."""
    return run if asked is None or asked is any_forced() else as_asked(asked)(run)


@contextlib.contextmanager
def use(
    implementation: str, config: Mapping[str, Any] | Any = None, *, op: str | None = None
) -> Iterator[None]:
    """Inside, operators run this implementation, whatever the records say.

    Args:
        implementation: its name: "aten", "inductor", "fused", ...
        config: knob values, the others being the heuristic's, or a config of its space; None takes
            the recorded one, else the heuristic's.
        op: only for this operator; None for all.

    It holds for the calling thread (and asyncio task), and for the backward of what is called
    inside, in whatever thread that runs. Contexts nest: the inner one wins, and one that names the
    operator wins over one that does not.

    Raises:
        InvalidArgument: no such implementation or operator, now; a config that does not fit the
            workload, at the call.
        NoImplementation: at the call, if it does not support the workload.
    """
    IMPLS[implementation]
    if op is not None:
        OPS[op]
    if not (config is None or isinstance(config, Mapping) or dataclasses.is_dataclass(config)):
        raise InvalidArgument(
            f"use: config={config!r} is none; give knob values by name, {{'rows': 2}}, or a config"
        )
    given = config if config is None or isinstance(config, Mapping) else config_dict(config)
    forced = Forced(implementation, None if given is None else tuple(sorted(given.items())))
    # An outer context that names an operator does not outlive an inner one for all of them.
    token = _forced.set({**(any_forced() or {}), op: forced} if op else {None: forced})
    try:
        yield
    finally:
        _forced.reset(token)


def choose(w: Workload, device: torch.device | str, forced: Forced | None = None) -> Choice:
    """What runs `w` on `device`, from the records loaded at first use; builds nothing.

    Raises:
        InvalidArgument: the forced config is not in the space.
        NoImplementation: the forced implementation does not support the workload.
    """
    device = torch.device(device)
    spec = device_spec_of(device)
    if any(s.numel == 0 for s in w.tensors.values()):
        return Choice("aten", NoConfig(), "default", "there is nothing to compute")
    if forced is not None:
        return _explicit(w, device, spec, forced)
    records = evidence.records_of(device, w.op)
    if w.promises_more(device.type):
        records = records.ours
    allowed = [_in_any_order(w), w] if _may_differ(w) else [w]
    found = (find(a, spec, records) for find in _BY_RECORDS for a in allowed)
    return (
        next((choice for choice in found if choice is not None), None)
        or _asked_for(w, spec)
        or as_promised(w, device, spec)
        or unbuilt(w, device)
    )


def _asked_for(w: Workload, spec: DeviceSpec) -> Choice | None:
    if not w.operator.fused:
        return None
    fused = IMPLS["fused"]
    reason = fused.unsupported(w, spec)
    if reason is not None and w.operator.draws(w):
        return Choice(
            "aten", NoConfig(), "default", f"it draws, and was given no seed: {w.with_seed()}"
        )
    if reason == EMPTY:  # a result, of tensors that are not
        return Choice("aten", NoConfig(), "default", "there is nothing to compute")
    if reason is None:
        config, reason = fused.heuristic(w, spec), "tw.fuse asks for a generated kernel"
        return Choice("fused", config, "asked", reason, untuned=True)
    if not w.operator.fallback:
        raise NoImplementation(
            f"{w} cannot be fused on {spec.name}: {reason}; "
            "change that step, or let PyTorch run it: tw.fuse(..., fallback=True)"
        )
    return Choice("aten", NoConfig(), "default", f"it cannot be fused: {reason}")


def as_promised(w: Workload, device: torch.device, spec: DeviceSpec) -> Choice | None:
    """What runs without a record where more is promised than PyTorch's kernels keep."""
    return _ordered(w, device, spec) or _of_copies(w, device, spec) or _of_slices(w, device, spec)


def _ordered(w: Workload, device: torch.device, spec: DeviceSpec) -> Choice | None:
    if not w.promises_more(device.type):
        return None
    return _untuned(w, spec, "ordered", _promise(w, device))


def _promise(w: Workload, device: torch.device) -> str:
    assert w.operator.indexed is not None
    if not w.promises_values(device.type):
        return "an index out of range is skipped, which ends the use of the GPU in aten"
    if device.type == "cpu":
        return "one rounding of a sum of halves, which aten rounds at each addition"
    if w.operator.indexed.last_wins:
        return "the last of several writes to one place wins, which aten leaves open"
    return "the same bits in every run, which aten's atomic sums have not"


def _of_copies(w: Workload, device: torch.device, spec: DeviceSpec) -> Choice | None:
    """What keeps the promise once tensors are contiguous: all but the index, which may be expanded
    and then takes little memory as it is, or that, too."""
    if not w.promises_more(device.type):
        return None
    for kept in (("index",), ()):
        copied = contiguous(w, kept)
        if copied != w and (choice := _ordered(copied, device, spec)) is not None:
            reason = f"{choice.reason}; of contiguous copies"
            return replace(choice, reason=reason, copied=copied)
    return None


def _of_slices(w: Workload, device: torch.device, spec: DeviceSpec) -> Choice | None:
    """What keeps the promise for each slice of a workload that is too large for kernels."""
    if device.type != "cuda" or not w.promises_more(device.type):
        return None  # on a CPU nothing may be written where a later slice has a bad index
    found = []
    for s in slices_of(w, LARGE):
        if (choice := _ordered(s.workload, device, spec)) is None:
            return None
        found.append((s, choice))
    if not found:
        return None
    reason = f"{_promise(w, device)}; in {len(found)} slices, one after the other"
    return replace(found[0][1], reason=reason, slices=tuple(found))


def contiguous(w: Workload, kept: Iterable[str] = ()) -> Workload:
    """The workload with contiguous tensors in place of others, but for those that are kept."""
    strided = {n: s for n, s in w.tensors.items() if s.strides is not None and n not in kept}
    given = {**dict(w.args), **{n: TensorSpec(s.dtype, s.shape) for n, s in strided.items()}}
    return w.operator.workload(flags=w.flags, **given)


def _untuned(
    w: Workload, spec: DeviceSpec, source: str, reason: str, any_shape: bool = False
) -> Choice | None:
    def taken(i: Implementation) -> bool:
        if any_shape:
            return i.any_shape and i.unsupported(w, spec) is None
        return i.takes_untuned(w, spec)

    for i in implementations(w):
        if i.backend in OWN_BACKENDS and taken(i):
            return Choice(i.name, i.heuristic(w, spec), source, reason, untuned=True)
    return None


def of_any_shape(w: Workload, device: torch.device) -> Choice | None:
    """What keeps the promise by a binary that serves other shapes, too, faster or not."""
    reason = "many kernels were compiled for other shapes; this one needs none of its own"
    return _untuned(w, device_spec_of(device), "ordered", reason, any_shape=True)


def deterministic(w: Workload, device: torch.device) -> Choice | None:
    """A kernel of ours, untuned, for PyTorch's deterministic mode."""
    reason = "torch.use_deterministic_algorithms, under which aten is slow"
    return _untuned(w, device_spec_of(device), "heuristic", reason)


def unbuilt(w: Workload, device: torch.device, spec: DeviceSpec | None = None) -> Choice:
    """What runs where no kernel of ours is built, yet or at all: aten, or what stands in for it."""
    if w.promises_values(device.type):
        stand_in = _stand_in(w, spec or device_spec_of(device))
        if stand_in is not None:
            reason = f"no kernel of ours is built for it: {_promise(w, device)}"
            return Choice(stand_in.name, NoConfig(), "default", reason)
    return VENDOR_WITHOUT_EVIDENCE


def _stand_in(w: Workload, spec: DeviceSpec) -> Implementation | None:
    found = (i for i in implementations(w) if i.stands_in and i.unsupported(w, spec) is None)
    return next(found, None)


def waits(w: Workload, device: torch.device, choice: Choice) -> bool:
    """Whether a choice is built only once a shape has come back. One that no record names is,
    unless what runs until then would break a promise."""
    if choice.source not in ("nearest", "heuristic", "ordered"):
        return False
    until_then = IMPLS[unbuilt(w, device).implementation]
    return until_then.stands_in or not w.promises_values(device.type)


def device_spec_of(device: torch.device) -> DeviceSpec:
    if device.type != "cuda":
        return spec_of(None)
    return spec_of(torch.cuda.current_device() if device.index is None else device.index)


def _explicit(w: Workload, device: torch.device, spec: DeviceSpec, forced: Forced) -> Choice:
    impl = IMPLS[forced.implementation]
    if impl.races and not torch.are_deterministic_algorithms_enabled():
        w = _in_any_order(w)
    reason = impl.unsupported(w, spec) if impl.serves(w.op) else f"it serves {impl.op} only"
    if w.seed is not None and impl.backend not in (*OWN_BACKENDS, "aten"):
        reason = "its masks would not be those of the seed, which a backward draws again"
    if reason is not None:
        raise NoImplementation(
            f"no implementation of {w} on {spec.name}, since only {impl.name} was asked for:\n"
            f"  {impl.name}: {reason}"
        )
    if forced.config is None:
        recorded = _recorded(w, spec, evidence.records_of(device, w.op))
        if recorded is not None and recorded.implementation == impl.name:
            return replace(
                recorded, source="explicit", reason="asked for, with its recorded config"
            )
        config = impl.heuristic(w, spec)
        reason = "asked for, with its heuristic config"
        return Choice(impl.name, config, "explicit", reason, untuned=True)
    config = impl.completed(dict(forced.config), w, spec)
    return Choice(impl.name, config, "explicit", "asked for")


def _may_differ(w: Workload) -> bool:
    """Whether sums of it may have other bits in each run."""
    sums = w.operator.indexed is not None and w.operator.indexed.races
    return sums and nondeterministic() and not torch.are_deterministic_algorithms_enabled()


def _in_any_order(w: Workload) -> Workload:
    return w.operator.workload(flags=[*w.flags, "nondeterministic"], **dict(w.args))


def _recorded(w: Workload, spec: DeviceSpec, records: OperatorRecords) -> Choice | None:
    found = records.exact.get(same(w), ())
    for other, record in sorted(found, key=lambda f: (f[0].scalars != w.scalars, spread(f[0]))):
        if (config := _fitting(w, spec, other, record)) is not None:
            return Choice(record.implementation, config, "record", f"fastest here: {_told(record)}")
    return None


def _nearest(w: Workload, spec: DeviceSpec, records: OperatorRecords) -> Choice | None:
    sizes = sizes_of(w)
    near = []
    for other, record in records.buckets.get(bucket(w), ()):
        octaves = [abs(a - b) for (a, _), (b, _) in zip(sizes, sizes_of(other), strict=True)]
        if all(o <= limit for o, (_, limit) in zip(octaves, sizes, strict=True)):
            near.append((sum(octaves), str(other), other, record))
    for _, text, other, record in sorted(near, key=lambda n: n[:2]):
        if (config := _fitting(w, spec, other, record)) is not None:
            reason = f"as for {text}: {_told(record)}"
            return Choice(record.implementation, config, "nearest", reason)
    return None


def _by_heuristic(w: Workload, spec: DeviceSpec, records: OperatorRecords) -> Choice | None:
    known = records.winners.get(family(w), ())
    winners = [record for other, record in known if record.program == other.program]
    names = {record.implementation for record in winners}
    if len(names) != 1 or len(winners) < MIN_EVIDENCE:
        return None
    (name,) = names
    if _serves_no_more(name, w, spec) or (w.scalars and not IMPLS[name].takes_scalars):
        return None
    reason = f"{name} won all {len(winners)} recorded workloads of {w.op} in {w.main.dtype}"
    return Choice(name, IMPLS[name].heuristic(w, spec), "heuristic", reason, untuned=True)


_BY_RECORDS = (_recorded, _nearest, _by_heuristic)


def _fitting(w: Workload, spec: DeviceSpec, recorded: Workload, record: Record) -> Any | None:
    """The config of `recorded` for `w`, or None where `_fitted` refuses it."""
    try:
        return _fitted(w, spec, recorded, record)
    except InvalidArgument:
        return None


def _fitted(w: Workload, spec: DeviceSpec, recorded: Workload, record: Record) -> Any:
    """The config of `recorded` for `w`.

    Raises:
        InvalidArgument: its code or knobs have gone since, or what it counts is of no use at
            another size, for which no size of it is compiled in.
    """
    name = record.implementation
    if record.program != recorded.program:
        raise InvalidArgument("another function had this name")
    if (reason := _serves_no_more(name, w, spec)) is not None:
        raise InvalidArgument(reason)
    if recorded.scalars != w.scalars and name != "aten" and not IMPLS[name].takes_scalars:
        raise InvalidArgument(f"it would be built anew for every number, as for {recorded}")
    space = IMPLS[name].space(w, spec)
    config = space.config(record.config)
    if same(w) != same(recorded):
        config = lent(config)
        if unlisted := space.unlisted(config):
            raise InvalidArgument(f"{', '.join(unlisted)} of {recorded} may be of no use here")
    if (reason := space.why_not(config)) is not None:
        raise InvalidArgument(reason)
    return config


def unfit_records(w: Workload, device: torch.device) -> Iterator[tuple[Record, str]]:
    """The winners of this very workload that do not serve it any more, and why."""
    spec = device_spec_of(device)
    for recorded, record in evidence.records_of(device, w.op).exact.get(same(w), ()):
        try:
            _fitted(w, spec, recorded, record)
        except InvalidArgument as reason:
            yield record, str(reason)


def _serves_no_more(name: str, w: Workload, spec: DeviceSpec) -> str | None:
    """Why what records name is not chosen, or None."""
    if name not in IMPLS:
        return f"no implementation is called {name} now"
    return IMPLS[name].only_compared(w) or IMPLS[name].unsupported(w, spec)


def _told(record: Record) -> str:
    time = "" if record.median_us is None else f" took {duration_text(record.median_us)}"
    runtime = ", under other versions" if record.prior else ""
    return f"{record.implementation}{time} ({record.created[:10]}{runtime})"
