"""tw.conv2d, and the weight gradient under autograd, transforms and torch.compile."""

import contextlib
from itertools import product

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright.impl import IMPLS
from tilewright.op import OPS

pytestmark = pytest.mark.usefixtures("conv2d_chooses")


def gradients(convolve, x, weight, bias, **geometry):
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = convolve(*leaves, **geometry)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": (1, 2), "groups": 2},
        {"padding": "valid", "stride": [2]},
        {"padding": "same"},
        {"padding": "same", "dilation": (1, 2)},
    ],
)
def test_conv2d_is_pytorchs_with_all_its_gradients(geometry, dtype):
    groups = geometry.get("groups", 1)
    x, weight = torch.randn(2, 4, 9, 8, dtype=dtype), torch.randn(6, 4 // groups, 3, 3, dtype=dtype)
    bias = torch.randn(6, dtype=dtype)
    found = gradients(tw.conv2d, x, weight, bias, **geometry)
    expected = gradients(torch.nn.functional.conv2d, x, weight, bias, **geometry)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@contextlib.contextmanager
def asked_for_another():
    """The weight gradient is one that is not to be had here."""
    with (
        tw.use("conv2d_weight_grad_sm90", op="conv2d_weight_grad"),
        pytest.raises(tw.NoImplementation, match="conv2d_weight_grad_sm90: wgmma"),
    ):
        yield


@pytest.mark.parametrize("padding", [0, "valid", "same"])
def test_conv2ds_weight_gradient_is_the_implementation_that_was_asked_for(padding):
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3, requires_grad=True)
    with asked_for_another():
        tw.conv2d(x, weight, padding=padding).sum().backward()


def test_conv2ds_weight_gradient_is_that_of_the_layer():
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3, requires_grad=True)
    with tw.use("conv2d_weight_grad_per_image", op="conv2d_weight_grad"):
        tw.conv2d(x, weight).sum().backward()
    expected = torch.nn.grad.conv2d_weight(x, weight.shape, torch.ones(2, 6, 7, 6))
    torch.testing.assert_close(weight.grad, expected)


