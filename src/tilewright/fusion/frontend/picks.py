"""Which elements the indices of a person's function may name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.examples import random_tensors
from tilewright.fusion.frontend.trace import arguments_of, name_of, trace_reference
from tilewright.fusion.remembered import ByOperator
from tilewright.op import Workload
from tilewright.tensor_spec import WHOLE

_ALONG = ("gather", "scatter", "scatter_add", "index_select")
_ANYWHERE = {"index": "self", "index_put": "self", "embedding": "weight"}
"""Steps that name elements along their `dim`, or along any dim, and of which argument."""
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_ANY_SEED = range(-(2**62), 2**62)


class Named(NamedTuple):
    """What whole numbers of a function's tensors name.

    Attributes:
        picked: whether an element is taken by an index.
        computed: whether such an index follows from floats; none may be where these are NaN.
        places: by tensor of whole numbers, how many elements it may name, or is compared with the
            positions of; where that is not known, the least of all such numbers.
    """

    picked: bool
    computed: bool
    places: dict[str, int]


@ByOperator
def named(w: Workload) -> Named:
    """Of what the reference of a workload names."""
    try:
        steps = trace_reference(w).graph.nodes
    except (InvalidArgument, NoImplementation):
        return Named(False, False, {})
    given = dict(zip((s for s in steps if s.op == "placeholder"), w.tensors, strict=True))
    behind: dict[fx.Node, set[fx.Node]] = {}
    picked, computed = False, False
    places: dict[str, int] = {}
    sizes = list[int]()
    for step in steps:
        own = {step} if step in given or _counts(step) else set[fx.Node]()
        behind[step] = own.union(*(behind[n] for n in step.all_input_nodes))
        if _counts(step):
            sizes.append(len(step.meta["val"]))
        for index, size, picks in _namings(step, behind):
            sizes.append(size)
            sources = [given[n] for n in behind[index] if n in given]
            dtypes = [w.tensors[name].torch_dtype for name in sources]
            picked |= picks
            computed |= picks and any(d.is_floating_point for d in dtypes)
            places.update((name, min(size, places.get(name, size))) for name in sources)
    whole = [n for n, spec in w.tensors.items() if spec.dtype in WHOLE]
    least = min(sizes, default=None)
    found = {n: places.get(n, least) for n in whole}
    return Named(picked, computed, {n: size for n, size in found.items() if size is not None})


def _counts(step: fx.Node) -> bool:
    return isinstance(step.target, OpOverload) and name_of(step) == "arange"


def _namings(
    step: fx.Node, behind: Mapping[fx.Node, set[fx.Node]]
) -> Iterator[tuple[fx.Node, int, bool]]:
    """What names how many elements, and whether it picks them.

    Args:
        behind: the arguments and positions that each step follows from.
    """
    if not isinstance(step.target, OpOverload):
        return
    kind, given = name_of(step), arguments_of(step)
    if kind in _ALONG:
        yield given["index"], given["self"].meta["val"].shape[given["dim"]], True
    elif kind in _ANYWHERE:
        shape = given[_ANYWHERE[kind]].meta["val"].shape
        indices = given["indices"] if kind != "embedding" else [given["indices"]]
        for index, size in zip(indices, shape, strict=False):
            if index is not None and index.meta["val"].dtype != torch.bool:
                yield index, size, True
    elif kind in _COMPARES:
        pair = [n for n in step.args if isinstance(n, fx.Node)]
        for one, other in (pair, pair[::-1]) if len(pair) == 2 else ():
            if behind[other] and all(map(_counts, behind[other])):
                yield one, min(len(n.meta["val"]) for n in behind[other]), False


def examples(
    w: Workload, kind: str = "random", seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Random tensors, of which those of whole numbers name any element along such a dim: on a GPU
    PyTorch's kernels end the process's context where one names none."""
    whole: dict[str, range] = {}
    if any(spec.dtype in WHOLE for spec in w.tensors.values()):
        whole = {name: range(max(size, 1)) for name, size in named(w).places.items()}
    if w.seed is not None:
        whole[str(w.operator.seed)] = _ANY_SEED
    return list(random_tensors(w.tensors, kind, seed, device, whole).values())
