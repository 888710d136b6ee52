"""An operator with an index on more elements than kernels number: by slices, one after the other.

Slices are cut along the outermost axis. Where that is the scattered one, each slice of the index
and of the source goes into the same table, in order: so the last of several writes still wins, and
a sum has the same order in every call. Else each slice has a table of its own, and any reduction is
right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright.impl import allocate
from tilewright.impls._in_place import refuse_shared
from tilewright.op import Workload
from tilewright.tensor_spec import HALVES, TensorSpec

LARGE = 2**31 - 1
"""Elements of a tensor from which on kernels may refuse a workload for its size."""
MOST_SLICES = 256
"""Each is a launch or more; a tensor that fits a GPU, of 2^37 bytes say, has fewer in any dtype."""


@dataclass(frozen=True)
class Slice:
    """The in-place form of a workload on some of the outermost axis of some of its tensors.

    Attributes:
        tensors: names of those that are cut.
        start, size: along their outermost axis.
    """

    workload: Workload
    tensors: tuple[str, ...]
    start: int
    size: int


def slices_of(w: Workload, most: int) -> list[Slice]:
    """Slices of which no tensor that is cut has `most` elements; none where the workload is small,
    or its result is not that of slices one after the other."""
    cut = _cut(w)
    if not cut or max(s.numel for s in w.tensors.values()) < most:
        return []
    length = w[cut[0]].shape[0]
    fit = min((most - 1) * length // w[name].numel for name in cut)  # so much of the axis
    count = math.ceil(length / fit) if fit else 0
    if not 1 < count <= MOST_SLICES:
        return []
    size = math.ceil(length / count)
    starts = range(0, length, size)
    return [_slice(w, cut, start, min(size, length - start)) for start in starts]


def of_slices(
    w: Workload, slices: Sequence[Slice], runs: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """For tensors of `w`, what each of `runs` does of its slice, in order; a result is a copy of x
    that they write to."""
    names, in_place = list(w.tensors), bool(w.operator.destinations(w))
    x = names.index("x")

    def call(*tensors: Tensor) -> Tensor:
        given = [*tensors]
        if in_place:  # before any slice is written
            read = {n: t for n, t in zip(names, tensors, strict=True) if n != "x"}
            refuse_shared(w.op, "x", tensors[x], **read)
        else:
            given[x] = allocate(w.outputs[0], tensors[x].device).copy_(tensors[x])
        for s, run in zip(slices, runs, strict=True):
            run(
                *(
                    t.narrow(0, s.start, s.size) if n in s.tensors else t
                    for n, t in zip(names, given, strict=True)
                )
            )
        return given[x]

    return call


def _cut(w: Workload) -> tuple[str, ...]:
    """The tensors that are cut along their outermost axis; none where that gives another result."""
    if "x" not in w.tensors or "index" not in w.tensors or w.op == "gather" or not w["x"].rank:
        return ()
    moved = [n for n in w.tensors if n not in ("x", "index")]
    by_rows = w.op.startswith("index")  # whose index is flat
    if w["dim"] == 0:
        return ("index", *moved) if _goes_on(w) else ()
    cut = ("x", *([] if by_rows else ["index"]), *moved)
    return cut if len({w[name].shape[:1] for name in cut}) == 1 else ()


def _goes_on(w: Workload) -> bool:
    """Whether what was reduced into a table is an old element like any other for what follows."""
    args = dict(w.args)
    reduce = "last" if w.op == "scatter" else args.get("reduce", "sum")
    exact = {"last": True, "amax": True, "amin": True, "sum": w["x"].dtype not in HALVES}
    whole = {"prod": w["x"].dtype in ("i32", "i64")}
    return bool(args.get("include_self", True)) and {**exact, **whole}.get(reduce, False)


def _slice(w: Workload, cut: Sequence[str], start: int, size: int) -> Slice:
    specs = {n: _narrowed(s, start, size) if n in cut else s for n, s in w.tensors.items()}
    x = specs["x"]
    if not w.operator.destinations(w):  # a copy, as it is allocated
        out = w.outputs[0]
        of_copy = TensorSpec(out.dtype, out.shape, out.strides)
        x = _narrowed(of_copy, start, size) if "x" in cut else of_copy
    flags = [f for f in w.flags if not f.startswith("donate=")]
    given = {**dict(w.args), **specs, "x": x}
    return Slice(w.operator.workload(flags=[*flags, "donate=x"], **given), tuple(cut), start, size)


def _narrowed(s: TensorSpec, start: int, size: int) -> TensorSpec:
    shape, strides = (size, *s.shape[1:]), s.real_strides
    align = math.gcd(s.align, start * strides[0] * s.itemsize)
    return TensorSpec(s.dtype, shape, strides, align)
