"""Trace an operator's reference to torch.fx, over torch's own decompositions."""

from __future__ import annotations

import torch
from torch import fx

from tilewright.op import DTYPES, Workload, traced_roundings


def trace_reference(w: Workload, dtype: str | None = None) -> fx.GraphModule:
    """The reference as a graph of core aten and prims operators.

    Every floating tensor is traced as `dtype` (default: the operator's arithmetic type, fp32 for
    halves), so that the graph holds no casts but those the program wrote: `rounded(t)` appears as
    a `tilewright.rounded` node. Placeholders stand in the order of `w.tensors`; every node's
    `meta["val"]` is a fake tensor with its shape.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    floating = DTYPES[dtype or w.arithmetic]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty_strided(
                s.shape,
                s.real_strides,
                dtype=floating if s.torch_dtype.is_floating_point else s.torch_dtype,
            )
            for s in w.tensors.values()
        ]

    def run(*tensors: torch.Tensor):
        out = w.operator.reference(**w.call(tensors))
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    with traced_roundings():
        functional = torch.func.functionalize(run, remove="mutations")
        return make_fx(functional, decomposition_table=_decompositions())(*fakes)


def _decompositions() -> dict:
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
    ]
    return {**core_aten_decompositions(), **get_decompositions(wanted)}
