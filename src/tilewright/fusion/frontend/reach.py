"""What autograd sees of a function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.fakes import fake_tensors, tracing_lock, without_hooks
from tilewright.fusion.frontend.families import AcrossSizes
from tilewright.fusion.frontend.trace import by_shapes
from tilewright.op import Workload
from tilewright.rounding import traced_roundings
from tilewright.tensor_spec import DTYPES


@dataclass(frozen=True)
class Reach:
    """What autograd sees of a function: a step may be detached, or run without gradients.

    Attributes:
        outputs: which have a gradient.
        flows: for each output, the names of the arguments that its gradient flows to.
        behind: the arguments that some output follows from, if only through steps that pass
            nothing on.
        derived: whether PyTorch has a derivative of each step on the way; else its backward raises.
    """

    outputs: tuple[bool, ...]
    flows: tuple[frozenset[str], ...]
    behind: frozenset[str]
    derived: bool

    @property
    def arguments(self) -> frozenset[str]:
        """Those that a gradient flows to."""
        return frozenset().union(*self.flows)

    def of(self, gradients: Sequence[Any]) -> frozenset[str]:
        """Those that the gradients of outputs flow to, where None is one that there is not."""
        pairs = zip(self.flows, gradients, strict=True)
        return frozenset().union(*(names for names, g in pairs if g is not None))

    def given(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of which no output follows from the others."""
        own, tensor = self.behind, torch.Tensor
        return {
            n: v.detach() if isinstance(v, tensor) and n not in own else v for n, v in bound.items()
        }

    def returned(self, found: Any) -> Any:
        """Outputs of which the others have none."""
        if isinstance(found, torch.Tensor):
            return found if self.outputs[0] else found.detach()
        return tuple(o if r else o.detach() for o, r in zip(found, self.outputs, strict=True))


@AcrossSizes
def reached(w: Workload, wanted: tuple[str, ...]) -> Reach:
    """What autograd would see if these arguments required gradients.

    Raises:
        NoImplementation, InvalidArgument: as trace_reference does.
    """
    grads = torch.inference_mode(False), torch.enable_grad(), without_hooks()
    with tracing_lock(), contextlib.ExitStack() as inside:
        for context in (*grads, traced_roundings(), fake_tensors()):
            inside.enter_context(context)
        fakes = [
            torch.empty_strided(s.shape, s.real_strides, dtype=dtype, device="cpu")
            for s, dtype in zip(w.tensors.values(), _dtypes_of_autograd(w), strict=True)
        ]
        given = w.call(fakes)
        leaves = {n: given[n].requires_grad_() for n in wanted}
        with by_shapes(w.operator, w):
            outs = w.operator.returned(w.operator.reference(**given))

        def among(steps: set[Any]) -> frozenset[str]:
            variables = [s.variable for s in steps if hasattr(s, "variable")]
            return frozenset(n for n, leaf in leaves.items() if any(leaf is v for v in variables))

        def flows(out: torch.Tensor) -> frozenset[str]:
            steps = _steps_behind(out, _passes_nothing)
            structural = among(steps)
            if not any(isinstance(s, torch.autograd.function.BackwardCFunction) for s in steps):
                return structural
            return _found(out, {n: leaves[n] for n in structural})

        behind = set[Any]().union(*(_steps_behind(o) for o in outs))
        return Reach(
            outputs=tuple(o.requires_grad for o in outs),
            flows=tuple(map(flows, outs)),
            behind=among(behind),
            derived=not any(step.name().endswith("::NotImplemented") for step in behind),
        )


@AcrossSizes
def memories(w: Workload) -> tuple[int, ...]:
    """Of the tensors, and then of what PyTorch returns for them, the first that lies in the same
    memory, by place among all of these."""
    with tracing_lock(), without_hooks(), traced_roundings(), fake_tensors():
        fakes = [
            torch.empty_strided(s.shape, s.real_strides, dtype=s.torch_dtype, device="cpu")
            for s in w.tensors.values()
        ]
        with by_shapes(w.operator, w):
            outs = w.operator.returned(w.operator.reference(**w.call(fakes)))
        found = [t.untyped_storage()._cdata for t in (*fakes, *outs)]
    return tuple(map(found.index, found))


def _found(out: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Those that a backward which a person wrote passes something on to: it may return None."""
    try:
        gradients = torch.autograd.grad(
            out, [*leaves.values()], torch.empty_like(out), retain_graph=True, allow_unused=True
        )
    except Exception:  # of whatever a person wrote; the backward itself raises it
        return frozenset(leaves)
    return frozenset(n for n, g in zip(leaves, gradients, strict=True) if g is not None)


def _dtypes_of_autograd(w: Workload) -> list[torch.dtype]:
    """Those of the tensors; of an operator's, whose halves PyTorch's kernels may not take beside
    fp32 weights, of their arithmetic."""
    own = [s.torch_dtype for s in w.tensors.values()]
    arithmetic = DTYPES[w.arithmetic]
    return own if w.operator.fused else [arithmetic if d.is_floating_point else d for d in own]


def _steps_behind(out: torch.Tensor, ends: Callable[[Any], bool] = lambda step: False) -> set[Any]:
    """The steps by which autograd goes from a result back to leaves, or to where it ends."""
    behind = [torch.autograd.graph.get_gradient_edge(out).node] if out.requires_grad else []
    known = set[Any]()
    while behind:
        step = behind.pop()
        if step not in known:
            known.add(step)
            following = () if ends(step) else step.next_functions
            behind += [before for before, _ in following if before is not None]
    return known


def _passes_nothing(step: Any) -> bool:
    """Not even zeros, as PyTorch's gradient of a norm that counts (p=0) does."""
    norms = ("NormBackward", "LinalgVectorNormBackward", "DistBackward")
    power = getattr(step, "_saved_ord", getattr(step, "_saved_p", None))
    return step.name().startswith(norms) and power == 0
