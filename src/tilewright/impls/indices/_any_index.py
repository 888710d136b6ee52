"""PyTorch's kernels on a GPU behind indices that were looked at without a wait.

Their own look is an assertion on the device, which ends the process's use of it; some have none.
Here indices out of range are told to later calls, and moved: to a place more that x is given for
the call, where what they would write is lost, or to the first one, whose elements are then replaced
by zeros in what was read. All is made of PyTorch's operators, differentiable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tilewright.compile.faults import raise_fault, report
from tilewright.impls._vendor import Result
from tilewright.op import OPS, Op, Workload
from tilewright.ops._indexing import told_once
from tilewright.settings import settings

POSITIONS = (torch.int32, torch.int64)


def of_any_index(w: Workload) -> Callable[..., Result]:
    """`vendor(w)` that leaves out what an index out of range names, and lets later calls tell."""
    op = w.operator
    form = op.in_place_form if op.destinations(w) else None
    return lambda *tensors: reference(form or op, w.call(tensors))


def reference(op: Op, args: Mapping[str, Any]) -> Result:
    """The reference of an operator with an index, or of its in-place form, likewise."""
    x, dim, index = (args.get(name) for name in ("x", "dim", "index"))
    if not isinstance(index, Tensor) or index.dtype not in POSITIONS or not index.numel():
        return op.reference(**args)
    if isinstance(given := args.get("num_weights"), Integral):
        rows = int(given)
        skipped = reported(outside(index, rows, args.get("padding_idx", -1)))
        moved = beyond(index, skipped, rows)
        table: Tensor = op.reference(**{**args, "num_weights": rows + 1, "index": moved})
        return table[:rows]
    if not isinstance(x, Tensor) or not isinstance(dim, Integral):
        return op.reference(**args)
    if op.name == "gather":
        return gather(x, int(dim), index, op.reference)
    if not x.dim():
        flat = {n: v.reshape(-1) if isinstance(v, Tensor) else v for n, v in args.items()}
        found = reference(OPS[op.form_of or op.name], flat)
        assert isinstance(found, Tensor)
        out = found.view(())
    else:
        dim = int(dim)
        places = x.shape[dim]
        moved = beyond(index, reported(outside(index, places)), places)
        roomy = {**args, "x": with_room(x, dim), "index": moved}
        found = OPS[op.form_of or op.name].reference(**roomy)
        assert isinstance(found, Tensor)
        out = found.narrow(dim, 0, places)
    return x.copy_(out) if op.form_of else out.contiguous()


def gather(
    x: Tensor, dim: int, index: Tensor, run: Callable[[Tensor, int, Tensor], Tensor]
) -> Tensor:
    """`run(x, dim, index)`, a torch.gather, with zeros where an index is out of range."""
    places = x.shape[dim] if x.dim() else 1
    skipped = reported(outside(index, places))
    found = run(x if places else with_room(x, dim), dim, beyond(index, skipped, 0))
    return found.masked_fill(skipped, 0)


def outside(index: Tensor, places: int, skipped: int = -1) -> Tensor:
    """Whether an element names no place, a bool each.

    Args:
        skipped: an index that is left out whatever it is, if not negative.
    """
    once = holding(told_once(index), max(places, skipped))
    found = (once < 0) | (once >= places)
    if skipped >= places:
        found = found & (once != skipped)
    return found.expand(index.shape)


def reported(found: Tensor) -> Tensor:
    """Those that are `outside`, of which later calls tell; this one where it is asked to wait.

    Raises:
        IndexOutOfRange: of an earlier call, or of this one.
    """
    raise_fault()
    report(told_once(found))
    if found.is_cuda and settings().check_indices and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(found.device)
        raise_fault()
    return found


def beyond(index: Tensor, skipped: Tensor, place: int) -> Tensor:
    """The index with `place` where it is skipped, expanded as it was."""
    once = holding(told_once(index), place)
    return once.masked_fill(told_once(skipped), place).expand(index.shape)


def holding(index: Tensor, number: int) -> Tensor:
    """The index in a dtype that holds `number`, too: PyTorch's arithmetic of an int32 tensor and a
    Python number beyond it wraps, or raises."""
    narrow = index.dtype == torch.int32 and number > torch.iinfo(torch.int32).max
    return index.long() if narrow else index


def from_front(index: Tensor, places: int) -> Tensor:
    """Negative positions counted from the front; those that name no place are left out of range."""
    index = holding(index, places)
    return torch.add(index, index < 0, alpha=places)


def outside_both_ways(index: Tensor, places: int) -> Tensor:
    """`outside` where negative positions count from the end."""
    index = holding(index, places)
    return (index < -places) | (index >= places)


def with_room(x: Tensor, dim: int) -> Tensor:
    """x with a place more along dim."""
    more = [1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(more)], dim)
