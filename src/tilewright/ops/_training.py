"""What operators that are a whole training step share: a forward, then its backward.

The gradient of the output arrives when the forward has ended, so the two are separate kernels that
read their inputs twice, though the operator has both as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import OPS, Op, Workload, op
from tilewright.ops._gradients import of_tensors, wanted_gradients


def step(
    function: Callable[..., Tensor],
    given: Mapping[str, Any],
    wanted: tuple[str, ...],
    grad_output: Tensor,
) -> tuple[Tensor, ...]:
    """The output of `function(**given)`, and the gradients of `wanted`, by PyTorch's autograd."""

    def call(*values: Tensor) -> Tensor:
        return function(**{**given, **dict(zip(wanted, values, strict=True))})

    out, pullback = torch.func.vjp(call, *(given[n] for n in wanted))  # type: ignore[misc]
    return out, *pullback(grad_output)


def forward_of(w: Workload) -> Workload:
    """The forward alone, as PyTorch's users write it."""
    forward = OPS[str(w.operator.training_of)]
    return forward.workload(**{n: w[n] for n in forward.parameters})


def halves(w: Workload) -> tuple[Workload, Workload]:
    """The forward, with the statistics that its backward needs, and the backward."""
    plain = forward_of(w)
    backward = OPS[f"{plain.op}_backward"]
    forward = plain
    if backward.wide:
        forward = OPS[f"{plain.op}_forward"].workload(**dict(plain.args))
    saved = dict(zip(saved_names(w), forward.outputs, strict=True))
    given = {**dict(w.args), **saved}
    return forward, backward.workload(**{n: given[n] for n in backward.parameters})


def saved_names(w: Workload) -> tuple[str, ...]:
    """What the forward of `halves` returns, as its backward names it: the output, statistics."""
    forward = OPS[str(w.operator.training_of)]
    return (*forward.returns, *OPS[f"{forward.name}_backward"].wide)


def traffic(w: Workload) -> tuple[int, int]:
    """Compulsory bytes of both halves: what both read is read twice."""
    forward, backward = halves(w)
    return tuple(sum(b) for b in zip(forward.bytes, backward.bytes, strict=True))  # type: ignore[return-value]


def flops(w: Workload) -> int:
    return sum(half.flops for half in halves(w))


def training_of(of: str) -> Callable[[Callable[..., tuple[Tensor, ...]]], Op]:
    """Declare the training step of operator `of` by decorating its reference."""

    def outputs_like(args: Mapping[str, Any]) -> tuple[str, ...]:
        tensors = of_tensors(*(n for n in args if n != "grad_output"))
        return "x", *(args.get("grads") or tensors(args))

    return op(
        flops=flops,
        check=_check(f"{of}_training", of),
        bytes=traffic,
        outputs_like=outputs_like,
        training_of=of,
    )


def _check(name: str, of: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Hold the arguments against those of operator `of` and of its gradients."""

    def check(args: dict[str, Any]) -> dict[str, Any]:
        forward = OPS[of]
        plain = forward.workload(**{n: args[n] for n in forward.parameters})
        out, given = plain.outputs[0], args["grad_output"]
        if (given.shape, given.dtype) != (out.shape, out.dtype):
            raise InvalidArgument(
                f"{name}: grad_output is {given.dtype}{list(given.shape)}, "
                f"but {of} gives {out.dtype}{list(out.shape)}"
            )
        args = {**args, **dict(plain.args)}
        args["grads"] = wanted_gradients(name, args, of_tensors(*forward.parameters)(args))
        return args

    return check
