"""Positional calls that came before, found by one check in C++ instead of a key built in Python.

To read shape, strides, dtype and device of five tensors into a key and hash it costs 2.3 us; the
guards of torch.compile compare the same, and the tensors' types, their dispatch keys (negation,
inference) and the thread's dispatch state (autocast, transforms) besides, in 0.35 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Real
from operator import itemgetter
from typing import Any

from torch import Tensor, get_num_threads
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

MAX_ALIKE = 6
"""Calls kept of those that share their first tensor's shape and dtype."""
MAX_KINDS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""

Run = Callable[..., Any]
Found = tuple[Run, tuple[Tensor, ...], dict[str, Any]]
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]
PLAIN = (Tensor, Parameter)

NOTHING: dict[str, Any] = {}
Answer = Callable[[tuple[Any, ...], bool], Found | None]
"""What is found for a call's arguments, where gradients are recorded or not, if it is such a one"""


def answering(args: tuple[Any, ...], run: Run, recorded: bool) -> Answer:
    """Let `run` answer the calls that are like this one.

    It is told the tensors' addresses, which are read anyway, if it `takes_pointers`.
    """
    tensors_of, others_of = _picking(args)
    tensors = tensors_of(args)
    check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    kinds, others = [*map(type, args)], _copied(others_of(args))
    sequences = any(type(a) in (tuple, list) for a in others)
    takes_pointers = getattr(run, "takes_pointers", False)
    threads = get_num_threads() if tensors[0].is_cpu else None

    def answer(args: tuple[Any, ...], differentiable: bool) -> Found | None:
        # Types first: no tensor is held against a number, and no subclass is asked anything.
        if differentiable is not recorded or [*map(type, args)] != kinds:
            return None
        if threads is not None and get_num_threads() != threads:
            return None
        tensors = tensors_of(args)
        for tensor in tensors:
            if tensor.is_nested:  # it has no strides, and guards that read them end the process
                return None
        if not check(*tensors) or (others and others_of(args) != others):
            return None
        if sequences and not _are_exact(others_of(args)):  # (True,) equals (1,)
            return None
        pointers = []
        for tensor in tensors:
            pointer = tensor.data_ptr()
            if pointer & 15:
                return None
            pointers.append(pointer)
        return run, tensors, {"pointers": pointers} if takes_pointers else NOTHING

    return answer


class Recent:
    """The calls of one operator whose tensors are all 16-byte aligned.

    Changes are made by one thread at a time; `find` may run beside them.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], tuple[Answer, ...]] = {}
        self.last: Answer | None = None  # kept; most programs call an operator on one shape

    def find(self, args: tuple[Any, ...], differentiable: bool) -> Found | None:
        """What ran for such arguments, the first of them a tensor; the tensors among them; and
        what it is told besides.

        `differentiable` is whether gradients are recorded. Those of an entry made while they are
        not may require one.
        """
        first, last = args[0], self.last
        if last is not None and (found := last(args, differentiable)) is not None:
            return found
        try:
            alike = self.kept.get((first.shape, first.dtype, len(args)), ())
        except RuntimeError:  # nested tensors have no shape
            return None
        for answer in alike:
            if answer is not last and (found := answer(args, differentiable)) is not None:
                return found
        return None

    def keep(self, args: tuple[Any, ...], run: Run, differentiable: bool) -> None:
        """Let `run` answer calls like this one, if there is room and its tensors are aligned.

        Numbers that are zero are left to those who tell 0.0 from -0.0, sequences of other things
        than sizes and words to those who tell 1.0 from 1.
        """
        first = args[0]
        kind = (first.shape, first.dtype, len(args))
        alike = self.kept.get(kind, ())
        if len(alike) >= MAX_ALIKE or any(a.data_ptr() % 16 for a in args if type(a) in PLAIN):
            return
        if any(isinstance(a, Real) and not isinstance(a, int) and not a for a in args):
            return
        if not _are_exact(args):
            return
        if len(self.kept) >= MAX_KINDS:
            self.clear()
        self.last = answering(args, run, differentiable)
        self.kept[kind] = (*alike, self.last)

    def clear(self) -> None:
        self.kept.clear()
        self.last = None


def _picking(args: tuple[Any, ...]) -> tuple[Pick, Pick]:
    """What picks the tensors from arguments such as these, and what picks all others."""

    def picking(places: list[int]) -> Pick:
        if len(places) == 1:  # of one place itemgetter gives no tuple, but of a slice
            return itemgetter(slice(places[0], places[0] + 1))
        return itemgetter(*places) if places else itemgetter(slice(0))

    plain = [type(a) in PLAIN for a in args]
    return picking([i for i, p in enumerate(plain) if p]), picking(
        [i for i, p in enumerate(plain) if not p]
    )


def is_exact(values: Iterable[Any]) -> bool:
    """Whether elements are sizes and words, which are equal only where they are the same."""
    return all(type(v) is int or type(v) is str for v in values)


def _are_exact(args: tuple[Any, ...]) -> bool:
    return all(is_exact(a) for a in args if type(a) is tuple or type(a) is list)


def _copied(others: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([*a] if type(a) is list else a for a in others)  # the caller may change a list
