"""Trace an operator's reference to torch.fx, over torch's own decompositions."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.overrides import TorchFunctionMode

from tilewright.op import Workload
from tilewright.rounding import traced_roundings
from tilewright.tensor_spec import DTYPES


def trace_reference(
    w: Workload, dtype: str | None = None, runtime_scalars: bool = False
) -> fx.GraphModule:
    """The reference as a graph of core aten and prims operators.

    Every floating tensor is traced as `dtype` (default: the operator's arithmetic type, fp32 for
    halves), so that the graph holds no casts but those the program wrote: `rounded(t)` appears as
    a `tilewright.rounded` node. Placeholders stand in the order of `w.tensors`, followed, with
    `runtime_scalars`, by one 0-d tensor for each of `w.scalars`. Every node's `meta["val"]` is a
    fake tensor with its shape; its `meta["stack_trace"]` names the line of the reference.
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
        with _Lines(w.operator.reference):
            out = w.operator.reference(**given)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    with _tracing, traced_roundings(), preserve_node_meta():
        differentiated = make_fx(run)(*fakes)
        again = fx.Interpreter(differentiated).run  # it passes lines on
        functional = torch.func.functionalize(again, remove="mutations")
        traced = make_fx(functional, decomposition_table=_decompositions())(*fakes)
    traced.graph.eliminate_dead_code()  # a gradient's forward, where only its shape was needed
    traced.recompile()
    return traced


_tracing = threading.RLock()
"""make_fx replaces global functions while it runs."""


class _Lines(TorchFunctionMode):
    """Notes for each step of a trace which line of the reference it comes from."""

    def __init__(self, reference: Callable[..., Any]):
        super().__init__()
        self.code = getattr(inspect.unwrap(reference), "__code__", None)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            set_stack_trace([f"{frame.f_code.co_filename}:{frame.f_lineno}"])
        return function(*args, **(kwargs or {}))


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
        *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward),
        *(aten.tanh_backward, aten.threshold_backward, aten.native_dropout, aten.softplus),
        *(aten.clamp_min, aten.clamp_max, aten.rsub, aten.addcdiv, aten.mse_loss, aten.hardswish),
        *(aten.linalg_vector_norm, aten.norm),
    ]
    return {**core_aten_decompositions(), **get_decompositions(wanted)}
