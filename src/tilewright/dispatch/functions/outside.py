"""Numbers that a function takes from outside of its arguments: parameters that nobody passes.

Each is a parameter of the operator, with the value that it had when the function was fused as its
default, and calls are given what it is now. So keys, traces, workloads and records tell functions
with other numbers apart, and a backward computes with those that its forward had.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import re
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from operator import is_
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tilewright.errors import InvalidArgument
from tilewright.op import Op

_NUMBERS = (Real, str, types.NoneType)
_EMPTY = object()
_TOLD = re.compile(r"a_.+_numbered_\d+")
MOST_OBJECTS = 64
"""That a function keeps of what its numbers have become. One that makes another object for each
call would fill memory."""


class Outside:
    """The numbers that a function's own code reads from its globals and its closure.

    Those are of `int`, `float`, `bool`, `str` and `None`, or not there yet. Where one has become
    another object, that object tells calls apart, and nothing in it, or a tuple's numbers do. What
    was not there yet, and is another object at a call, such as a function that is defined further
    down, counts as None.
    """

    def __init__(self, function: types.FunctionType):
        self.function = function
        taken = inspect.signature(function).parameters
        read = {
            name: function.__globals__.get(name, _EMPTY) for name in _globals(function.__code__)
        }
        self.globals = [n for n, v in read.items() if n not in taken and _is_number(n, v)]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells = {n: c for n, c in cells if _is_number(n, _content(c))}
        contents = {n: _content(c) for n, c in self.cells.items()}
        self._later = {n for n, v in (*read.items(), *contents.items()) if v is _EMPTY}
        self._told: OrderedDict[Any, str] = OrderedDict()
        self._others: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._last: tuple[list[Any], dict[str, Any]] = [], {}

    def __call__(self) -> dict[str, Any]:
        """What they are now, by name. The same dict while they are the same objects."""
        found = [*map(self.function.__globals__.get, self.globals)]
        if self.cells:
            found += map(_content, self.cells.values())
        last, values = self._last
        if len(last) != len(found) or not all(map(is_, found, last)):
            names = (*self.globals, *self.cells)
            values = {n: self._as_argument(n, v) for n, v in zip(names, found, strict=True)}
            self._last = found, values
        return values

    def _as_argument(self, name: str, value: Any) -> Any:
        """As a workload has it: a number of numpy is one of Python, another object is numbered."""
        if type(value) in (bool, int) or (type(value) is str and not _TOLD.fullmatch(value)):
            return value
        if isinstance(value, Real):
            return int(value) if isinstance(value, Integral) else _Fixed(value)
        if isinstance(value, str) and type(value) is not str:
            return self._as_argument(name, str(value))
        if value is None or value is _EMPTY or name in self._later:
            return None
        return self._numbered(value)

    def _numbered(self, value: Any) -> str:
        """A word for an object, which is no other's, and by which those met last are found."""
        known_by = _known_by(value)
        with self._lock:
            if known_by not in self._told:
                told = f"a_{type(value).__name__}_numbered_{next(self._numbers)}"
                self._told[known_by], self._others[told] = told, value
                if len(self._told) > MOST_OBJECTS:
                    _, gone = self._told.popitem(last=False)
                    del self._others[gone]
            self._told.move_to_end(known_by)
            return self._told[known_by]

    def _object(self, name: str, value: Any) -> Any:
        """What a workload has for it."""
        if type(value) is not str or not _TOLD.fullmatch(value):
            return value
        if value not in self._others:
            raise InvalidArgument(
                f"{self.function.__name__}: {name}={value} is an object of another process, or one "
                f"before the last {MOST_OBJECTS} that {name} and others have been; pass it as an "
                "argument"
            )
        return self._others[value]

    def bound(self, values: Mapping[str, Any]) -> Callable[..., Any]:
        """The function where its numbers are these."""
        now = self()
        values = {n: self._object(n, v) for n, v in values.items() if repr(v) != repr(now[n])}
        if not values:
            return self.function
        function, cells = (
            self.function,
            {n: types.CellType(values[n]) for n in self.cells if n in values},
        )
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        other = types.FunctionType(
            function.__code__,
            {**function.__globals__, **{n: values[n] for n in self.globals if n in values}},
            function.__name__,
            function.__defaults__,
            tuple(cells.get(n, cell) for n, cell in free),
        )
        other.__kwdefaults__ = function.__kwdefaults__
        return other


def with_outside(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], Outside | None]:
    """The function with a keyword for each number that it takes from outside, and what reads them;
    None if there are none. Without those keywords it is the function itself."""
    if not isinstance(function, types.FunctionType) or not (outside := Outside(function))():
        return function, None
    names = tuple(outside())

    @functools.wraps(function)
    def reference(*args: Any, **kwargs: Any) -> Any:
        values = {n: kwargs.pop(n) for n in names if n in kwargs}
        # Dynamo has guards of its own for what it reads.
        now = not values or is_dynamo_compiling()
        return (function if now else outside.bound(values))(*args, **kwargs)

    signature = inspect.signature(function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(n, keyword, default=v) for n, v in outside().items()]
    own = list(signature.parameters.values())
    place = sum(p.kind < keyword for p in own)
    listed = [*own[:place], *added, *own[place:]]
    reference.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return reference, outside


def reading_outside(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """The public function, which is given what stands outside now. Where no argument is named, all
    are passed by place, as calls that come again are found by."""
    outside = op.outside
    assert outside is not None
    order = list(op.parameters)
    place = order.index(next(iter(outside())))
    defaults = [op.parameters[n].default for n in order[:place]]
    needed = sum(d is inspect.Parameter.empty for d in defaults)

    def reading(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or len(args) > place:
            return call(*args, **kwargs)
        values = outside()
        if kwargs or len(args) < needed:
            return call(*args, **{**values, **kwargs})
        return call(*args, *defaults[len(args) :], *values.values())

    return reading


def _globals(code: types.CodeType) -> Iterator[str]:
    """The globals that code names, that of functions inside it included; each once."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _globals(c)]
    return iter(dict.fromkeys([*own, *inner]))


def _is_number(name: str, value: Any) -> bool:
    return not hasattr(builtins, name) if value is _EMPTY else isinstance(value, _NUMBERS)


def _known_by(value: Any) -> Any:
    """What tells an object from others while it is kept: which it is, or a tuple's numbers."""
    if type(value) in (tuple, torch.Size):
        return type(value), tuple(map(_known_by, value))
    alike = isinstance(value, (*_NUMBERS, torch.device))
    return type(value), repr(value) if alike else id(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


class _Fixed(float):
    """A float that is part of a call's key, beside those of `scalars`, which need no other kernel:
    they are found there by their type."""
