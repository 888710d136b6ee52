"""Which elements the indices of a person's function may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.examples import SMALL, random_tensors
from tilewright.fusion.frontend.trace import arguments_of, trace_reference
from tilewright.fusion.remembered import ByOperator
from tilewright.op import Workload

_ALONG = {"gather": "self", "scatter": "self", "scatter_add": "self", "index_select": "self"}
_ANYWHERE = {"index": "self", "index_put": "self", "embedding": "weight"}
"""Steps that name elements along their `dim`, or along any dim, and of which argument."""


@ByOperator
def least_picked(w: Workload) -> int | None:
    """The size of the shortest dim along which it takes an element by an index; None where it
    takes none."""
    found: list[int] = []
    for name, step in _steps(w):
        if name in _ALONG:
            given = arguments_of(step)
            found.append(given[_ALONG[name]].meta["val"].shape[given["dim"]])
        elif name in _ANYWHERE:
            found += arguments_of(step)[_ANYWHERE[name]].meta["val"].shape
    return min(found, default=None)


@ByOperator
def _least_counted(w: Workload) -> int | None:
    """How many positions it counts, at least: one_hot compares an index with them."""
    counted = (len(step.meta["val"]) for name, step in _steps(w) if name == "arange")
    return min(counted, default=None)


def _steps(w: Workload) -> Iterator[tuple[str, Any]]:
    try:
        trace = trace_reference(w)
    except (InvalidArgument, NoImplementation):
        return
    for step in trace.graph.nodes:
        if isinstance(step.target, torch._ops.OpOverload):
            yield step.target._schema.name.split("::")[1], step


def examples(
    w: Workload, kind: str = "random", seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Random tensors, of which those of whole numbers name any element along such a dim: on a GPU
    PyTorch's kernels end the process's context where one names none."""
    sizes = [n for n in (least_picked(w), _least_counted(w)) if n is not None]
    whole = range(max(min(sizes), 1)) if sizes else SMALL
    return list(random_tensors(w.tensors, kind, seed, device, whole).values())
