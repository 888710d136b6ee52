"""Gradient operators and training steps that are not told which gradients: all of them, wherever
PyTorch runs the call."""

import functools

import pytest
import torch

import tilewright as tw
from operator_cases import CASES
from tilewright.dispatch.call import operators
from tilewright.op import OPS, Workload

NAMES = [n for n in CASES if OPS[n].fused is False and "grads" in OPS[n].parameters]
SURROUNDINGS = {
    "compiled": lambda call, tensors: torch.compile(call, backend="eager", fullgraph=True)(tensors),
    "mapped": lambda call, tensors: [
        o[0] for o in torch.vmap(call)({n: t[None] for n, t in tensors.items()})
    ],
    "under autocast": lambda call, tensors: torch.autocast("cpu", torch.bfloat16)(call)(tensors),
    "leaves": lambda call, tensors: call(
        {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    ),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_all_gradients_are_given_where_pytorch_runs_the_call(name, surroundings):
    run = getattr(tw, name)
    for text in CASES[name]:
        w = Workload.parse(text.format(d="f32", w="f32"))
        given = w.call(w.operator.examples(w, "random", 0, "cpu"))
        if given.pop("grads") != w.operator.workload(**{**dict(w.args), "grads": None})["grads"]:
            continue  # a case of fewer gradients
        tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
        others = {n: v for n, v in given.items() if n not in tensors}
        call = functools.partial(_called, run, others)
        torch._dynamo.reset()
        found = SURROUNDINGS[surroundings](call, tensors)
        torch.testing.assert_close(tuple(found), run(**given), rtol=1e-5, atol=1e-5)


def _called(run, others, tensors):
    return run(**tensors, **others)


def test_so_are_those_of_fused_functions():
    tw.fuse(lambda x, mask, k: (x * k).masked_fill(mask, 0.0).exp(), name="masked_exp")
    x, grad, mask = torch.randn(3, 8), torch.randn(3, 8), torch.rand(3, 8) > 0.5
    backward = operators["masked_exp_backward"]
    (right,) = backward(grad, x, mask, 2.0)
    assert torch.equal(right, torch.where(mask, 0.0, grad * 2 * (x * 2).exp()))
    mapped = torch.vmap(lambda g, x, mask: backward(g, x, mask, 2.0))
    torch.testing.assert_close(mapped(grad, x, mask), (right,))


@pytest.mark.parametrize("implementation", [None, "aten"])
@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_training")])
def test_training_steps_differentiate_tensors_of_inference_mode_and_in_it(name, implementation):
    w = Workload.parse(CASES[name][0].format(d="f32", w="f32"))
    given = w.call(w.operator.examples(w, "random", 0, "cpu"))
    run, right = getattr(tw, name), getattr(tw, name)(**given)
    with torch.inference_mode():
        inside = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        found = [_forced(implementation, name, run, values) for values in (given, inside)]
    found.append(_forced(implementation, name, run, inside))
    for outs in found:
        torch.testing.assert_close(outs, right)
    assert not any(t.requires_grad for outs in found for t in outs)


def _forced(implementation, name, run, values):
    if implementation is None:
        return run(**values)
    with tw.use(implementation, op=name):
        return run(**values)
