"""Tensor specs, operators and workloads against real tensors and PyTorch itself."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tilewright.errors import InvalidArgument
from tilewright.op import OPS, Workload
from tilewright.rounding import rounded
from tilewright.suite import SUITES, Suite
from tilewright.tensor_spec import DTYPES, TensorSpec, channels_last_strides

sizes = st.integers(1, 9)


@st.composite
def views(draw):
    """Real tensors: sliced, transposed, expanded, off the base of their storage."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(sizes, max_size=4))
    offset = draw(st.integers(0, 20))
    t = torch.zeros(math.prod(shape) + offset, dtype=dtype)[offset:].view(shape)
    for dim in range(t.dim()):
        how = draw(st.sampled_from(["whole", "whole", "every other", "tail", "expand"]))
        if how == "every other":
            t = t[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how == "tail":
            t = t.narrow(dim, 1, t.shape[dim] - 1) if t.shape[dim] > 1 else t
        elif how == "expand":
            first = t.narrow(dim, 0, 1)
            t = first.expand([*t.shape[:dim], 5, *t.shape[dim + 1 :]])
    return t.permute(draw(st.permutations(range(t.dim()))))


@given(views())
def test_a_spec_makes_a_tensor_of_its_own_layout_and_alignment(t):
    spec = TensorSpec.of(t)
    made = spec.empty("cpu")
    assert TensorSpec.of(made) == spec
    assert made.shape == t.shape
    assert made.dtype == t.dtype
    assert (spec.strides is None) == t.is_contiguous()


@given(views())
def test_sizes_of_a_spec_are_those_of_the_tensor(t):
    spec = TensorSpec.of(t)
    assert (spec.rank, spec.numel, spec.itemsize) == (t.dim(), t.numel(), t.element_size())
    addresses = torch.empty_strided(t.shape, spec.real_strides, device="meta")
    assert spec.storage_elements == addresses.untyped_storage().nbytes() // 4
    expanded = [n for n, s in zip(t.shape, t.stride(), strict=True) if s == 0 and n > 1]
    assert spec.distinct_bytes == t.numel() // math.prod(expanded) * t.element_size()


def test_equal_layouts_of_contiguous_tensors_are_equal_specs():
    whole = torch.empty(6, 8)
    assert TensorSpec.of(whole[2:3]) == TensorSpec("f32", (1, 8))
    assert TensorSpec.of(whole[:, :8]) == TensorSpec("f32", (6, 8), (8, 1))
    assert TensorSpec.of(whole[:, :4]) == TensorSpec("f32", (6, 4), (8, 1))
    assert TensorSpec.of(whole[:0]).strides is None


@pytest.mark.parametrize(("offset", "align"), [(0, 16), (1, 2), (2, 4), (4, 8), (8, 16), (12, 8)])
def test_the_alignment_of_a_slice_is_read_off_its_address(offset, align):
    flat = torch.empty(64, dtype=torch.float16)
    assert TensorSpec.of(flat[offset : offset + 16]).align == align


def test_channels_last_is_recognised():
    t = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert str(TensorSpec.of(t)) == "f32[2,3,4,5]@channels_last"
    assert TensorSpec.of(t).strides == channels_last_strides((2, 3, 4, 5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("f8", (2,)), "unknown dtype 'f8'; known: f16, bf16"),
        (("f32", (2, -1)), "negative size in shape [2, -1]"),
        (("f32", (2, 3), (1,)), "1 strides [1] for a tensor of rank 2"),
        (("f32", (2, 3), (3, -1)), "negative stride in [3, -1]"),
    ],
)
def test_a_spec_that_no_tensor_has_is_refused(given, message):
    with pytest.raises(InvalidArgument) as caught:
        TensorSpec(*given)
    assert message in str(caught.value)


def test_a_dtype_that_is_not_served_is_named():
    with pytest.raises(InvalidArgument, match=r"dtype torch\.complex64 is not supported"):
        TensorSpec.of(torch.empty(2, dtype=torch.complex64))


# --- every operator -----------------------------------------------------------------------------

WORKLOADS = [
    "layer_norm(x=f32[3,5,8], normalized_shape=[5,8], weight=f32[5,8], bias=f32[5,8])",
    "layer_norm(x=f16[6,24]@strides(40,1)@align8, weight=f32[24])",
    "rms_norm(x=bf16[4,16], weight=bf16[16], eps=0.001)",
    "rms_norm(x=f64[4,16])",
    "softmax(x=f16[4,6,10], dim=1)",
    "softmax(x=f32[])",
    "lerp(x=f32[4,1,1], end=f32[4,3,8], weight=f32[3,8])",
    "lerp(x=f64[7], end=f64[7], weight=0.75)",
    "bias_layer_norm(x=bf16[4,32], bias0=bf16[32], bias1=bf16[32], weight=bf16[32], bias=bf16[32])",
]
each_workload = pytest.mark.parametrize("w", [Workload.parse(t) for t in WORKLOADS], ids=WORKLOADS)


