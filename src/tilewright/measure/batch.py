"""The dim along which an operator treats every slice by itself: found by trying, and of a person's
function by its steps, too."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.picks import named
from tilewright.fusion.frontend.trace import arguments_of, name_of, trace_reference
from tilewright.op import Workload

FEW_SLICES = 16
"""With fewer slices than this a later dim with more is preferred, and more examples are run."""

SLICES_TRACED = 13
"""A prime: dims of so many slices cannot be split into equal parts."""

_ALONG = ("slice", "slice_scatter", "select", "select_scatter", "cat", "unfold")
_BY_PLACE = ("arange", "as_strided")
"""Steps that go by places along their dim, or along every dim."""


@dataclass(frozen=True)
class Batch:
    """A dim along which the operator treats every slice by itself.

    Attributes:
        dim: counted from the end, as broadcasting aligns shapes; 0: the operator has none.
        size: number of slices, 1 without a dim.
    """

    dim: int = 0
    size: int = 1

    def carried_by(self, shape: Sequence[int]) -> bool:
        return self.dim < 0 and len(shape) >= -self.dim and shape[self.dim] == self.size

    def narrow(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """Slices `start` to `start + length` of all tensors that have the dim."""
        return [
            t.narrow(self.dim, start, length) if self.carried_by(t.shape) else t for t in tensors
        ]

    def select(self, tensors: Sequence[Tensor], slices: Tensor) -> list[Tensor]:
        return [
            t.index_select(self.dim, slices) if self.carried_by(t.shape) else t for t in tensors
        ]

    def workload(self, w: Workload, length: int) -> Workload:
        """The same problem with `length` slices, all tensors contiguous."""
        if self.dim == 0:
            return w
        changes = {}
        for name, spec in w.tensors.items():
            shape = list(spec.shape)
            if self.carried_by(shape):
                shape[self.dim] = length
            changes[name] = replace(spec, shape=tuple(shape), strides=None)
        return w.with_args(**changes)


def find_batch(w: Workload, tensors: Sequence[Tensor]) -> Batch:
    """The first dim with at least FEW_SLICES independent slices, else the one with most."""
    shape = w.outputs[0].shape
    if w.seed is not None:
        return Batch()  # what an element draws depends on its place among all
    if w.operator.fused and named(w).picked:
        return Batch()  # an index may be beyond a part of a row, which ends a GPU's context
    if w.operator.indexed is not None:
        declared = w.operator.indexed.batch_dim(w)
        return Batch(declared, shape[declared]) if declared else Batch()
    found = Batch()
    for dim, size in enumerate(shape):
        batch = Batch(dim - len(shape), size)
        if size > found.size and _independent(w, tensors, batch) and _in_place(w, batch):
            found = batch
            if size >= FEW_SLICES:
                break
    return found


def _independent(w: Workload, tensors: Sequence[Tensor], batch: Batch) -> bool:
    """Whether two slices computed together are what each is alone."""
    if not all(batch.carried_by(o.shape) for o in w.outputs):
        return False
    if not any(batch.carried_by(t.shape) for t in tensors):
        return False
    failures = logging.getLogger("torch._subclasses.fake_tensor")  # it would log what may fail here
    failures.disabled = True
    try:
        pair = w.operator.truth(batch.workload(w, 2), batch.narrow(tensors, 0, 2))
        one = batch.workload(w, 1)
        alone = [w.operator.truth(one, batch.narrow(tensors, i, 1)) for i in (0, 1)]
    except (InvalidArgument, NoImplementation, RuntimeError, IndexError, ValueError):
        return False  # something else is tied to this dim
    finally:
        failures.disabled = False
    for i, singles in enumerate(alone):
        for together, single in zip(pair, singles, strict=True):
            part = together.narrow(batch.dim, i, 1)
            if part.shape != single.shape:
                return False
            if not torch.allclose(part, single, rtol=1e-9, atol=0.0, equal_nan=True):
                return False
    return True


def _in_place(w: Workload, batch: Batch) -> bool:
    """Whether no step of a person's function moves slices or tells them apart by their places:
    shifts by many, pieces and positions do not show in two slices.

    It must take the same steps with another number of slices, none of them along a dim that has
    grown or shrunk with it, and no number but sizes may follow from how many there are.
    """
    if not w.operator.fused:
        return True
    length = SLICES_TRACED if batch.size != SLICES_TRACED else SLICES_TRACED + 4
    try:
        traces = [trace_reference(v) for v in (w, batch.workload(w, length))]
    except (InvalidArgument, NoImplementation):
        return False
    resized: dict[fx.Node, list[bool]] = {}
    for step, other in itertools.zip_longest(*(t.graph.nodes for t in traces)):
        if step is None or other is None or step.target != other.target:
            return False
        if step.op == "output":
            continue
        if step.op == "get_attr":
            one, another = (getattr(t, step.target) for t in traces)
            if not torch.equal(one, another):
                return False
        shapes = _shape(step), _shape(other)
        if len(shapes[0]) != len(shapes[1]):
            return False
        pairs = list(zip(*shapes, strict=True))
        resized[step] = [n != m for n, m in pairs]
        if any(n != m and n * length != m * batch.size for n, m in pairs):
            return False
        if any(sum(resized[n]) > sum(resized[step]) for n in step.all_input_nodes):
            return False  # it reduces over slices, or picks one
        one, another = ([*s.args, *s.kwargs.values()] for s in (step, other))
        if _moves(step, resized) or not _like(one, another, batch.size, length):
            return False
    return True


def _like(a: Any, b: Any, size: int, length: int) -> bool:
    """Whether arguments of a step with `size` and with `length` slices differ in sizes alone."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return isinstance(a, fx.Node) and isinstance(b, fx.Node)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        both = itertools.zip_longest(a, b)
        return all(_like(one, another, size, length) for one, another in both)
    if a == b:
        return True
    return type(a) is type(b) is int and a * length == b * size


def _shape(step: fx.Node) -> Sequence[int]:
    return getattr(step.meta.get("val"), "shape", ())


def _moves(step: fx.Node, resized: dict[fx.Node, list[bool]]) -> bool:
    """Whether it takes or leaves elements by their places along a dim whose size has changed."""
    if not isinstance(step.target, torch._ops.OpOverload):
        return False
    name, given = name_of(step), arguments_of(step)
    if name in _BY_PLACE:
        return any(resized[step])
    if name not in _ALONG:
        return False
    taken = step if name == "cat" else given["self"]
    whole = name == "slice" and _shape(step) == _shape(taken)
    return not whole and resized[taken][given.get("dim", given.get("dimension", 0))]
