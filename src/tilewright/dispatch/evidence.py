"""What the records know: the winners on a kind of device, by workload, by bucket and by family.

The store is read once, an operator's workloads at its first use.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tilewright.environment import device_key, environment
from tilewright.errors import InvalidArgument, StoreError
from tilewright.impl import IMPLS
from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.store import Key, Store
from tilewright.tensor_spec import TensorSpec

NUMEL_OCTAVES = 2.0
DIM_OCTAVES = 1.0
"""How far the nearest workload may be: total sizes within 4x, inner dims within 2x. A policy, not a
measurement."""


class Records:
    """The winners on one kind of device; an operator's workloads are read at its first use."""

    def __init__(self, winners: Mapping[Key, Record]):
        self._winners = winners
        self._keys: dict[str, list[Key]] = defaultdict(list)
        for key in winners:
            self._keys[key[0]].append(key)
        self._of: dict[str, OperatorRecords] = {}
        self._told = False

    def of(self, op: str) -> OperatorRecords:
        if op not in self._of:
            self._of[op] = OperatorRecords(self._readable(self._keys.get(op, ())))
        return self._of[op]

    def _readable(self, keys: Iterable[Key]) -> Iterator[Record]:
        for key in keys:
            try:
                yield self._winners[key]
            except StoreError as error:
                if not self._told:
                    warnings.warn(f"a record is not used: {error}", RuntimeWarning, stacklevel=2)
                self._told = True


class OperatorRecords:
    """One operator's winners: by workload, by bucket, and by family."""

    def __init__(self, winners: Iterable[Record]):
        self.exact: dict[tuple, list[tuple[Workload, Record]]] = defaultdict(list)
        self.buckets: dict[tuple, list[tuple[Workload, Record]]] = defaultdict(list)
        self.winners: dict[tuple, list[tuple[Workload, Record]]] = defaultdict(list)
        for record in winners:
            try:
                w = Workload.parse(record.workload)
            except InvalidArgument:  # written for another version of the operator
                continue
            self.exact[same(w)].append((w, record))
            self.buckets[bucket(w)].append((w, record))
            self.winners[family(w)].append((w, record))

    @functools.cached_property
    def beat_aten(self) -> bool:
        """Whether any of them is of another implementation than PyTorch's own."""
        return any(r.implementation != "aten" for found in self.winners.values() for _, r in found)

    @functools.cached_property
    def ours(self) -> OperatorRecords:
        """Those that implementations of ours won."""
        winners = (r for found in self.winners.values() for _, r in found)
        return OperatorRecords(
            r
            for r in winners
            if r.implementation in IMPLS and IMPLS[r.implementation].keeps_promises
        )


_loaded: dict[str, Records] = {}
_store_url: str | None = None
_loading = threading.Lock()


def records_of(device: torch.device, op: str) -> OperatorRecords:
    """What the store knows of an operator on this kind of device: nothing if it is unreadable, all
    but those rows if some are."""
    key = device_key(device)
    with _loading:
        if key not in _loaded:
            _loaded[key] = _load(key, device)
        return _loaded[key].of(op)


def forget_records(store: str | None = None) -> None:
    """Read the store at the next choice: this one, or that of the settings."""
    global _store_url
    with _loading:
        _store_url = store
        _loaded.clear()


@contextlib.contextmanager
def records_in(store: str | None) -> Iterator[None]:
    """Choices by the records of this store; None for those that are used anyway."""
    before = _store_url
    if store is not None:
        forget_records(store)
    try:
        yield
    finally:
        if store is not None:
            forget_records(before)


def _load(key: str, device: torch.device) -> Records:
    try:
        with Store(_store_url) as store:
            if not store.has_duels(key):  # nor need a compiler be asked for its version
                return Records({})
            _, _, versions = environment(device)
            return Records(store.load_device(key, versions))
    except StoreError as error:
        warnings.warn(f"PyTorch's own kernels run: {error}", RuntimeWarning, stacklevel=2)
        return Records({})


def same(w: Workload) -> tuple:
    """What two workloads share that run the same kernel: all but the run-time scalars, and how the
    values of an index are spread, which no call tells."""
    return w.op, _flags(w), tuple((n, v) for n, v in w.args if n not in w.scalars)


def spread(w: Workload) -> int:
    """Which record answers a call, that tells nothing of its indices: one without the flag, then
    in the order of the distributions."""
    named = [flag for flag in w.flags if flag.startswith("indices=")]
    return 1 + DISTRIBUTIONS.index(str(w.distribution)) if named else 0


def _flags(w: Workload) -> tuple[str, ...]:
    return tuple(f for f in w.flags if not f.startswith("indices="))


def depends_on_scalars(w: Workload, device: torch.device) -> bool:
    """Whether for other run-time scalars something else than aten might run."""
    found = records_of(device, w.op).exact.get(same(w), ())
    return any(record.implementation != "aten" for _, record in found)


def family(w: Workload) -> tuple:
    """Workloads whose winners speak for a heuristic: of one dtype, contiguous alike, with TF32 or
    without. What is fast on one layout may convert another first."""
    return w.main.dtype, w.main.strides is None, dict(w.args).get("allow_tf32")


def bucket(w: Workload) -> tuple:
    """Everything but sizes and real numbers: workloads that differ here say nothing mutually."""
    return (w.op, _flags(w), *(_kind(name, value) for name, value in w.args))


def _kind(name: str, value: Any) -> tuple:
    if isinstance(value, TensorSpec):
        return name, value.dtype, value.strides is None, value.align, value.rank > 0
    if isinstance(value, tuple):
        return name, len(value) if _are_sizes(value) else tuple(_kind(name, v) for v in value)
    return name, None if isinstance(value, float) else value


def _are_sizes(value: tuple) -> bool:
    return all(type(v) is int for v in value)


def sizes_of(w: Workload) -> list[tuple[float, float]]:
    """(log2 of a size, how far it may be from another's) for every size that matters."""
    sizes = []
    for _, value in w.args:
        if isinstance(value, TensorSpec):
            sizes.append((math.log2(max(value.numel, 1)), NUMEL_OCTAVES))
            sizes.append((math.log2(max(1, *value.shape[-1:], 1)), DIM_OCTAVES))
        elif isinstance(value, tuple) and _are_sizes(value):
            sizes.append((math.log2(max(math.prod(value), 1)), DIM_OCTAVES))
    return sizes
