"""Which elements the indices of a person's function may name."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.examples import SMALL, random_tensors
from tilewright.fusion.frontend.trace import arguments_of, trace_reference
from tilewright.fusion.remembered import ByOperator
from tilewright.op import Workload
from tilewright.tensor_spec import WHOLE

_ALONG = ("gather", "scatter", "scatter_add", "index_select")
_ANYWHERE = {"index": "self", "index_put": "self", "embedding": "weight"}
"""Steps that name elements along their `dim`, or along any dim, and of which argument."""


class Named(NamedTuple):
    """Sizes of what whole numbers of a function's tensors may name; None where nothing is.

    Attributes:
        picked: of the shortest dim along which it takes an element by an index.
        counted: of the shortest `arange`; one_hot compares an index with it.
    """

    picked: int | None
    counted: int | None


@ByOperator
def named(w: Workload) -> Named:
    """Of what the reference of a workload names."""
    try:
        steps = trace_reference(w).graph.nodes
    except (InvalidArgument, NoImplementation):
        return Named(None, None)
    picked, counted = list[int](), list[int]()
    for step in steps:
        if not isinstance(step.target, torch._ops.OpOverload):
            continue
        name, given = step.target._schema.name.split("::")[1], arguments_of(step)
        if name in _ALONG:
            picked.append(given["self"].meta["val"].shape[given["dim"]])
        elif name in _ANYWHERE:
            picked += given[_ANYWHERE[name]].meta["val"].shape
        elif name == "arange":
            counted.append(len(step.meta["val"]))
    return Named(min(picked, default=None), min(counted, default=None))


def examples(
    w: Workload, kind: str = "random", seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Random tensors, of which those of whole numbers name any element along such a dim: on a GPU
    PyTorch's kernels end the process's context where one names none."""
    sizes: list[int] = []
    if any(spec.dtype in WHOLE for spec in w.tensors.values()):
        sizes = [n for n in named(w) if n is not None]
    whole = range(max(min(sizes), 1)) if sizes else SMALL
    return list(random_tensors(w.tensors, kind, seed, device, whole).values())
