"""Calls that PyTorch answers: through the operator's reference, differentiable and traceable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.errors import InvalidArgument
from tilewright.impls._vendor import call_reference
from tilewright.op import Op


def as_pytorch(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What PyTorch gives for a call of the public function, without validation of ours."""
    return call_reference(op, bind(op, args, kwargs))


def bind(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the reference's names; one int for several sizes becomes a tuple.

    Raises:
        InvalidArgument: too many arguments, an unknown name, or one given twice.
    """
    names = list(op.parameters)
    if len(args) > len(names):
        raise InvalidArgument(
            f"{op.name}: {len(args)} positional arguments, but there are {len(names)}: "
            f"{', '.join(names)}"
        )
    bound = dict(zip(names, args, strict=False))
    for given, value in kwargs.items():
        name = op.aliases.get(given, given)
        if name not in names:
            raise InvalidArgument(f"{op.name}: unknown argument {given!r}; known: {names}")
        if name in bound:
            raise InvalidArgument(f"{op.name}: argument {name!r} is given twice")
        bound[name] = value
    for name, value in bound.items():
        if type(value) is int and "tuple" in op.parameters[name].annotation:
            bound[name] = (value,)
    return bound
