"""What a person's function makes of its tensors' dtypes, though halves are traced in fp32."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tilewright.errors import NoImplementation
from tilewright.tensor_spec import share_memory

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
"""What a function may do for some dtypes alone, where floats become floats."""
_HALVES = (torch.float16, torch.bfloat16)
_CONSTANTS = (int, float, str, NoneType, torch.dtype)

Label = tuple[Any, ...]
"""Which tensor: an argument by its place, a step's result, or another by when it was first met."""


@dataclass
class Step:
    """A call that makes or writes a tensor; `given` has labels where tensors were."""

    name: str
    form: TreeSpec
    given: list[Any]


class Cast(NamedTuple):
    """From one dtype to another; of one to its own, it may give the tensor itself."""

    before: torch.dtype
    after: torch.dtype
    itself: bool


@dataclass
class Calls:
    """The steps of a function that was called with tensors of the dtypes that were given.

    Attributes:
        casts: of each tensor that was cast.
    """

    code: CodeType | None
    steps: list[Step] = field(default_factory=list)
    casts: dict[Label, list[Cast]] = field(default_factory=lambda: defaultdict(list))


class _Labelling(TorchFunctionMode):
    """Knows tensors again; a cast of one is the same."""

    def __init__(self, calls: Calls, tensors: Sequence[Tensor]):
        super().__init__()
        self.calls = calls
        self.labels: dict[int, tuple[Label, Tensor]] = {}  # by ids, of what is kept alive
        self.others = 0
        for place, t in enumerate(tensors):
            self.name(t, ("argument", place))

    def name(self, t: Tensor, label: Label) -> None:
        self.labels[id(t)] = label, t

    def label(self, t: Tensor) -> Label:
        if id(t) not in self.labels:
            self.name(t, ("other", self.others))
            self.others += 1
        return self.labels[id(t)][0]

    def name_results(self, step: int, out: Any) -> None:
        for place, t in enumerate(tree_leaves(out)):
            if isinstance(t, Tensor):
                self.name(t, ("step", step, place))

    def step(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Step:
        leaves, form = tree_flatten((args, kwargs))
        given = [self.label(v) if isinstance(v, Tensor) else v for v in leaves]
        return Step(_name(function), form, given)

    def outside(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that is not the function's."""
        out = function(*args, **kwargs)
        if _name(function) == "detach":  # what is differentiated is given so
            self.name(out, self.label(args[0]))
        return out


class Noting(_Labelling):
    """Notes each step, and casts."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _explicit(function, args, kwargs or {})
        if not _line_of(self.calls.code):
            return self.outside(function, args, kwargs)
        step = self.step(function, args, kwargs)
        out = function(*args, **kwargs)
        if _is_cast(function, args, out):
            label = self.label(args[0])
            self.calls.casts[label].append(Cast(args[0].dtype, out.dtype, out is args[0]))
            self.name(out, label)
        elif _is_step(function, out):
            self.name_results(len(self.calls.steps), out)
            self.calls.steps.append(step)
        return out


class Following(_Labelling):
    """Gives each step the numbers that were noted: `torch.finfo(x.dtype).min` is that of a half.

    What was cast to a half is rounded to it; a cast that was not taken is none.

    Raises:
        NoImplementation: at another step than was noted, or one of a tensor of which a cast that
            gave the tensor itself was written to, naming its line.
    """

    def __init__(self, calls: Calls, tensors: Sequence[Tensor]):
        super().__init__(calls, tensors)
        self.arguments = tensors
        self.next, self.last = 0, ""
        self.cast = Counter[Label]()
        self.twins: list[tuple[Tensor, Tensor, int]] = []
        """Two that were one tensor, and the version of the second when they became two."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _explicit(function, args, kwargs or {})
        line, k = _line_of(self.calls.code), self.next
        if not line:
            return self.outside(function, args, kwargs)
        step = self.step(function, args, kwargs)
        noted = self.calls.steps[k] if k < len(self.calls.steps) else None
        if noted is not None and _alike(step, noted):
            leaves = tree_leaves((args, kwargs))
            for i, value in enumerate(noted.given):
                if isinstance(value, _CONSTANTS) and value not in _HALVES:
                    leaves[i] = value
            args, kwargs = tree_unflatten(leaves, step.form)
        out = function(*args, **kwargs)
        if _is_cast(function, args, out) or _is_step(function, out):
            self.check_twins((args, kwargs), line)
        if _is_cast(function, args, out):
            return self.as_noted(args[0], out)
        if _is_step(function, out):
            if noted is None or not _alike(step, noted):
                raise self._other(line)
            self.name_results(k, out)
            self.next, self.last = k + 1, line
        return out

    def as_noted(self, x: Tensor, out: Tensor) -> Tensor:
        label = self.label(x)
        noted, k = self.calls.casts[label], self.cast[label]
        self.cast[label] += 1
        if k >= len(noted):
            return x
        before, after, itself = noted[k]
        if itself and out is not x:
            self.twins += [(x, out, out._version), (out, x, x._version)]
        if before != after:
            if after in _HALVES and out.dtype not in _HALVES:
                out = out.to(after).to(out.dtype)
            elif out is x:
                out = x.clone()
        self.name(out, label)
        return out

    def check_twins(self, read: Any, line: str) -> None:
        for t in tree_leaves(read):
            for one, other, version in self.twins:
                if isinstance(t, Tensor) and share_memory(t, one) and other._version != version:
                    where = f" ({line})" if line else ""
                    raise NoImplementation(
                        f"it writes to one of a half and its cast to that dtype, which are one "
                        f"tensor, and needs the other{where}: clone() what is written to"
                    )

    def finish(self, out: Any) -> None:
        if self.next < len(self.calls.steps):
            raise self._other(self.last)
        self.check_twins((self.arguments, out), self.last)

    def _other(self, line: str) -> NoImplementation:
        where = f" ({line})" if line else ""
        return NoImplementation(
            f"it decides by a tensor's dtype which steps it takes{where}, and halves are traced as "
            "fp32: fuse a function for each"
        )


def _alike(step: Step, noted: Step) -> bool:
    """The same step of the same tensors, whatever its numbers are."""
    if (step.name, step.form) != (noted.name, noted.form):
        return False
    pairs = zip(step.given, noted.given, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, tuple) or isinstance(b, tuple))


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


def _is_cast(function: Any, args: Any, out: Any) -> bool:
    if _name(function) not in _CASTS or not isinstance(out, Tensor):
        return False
    return args[0].is_floating_point() and out.is_floating_point()


def _is_step(function: Any, out: Any) -> bool:
    """It makes a tensor, or writes to one."""
    return _name(function) == "__setitem__" or any(isinstance(t, Tensor) for t in tree_leaves(out))


def _line_of(code: CodeType | None) -> str:
    """Where this code runs now, of the frames that called; empty if in none."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
