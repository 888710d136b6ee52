"""torch.compile of the operator's reference: what a user gets without writing a kernel."""

from __future__ import annotations

import importlib.util
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from tilewright.compile import cxx
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError
from tilewright.fakes import tracing_lock
from tilewright.impl import Executable, Implementation
from tilewright.impls._vendor import Backward, TrainingStep, unseeded, vendor, without_seed
from tilewright.op import Workload

_serial = itertools.count()
_REFUSED = "using FX to symbolically trace a dynamo-optimized function"


class InductorExecutable(Executable):
    """One compiled function. Grad mode and parameters are normalised: each is a guard of it.

    While a thread traces, PyTorch refuses compiled functions in all of them: such a call waits.
    """

    def __init__(self, compiled: Callable[..., Any]):
        self.compiled = compiled

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        plain = [t if type(t) is torch.Tensor else t.detach() for t in tensors]
        with torch.no_grad():
            try:
                return self.compiled(*plain)
            except RuntimeError as error:
                if _REFUSED not in str(error):
                    raise
            with tracing_lock():
                return self.compiled(*plain)


class Inductor(Implementation):
    """torch.compile with static shapes, in its default mode."""

    name = "inductor"
    backend = "inductor"
    mode: str | None = None

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind == "cpu":
            return cxx.missing()
        if not torch.cuda.is_available():
            return "torch.compile builds only for the GPU it runs on, and torch sees none"
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs Triton on a GPU; run: pip install triton"
        return None

    def only_compared(self, w: Workload) -> str | None:
        if w.operator.indexed is not None and w.operator.indexed.last_wins:
            return "it leaves open which of several writes to one place wins"
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        """Compile now, on scratch tensors of the workload's layout.

        Raises:
            CompileError: Dynamo or Inductor refused.
        """
        # fullgraph raises where Dynamo would otherwise run eagerly: on a graph break and beyond
        # the recompile limit.
        # 0 is the one index that is in range wherever any is.
        given, w = w, unseeded(w)
        scratch = [
            s.empty(device.kind, fill=float(s.torch_dtype.is_floating_point))
            for s in w.tensors.values()
        ]
        run = vendor(w)
        if isinstance(run, Backward):  # Dynamo traces calls of the graph, not the making of it
            run = run.graph(scratch)
        if isinstance(run, TrainingStep):  # the backward is compiled as autograd meets it
            run.forward = self._compiled(run.forward)
            compiled: Callable[..., Any] = run
        else:
            compiled = self._compiled(run)
        executable = InductorExecutable(compiled)
        try:
            executable(*scratch)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CompileError(f"{self.name}: {w}: {error}") from error
        executable.compiled = without_seed(given, executable.compiled)
        return executable

    def _compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        own = _with_own_code(run)
        return torch.compile(own, fullgraph=True, dynamic=False, mode=self.mode)


class InductorMax(Inductor):
    """torch.compile with Triton's autotuning, without CUDA graphs."""

    name = "inductor_max"
    mode = "max-autotune-no-cudagraphs"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind == "cpu":
            return "max-autotune tunes Triton kernels, which run on a GPU; inductor is the same"
        return super().unsupported(w, device)


def _with_own_code(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` behind a function with a code object of its own.

    Dynamo keeps compiled variants, and counts them against its limit, by code object: workloads
    that shared one would evict each other from the ninth on.
    """

    def call(*tensors: torch.Tensor) -> Any:
        return run(*tensors)

    code = call.__code__.replace(co_name=f"workload_{next(_serial)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