def eager(w, tensors):
    out = w.operator.reference(**w.call(tensors))
    return out if isinstance(out, tuple) else (out,)


@each_workload
@pytest.mark.parametrize("kind", ["random", "integer"])
def test_examples_have_the_layout_of_the_workload_and_are_not_zero(w, kind):
    tensors = w.operator.examples(w, kind, 0, "cpu")
    assert [TensorSpec.of(t) for t in tensors] == list(w.tensors.values())
    for t in tensors:
        assert t.ne(0).any()
        assert t.isfinite().all()
        if kind == "integer":
            assert t.eq(t.round()).all()


@each_workload
def test_a_seed_fixes_the_examples(w):
    same, again, other = (w.operator.examples(w, "random", seed, "cpu") for seed in (3, 3, 4))
    assert all(map(torch.equal, same, again))
    assert not all(map(torch.equal, same, other))


@each_workload
def test_a_call_with_the_examples_is_the_workload(w):
    tensors = w.operator.examples(w, "random", 0, "cpu")
    called, found = w.operator.workload_of(**w.call(tensors))
    assert called == w
    assert all(a is b for a, b in zip(found, tensors, strict=True))


@each_workload
def test_the_specs_of_the_outputs_are_those_of_pytorch(w):
    tensors = w.operator.examples(w, "random", 0, "cpu")
    narrow = [t.to(w.main.torch_dtype) for t in tensors]  # eager kernels take one dtype
    for spec, t in zip(w.outputs, eager(w, narrow), strict=True):
        assert (spec.shape, spec.torch_dtype) == (tuple(t.shape), t.dtype)
        assert spec.real_strides == t.stride()


@each_workload
def test_the_truth_is_fp64_and_near_pytorch(w):
    tensors = w.operator.examples(w, "random", 0, "cpu")
    truth = w.operator.truth(w, tensors)
    assert all(t.dtype == torch.float64 for t in truth)
    narrow = [t.to(w.main.torch_dtype) for t in tensors]
    for true, t in zip(truth, eager(w, narrow), strict=True):
        torch.testing.assert_close(t.double(), true, rtol=0.05, atol=0.05)


@each_workload
def test_traffic_counts_each_distinct_byte_once(w):
    read, written = w.bytes
    assert read == sum(spec.distinct_bytes for spec in w.tensors.values())
    assert written == sum(o.numel * o.itemsize for o in w.outputs)
    assert w.flops > 0


def test_an_expanded_input_is_read_once():
    w = Workload.parse("softmax(x=f32[100,8]@strides(0,1))")
    assert w.bytes == (32, 3200)


def test_parameters_wider_than_a_half_input_do_not_widen_the_result():
    w = Workload.parse("layer_norm(x=f16[4,8], weight=f32[8], bias=f32[8])")
    assert (w.outputs[0].dtype, w.arithmetic) == ("f16", "f32")


@pytest.mark.parametrize("number", ["nan", "inf", "-0.0", "0.0"])
def test_a_workload_with_any_number_equals_itself_read_back(number):
    text = f"scatter(x=f32[4], dim=0, index=i64[2], src={number})"
    w = Workload.parse(text)
    assert (str(w), w) == (text, Workload.parse(text))
    assert (w == Workload.parse(text.replace(number, "0.0"))) == (number == "0.0")


def test_workloads_of_different_strides_alignment_or_attributes_are_different_keys():
    texts = [
        "softmax(x=f16[8,64])",
        "softmax(x=f16[8,64]@strides(128,1))",
        "softmax(x=f16[8,64]@align2)",
        "softmax(x=bf16[8,64])",
        "softmax(x=f16[8,64], dim=0)",
        "softmax(x=f16[8,64])!relaxed",
        "softmax(x=f16[8,64])!donate=x",
    ]
    assert len({Workload.parse(text) for text in texts}) == len({*map(str, texts)}) == 7


@pytest.mark.parametrize("op", list(OPS))
def test_an_operator_documents_itself(op):
    doc = OPS[op].__doc__
    assert doc
    for section in ("Args:", "Returns:", "Raises:"):
        assert section in doc
    for parameter in OPS[op].parameters:
        assert f"{parameter}" in doc


