"""Results of a method that live as long as its object, and those of functions of a workload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tilewright.op import Op, Workload

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


def last_remembered(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The same, of which the object keeps the last result only: that of one argument is asked for a
    few times in a row, and those of many would fill memory."""
    name = f"_{method.__name__}_remembered"

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, *kwargs.items())
        last = vars(self).get(name)
        if last is None or last[0] != key:
            last = vars(self)[name] = key, method(self, *args, **kwargs)
        found: R = last[1]
        return found

    return call


class ByOperator(Generic[P, R]):
    """A function of a workload that computes each result once for the operator of the workload's
    name: a person may fuse another function under it, even while this one runs.

    The last 1024 results are kept.
    """

    def __init__(self, function: Callable[Concatenate[Workload, P], R]):
        @functools.lru_cache(maxsize=1024)
        def of(op: Op, w: Workload, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(w, *args, **kwargs)

        self._of = of
        self.cache_clear = of.cache_clear
        functools.update_wrapper(self, function)

    def __call__(self, w: Workload, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._of(w.operator, w, *args, **kwargs)  # type: ignore[arg-type]
