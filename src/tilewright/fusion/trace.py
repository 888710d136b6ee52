"""Trace an operator's reference to torch.fx, over torch's own decompositions."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import fx

from tilewright.op import DTYPES, Workload, traced_roundings


def trace_reference(
    w: Workload, dtype: str | None = None, runtime_scalars: bool = False
) -> fx.GraphModule:
    """The reference as a graph of core aten and prims operators.

    Every floating tensor is traced as `dtype` (default: the operator's arithmetic type, fp32 for
    halves), so that the graph holds no casts but those the program wrote: `rounded(t)` appears as
    a `tilewright.rounded` node. Placeholders stand in the order of `w.tensors`, followed, with
    `runtime_scalars`, by one 0-d tensor for each of `w.scalars`; every node's `meta["val"]` is a
    fake tensor with its shape.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    floating = DTYPES[dtype or w.arithmetic]
    scalars = w.scalars if runtime_scalars else {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(
                s.shape,
                s.real_strides,
                dtype=floating if s.torch_dtype.is_floating_point else s.torch_dtype,
            )
            for s in w.tensors.values()
        ]
        fakes += [torch.empty((), dtype=floating) for _ in scalars]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = w.call(tensors[: len(w.tensors)])
        given.update(zip(scalars, tensors[len(w.tensors) :], strict=True))
        out = w.operator.reference(**given)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    with _tracing, traced_roundings():
        differentiated = make_fx(run)(*fakes)
        functional = torch.func.functionalize(differentiated, remove="mutations")
        traced = make_fx(functional, decomposition_table=_decompositions())(*fakes)
    traced.graph.eliminate_dead_code()  # a gradient's forward, where only its shape was needed
    traced.recompile()
    return traced


_tracing = threading.RLock()
"""make_fx replaces global functions while it runs."""


@functools.cache
def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    aten = torch.ops.aten
    wanted = [
        aten.native_layer_norm,
        aten._fused_rms_norm,
        aten.lerp,
        aten._softmax,
        aten.mean,
        aten.var_mean,
        aten.addcmul,
        aten.native_layer_norm_backward,
        aten._fused_rms_norm_backward,
        aten._softmax_backward_data,
    ]
    return {**core_aten_decompositions(), **get_decompositions(wanted)}
