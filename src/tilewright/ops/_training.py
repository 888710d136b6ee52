"""What operators that are a whole training step share: a forward, then its backward.

The gradients of the outputs arrive when the forward has ended, so the two are separate kernels that
read their inputs twice, though the operator has both as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import OPS, Op, Workload, op
from tilewright.ops._gradients import Possible, like_arguments, of_tensors, wanted_gradients


def step(
    function: Callable[..., Tensor],
    given: Mapping[str, Any],
    grads: tuple[str, ...] | None,
    grad_output: Tensor,
) -> tuple[Tensor, ...]:
    """The output of `function(**given)`, and its gradients that are asked for, by PyTorch's
    autograd."""
    possible = [n for n, v in given.items() if isinstance(v, Tensor)]
    wanted = wanted_gradients("a training step", grads, possible)

    def call(*values: Tensor) -> Tensor:
        return function(**{**given, **dict(zip(wanted, values, strict=True))})

    out, pullback = torch.func.vjp(call, *(given[n] for n in wanted))  # type: ignore[misc]
    return out, *pullback(grad_output)


def step_by_operators(of: str, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The outputs of operator `of`, and the gradients that `given["grads"]` asks for, by the
    references of its forward with statistics and of its backward."""
    forward, backward = OPS[f"{of}_forward"], OPS[f"{of}_backward"]
    found = forward.reference(**{n: given[n] for n in forward.parameters})
    outputs = OPS[of].returns
    every = {**given, **dict(zip((*outputs, *backward.wide), found, strict=True))}
    every["grads"] = wanted_gradients(f"{of}_training", given["grads"], _possible(of)(given))
    gradients = backward.reference(**{n: every[n] for n in backward.parameters})
    return *found[: len(outputs)], *gradients


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
    """What the forward of `halves` returns, as its backward names it: the outputs, statistics."""
    forward = OPS[str(w.operator.training_of)]
    return (*forward.returns, *OPS[f"{forward.name}_backward"].wide)


def gradient_arguments(names: Iterable[str]) -> tuple[str, ...]:
    """Those of arguments that are the gradients of outputs, in the outputs' order."""
    return tuple(n for n in names if n.startswith("grad_output"))


def traffic(w: Workload) -> tuple[int, int]:
    """Compulsory bytes of both halves: what both read is read twice."""
    forward, backward = halves(w)
    return tuple(sum(b) for b in zip(forward.bytes, backward.bytes, strict=True))  # type: ignore[return-value]


def flops(w: Workload) -> int:
    return sum(half.flops for half in halves(w))


def training_of(of: str) -> Callable[[Callable[..., tuple[Tensor, ...]]], Op]:
    """Declare the training step of operator `of` by decorating its reference."""

    def outputs_like(args: Mapping[str, Any]) -> tuple[str, ...]:
        return *("x" for _ in OPS[of].returns), *like_arguments(_possible(of))(args)

    return op(
        flops=flops,
        check=_check(f"{of}_training", of),
        bytes=traffic,
        outputs_like=outputs_like,
        training_of=of,
    )


def _possible(of: str) -> Possible:
    """The gradients of operator `of`, each once: the arguments that are tensors."""
    same = OPS[f"{of}_backward"].same_gradient
    return of_tensors(*(n for n in OPS[of].parameters if n not in same))


def _check(name: str, of: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Hold the arguments against those of operator `of` and of its gradients."""

    def check(args: dict[str, Any]) -> dict[str, Any]:
        forward = OPS[of]
        plain = forward.workload(**{n: args[n] for n in forward.parameters})
        for argument, out in zip(gradient_arguments(args), plain.outputs, strict=True):
            given = args[argument]
            if (given.shape, given.dtype) != (out.shape, out.dtype):
                raise InvalidArgument(
                    f"{name}: {argument} is {given.dtype}{list(given.shape)}, "
                    f"but {of} gives {out.dtype}{list(out.shape)}"
                )
        args = {**args, **dict(plain.args)}
        args["grads"] = wanted_gradients(name, args["grads"], _possible(of)(args))
        return args

    return check
