"""Every operator is what it is alone where torch.compile has it as one node."""

import functools

import pytest
import torch

import tilewright as tw
from operator_cases import CASES
from tilewright.dispatch import torch_ops
from tilewright.op import OPS, Workload

NODES = [name for name in CASES if OPS[name].training_of is None]
BY_FUNCTION_TRANSFORMS = ("lerp_backward", "bias_layer_norm_backward")
"""References that cannot run below dispatch modes."""


def call_of(text):
    w = Workload.parse(text.format(d="f32", w="f32"))
    return w.call(w.operator.examples(w, "random", 0, "cpu"))


def always(*_):
    return True


always._dynamo_marked_constant = True


@pytest.fixture
def tuned(monkeypatch):
    """Records speak for every operator."""
    monkeypatch.setattr(torch_ops, "_is_tuned", always)


@pytest.mark.parametrize("name", NODES)
def test_a_compiled_call_is_one_node_with_the_same_result(name, tuned):
    nodes = []

    def backend(module, _):
        nodes.extend(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        return module

    for text in CASES[name][:2]:
        torch._dynamo.reset()
        nodes.clear()
        args = call_of(text)
        call = functools.partial(getattr(tw, name), **args)
        found = torch.compile(lambda: call(), backend=backend, fullgraph=True)()  # noqa: B023
        torch.testing.assert_close(found, call())
        assert any(f"tilewright.{name}" in node for node in nodes)


@pytest.mark.parametrize("name", ["softmax", "embedding_backward", "lerp", "conv2d_weight_grad"])
def test_numbers_that_change_are_traced(name, tuned):
    """Dynamo has no value of a number that it has seen change."""
    x, index = torch.randn(6, 9), torch.randint(5, (6,))
    image = torch.randn(2, 3, 8, 8)
    calls = {
        "softmax": (lambda n: tw.softmax(x, dim=n - 7), (6, 7, 6, 7)),
        "embedding_backward": (lambda n: tw.embedding_backward(x, index, n), (5, 6, 7)),
        "lerp": (lambda n: tw.lerp(x, x + 1, n / 4), (1, 2, 3)),
        "conv2d_weight_grad": (
            lambda n: tw.conv2d_weight_grad(image, image, 2 * n + 1, padding=n),
            (1, 2, 3),
        ),
    }
    call, numbers = calls[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for n in numbers:
        torch.testing.assert_close(compiled(n), call(n))


@pytest.mark.parametrize("name", NODES)
def test_custom_operators_are_well_formed(name):
    args = call_of(CASES[name][0])
    getattr(tw, name)
    packet = getattr(torch.ops.tilewright, name)
    by_number = any(isinstance(args.get(n), float) for n in ("weight", "src"))
    target = packet.overload1 if by_number else packet.default
    known = {a.name for a in target._schema.arguments}
    args = {n: list(v) if isinstance(v, tuple) else v for n, v in args.items() if n in known}
    checks = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    if name not in BY_FUNCTION_TRANSFORMS:
        checks += ["test_schema", "test_faketensor"]
    torch.library.opcheck(target, (), args, test_utils=checks)