def test_a_suite_that_cannot_be_read_is_named():
    with pytest.raises(InvalidArgument, match=r"suite mine: cannot read workload 'softmax\(x='"):
        Suite("mine", ("softmax(x=f32[4])", "softmax(x=")).workloads()


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_workload_of_a_suite_has_outputs_bytes_and_flops(suite):
    for w in SUITES[suite].workloads():
        assert all(o.numel > 0 for o in w.outputs)
        assert min(*w.bytes, w.flops) > 0


# --- calls --------------------------------------------------------------------------------------


def test_pytorchs_own_keyword_names_are_understood():
    x = torch.randn(4, 8)
    assert OPS["softmax"].workload_of(input=x)[0] == OPS["softmax"].workload_of(x)[0]


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("softmax", (), "softmax: argument 'x' is missing"),
        (
            "softmax",
            (torch.ones(2), 0, 1),
            "softmax: 3 positional arguments, but there are 2: x, dim",
        ),
        ("softmax", (torch.ones(2), 1), "dim=1 is out of range for x of rank 1: use -1 to 0"),
        ("softmax", ([1.0, 2.0],), "softmax: x=[1.0,2.0] should be"),
        ("softmax", (torch.ones(2, dtype=torch.int32),), "softmax: x is i32, expected one of"),
        ("layer_norm", (torch.ones(4, 8), (4,)), "normalized_shape=[4] does not end x's shape"),
        ("layer_norm", (torch.tensor(1.0),), "x is a scalar; it needs at least one dim"),
        ("lerp", (torch.ones(3), torch.ones(4), 0.5), "do not broadcast"),
        ("rms_norm", (torch.ones(3, 4), None, torch.ones(3)), "weight has shape [3], but a row"),
    ],
)
def test_a_wrong_call_says_what_was_wrong(op, args, message):
    with pytest.raises(InvalidArgument) as caught:
        OPS[op].workload_of(*args)
    assert message in str(caught.value)


BYTES, PLACES = torch.ones(3, dtype=torch.uint8), torch.tensor([0, 2])
NUMBERS = "f16, bf16, f32, f64, i32, i64"


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("softmax", (BYTES,), "x is torch.uint8, expected one of f16, bf16, f32, f64"),
        ("lerp", (BYTES.float(), BYTES, 0.5), "end is torch.uint8, expected one of f32"),
        ("gather", (BYTES, 0, PLACES), f"x is torch.uint8, expected one of {NUMBERS}"),
        ("scatter", (BYTES, 0, PLACES, BYTES), f"x is torch.uint8, expected one of {NUMBERS}"),
        ("scatter", (BYTES.int(), 0, PLACES, BYTES), "src is torch.uint8, expected one of i32"),
        ("embedding_backward", (BYTES[:2, None], PLACES, 3),
         "grad is torch.uint8, expected one of f16, bf16, f32, f64"),
        ("gather", (BYTES.float(), 0, BYTES), "index is torch.uint8, expected i64 or i32; "
         "convert it: index.long()"),
    ],
)  # fmt: skip
def test_a_dtype_that_nothing_has_is_told_those_that_the_call_could_be_made_in(op, args, message):
    with pytest.raises(InvalidArgument) as caught:
        OPS[op].workload_of(*args)
    assert str(caught.value) == f"{op}: {message}"


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(InvalidArgument, match="tensors are on cpu, meta; move them to one"):
        OPS["lerp"].workload_of(torch.ones(2), torch.ones(2, device="meta"), 0.5)


def test_changing_an_argument_gives_another_workload():
    w = Workload.parse("softmax(x=f32[4,8])!relaxed")
    wide = w.with_args(x=dataclasses.replace(w["x"], dtype="f64"))
    assert str(wide) == "softmax(x=f64[4,8])!relaxed"
    assert str(w) == "softmax(x=f32[4,8])!relaxed"


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from([torch.float16, torch.bfloat16]))
def test_a_rounding_written_in_a_reference_is_what_eager_pytorch_does(width, rows, dtype):
    x, bias0, bias1, weight, bias = (
        torch.randn(*shape, dtype=dtype) for shape in [(rows, width), *[(width,)] * 4]
    )
    ours = OPS["bias_layer_norm"].reference(x, bias0, bias1, weight, bias)
    theirs = F.layer_norm((x + bias0) + bias1, (width,), weight, bias)
    assert torch.equal(ours, theirs)
    assert torch.equal(rounded(x), x)
