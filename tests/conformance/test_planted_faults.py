"""Faults that real kernels have, planted into every operator: the verifier refuses each of them."""

import functools
import itertools
import operator
import re

import pytest
import torch
from torch import fx

from tilewright.fusion.frontend.trace import trace_reference
from tilewright.impl import allocate
from tilewright.impls._vendor import vendor
from tilewright.measure.error_bound import truth_and_tolerance
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import DTYPES

# Small odd shapes, d for the dtype. A new operator adds its own here.
WORKLOADS = {
    "layer_norm": [
        "layer_norm(x=d[7,37], weight=d[37], bias=d[37])",
        "layer_norm(x=d[5,3,11], normalized_shape=[3,11])",
    ],
    "rms_norm": ["rms_norm(x=d[7,37], weight=d[37])", "rms_norm(x=d[3,129])"],
    "bias_layer_norm": [
        "bias_layer_norm(x=d[7,37], bias0=d[37], bias1=d[37], weight=d[37], bias=d[37])"
    ],
    "softmax": ["softmax(x=d[7,37])", "softmax(x=d[3,19,5], dim=1)"],
    "scatter": ["scatter(x=d[7,37], dim=0, index=i64[5,37], src=d[5,37])!indices=unique"],
    "scatter_add": ["scatter_add(x=d[7,37], dim=0, index=i64[9,37], src=d[9,37])"],
    "scatter_reduce": [
        "scatter_reduce(x=d[7,37], dim=1, index=i64[7,50], src=d[7,50], reduce=mean)",
        "scatter_reduce(x=d[7,37], dim=1, index=i64[7,50], src=d[7,50], reduce=amax)",
    ],
    "gather": ["gather(x=d[7,37], dim=1, index=i64[7,37])"],
    "index_add": ["index_add(x=d[7,37], dim=0, index=i64[20], source=d[20,37])"],
    "index_reduce": ["index_reduce(x=d[7,37], dim=0, index=i64[20], source=d[20,37], reduce=amin)"],
    "embedding_backward": [
        "embedding_backward(grad=d[20,37], index=i64[20], num_weights=7)!indices=balanced"
    ],
    "lerp": [
        "lerp(x=d[7,37], end=d[7,37], weight=0.3)",
        "lerp(x=d[5,1], end=d[37], weight=d[5,37])",
    ],
    "conv2d_weight_grad": [
        "conv2d_weight_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=3, padding=1)",
        "conv2d_weight_grad(x=d[3,8,5,5], grad_output=d[3,4,3,3], kernel_size=1, stride=2,"
        " groups=4)",
        "conv2d_weight_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=3, padding=1,"
        " into=d[3,5,3,3])",
        "conv2d_weight_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=1, out_dtype=w)",
        "conv2d_weight_grad(x=d[2,5,6,7], grad_output=d[2,3,4,5], kernel_size=3, allow_tf32=True)",
    ],
    "conv2d_weight_bias_grad": [
        "conv2d_weight_bias_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=3, padding=1)",
        "conv2d_weight_bias_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=3, padding=1,"
        " into=d[3,5,3,3], into_bias=d[3])",
        "conv2d_weight_bias_grad(x=d[2,5,6,7], grad_output=d[2,3,6,7], kernel_size=1, out_dtype=w)",
    ],
    "layer_norm_forward": ["layer_norm_forward(x=d[7,37], weight=d[37], bias=d[37])"],
    "rms_norm_forward": ["rms_norm_forward(x=d[7,37], weight=d[37])"],
    "bias_layer_norm_forward": [
        "bias_layer_norm_forward(x=d[7,37], bias0=d[37], bias1=d[37], weight=d[37], bias=d[37])"
    ],
    "layer_norm_backward": [
        "layer_norm_backward(grad_output=d[7,37], x=d[7,37], mean=w[7,1], rstd=w[7,1],"
        " weight=d[37])",
        "layer_norm_backward(grad_output=d[7,37], x=d[7,37], mean=w[7,1], rstd=w[7,1],"
        " weight=d[37], grads=[x])",
    ],
    "rms_norm_backward": [
        "rms_norm_backward(grad_output=d[7,37], x=d[7,37], rstd=w[7,1], weight=d[37])"
    ],
    "bias_layer_norm_backward": [
        "bias_layer_norm_backward(grad_output=d[7,37], x=d[7,37], bias0=d[37], bias1=d[37],"
        " mean=w[7,1], rstd=w[7,1], weight=d[37])"
    ],
    "add_layer_norm": ["add_layer_norm(x=d[7,37], residual=d[7,37], weight=d[37], bias=d[37])"],
    "add_rms_norm": ["add_rms_norm(x=d[7,37], residual=d[7,37], weight=d[37])"],
    "add_layer_norm_forward": [
        "add_layer_norm_forward(x=d[7,37], residual=d[7,37], weight=d[37], bias=d[37])"
    ],
    "add_rms_norm_forward": ["add_rms_norm_forward(x=d[7,37], residual=d[7,37], weight=d[37])"],
    "add_layer_norm_backward": [
        "add_layer_norm_backward(grad_output=d[7,37], grad_output_total=d[7,37], total=d[7,37],"
        " mean=w[7,1], rstd=w[7,1], weight=d[37])"
    ],
    "add_rms_norm_backward": [
        "add_rms_norm_backward(grad_output=d[7,37], grad_output_total=d[7,37], total=d[7,37],"
        " rstd=w[7,1], weight=d[37])"
    ],
    "softmax_backward": [
        "softmax_backward(grad_output=d[7,37], output=d[7,37])",
        "softmax_backward(grad_output=d[3,19,5], output=d[3,19,5], dim=1)",
    ],
    "lerp_backward": [
        "lerp_backward(grad_output=d[5,19,3], x=d[5,1,3], end=d[19,1], weight=d[5,19,3])",
    ],
    "layer_norm_training": [
        "layer_norm_training(x=d[7,37], grad_output=d[7,37], weight=d[37], bias=d[37])"
    ],
    "rms_norm_training": ["rms_norm_training(x=d[7,37], grad_output=d[7,37], weight=d[37])"],
    "softmax_training": [
        "softmax_training(x=d[7,37], grad_output=d[7,37])",
        "softmax_training(x=d[3,19,5], grad_output=d[3,19,5], dim=1)",
    ],
    "bias_layer_norm_training": [
        "bias_layer_norm_training(x=d[7,37], grad_output=d[7,37], bias0=d[37], bias1=d[37],"
        " weight=d[37], bias=d[37])"
    ],
    "add_layer_norm_training": [
        "add_layer_norm_training(x=d[7,37], residual=d[7,37], grad_output=d[7,37],"
        " grad_output_total=d[7,37], weight=d[37], bias=d[37])"
    ],
    "add_rms_norm_training": [
        "add_rms_norm_training(x=d[7,37], residual=d[7,37], grad_output=d[7,37],"
        " grad_output_total=d[7,37], weight=d[37])"
    ],
    "lerp_training": ["lerp_training(x=d[5,1], end=d[37], grad_output=d[5,37], weight=d[5,37])"],
}
FLOATS = ("f16", "bf16", "f32", "f64")


