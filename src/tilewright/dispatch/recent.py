"""Positional calls that came before, found by one check in C++ instead of a key built in Python.

To read shape, strides, dtype and device of five tensors into a key and hash it costs 2.3 us; the
guards of torch.compile compare the same, and the tensors' types, their dispatch keys (negation,
inference) and the thread's dispatch state (autocast, transforms) besides, in 0.35 us.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter, or_
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

MAX_ALIKE = 6
"""Calls kept of those that share their first tensor's shape and dtype."""
MAX_KINDS = 4096

Run = Callable[..., Any]
Found = tuple[Run, tuple[Tensor, ...], dict[str, Any]]
PLAIN = (Tensor, Parameter)


NOTHING: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Kept:
    """One call: what runs it, and what another call must have in common with it.

    Attributes:
        others: place, type and value of the arguments that are no tensors.
        count: of arguments.
        differentiable: whether gradients were recorded.
        takes_pointers: whether `run` wants the tensors' addresses, which are read here anyway.
    """

    run: Run
    pick: Callable[[tuple[Any, ...]], tuple[Tensor, ...]]
    check: Callable[..., bool]
    others: tuple[tuple[int, type, Any], ...]
    count: int
    differentiable: bool
    takes_pointers: bool

    def answer(self, args: tuple[Any, ...], differentiable: bool) -> Found | None:
        if len(args) != self.count or differentiable is not self.differentiable:
            return None
        tensors = self.pick(args)
        if not self.check(*tensors):
            return None
        pointers = [*map(Tensor.data_ptr, tensors)]
        if reduce(or_, pointers) & 15 or (self.others and not _equal(args, self.others)):
            return None
        return self.run, tensors, {"pointers": pointers} if self.takes_pointers else NOTHING


class Recent:
    """The calls of one operator whose tensors are all 16-byte aligned.

    Changes are made by one thread at a time; `find` may run beside them.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], tuple[Kept, ...]] = {}
        self.last: Kept | None = None  # kept; most programs call an operator on one shape

    def find(self, args: tuple[Any, ...], differentiable: bool) -> Found | None:
        """What ran for such arguments, the first of them a tensor; the tensors among them; and
        what it is told besides.

        `differentiable` is whether gradients are recorded. Those of an entry made while they are
        not may require one.
        """
        last = self.last
        if last is not None and (found := last.answer(args, differentiable)) is not None:
            return found
        first = args[0]
        for kept in self.kept.get((first.shape, first.dtype, len(args)), ()):
            if kept is not last and (found := kept.answer(args, differentiable)) is not None:
                return found
        return None

    def keep(self, args: tuple[Any, ...], run: Run, differentiable: bool) -> None:
        """Let `run` answer calls like this one, if there is room and its tensors are aligned.

        Numbers that are zero are left to those who tell 0.0 from -0.0.
        """
        first = args[0]
        kind = (first.shape, first.dtype, len(args))
        alike = self.kept.get(kind, ())
        places = [i for i, a in enumerate(args) if type(a) in PLAIN]
        tensors = [args[i] for i in places]
        if len(alike) >= MAX_ALIKE or any(t.data_ptr() % 16 for t in tensors):
            return
        others = tuple(
            (i, type(a), [*a] if type(a) is list else a)  # the caller may change a list
            for i, a in enumerate(args) if i not in places
        )  # fmt: skip
        if any(kind is float and not value for _, kind, value in others):
            return
        if len(self.kept) >= MAX_KINDS:
            self.clear()
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        one = len(places) == 1  # itemgetter gives a tuple for several places or a slice
        pick = itemgetter(slice(places[0], places[0] + 1)) if one else itemgetter(*places)
        pointers = getattr(run, "takes_pointers", False)
        new = Kept(run, pick, guards.check, others, len(args), differentiable, pointers)
        self.kept[kind] = (*alike, new)
        self.last = new

    def clear(self) -> None:
        self.kept.clear()
        self.last = None


def _equal(args: tuple[Any, ...], others: tuple[tuple[int, type, Any], ...]) -> bool:
    return all(type(args[i]) is kind and args[i] == value for i, kind, value in others)
