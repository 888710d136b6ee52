"""What the gradient operators share: which gradients are asked for, and their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import InvalidArgument


def wanted_gradients(
    name: str, grads: Sequence[str] | None, possible: Iterable[str]
) -> tuple[str, ...]:
    """The gradients to compute, in the order of `possible`; None asks for all of them.

    Raises:
        InvalidArgument: none, or one that the operator does not have.
    """
    possible = tuple(possible)
    asked = _names(grads, possible)
    unknown = [n for n in asked if n not in possible]
    if unknown or not asked:
        found = f"there is no gradient of {unknown[0]!r}" if unknown else "grads is empty"
        raise InvalidArgument(f"{name}: {found}; ask for some of {', '.join(possible)}")
    return in_order(grads, possible)


def in_order(grads: Sequence[str] | None, possible: Iterable[str]) -> tuple[str, ...]:
    """Those of `possible` that are asked for, each once; None asks for all of them."""
    possible = tuple(possible)
    return tuple(n for n in possible if n in _names(grads, possible))


def _names(grads: Sequence[str] | None, possible: tuple[str, ...]) -> Sequence[str]:
    """Also of one that stands alone."""
    return possible if grads is None else (grads,) if isinstance(grads, str) else grads


Possible = Callable[[Mapping[str, Any]], tuple[str, ...]]
"""(arguments by name, those that a call left out missing) -> the gradients that there are."""


def weighted(*possible: str) -> Possible:
    """The first alone without a weight."""
    return lambda args: possible if args.get("weight") is not None else possible[:1]


def of_tensors(*names: str) -> Possible:
    """Those of arguments that are tensors, or their specs, rather than numbers or absent."""
    return lambda args: tuple(n for n in names if hasattr(args.get(n), "dtype"))


def like_arguments(possible: Possible, **others: str) -> Any:
    """For Op.outputs_like: a gradient has the dtype of its argument, or of `others[argument]`."""

    def like(args: Mapping[str, Any]) -> list[str]:
        return [others.get(n, n) for n in in_order(args.get("grads"), possible(args))]

    return like


def chosen(grads: tuple[str, ...], found: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple(found[n] for n in grads)