def of_dtype(text, dtype):
    """d is the dtype; w what rows' statistics have beside it."""
    wide = "f64" if dtype == "f64" else "f32"
    return re.sub(r"\bw(?=\[|\))", wide, re.sub(r"\bd\[", f"{dtype}[", text))


CASES = [
    of_dtype(text, dtype) for texts in WORKLOADS.values() for text in texts for dtype in FLOATS
]
COORDINATE = r"\(\d+(, \d+)*\)"


def test_every_operator_is_here():
    own = {name for name in OPS if OPS[name].reference.__module__.startswith("tilewright.ops.")}
    assert own == set(WORKLOADS) == set(LAYOUTS)


@functools.cache
def verifier(text):
    return Verifier(Workload.parse(text), torch.device("cpu"))


@functools.cache
def pytorchs(w):
    """PyTorch's result, of gradients by what was traced once."""
    return vendor(w)


def refusal(text, executable):
    verdict = verifier(text).check(executable)
    assert not verdict.ok
    return verdict.message


SUMS = ("sum", "var", "mean", "convolution_backward")


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def altered(w, change):
    """An executable: PyTorch's result, its first output put through `change`."""

    def executable(*tensors):
        first, *rest = as_tuple(pytorchs(w)(*tensors))
        return (change(first), *rest)

    return executable


