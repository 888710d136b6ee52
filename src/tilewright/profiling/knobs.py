"""Records for people: their knobs in the order in which config spaces declare them."""

from __future__ import annotations

from dataclasses import replace

from tilewright.device import DEVICES, DeviceSpec, spec_of
from tilewright.fusion.remembered import ByOperator
from tilewright.impl import IMPLS
from tilewright.op import Workload
from tilewright.record import Record


def as_declared(record: Record, w: Workload, spec: DeviceSpec | None = None) -> Record:
    """The record of a workload with its knobs in the order in which they are declared, as other
    tables have them; those that are gone come last.

    Args:
        spec: None for that of the record's device, without which its knobs stay as they are.
    """
    if (spec := spec or _spec_of(record)) is None:
        return record
    declared = _declared(w, record.implementation, spec)
    order = {name: i for i, name in enumerate(declared)}
    knobs = sorted(record.config, key=lambda name: order.get(name, len(order)))
    return replace(record, config={name: record.config[name] for name in knobs})


@ByOperator
def _declared(w: Workload, implementation: str, spec: DeviceSpec) -> tuple[str, ...]:
    impl = IMPLS.get(implementation)
    if impl is None or not impl.serves(w.op) or impl.unsupported(w, spec):
        return ()
    return tuple(impl.space(w, spec).values)


def _spec_of(record: Record) -> DeviceSpec | None:
    if record.method == "cpu":
        return spec_of(None)
    known = (d for d in DEVICES.values() if any(part in record.device for part in d.matches))
    return next(known, None)