def test_conv2d_takes_both_gradients_from_one_pass_where_that_was_asked_for():
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    bias, calls = torch.randn(6), []
    build = IMPLS["conv2d_weight_grad_per_image"].build

    def spied(config, w, device):
        calls.append(w.op)
        return build(config, w, device)

    with (
        pytest.MonkeyPatch.context() as patch,
        tw.use("conv2d_weight_grad_per_image", op="conv2d_weight_bias_grad"),
    ):
        patch.setattr(IMPLS["conv2d_weight_grad_per_image"], "build", spied)
        found = gradients(tw.conv2d, x, weight, bias, padding=1)
    assert calls == ["conv2d_weight_bias_grad"]
    for a, b in zip(
        found, gradients(torch.nn.functional.conv2d, x, weight, bias, padding=1), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_conv2d_can_be_differentiated_twice():
    x, weight = (
        torch.randn(size, dtype=torch.float64, requires_grad=True)
        for size in ((1, 2, 4, 4), (2, 2, 3, 3))
    )
    assert torch.autograd.gradgradcheck(lambda x, w: tw.conv2d(x, w, padding=1), (x, weight))


TRANSFORMS = {
    "vmap": lambda f, x, w: torch.func.vmap(lambda x: f(x, w))(torch.stack([x, -x, x + 1])),
    "vmap of leaves": lambda f, x, w: torch.autograd.grad(
        torch.func.vmap(lambda x: f(x, w))(torch.stack([x, -x])).square().sum(), w
    ),
    "gradients of samples": lambda f, x, w: torch.func.vmap(
        torch.func.grad(lambda w, x: f(x[None], w).square().sum()), in_dims=(None, 0)
    )(w.detach(), x),
    "grad": lambda f, x, w: torch.func.grad(lambda w: f(x, w).square().sum())(w.detach()),
    "jvp": lambda f, x, w: torch.func.jvp(lambda w: f(x, w), (w.detach(),), (w.detach() + 1,)),
    "jacrev": lambda f, x, w: torch.func.jacrev(lambda w: f(x, w).sum((2, 3)))(w.detach()),
    "jacfwd": lambda f, x, w: torch.func.jacfwd(lambda w: f(x, w).sum((2, 3)))(w.detach()),
    "jacobian": lambda f, x, w: torch.autograd.functional.jacobian(
        lambda w: f(x, w).sum((2, 3)), w, vectorize=True
    ),
    "many gradients at once": lambda f, x, w: torch.autograd.grad(
        f(x, w), w, torch.ones(3, 2, 3, 6, 6), is_grads_batched=True
    ),
    "vmap of the backward": lambda f, x, w: backward_mapped(f(x, w), w, torch.ones(3, 2, 3, 6, 6)),
}


def backward_mapped(out, leaf, grads):
    return torch.func.vmap(lambda g: torch.autograd.grad(out, leaf, g, retain_graph=True))(grads)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_conv2d_is_pytorchs_under_transforms(transform, layout):
    x = torch.randn(2, 4, 6, 6).to(memory_format=layout)
    weight = torch.randn(3, 4, 3, 3).to(memory_format=layout).requires_grad_()
    bias = torch.randn(3, requires_grad=True)
    found, expected = (
        TRANSFORMS[transform](lambda x, w, f=f: f(x, w, bias, padding=1), x, weight)
        for f in (tw.conv2d, torch.nn.functional.conv2d)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["conv2d_weight_grad", "conv2d_weight_bias_grad"])
def test_the_operators_map_over_images_and_can_be_transformed(name):
    def run(x, grad, **more):
        found = getattr(tw, name)(x, grad, 3, padding=1, **more)
        return found if isinstance(found, tuple) else (found,)

    xs, grads = torch.randn(5, 2, 4, 8, 8), torch.randn(5, 2, 6, 8, 8)
    each = [run(x, grad) for x, grad in zip(xs, grads, strict=True)]
    expected = tuple(torch.stack(found) for found in zip(*each, strict=True))
    torch.testing.assert_close(torch.func.vmap(run)(xs, grads), expected)
    into = [torch.randn_like(t) for t in expected]
    sums = torch.func.vmap(
        lambda x, grad, *into: run(x, grad, **dict(zip(OPS[name].writes, into, strict=True)))
    )(xs, grads, *into)
    torch.testing.assert_close(sums, tuple(map(torch.add, expected, into)))
    _, tangents = torch.func.jvp(lambda x: run(x, grads[0]), (xs[0],), (xs[1],))
    torch.testing.assert_close(tangents[0], run(xs[1], grads[0])[0])
    found = torch.func.grad(lambda x: run(x, grads[0])[0].square().sum())(xs[0])
    x = xs[0].clone().requires_grad_()
    run(x, grads[0])[0].square().sum().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_complex_convolutions_are_pytorchs():
    x, weight = torch.randn(2, 4, 8, 8, dtype=torch.cfloat), torch.randn(6, 4, 3, 3).cfloat()
    found, expected = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    for function, leaf in ((tw.conv2d, found), (torch.nn.functional.conv2d, expected)):
        function(x, leaf).abs().sum().backward()
    assert torch.equal(found.grad, expected.grad)


def test_padding_that_differs_from_side_to_side_is_pytorchs():
    x, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 2, 3, requires_grad=True)
    expected = torch.nn.functional.conv2d(x, weight, padding="same")
    assert torch.equal(tw.conv2d(x, weight, padding="same"), expected)