def name_of(target):
    return target.__name__ if target is operator.getitem else target._schema.name.split("::")[1]


@functools.cache
def traced(text):
    return trace_reference(Workload.parse(text))


class Emulated(fx.Interpreter):
    """The traced reference in the operator's arithmetic, with a fault in its `fault`-th sum.

    `term` is the position that is left out, in the last of the dims summed over; of a convolution's
    weight gradient, the first or the last pixel of all.
    """

    def __init__(self, text, fault=None, term=-1):
        self.w = Workload.parse(text)
        super().__init__(traced(text))
        self.fault, self.term = fault, term

    @property
    def sums(self):
        calls = [n.target for n in self.module.graph.nodes if n.op == "call_function"]
        return sum(name_of(target) in SUMS for target in calls)

    def call_function(self, target, args, kwargs):
        name = name_of(target)
        if name == "rounded":
            return args[0].to(self.w.main.torch_dtype).to(args[0].dtype)
        if name not in SUMS:
            return super().call_function(target, args, kwargs)
        self.seen += 1
        if self.seen - 1 != self.fault:
            return super().call_function(target, args, kwargs)
        if name == "convolution_backward":
            grad = args[0].clone()
            grad[self.term, :, self.term, self.term] = 0.0
            return super().call_function(target, (grad, *args[1:]), kwargs)
        x, dims, *rest = args
        keepdim = name != "var" and bool(rest and rest[0])
        terms = (x - x.mean(dims, keepdim=True)).square() if name == "var" else x.clone()
        terms.select(dims[-1], self.term).zero_()
        total = terms.sum(dims, keepdim)
        return total if name == "sum" else total * (total.numel() / x.numel())

    def __call__(self, *tensors):
        self.seen = 0
        wide = DTYPES[self.w.arithmetic]
        outs = self.run(*(t.to(wide) if t.is_floating_point() else t for t in tensors))
        # A copy each: two gradients may be one value.
        return tuple(
            o.to(spec.torch_dtype, copy=True) for o, spec in zip(outs, self.w.outputs, strict=True)
        )


@pytest.mark.parametrize("text", CASES)
def test_pytorchs_own_result_passes(text):
    verdict = verifier(text).check(pytorchs(Workload.parse(text)))
    assert verdict.message == ""
    assert verdict.max_ulp <= verdict.bound_ulp


@pytest.mark.parametrize("text", CASES)
def test_the_reference_in_the_operators_arithmetic_passes(text):
    verdict = verifier(text).check(Emulated(text))
    assert verdict.message == ""


@pytest.mark.parametrize("text", CASES)
def test_a_term_missing_from_any_sum_is_refused(text):
    for fault, term in itertools.product(range(Emulated(text).sums), (0, -1)):
        assert re.search(COORDINATE, refusal(text, Emulated(text, fault, term)))


WIDE = [
    text.replace("K", "65536")
    for text in (
        "rms_norm(x=f16[1,K])",
        "layer_norm(x=f16[1,K])",
        "layer_norm(x=f16[1,K], weight=f16[K], bias=f16[K])",
        "softmax(x=f16[1,K])",
        "bias_layer_norm(x=f16[1,K], bias0=f16[K], bias1=f16[K], weight=f16[K], bias=f16[K])",
        "rms_norm(x=bf16[16,K])",
        "layer_norm(x=bf16[16,K])",
        "softmax(x=bf16[16,K])",
    )
]


