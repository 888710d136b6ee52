"""Results of a method that live as long as its object."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def remembered(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method, or a function of an object, that computes each result once; its other arguments are
    hashable.

    The object itself keeps the results. `functools.cache` would keep every object, too.
    """
    name = f"_{method.__name__}_remembered"

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, R] = vars(self).setdefault(name, {})
        key = (args, *kwargs.items())
        if key not in results:
            results[key] = method(self, *args, **kwargs)
        return results[key]

    return call
