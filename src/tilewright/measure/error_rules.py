"""How each operation of a traced reference carries rounding errors on; see error_bound.py.

With a correctly rounded result y: the operands' errors times the derivatives, plus |y|, in units
of u. Library functions (exp, rsqrt, ...) are allowed two ulps: 4 |y|. An operand that is known too
badly for derivatives is looked at where it may end (`Arithmetic.spread`). Reductions, steps and
choices, and convolutions have rules of their own beside this module, which has those of smooth
functions of single elements and of what is only moved.

A new operation is one line in a table here, or a function under @rule.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.philox import philox_bernoulli

SAFETY = 2.0
"""Covers second-order terms and formulas that round once or twice more than the reference's."""

LIBRARY = 4.0
"""Error of a library function in units of u * |y|: CUDA's and SLEEF's keep within two ulps."""


@dataclass(frozen=True)
class Pair:
    """An intermediate of the reference.

    Attributes:
        value: fp64, or integer or bool where the reference has such.
        error: fp64, in units of u; None where the value is exact. Of a bool that may be either it
            reaches from one to the other; infinite where anything goes.
        exact: whether the error may be zero somewhere, so that it is worth finding out.
    """

    value: Tensor
    error: Tensor | None = None
    exact: bool = True

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """The same rearrangement of value and error."""
        return Pair(
            function(self.value),
            None if self.error is None else function(self.error),
            self.exact,
        )


@dataclass(frozen=True)
class Arithmetic:
    """What implementations compute in.

    Attributes:
        dtype: of the intermediates.
        storage: what `rounded` rounds to: the dtype of the operator's first tensor.
        relaxed: written roundings may be dropped, so both outcomes are allowed.
        device: where constants are made.
        tf32: operands of matrix products may be rounded to TF32.
        decided: what rounding decides is taken to end as with exact operands.
        choices: what rounding decided elsewhere, by the names of the steps; added to by them.
    """

    dtype: torch.dtype
    storage: torch.dtype
    relaxed: bool
    device: torch.device
    tf32: bool = False
    decided: bool = False
    choices: list[str] = field(default_factory=list)

    @property
    def u(self) -> float:
        """The unit of errors: the unit roundoff; of fp64 twice that, since the truth itself
        carries such roundings."""
        return torch.finfo(self.dtype).eps / (1 if self.dtype == torch.float64 else 2)

    def rounding(self, y: Tensor, operands: Sequence[Pair], error: Tensor | None, n: float) -> Pair:
        """The result y of one operation: error carried over from the operands, plus n |y|."""
        exact = n <= 1.0 and all(p.exact for p in operands)
        if error is not None:
            error = _told(error, operands)
        if n == 0.0:
            return Pair(y, error, exact)
        own = n * self.sized(y)
        if exact:
            own.masked_fill_(self._representable(y), 0.0)
            if error is not None:
                own = torch.where(error == 0, own, n * self.sized(y))
        if error is not None:
            own = own + error
        elif exact and not own.any():
            return Pair(y)
        return Pair(y, own, exact)

    def sized(self, y: Tensor) -> Tensor:
        """What one rounding of y may be, in units of u: numbers too small to be normal are rounded
        to steps as wide as those of the least normal one."""
        size = magnitude(y)
        return size.clamp_min_(torch.finfo(self.dtype).tiny) if y.is_floating_point() else size

    def spread(
        self, error: Tensor, function: Callable[..., Tensor], y: Tensor, *operands: Pair
    ) -> Tensor:
        """`error`, which derivatives tell, or more where operands may end farther from y.

        That is looked for where squares of their errors count beside roundings, as behind a jump of
        `floor` or `remainder`, and where a derivative is infinite, as that of sqrt at 0.
        """
        errors = [p.error for p in operands if p.error is not None]
        coarse = any(bool((SAFETY * self.u * e > math.sqrt(self.u)).any()) for e in errors)
        if not coarse and bool(error.isfinite().all()):
            return error
        return torch.maximum(_told(error, operands), self.tried(function, y, *operands))

    def ends(self, p: Pair) -> tuple[Tensor, ...]:
        """The least and the greatest that an implementation may hold; one where it is exact."""
        if p.error is None:
            return (p.value,)
        if p.value.dtype == torch.bool:
            return p.value & (p.error == 0), p.value | (p.error > 0)
        reach = SAFETY * self.u * p.error
        if not p.value.is_floating_point():
            return integer_ends(p.value, reach)
        return p.value - reach, p.value + reach

    def reaching(self, y: Tensor, ends: Sequence[Tensor]) -> Tensor:
        """The error of y, which may be as far away as any of `ends`."""

        def away(end: Tensor) -> Tensor:
            if y.dtype == torch.bool:
                return end != y
            return magnitude(end.double() - y.double())

        return functools.reduce(torch.maximum, map(away, ends)).double() / (SAFETY * self.u)

    def tried(self, function: Callable[..., Tensor], y: Tensor, *operands: Pair) -> Tensor:
        """The error of y, the function of the operands, by what it is at all of their ends."""
        ends = itertools.product(*map(self.ends, operands))
        return self.reaching(y, [function(*end) for end in ends])

    def between(self, function: Callable[..., Tensor], *operands: Pair) -> Pair:
        """A function that never falls: it is between what it is at the ends of its operands."""
        y = function(*(p.value for p in operands))
        if all(p.error is None for p in operands):
            return Pair(y)
        ends = [self.ends(p) for p in operands]
        extremes = [function(*(of[at] for of in ends)) for at in (0, -1)]
        error = self.reaching(y, extremes)
        if _open(operands):
            for end in extremes:
                error = error.masked_fill(y.isfinite() & ~end.isfinite(), math.inf)
        return Pair(y, error, all(p.exact for p in operands))

    def chosen(self, name: str, y: Tensor, error: Tensor | None) -> Pair:
        """The result of a step that jumps, and what rounding may make of it."""
        if error is None or self.decided or not error.any():
            return Pair(y)
        self.choices.append(name)
        return Pair(y, error)

    def _representable(self, y: Tensor) -> Tensor:
        if self.dtype != torch.float64:
            return y.to(self.dtype).double() == y
        # In fp64 the truth is rounded too; of its results, only integers are surely exact.
        return (y == y.round()) & (y.abs() < 2.0**40)

    def lift(self, value: Any) -> Pair:
        """A constant of the graph as a pair: a number, or a tensor that the trace holds."""
        if isinstance(value, Pair):
            return value
        t = torch.as_tensor(value, device=self.device)
        if not t.is_floating_point():
            return Pair(t)
        t = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        inexact = t.to(self.dtype).double() != t
        return Pair(t, t.abs() * inexact) if inexact.any() else Pair(t)