@pytest.mark.parametrize("text", WIDE)
def test_one_term_missing_of_65536_is_refused_in_halves(text):
    assert verifier(text).check(Emulated(text)).message == ""
    for fault in range(Emulated(text).sums):
        for term in (0, 31415, 65535):
            refusal(text, Emulated(text, fault, term))


@pytest.mark.parametrize("text", CASES)
def test_an_element_never_written_is_refused(text):
    w = Workload.parse(text)

    def all_but_the_last(right):
        out = allocate(w.outputs[0], right.device)
        out.view(-1)[:-1] = right.view(-1)[:-1]
        return out

    executable = altered(w, all_but_the_last)
    last = ", ".join(str(n - 1) for n in w.outputs[0].shape)
    assert re.search(rf"never written at \({last}\)", refusal(text, executable))


@pytest.mark.parametrize("text", CASES)
def test_a_stale_last_element_is_refused(text):
    w = Workload.parse(text)

    def stale(right):
        out = right.clone()
        out.view(-1)[-1] = out.view(-1)[0]
        return out

    assert re.search(COORDINATE, refusal(text, altered(w, stale)))


@pytest.mark.parametrize("text", CASES)
def test_rows_shifted_by_one_are_refused(text):
    w = Workload.parse(text)
    message = refusal(text, altered(w, lambda out: out.roll(1, 0)))
    assert re.search(COORDINATE, message)


@pytest.mark.parametrize("text", CASES)
def test_a_forgotten_argument_is_refused(text):
    w = Workload.parse(text)
    for i, fill in itertools.product(range(1, len(w.tensors)), (0.0, 1.0)):

        def executable(*tensors, i=i, fill=fill):
            given = list(tensors)
            given[i] = torch.full_like(given[i], fill)
            return pytorchs(w)(*given)

        assert re.search(COORDINATE, refusal(text, executable)), (i, fill)


@pytest.mark.parametrize("text", [t for t in CASES if not re.search(r"\bbf16", t)])
def test_a_result_rounded_through_a_narrower_dtype_is_refused(text):
    w = Workload.parse(text)
    narrower = torch.float32 if w.main.dtype == "f64" else torch.bfloat16
    own = w.outputs[0].torch_dtype
    message = refusal(text, altered(w, lambda out: out.to(narrower).to(own)))
    assert re.search(COORDINATE, message)


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize(("place", "words"), [(-1, "before its start"), (None, "past its end")])
def test_a_write_outside_an_output_is_refused(text, place, words):
    w = Workload.parse(text)

    def beyond(right):
        out = allocate(w.outputs[0], right.device).copy_(right)
        offset = out.storage_offset() + (out.numel() if place is None else place)
        out.as_strided((1,), (1,), offset).fill_(1.0)
        return out

    message = refusal(text, altered(w, beyond))
    assert str(w.outputs[0]) in message
    assert re.search(rf"\d+ bytes {words}", message)


@pytest.mark.parametrize("text", CASES)
def test_a_modified_input_is_refused_and_restored(text):
    w = Workload.parse(text)

    def executable(*tensors):
        out = pytorchs(w)(*tensors)
        tensors[0].view(-1)[4] += 1
        return out

    message = refusal(text, executable)
    first = next(iter(w.tensors))
    assert re.match(rf"modified its input {first} at {COORDINATE}: .* became", message)
    assert verifier(text).check(pytorchs(w)).ok


@pytest.mark.parametrize("text", CASES)
def test_a_result_in_another_layout_or_dtype_is_refused(text):
    w = Workload.parse(text)

    def refused(change):
        return refusal(text, altered(w, change))

    transposed = refused(lambda out: out.transpose(0, -1).contiguous().transpose(0, -1))
    assert re.match(r"returned .*@strides\(.*, expected", transposed)
    assert "returned" in refused(lambda out: out[:-1])
    other = torch.float64 if w.main.dtype != "f64" else torch.float32
    assert "returned" in refused(lambda out: out.to(other))
    more = refusal(text, lambda *ts: (*as_tuple(pytorchs(w)(*ts)), ts[0]))
    assert f"returned {len(w.outputs) + 1} tensors" in more


