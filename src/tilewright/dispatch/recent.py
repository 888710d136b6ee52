"""Positional calls that came before, known by one check in C++ instead of a key built in Python.

To read shape, strides, dtype and device of five tensors into a key and hash it costs 2.3 us; the
guards of torch.compile compare the same, and the tensors' types, their dispatch keys (negation,
inference) and the thread's dispatch state (autocast, transforms) besides, in 0.35 us. All that
remains is written out argument by argument: loops over them would cost more than the guards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from copy import copy
from numbers import Real
from typing import Any

from torch import Tensor, get_num_threads
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Parameter

MAX_ALIKE = 6
"""Calls kept of those that share their first tensor's shape and dtype."""
MAX_KINDS = 4096
"""Kinds of calls that are remembered; all are forgotten beyond, so that memory has a bound."""

Run = Callable[..., Any]
PLAIN = (Tensor, Parameter)

_EXACT = frozenset({int, str})

MISSED = object()
"""In place of a result, where no call like this one came before."""
Answer = Callable[[tuple[Any, ...], bool], Any]
"""The result of a call with these arguments, where gradients are recorded or not, or MISSED."""


def answering(args: tuple[Any, ...], run: Run, recorded: bool) -> Answer:
    """Let `run` answer the calls that are like this one.

    It is told the tensors' addresses, which are read anyway, alone if it has a way of its own
    `by_addresses`, or besides if it `takes_pointers`.
    """
    tensors = [a for a in args if type(a) in PLAIN]
    run_given = "tensors"
    if alone := getattr(run, "by_addresses", lambda device: None)(tensors[0].device):
        run, run_given = alone, "addresses"
    elif getattr(run, "takes_pointers", False):
        run_given = "both"
    check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    threads = get_num_threads() if tensors[0].is_cpu else None
    kept = [None if type(a) in PLAIN else _copied(a) for a in args]
    make = _maker("".join(map(_letter, args)), run_given, threads is not None)
    return make(run, check, recorded, threads, [*map(type, args)], kept)


def _letter(arg: Any) -> str:
    """t for a tensor, s for a sequence, n for numbers and words, o for other objects."""
    if type(arg) in PLAIN:
        return "t"
    if isinstance(arg, (tuple, list)):
        return "s"
    return "n" if isinstance(arg, (Real, str)) else "o"


@functools.cache
def _maker(layout: str, run_given: str, on_cpu: bool) -> Callable[..., Answer]:
    """What makes the answers to calls whose arguments have these letters."""
    places = range(len(layout))
    tensors = [n for n in places if layout[n] == "t"]
    others = [n for n in places if layout[n] != "t"]
    # Types first: no tensor is held against a number, and no subclass is asked anything.
    differs = [f"type(a{n}) is not type{n}" for n in tensors]
    for n in others:
        if layout[n] == "o":  # which may be equal to what it differs from
            differs.append(f"a{n} is not kept{n}")
            continue
        exact = f" or not is_exact(a{n})" if layout[n] == "s" else ""  # (True,) equals (1,)
        unequal = f"type(a{n}) is not type{n} or not a{n} == kept{n}{exact}"
        differs.append(f"(a{n} is not kept{n} and ({unequal}))")
    if on_cpu:
        differs.append("get_num_threads() != threads")
    # Nested tensors have no strides, and guards that read them end the process.
    differs += [f"a{n}.is_nested" for n in tensors]
    differs.append(f"not check({_listed('a', tensors)})")
    differs += [f"(p{n} := a{n}.data_ptr()) & 15" for n in tensors]
    given = {
        "tensors": _listed("a", tensors),
        "addresses": _listed("p", tensors),
        "both": f"{_listed('a', tensors)} pointers=[{_listed('p', tensors)}]",
    }[run_given]
    source = f"""
def make(run, check, recorded, threads, types, kept):
    {_listed("type", places)} = types
    {_listed("kept", places)} = kept

    def answer(args, differentiable):
        if differentiable is not recorded or len(args) != {len(layout)}:
            return MISSED
        {_listed("a", places)} = args
        if {" or ".join(differs)}:
            return MISSED
        return run({given})

    return answer
"""
    made: dict[str, Any] = {}
    exec(compile(source, f"<answer to {layout}>", "exec"), globals(), made)
    return made["make"]  # type: ignore[no-any-return]


def _listed(letter: str, places: Iterable[int]) -> str:
    return "".join(f"{letter}{n}, " for n in places)


class Recent:
    """The calls of one operator whose tensors are all 16-byte aligned.

    Changes are made by one thread at a time; calls may come beside them.

    Attributes:
        last: answers calls like the one kept last: most programs call an operator on one shape.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], tuple[Answer, ...]] = {}
        self.last: Answer = _nothing

    def earlier(self, args: tuple[Any, ...], differentiable: bool) -> Any:
        """The result of a call, the first of whose arguments is a tensor, that is not like the last
        one but like one kept before; else MISSED.

        `differentiable` is whether gradients are recorded. Those of a call kept while they are not
        may require one.
        """
        first, last = args[0], self.last
        try:
            alike = self.kept.get((first.shape, first.dtype, len(args)), ())
        except RuntimeError:  # nested tensors have no shape
            return MISSED
        for answer in alike:
            if answer is not last and (found := answer(args, differentiable)) is not MISSED:
                return found
        return MISSED

    def keep(self, args: tuple[Any, ...], run: Run, differentiable: bool) -> None:
        """Let `run` answer calls like this one, if there is room and its tensors are aligned.

        Numbers that are zero are left to those who tell 0.0 from -0.0, sequences of other things
        than sizes and words to those who tell 1.0 from 1, and a tensor that comes twice to those
        who take it: guards do not.
        """
        first = args[0]
        tensors = [a for a in args if type(a) in PLAIN]
        kind = (first.shape, first.dtype, len(args))
        alike = self.kept.get(kind, ())
        if len(alike) >= MAX_ALIKE or any(t.data_ptr() % 16 for t in tensors):
            return
        if len({*map(id, tensors)}) < len(tensors):
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
        self.last = _nothing


def _nothing(args: tuple[Any, ...], differentiable: bool) -> Any:
    return MISSED


def is_exact(values: Iterable[Any]) -> bool:
    """Whether elements are sizes and words, which are equal only where they are the same."""
    return _EXACT.issuperset(map(type, values))


def _are_exact(args: tuple[Any, ...]) -> bool:
    return all(is_exact(a) for a in args if isinstance(a, (tuple, list)))


def _copied(argument: Any) -> Any:
    return copy(argument) if isinstance(argument, list) else argument  # the caller may change it