def integer_ends(whole: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """The integers farthest from `whole` within `reach`, of those that its dtype has."""
    limits = torch.iinfo(whole.dtype)
    most = min(limits.max, 2**63 - 1024)  # which fp64 holds
    steps = (reach * (1 + 2.0**-50)).round()  # fp64 does not tell large integers apart

    def end(sign: int) -> Tensor:
        moved = (whole.double() + sign * steps).clamp(limits.min, most).to(whole.dtype)
        return torch.where(steps == 0, whole, moved)

    low, high = end(-1), end(1)
    return low, high.masked_fill(high == most, limits.max)


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""By the operation's name, without the underscore of in-place forms; aten and prims share it."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def magnitude(y: Tensor) -> Tensor:
    """|y|, and 0 where y is infinite or NaN: such results are not rounded."""
    return y.abs().nan_to_num_(0.0, 0.0)


def _open(operands: Sequence[Pair]) -> bool:
    """Whether one may be anything somewhere."""
    return any(bool((p.error == math.inf).any()) for p in operands if p.error is not None)


def _told(error: Tensor, operands: Sequence[Pair]) -> Tensor:
    """What derivatives tell of an error: nothing where they are NaN, or infinite while errors of
    operands are not."""
    if bool(error.isfinite().all()):
        return error
    return error.nan_to_num(0.0, math.inf if _open(operands) else 0.0, 0.0)


def times(factor: Tensor | float, error: Tensor | None) -> Tensor | None:
    if error is None:
        return None
    if isinstance(factor, Tensor) and factor.dtype == torch.bool:
        return error * factor
    return error * (factor.abs() if isinstance(factor, Tensor) else abs(factor))


def plus(*errors: Tensor | None) -> Tensor | None:
    present = [e for e in errors if e is not None]
    return sum(present[1:], present[0]) if present else None


def _unary(name: str, function: Rule, slope: Rule, n: float) -> None:
    """`slope(x, y)` is dy/dx; `n` the operation's own error in units of u |y|."""

    def apply(arithmetic: Arithmetic, x: Any, **_: Any) -> Pair:
        x = arithmetic.lift(x).map(torch.Tensor.double)
        y = function(x.value)
        error = None if x.error is None else times(slope(x.value, y), x.error)
        if error is not None:
            error = arithmetic.spread(error, function, y, x)
        return arithmetic.rounding(y, (x,), error, n)

    RULES[name] = apply


UNARY: tuple[tuple[str, Rule, Rule, float], ...] = (
    ("neg", torch.neg, lambda x, y: 1.0, 0.0),
    ("abs", torch.abs, lambda x, y: 1.0, 0.0),
    ("square", torch.square, lambda x, y: 2 * x, 1.0),
    ("sqrt", torch.sqrt, lambda x, y: 0.5 / y, 1.0),
    ("rsqrt", torch.rsqrt, lambda x, y: 0.5 * y / x, LIBRARY),
    ("reciprocal", torch.reciprocal, lambda x, y: y * y, 2.0),
    ("exp", torch.exp, lambda x, y: y, LIBRARY),
    ("exp2", torch.exp2, lambda x, y: y * math.log(2), LIBRARY),
    ("expm1", torch.expm1, lambda x, y: y + 1, LIBRARY),
    ("log", torch.log, lambda x, y: 1 / x, LIBRARY),
    ("log2", torch.log2, lambda x, y: 1 / (x * math.log(2)), LIBRARY),
    ("log1p", torch.log1p, lambda x, y: 1 / (1 + x), LIBRARY),
    ("sin", torch.sin, lambda x, y: torch.cos(x), LIBRARY),
    ("cos", torch.cos, lambda x, y: torch.sin(x), LIBRARY),
    ("tanh", torch.tanh, lambda x, y: 1 - y * y, LIBRARY),
    ("sigmoid", torch.sigmoid, lambda x, y: y * (1 - y), 2 * LIBRARY),
    ("erf", torch.erf, lambda x, y: torch.exp(-x * x) * (2 / math.sqrt(math.pi)), LIBRARY),
    ("erfc", torch.erfc, lambda x, y: torch.exp(-x * x) * (2 / math.sqrt(math.pi)), 2 * LIBRARY),
    ("log10", torch.log10, lambda x, y: 1 / (x * math.log(10)), LIBRARY),
    ("tan", torch.tan, lambda x, y: 1 + y * y, 2 * LIBRARY),
    ("asin", torch.asin, lambda x, y: 1 / torch.cos(y), LIBRARY),
    ("acos", torch.acos, lambda x, y: 1 / torch.sin(y), LIBRARY),
    ("atan", torch.atan, lambda x, y: 1 / (1 + x * x), LIBRARY),
    ("sinh", torch.sinh, lambda x, y: torch.cosh(x), 2 * LIBRARY),
    ("cosh", torch.cosh, lambda x, y: torch.sinh(x), LIBRARY),
    ("asinh", torch.asinh, lambda x, y: 1 / torch.cosh(y), 2 * LIBRARY),
    ("acosh", torch.acosh, lambda x, y: 1 / torch.sinh(y), 2 * LIBRARY),
    ("atanh", torch.atanh, lambda x, y: 1 / (1 - x * x), 2 * LIBRARY),
)
for _entry in UNARY:
    _unary(*_entry)


def _binary(name: str, function: Rule, slopes: Rule, n: float) -> None:
    """`slopes(a, b, y)` are (dy/da, dy/db); `n` the operation's own error in units of u |y|."""

    def apply(arithmetic: Arithmetic, a: Any, b: Any, alpha: float = 1) -> Pair:
        a, b = arithmetic.lift(a), arithmetic.lift(b)
        if alpha != 1:
            b = RULES["mul"](arithmetic, b, alpha)
        y = function(a.value, b.value)
        if y.dtype == torch.bool:
            inexact = not a.error is b.error is None
            return Pair(y, arithmetic.tried(function, y, a, b) if inexact else None)
        da, db = (1.0, 1.0) if a.error is b.error is None else slopes(a.value, b.value, y)
        error = plus(times(da, a.error), times(db, b.error))
        if error is not None:
            error = arithmetic.spread(error.expand(y.shape), function, y, a, b)
            if name in JUMPING:
                error = torch.maximum(error, arithmetic.tried(function, y, a, b))
        return arithmetic.rounding(y, (a, b), error, n)

    RULES[name] = apply


JUMPING = ("copysign", "atan2")
"""However little an operand is off: its sign decides."""

BINARY: tuple[tuple[str, Rule, Rule, float], ...] = (
    ("add", torch.add, lambda a, b, y: (1.0, 1.0), 1.0),
    ("sub", torch.sub, lambda a, b, y: (1.0, 1.0), 1.0),
    ("rsub", lambda a, b: b - a, lambda a, b, y: (1.0, 1.0), 1.0),
    ("mul", torch.mul, lambda a, b, y: (b, a), 1.0),
    ("div", torch.div, lambda a, b, y: (1 / b, y / b), 1.0),
    ("copysign", torch.copysign, lambda a, b, y: (1.0, 0.0), 0.0),
    ("hypot", torch.hypot, lambda a, b, y: (a / y, b / y), 2 * LIBRARY),
    ("atan2", torch.atan2, lambda a, b, y: (b / (a * a + b * b), a / (a * a + b * b)), 2 * LIBRARY),
)
for _entry in BINARY:
    _binary(*_entry)


@rule("pow")
def _pow(arithmetic: Arithmetic, x: Any, exponent: Any) -> Pair:
    x = arithmetic.lift(x)
    if exponent == 2:
        return RULES["mul"](arithmetic, x, x)
    power = arithmetic.lift(exponent)
    y = torch.pow(x.value, power.value)
    error = plus(
        times(power.value * y / x.value, x.error), times(y * torch.log(x.value), power.error)
    )
    if error is not None:
        error = arithmetic.spread(error.expand(y.shape), torch.pow, y, x, power)
    return arithmetic.rounding(y, (x, power), error, LIBRARY)


@rule("philox_bernoulli")
def _philox_bernoulli(
    arithmetic: Arithmetic, seed: Pair, call: int, threshold: int, shape: Sequence[int]
) -> Pair:
    return Pair(philox_bernoulli(seed.value, call, threshold, shape))


@rule("clamp")
def _clamp(arithmetic: Arithmetic, x: Pair, low: Any = None, high: Any = None) -> Pair:
    for bound, name in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            x = RULES[name](arithmetic, x, float(bound) if not isinstance(bound, Pair) else bound)
    return x


def _rearrange(name: str, function: Rule) -> None:
    def apply(arithmetic: Arithmetic, x: Pair, *args: Any, **_: Any) -> Pair:
        return x.map(lambda t: function(t, *args))

    RULES[name] = apply


VIEWS: tuple[tuple[str, Rule], ...] = (
    ("expand", torch.Tensor.expand),
    ("view", torch.Tensor.reshape),
    ("_unsafe_view", torch.Tensor.reshape),
    ("reshape", torch.Tensor.reshape),
    ("unsqueeze", torch.unsqueeze),
    ("squeeze", torch.squeeze),
    ("permute", torch.permute),
    ("transpose", torch.transpose),
    ("select", torch.select),
    ("slice", torch.ops.aten.slice),
    ("broadcast_in_dim", torch.ops.prims.broadcast_in_dim),
    ("repeat", torch.Tensor.repeat),
    ("clone", lambda t: t),
    ("alias", lambda t: t),
    ("detach", lambda t: t),
    ("lift_fresh_copy", lambda t: t),
    ("copy_strided", lambda t, strides: t),
)
for _view in VIEWS:
    _rearrange(*_view)


def _cast(x: Pair, dtype: torch.dtype) -> Pair:
    return Pair(x.value.to(dtype), x.error, x.exact)


def _together(pairs: Sequence[Pair], function: Callable[[list[Tensor]], Tensor]) -> Pair:
    """One tensor whose elements are those of several."""
    value = function([p.value for p in pairs])
    if all(p.error is None for p in pairs):
        return Pair(value)
    errors = [
        p.value.new_zeros(p.value.shape, dtype=torch.float64) if p.error is None else p.error
        for p in pairs
    ]
    return Pair(value, function(errors), all(p.exact for p in pairs))


@rule("cat")
def _cat(arithmetic: Arithmetic, pieces: Sequence[Any], dim: int = 0) -> Pair:
    return _together([arithmetic.lift(p) for p in pieces], lambda tensors: torch.cat(tensors, dim))


@rule("slice_scatter")
def _slice_scatter(arithmetic: Arithmetic, into: Pair, part: Pair, *where: int) -> Pair:
    # PyTorch's leaves what was expanded as it is, where elements share their memory.
    into = _cast(into, part.value.dtype).map(torch.Tensor.contiguous)
    return _together([into, part], lambda tensors: torch.ops.aten.slice_scatter(*tensors, *where))


def _filling(
    arithmetic: Arithmetic, value: Any, dtype: torch.dtype | None, shape: Sequence[int]
) -> Pair:
    """Of the dtype of what it fills: other numbers may be written over a part of it."""
    filled = arithmetic.lift(value)
    if dtype is not None:
        filled = _cast(filled, torch.float64 if dtype.is_floating_point else dtype)
    return filled.map(lambda t: t.expand(tuple(shape)))


@rule("full")
def _full(
    arithmetic: Arithmetic,
    shape: Sequence[int],
    value: Any,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> Pair:
    return _filling(arithmetic, value, dtype, shape)


@rule("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
def _empty(arithmetic: Arithmetic, like: Any, *given: Any, **__: Any) -> Pair:
    """Memory that is filled before it is read: it stands for a shape."""
    sizes = (given[0] if given else like.value.shape) if isinstance(like, Pair) else like
    return Pair(torch.zeros(tuple(sizes), dtype=torch.float64, device=arithmetic.device))


@rule("full_like")
def _full_like(
    arithmetic: Arithmetic, like: Pair, value: Any, dtype: torch.dtype | None = None, **_: Any
) -> Pair:
    return _filling(arithmetic, value, dtype or like.value.dtype, like.value.shape)


@rule("scalar_tensor")
def _scalar_tensor(
    arithmetic: Arithmetic, value: Any, dtype: torch.dtype | None = None, **_: Any
) -> Pair:
    return _filling(arithmetic, value, dtype, ())


@rule("convert_element_type", "_to_copy")
def _convert(arithmetic: Arithmetic, x: Pair, dtype: torch.dtype | None = None, **_: Any) -> Pair:
    if dtype is None:
        return x
    if dtype.is_floating_point:
        wide = Pair(x.value.double(), x.error, x.exact)
        narrows = torch.finfo(dtype).eps > torch.finfo(arithmetic.dtype).eps
        return RULES["rounded"](replace(arithmetic, storage=dtype), wide) if narrows else wide
    if dtype != torch.bool and x.value.is_floating_point():
        return RULES["trunc"](arithmetic, x)  # NaN stays: of what torch leaves open, all is right
    if dtype == torch.bool and x.value.dtype != torch.bool:
        return RULES["ne"](arithmetic, x, 0)
    return _cast(x, dtype)


@rule("copy")
def _copy(arithmetic: Arithmetic, like: Pair, x: Pair, *_: Any) -> Pair:
    return _cast(x, like.value.dtype).map(lambda t: t.expand(like.value.shape))


@rule("rounded")
def _rounded(arithmetic: Arithmetic, x: Pair) -> Pair:
    """A rounding to the storage dtype, which an exact implementation does at this very place.

    Rounding is monotone: an exact value rounds to one result, and one known within +-e to
    something between the roundings of both ends, mostly the same.
    """
    if arithmetic.storage == arithmetic.dtype:
        return x
    u, storage = arithmetic.u, arithmetic.storage
    value = x.value.to(storage).double()
    if arithmetic.relaxed:
        kept = magnitude(value - x.value) / u
        return Pair(x.value, kept if x.error is None else kept + x.error, exact=False)
    if x.error is None:
        return Pair(value)
    error = arithmetic.reaching(value, [end.to(storage).double() for end in arithmetic.ends(x)])
    return Pair(value, error) if error.any() else Pair(value)