@pytest.mark.parametrize("text", CASES)
def test_a_result_that_changes_from_call_to_call_is_refused(text):
    w = Workload.parse(text)
    calls = itertools.count()

    def drifting(right):
        out = right.clone()
        if next(calls) % 2:
            element = out.view(-1)[3:4]
            element.copy_(torch.nextafter(element, torch.full_like(element, 9.0)))
        return out

    message = refusal(text, altered(w, drifting))
    assert re.search(COORDINATE, message)
    copies = w.operator.indexed and w.operator.indexed.exact(w)
    if w.main.dtype in ("f32", "f64") and not w.op.startswith("lerp") and not copies:
        assert message.startswith("two runs on the same inputs differ at")


@pytest.mark.parametrize("text", CASES)
def test_one_buffer_returned_twice_is_refused(text):
    w = Workload.parse(text)
    buffer = torch.empty(w.outputs[0].shape, dtype=w.outputs[0].torch_dtype)
    message = refusal(text, altered(w, buffer.copy_))
    assert message == "returned the same memory from two calls"


LAYOUTS = {
    "layer_norm": [
        "layer_norm(x=d[6,40]@strides(50,1), weight=d[40]@strides(2), bias=d[40])",
        "layer_norm(x=d[6,40]@strides(0,1))",
        "layer_norm(x=d[6,40]@strides(1,6)@align8, weight=d[40])",
        "layer_norm(x=d[1,40])",
        "layer_norm(x=d[6,1])",
        "layer_norm(x=d[0,40])",
        "layer_norm(x=d[40], weight=d[40])",
    ],
    "rms_norm": [
        "rms_norm(x=d[6,40]@strides(50,1), weight=d[40])",
        "rms_norm(x=d[2,3,40]@strides(40,80,1))",
        "rms_norm(x=d[1,1])",
    ],
    "bias_layer_norm": [
        "bias_layer_norm(x=d[4,6,40]@strides(40,160,1), bias0=d[40], bias1=d[40], weight=d[40],"
        " bias=d[40])"
    ],
    "softmax": [
        "softmax(x=d[])",
        "softmax(x=d[40])",
        "softmax(x=d[2,6,4,5]@channels_last, dim=1)",
        "softmax(x=d[2,6,4,5]@channels_last)",
        "softmax(x=d[6,40]@strides(1,6), dim=0)",
        "softmax(x=d[3,0])",
    ],
    "scatter": ["scatter(x=d[6,40]@strides(1,6), dim=0, index=i64[0,40], src=d[6,40])"],
    "scatter_add": ["scatter_add(x=d[6,4], dim=0, index=i64[9,4]@strides(1,0), src=d[9,4])"],
    "scatter_reduce": [
        "scatter_reduce(x=d[6], dim=0, index=i32[9], src=d[9], reduce=prod, include_self=False)"
    ],
    "gather": ["gather(x=d[6,40]@strides(1,6), dim=0, index=i64[2,40])"],
    "index_add": ["index_add(x=d[2,6,4,5]@channels_last, dim=1, index=i64[9], source=d[2,9,4,5])"],
    "index_reduce": ["index_reduce(x=d[9], dim=0, index=i64[4], source=d[4], reduce=mean)"],
    "embedding_backward": ["embedding_backward(grad=d[4,40], index=i64[4], num_weights=900)"],
    "lerp": [
        "lerp(x=d[2,6,4,5]@channels_last, end=d[2,6,4,5]@channels_last, weight=0.5)",
        "lerp(x=d[4,6]@strides(0,1), end=d[4,6]@strides(1,4)@align8, weight=0.0)",
        "lerp(x=d[], end=d[], weight=d[])",
        "lerp(x=d[33]@strides(3), end=d[33], weight=1.0)",
    ],
    "conv2d_weight_grad": [
        "conv2d_weight_grad(x=d[2,6,4,5]@channels_last, grad_output=d[2,3,4,5]@channels_last,"
        " kernel_size=3, padding=1)",
        "conv2d_weight_grad(x=d[2,6,4,5], grad_output=d[2,3,4,5]@strides(0,0,0,0), kernel_size=1)",
        "conv2d_weight_grad(x=d[3,1,1,1], grad_output=d[3,2,1,1], kernel_size=1)",
    ],
    "conv2d_weight_bias_grad": [
        "conv2d_weight_bias_grad(x=d[2,6,4,5]@channels_last, grad_output=d[2,3,4,5],"
        " kernel_size=3, padding=1)",
    ],
    "layer_norm_forward": ["layer_norm_forward(x=d[6,40]@strides(1,6)@align8, weight=d[40])"],
    "rms_norm_forward": ["rms_norm_forward(x=d[2,3,40]@strides(40,80,1))"],
    "bias_layer_norm_forward": [
        "bias_layer_norm_forward(x=d[6,40]@strides(50,1), bias0=d[40], bias1=d[40], weight=d[40],"
        " bias=d[40])"
    ],
    "layer_norm_backward": [
        "layer_norm_backward(grad_output=d[6,40]@strides(50,1), x=d[6,40]@strides(1,6),"
        " mean=w[6,1], rstd=w[6,1], weight=d[40])",
        "layer_norm_backward(grad_output=d[6,40], x=d[6,40], mean=w[6,1], rstd=w[6,1],"
        " weight=d[40], grads=[weight,bias])",
    ],
    "rms_norm_backward": [
        "rms_norm_backward(grad_output=d[2,3,40], x=d[2,3,40]@strides(40,80,1), rstd=w[2,3,1])"
    ],
    "bias_layer_norm_backward": [
        "bias_layer_norm_backward(grad_output=d[2,3,40], x=d[2,3,40], bias0=d[40], bias1=d[40],"
        " mean=w[2,3,1], rstd=w[2,3,1], weight=d[40], grads=[bias1])"
    ],
    "add_layer_norm": ["add_layer_norm(x=d[6,40]@strides(1,6)@align8, residual=d[6,40])"],
    "add_rms_norm": ["add_rms_norm(x=d[2,3,40], residual=d[2,3,40]@strides(40,80,1))"],
    "add_layer_norm_forward": [
        "add_layer_norm_forward(x=d[6,40], residual=d[6,40]@strides(50,1), weight=d[40])"
    ],
    "add_rms_norm_forward": ["add_rms_norm_forward(x=d[6,40]@strides(0,1), residual=d[6,40])"],
    "add_layer_norm_backward": [
        "add_layer_norm_backward(grad_output=d[6,40]@strides(50,1), grad_output_total=d[6,40],"
        " total=d[6,40], mean=w[6,1], rstd=w[6,1], weight=d[40], grads=[x])"
    ],
    "add_rms_norm_backward": [
        "add_rms_norm_backward(grad_output=d[2,3,40], grad_output_total=d[2,3,40]@strides(0,0,0),"
        " total=d[2,3,40], rstd=w[2,3,1])"
    ],
    "softmax_backward": ["softmax_backward(grad_output=d[6,4], output=d[6,4]@strides(1,6), dim=0)"],
    "lerp_backward": [
        "lerp_backward(grad_output=d[2,2,3,4], x=d[2,3,4], end=d[2,2,3,4], weight=0.3)",
        "lerp_backward(grad_output=d[2,6,4,5]@channels_last, x=d[6,1,1], end=d[2,6,4,5],"
        " weight=d[2,1,4,5])",
    ],
    "layer_norm_training": [
        "layer_norm_training(x=d[6,40]@strides(1,6), grad_output=d[6,40]@strides(50,1),"
        " weight=d[40])"
    ],
    "rms_norm_training": [
        "rms_norm_training(x=d[6,40]@strides(1,6), grad_output=d[6,40]@strides(50,1))"
    ],
    "softmax_training": [
        "softmax_training(x=d[6,4]@strides(1,6), grad_output=d[6,4]@strides(5,1), dim=0)"
    ],
    "bias_layer_norm_training": [
        "bias_layer_norm_training(x=d[6,40]@strides(1,6), grad_output=d[6,40], bias0=d[40],"
        " bias1=d[40], weight=d[40], bias=d[40], grads=[x,bias1])"
    ],
    "add_layer_norm_training": [
        "add_layer_norm_training(x=d[6,40]@strides(1,6), residual=d[6,40], grad_output=d[6,40],"
        " grad_output_total=d[6,40]@strides(50,1), weight=d[40], grads=[weight])"
    ],
    "add_rms_norm_training": [
        "add_rms_norm_training(x=d[2,3,40], residual=d[2,3,40]@strides(40,80,1),"
        " grad_output=d[2,3,40], grad_output_total=d[2,3,40]@strides(0,0,0))"
    ],
    "lerp_training": [
        "lerp_training(x=d[6,40]@strides(1,6), end=d[40], grad_output=d[6,40], weight=0.3)"
    ],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("text", [t for texts in LAYOUTS.values() for t in texts])
def test_pytorchs_own_result_passes_in_any_layout(text, dtype):
    w = Workload.parse(of_dtype(text, dtype))
    assert Verifier(w, torch.device("cpu")).check(pytorchs(w)).message == ""


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize(
    "text",
    [
        "layer_norm(x=d[7,37], weight=f32[37], bias=f32[37])",
        "rms_norm(x=d[7,37], weight=f32[37])",
        "bias_layer_norm(x=d[9,37], bias0=f32[37], bias1=d[37], weight=f32[37], bias=f32[37])",
    ],
)
def test_pytorchs_own_result_passes_with_halves_beside_fp32_parameters(text, half):
    w = Workload.parse(re.sub(r"\bd\[", f"{half}[", text))
    assert Verifier(w, torch.device("cpu")).check(pytorchs(w)).message == ""


# A convolution's weight gradient, split along its pixels as the fastest kernels do.
SPLIT = "conv2d_weight_grad(x=d[8,6,12,12], grad_output=d[8,5,12,12], kernel_size=3, padding=1)"


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_lost_slice_a_swapped_tap_and_a_dropped_border_row_are_refused(dtype):
    text = re.sub(r"\bd\[", f"{dtype}[", SPLIT)
    run = pytorchs(Workload.parse(text))

    def lost_slice(x, grad):
        return run(x, grad.clone().index_fill_(0, torch.tensor([3]), 0.0))

    def swapped_taps(x, grad):
        return run(x, grad)[:, :, :, [1, 0, 2]].contiguous()

    def dropped_border(x, grad):
        x = x.clone()
        x[:, :, -1] = 0.0
        return run(x, grad)

    for fault in (lost_slice, swapped_taps, dropped_border):
        assert re.search(COORDINATE, refusal(text, fault))


def test_the_terms_of_one_sign_may_be_truncated_and_no_more():
    """As tensor cores do it: every 16 products, toward zero."""
    w = Workload.parse(
        "conv2d_weight_grad(x=f16[64,2,8,8], grad_output=f16[64,2,8,8], kernel_size=1)"
    )
    tensors = [t.abs() for t in w.operator.examples(w, "random", 0, "cpu")]
    ((value, tolerance),) = truth_and_tolerance(w, tensors)
    x, grad = (t.double().permute(1, 0, 2, 3).reshape(2, -1) for t in tensors)
    total = torch.zeros(2, 2, dtype=torch.float64)
    for start in range(0, x.shape[1], 16):
        total += grad[:, start : start + 16] @ x[:, start : start + 16].T
        total = (total.view(torch.int64) >> 29 << 29).view(torch.float64)  # 24 bits are kept
    assert (total - value[:, :, 0, 0]).abs().max() > 0
    assert ((total - value[:, :, 0, 0]).abs() <= tolerance[:, :, 0, 0]).all()
    assert (tolerance < 1e-4 * value).all()
