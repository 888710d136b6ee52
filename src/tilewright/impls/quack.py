"""Quack's row kernels (Dao-AILab/quack, written in CuTe DSL): a baseline, where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.errors import CompileError, CompilerMissing
from tilewright.impl import Executable, Implementation
from tilewright.op import Workload
from tilewright.tensor_spec import DEFAULT_ALIGN, TensorSpec

INSTALL = "pip install 'quack-kernels[cu13]' (it brings nvidia-cutlass-dsl and apache-tvm-ffi)"
MODULES = ("quack", "cutlass", "tvm_ffi", "triton")
"""What importing Quack imports."""
DTYPES = ("f16", "bf16", "f32")
LEAST_COPY_BYTES = 4
"""Of an asynchronous copy to shared memory."""
MAX_CLUSTER = {9: 16, 10: 16, 12: 8}
"""Blocks over which Quack spreads one row, by major compute capability; one on others."""
MAX_ROWS = 2**31 - 1
"""Quack's row count is an int32."""


class QuackExecutable(Executable):
    """One of Quack's functions of (rows, columns); it launches on PyTorch's current stream."""

    def __init__(self, run: Callable[..., Tensor], x: TensorSpec):
        self._run, self._columns = run, x.shape[-1]
        self._flatten = x.rank != 2

    def __call__(self, *tensors: Tensor) -> Tensor:
        x, *parameters = (t.detach() if t.requires_grad else t for t in tensors)
        if not self._flatten:
            return self._run(x, *parameters)
        return self._run(x.view(-1, self._columns), *parameters).view(x.shape)


class Quack(Implementation):
    """Quack's forward functions, with the launch knobs of its own heuristics.

    Its layer norm takes parameters in fp32 alone; its softmax, rows that are whole 16-byte vectors.
    """

    name = backend = "quack"
    op = ("layer_norm", "rms_norm", "softmax")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cuda":
            return "Quack's kernels run on NVIDIA GPUs"
        if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
            return f"Quack cannot be imported without {', '.join(missing)}; run: {INSTALL}"
        return _layout_refused(w) or _parameters_refused(w) or _width_refused(w, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        """Compile now, by a call on one row: the row count is no part of Quack's binaries.

        Raises:
            CompileError: Quack refused, or cannot be imported.
        """
        executable = QuackExecutable(_function(w), w["x"])
        rows = {"x": (1,) * (w["x"].rank - 1) + w["x"].shape[-1:]}
        scratch = [
            torch.ones(rows.get(name, spec.shape), dtype=spec.torch_dtype, device=device.kind)
            for name, spec in w.tensors.items()
        ]
        try:
            executable(*scratch)
        except AssertionError as error:  # how Quack states its limits
            raise CompileError(f"quack: {w}: {error}") from error
        return executable


def _layout_refused(w: Workload) -> str | None:
    x = w["x"]
    if x.rank == 0 or x.numel == 0:
        return "there is no row to compute"
    last = w["dim"] == -1 if w.op == "softmax" else len(w["normalized_shape"]) == 1
    if not last:
        return "Quack's rows are the last dim alone"
    for name, spec in w.tensors.items():
        if spec.dtype not in DTYPES:
            return f"{name} is {spec.dtype}; Quack takes {', '.join(DTYPES)}"
        if spec.strides is not None or spec.align != DEFAULT_ALIGN:
            return f"{name}={spec} is not contiguous at a multiple of {DEFAULT_ALIGN} bytes"
    return None


def _parameters_refused(w: Workload) -> str | None:
    if w.op != "layer_norm":
        return None
    if w["weight"] is None:
        return "Quack's layer norm needs a weight"
    for name in ("weight", "bias"):
        if isinstance(w[name], TensorSpec) and w[name].dtype != "f32":
            return f"{name} is {w[name].dtype}; Quack's layer norm takes parameters in f32"
    return None


def _width_refused(w: Workload, device: DeviceSpec) -> str | None:
    x = w["x"]
    columns, rows = x.shape[-1], math.prod(x.shape[:-1])
    if w.op == "softmax" and columns * x.itemsize % 16:
        return f"a row of {columns} {x.dtype} is no whole number of 16-byte vectors"
    if columns * x.itemsize % LEAST_COPY_BYTES:
        return f"a row of {columns} {x.dtype} is no whole number of {LEAST_COPY_BYTES}-byte copies"
    blocks = MAX_CLUSTER.get(device.capability // 10, 1)
    if columns * x.itemsize > (held := blocks * device.shared_bytes_per_block):
        return f"a row of {columns * x.itemsize} bytes exceeds the {held} that {blocks} blocks hold"
    if rows > MAX_ROWS:
        return f"{rows} rows exceed {MAX_ROWS}"
    return None


def _function(w: Workload) -> Callable[..., Tensor]:
    """Quack's function of the workload's tensors, in their order, x in two dims."""
    try:
        from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd
        from quack.softmax import softmax_fwd
    except ImportError as error:
        raise CompilerMissing(f"Quack cannot be imported: {error}; run: {INSTALL}") from error
    if w.op == "softmax":
        return softmax_fwd
    if w.op == "layer_norm":
        return functools.partial(layernorm_fwd, eps=w["eps"])
    return lambda x, *weight: rmsnorm_fwd(x, *weight, eps=w["eps"])[0]
