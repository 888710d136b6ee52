"""What a person's function makes of its tensors' dtypes, though halves are traced in fp32."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilewright.errors import NoImplementation

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
"""Steps that a function takes for some dtypes alone, and that leave values as they are."""


@dataclass
class Calls:
    """The steps of a function that was called with tensors of the dtypes that were given."""

    code: CodeType | None
    names: list[str] = field(default_factory=list)
    numbers: list[list[Any]] = field(default_factory=list)


class Noting(TorchFunctionMode):
    """Notes each step's name, and the numbers that it was given."""

    def __init__(self, calls: Calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _explicit(function, args, kwargs or {})
        out = function(*args, **kwargs)
        if _line_of(self.calls.code) and _is_step(function, out):
            self.calls.names.append(function.__name__)
            self.calls.numbers.append([n for n in tree_leaves((args, kwargs)) if _is_number(n)])
        return out


class Following(TorchFunctionMode):
    """Gives each step the numbers that were noted: `torch.finfo(x.dtype).min` is that of a half.

    Raises:
        NoImplementation: at another step than was noted, naming its line.
    """

    def __init__(self, calls: Calls):
        super().__init__()
        self.calls, self.next, self.last = calls, 0, ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _explicit(function, args, kwargs or {})
        line, k = _line_of(self.calls.code), self.next
        if not line or _name(function) in _CASTS or k >= len(self.calls.names):
            out = function(*args, **kwargs)
            if line and _is_step(function, out):
                raise self._other(line)
            return out
        leaves, form = tree_flatten((args, kwargs))
        at = [i for i, n in enumerate(leaves) if _is_number(n)]
        if self.calls.names[k] == _name(function) and len(at) == len(self.calls.numbers[k]):
            for i, number in zip(at, self.calls.numbers[k], strict=True):
                leaves[i] = number
            args, kwargs = tree_unflatten(leaves, form)
        out = function(*args, **kwargs)
        if _is_step(function, out):
            if self.calls.names[k] != _name(function):
                raise self._other(line)
            self.next, self.last = k + 1, line
        return out

    def finish(self) -> None:
        if self.next < len(self.calls.names):
            raise self._other(self.last)

    def _other(self, line: str) -> NoImplementation:
        where = f" ({line})" if line else ""
        return NoImplementation(
            f"it decides by a tensor's dtype which steps it takes{where}, and halves are traced as "
            "fp32: fuse a function for each"
        )


def _explicit(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`nan_to_num` with the numbers that follow from its tensor's dtype."""
    if not _name(function).startswith("nan_to_num"):
        return args, kwargs
    given = {**dict(zip(("input", "nan", "posinf", "neginf"), args, strict=False)), **kwargs}
    x = given.pop("input")
    if not x.is_floating_point():
        return args, kwargs
    limits = torch.finfo(x.dtype)
    for name, limit in (("posinf", limits.max), ("neginf", limits.min)):
        if given.get(name) is None:
            given[name] = limit
    return (x,), given


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _is_step(function: Any, out: Any) -> bool:
    """It makes a tensor."""
    return _name(function) not in _CASTS and any(isinstance(t, Tensor) for t in tree_leaves(out))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _line_of(code: CodeType | None) -> str:
    """Where this code runs now, of the frames that called; empty if in none."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