def test_conv2d_under_compile_is_pytorchs():
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3, requires_grad=True)
    expected = torch.nn.functional.conv2d(x, weight)
    assert torch.equal(torch.compile(tw.conv2d, backend="eager")(x, weight), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_pytorchs_convolution_and_leaves_the_choice(dtype):
    x, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3), torch.randn(3)
    with torch.autocast("cpu", dtype):
        found = gradients(tw.conv2d, x, weight, bias, padding=1)
        expected = gradients(torch.nn.functional.conv2d, x, weight, bias, padding=1)
        with asked_for_another():
            gradients(tw.conv2d, x, weight, bias, padding=1)
    assert found[0].dtype == dtype
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "change",
    [
        {"input": None},
        {"input": [1.0]},
        {"weight": None},
        {"bias": 1.0},
        {"stride": (1, 2, 3)},
        {"stride": ()},
        {"stride": None},
        {"stride": 1.5},
        {"stride": 0},
        {"padding": (1, 2, 3)},
        {"padding": -1},
        {"padding": "full"},
        {"padding": "same", "stride": 2},
        {"padding": "same", "stride": np.int64(2)},
        {"padding": "same", "stride": np.array([1, 1])},
        {"padding": np.array([1, 1])},
        {"dilation": 0},
        {"dilation": 9},
        {"groups": 3},
        {"groups": 0},
        {"input": torch.ones(2, 5, 6, 6)},
        {"input": torch.ones(4, 6)},
        {"input": torch.ones(2, 4, 6, 6).double()},
        {"bias": torch.ones(4)},
    ],
    ids=str,
)
def test_bad_arguments_get_the_words_that_pytorch_has_for_them(change):
    given = {"input": torch.randn(2, 4, 6, 6), "weight": torch.randn(3, 4, 3, 3).requires_grad_()}
    messages = []
    for convolve in (tw.conv2d, torch.nn.functional.conv2d):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            convolve(**{**given, "bias": None, **change})
        messages.append((raised.type, str(raised.value).partition(" - got")[0]))
    assert messages[0] == messages[1]


def test_sizes_that_pytorch_makes_sense_of_are_taken():
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(3, 4, 3, 3, requires_grad=True)
    expected = torch.nn.functional.conv2d(x, weight, stride=2)
    assert torch.equal(tw.conv2d(x, weight, stride=torch.tensor(2)), expected)


@pytest.mark.parametrize("groups", [torch.tensor(2), np.int64(2)], ids=repr)
def test_groups_that_pytorch_takes_are_taken_by_the_backward_too(groups):
    x, weight, bias = torch.randn(2, 4, 6, 6), torch.randn(6, 2, 3, 3), torch.randn(6)
    found = gradients(tw.conv2d, x, weight, bias, groups=groups)
    expected = gradients(torch.nn.functional.conv2d, x, weight, bias, groups=2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 4, 6, 6), (2, 0, 6, 6)])
def test_empty_tensors_are_pytorchs_with_their_gradients(shape):
    """Without channels PyTorch gives no features either, whatever the weight has."""
    x, weight, bias = torch.randn(shape), torch.randn(3, shape[1], 3, 3), torch.randn(3)
    found = gradients(tw.conv2d, x, weight, bias, padding=1)
    expected = gradients(torch.nn.functional.conv2d, x, weight, bias, padding=1)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


FORMATS = (torch.contiguous_format, torch.channels_last)
LAYERS = {
    "3x3": ((2, 4, 9, 8), (6, 4, 3, 3), {"padding": 1}),
    "1x1": ((2, 4, 9, 8), (6, 4, 1, 1), {}),
    "groups": ((2, 4, 9, 8), (6, 2, 3, 3), {"groups": 2}),
    "depthwise": ((2, 4, 9, 8), (4, 1, 3, 3), {"groups": 4}),
    "one channel": ((2, 1, 9, 8), (6, 1, 3, 3), {}),
    "one feature": ((2, 4, 9, 8), (1, 4, 3, 3), {}),
}


@pytest.mark.parametrize("accumulated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_weights_gradient_is_laid_out_as_pytorchs(layer, dtype, accumulated):
    """But for the strides of dims of one element, where the weight's own are right as well."""
    sizes, shape, geometry = LAYERS[layer]
    for formats in product(FORMATS, repeat=3):
        strides = []
        for f in (tw.conv2d, torch.nn.functional.conv2d):
            x, w = (
                torch.ones(s, dtype=dtype).to(memory_format=m)
                for s, m in zip((sizes, shape), formats, strict=False)
            )
            out = f(x, w.requires_grad_(), **geometry)
            grad = torch.ones_like(out).to(memory_format=formats[2])
            if accumulated:
                out.backward(grad)
            (found,) = [w.grad] if accumulated else torch.autograd.grad(out, w, grad)
            strides.append([(n, s) for n, s in zip(found.shape, found.stride(), strict=True)])
        assert all(a == b for a, b in zip(*strides, strict=True) if a[0] > 1), formats
        assert [s for _, s in strides[0]] in ([s for _, s in strides[1]], [*w.stride()]), formats
