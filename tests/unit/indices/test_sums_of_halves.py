"""On a CPU sums of halves are rounded once, with or without records: by rows_cpp, and by PyTorch's
kernels for fp32 until that is built and where it takes no such layout."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings

import tilewright as tw
from allocations import peak_bytes
from indexing import moves
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch import evidence, selection
from tilewright.dispatch.prepared import HOT_CALLS
from tilewright.errors import IndexOutOfRange
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows import sums_widened
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.tensor_spec import HALVES

CPU, SPEC = torch.device("cpu"), spec_of(None)
WIDENED, ROWS = IMPLS["sums_widened"], IMPLS["rows_cpp"]
needs_cxx = pytest.mark.skipif(cxx.missing() is not None, reason="no C++ compiler")


def both(w):
    """The executables that widen the whole table, and only what is named."""
    found = []
    for started in (math.inf, -math.inf):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sums_widened, "STARTED", started)
            found.append(WIDENED.build(WIDENED.heuristic(w, SPEC), w, SPEC))
    return found


def bits(run, w):
    found = run(*w.operator.examples(w, "random", 0, "cpu"))
    return found.view(torch.int16), found.stride()


def assert_alike(w):
    (whole, strides), (named, others) = (bits(run, w) for run in both(w))
    assert torch.equal(whole, named)
    assert strides == others


@settings(max_examples=50)
@given(moves(HALVES))
def test_sums_of_any_operator_shape_and_layout_are_right(w):
    halves = [s.dtype in HALVES for n, s in w.tensors.items() if n != "index"]
    assume(WIDENED.unsupported(w, SPEC) is None)
    columns = w.main.numel // w.main.shape[w["dim"]] if w.op == "index_reduce" else 0
    assume(w.main.rank == 1 or columns != 1 or w["reduce"] != "prod")  # see the test below
    assert all(halves)
    for run in both(w):
        verdict = Verifier(w, CPU).check(run)
        assert verdict.ok, verdict.message
        assert verdict.deterministic
    assert_alike(w)


@pytest.mark.parametrize(
    "text",
    [
        "scatter_add(x=bf16[9,7]@strides(8,1), dim=0, index=i64[90,6], src=bf16[95,7])",
        "scatter_add(x=f16[9,7]@strides(1,9), dim=1, index=i32[9,90]@strides(90,1), "
        "src=f16[9,90]@strides(1,9))",
        "index_add(x=bf16[4,9,7]@strides(63,1,9), dim=1, index=i64[90]@strides(2), "
        "source=bf16[4,90,7], alpha=-2.0)!donate=x",
        "embedding_backward(grad=f16[9,10,7]@strides(1,9,90), index=i32[9,10]@strides(1,9), "
        "num_weights=20, padding_idx=3)",
        "scatter_reduce(x=bf16[], dim=0, index=i64[], src=bf16[], reduce=mean)",
    ],
)
def test_sums_of_any_strides_are_right(text):
    w = Workload.parse(text)
    choice = selection.unbuilt(w, CPU)
    assert choice.implementation == "sums_widened"
    for run in both(w):
        verdict = Verifier(w, CPU).check(run)
        assert verdict.ok, verdict.message
    assert_alike(w)


LARGE = [
    f"{text.format(x=f'{t}[3000,700]', t=t)}{flags}"
    for t, text in itertools.product(
        HALVES,
        (
            "index_add(x={x}, dim=0, index=i32[9], source={t}[9,700], alpha=0.3)",
            "index_add(x={x}, dim=1, index=i64[9], source={t}[3000,9], alpha=0.3)",
            "index_add(x={x}@strides(1,3000), dim=0, index=i64[9], source={t}[9,700])",
            "index_reduce(x={x}, dim=0, index=i64[9], source={t}[9,700], reduce=mean)",
            "index_reduce(x={x}@strides(701,1), dim=1, index=i32[9], source={t}[3000,9], "
            "reduce=prod, include_self=False)",
            "scatter_add(x={x}, dim=0, index=i64[9,70]@strides(1,0), src={t}[9,700])",
            "scatter_add(x={x}@strides(1,3000), dim=1, index=i32[60,90], src={t}[60,91])",
            "scatter_reduce(x={x}, dim=-2, index=i64[90,60]@strides(1,91), src={t}[90,60], "
            "reduce=mean, include_self=False)",
            "scatter_reduce(x={x}, dim=0, index=i64[9000,1], src={t}[9000,1], reduce=prod)",
            "scatter_add(x={x}, dim=0, index=i64[0,7], src={t}[9,7])",
            "scatter_add(x={t}[300000], dim=0, index=i64[], src={t}[1])",
            "embedding_backward(grad={t}[3,5,700], index=i32[3,5], num_weights=3000, "
            "padding_idx=7, scale_grad_by_freq=True)",
        ),
    )
    for flags in ("", "!donate=x", "!indices=constant!donate=x")
    if not (flags and text.startswith("embedding"))
]


@pytest.mark.parametrize("text", LARGE)
def test_of_a_large_table_only_what_is_named_is_widened_with_the_same_bits(text):
    w = Workload.parse(text)
    assert_alike(w)
    tensors = w.operator.examples(w, "random", 0, "cpu")
    run = WIDENED.build(WIDENED.heuristic(w, SPEC), w, SPEC)
    table = w.outputs[0].numel * w.main.itemsize
    made = 0 if "x" in w.donated else table
    assert peak_bytes(lambda: run(*tensors)) - made < table / 4


@pytest.mark.parametrize(
    "text",
    [
        *(text for text in LARGE if "bf16" in text and "constant" not in text),
        "index_reduce(x=f16[900,70], dim=0, index=i64[9000], source=f16[9000,70], reduce=mean)",
        "scatter_add(x=f16[900,70], dim=0, index=i32[9000,70], src=f16[9000,70])!donate=x",
        "scatter_reduce(x=f16[900,70], dim=0, index=i64[9000,70], src=f16[9000,70], reduce=mean)",
        "scatter_reduce(x=f16[900,70], dim=0, index=i32[9000,70]@strides(1,0), src=f16[9000,70], "
        "reduce=prod)",
        "embedding_backward(grad=f16[9000,1], index=i64[9000], num_weights=90000, "
        "scale_grad_by_freq=True)",
    ],
)
def test_records_tell_what_is_allocated(text):
    w = Workload.parse(text)
    made = 0 if "x" in w.donated else w.outputs[0].numel * w.main.itemsize
    tensors = w.operator.examples(w, "random", 0, "cpu")
    for run in both(w):
        taken = peak_bytes(lambda run=run: run(*tensors)) - made
        assert taken <= 1.01 * run.workspace_bytes + 2000
        assert taken >= 0.7 * run.workspace_bytes


def test_what_is_not_named_keeps_its_bits():
    text = "index_add(x=bf16[3000,700], dim=0, index=i64[9], source=bf16[9,700])!donate=x"
    w = Workload.parse(text)
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    x.view(torch.int16)[1::2] = 0x7F81  # a NaN that is not what rounding makes
    before = x.clone()
    WIDENED.build(WIDENED.heuristic(w, SPEC), w, SPEC)(x, index * 0, source)
    assert torch.equal(x[1:].view(torch.int16), before[1:].view(torch.int16))


def test_padding_that_no_index_names_is_no_row_that_one_does():
    grad = torch.ones(4, 700).half()
    found = tw.embedding_backward(grad, torch.tensor([1, 9, 9, 4]), 3000, padding_idx=3)
    assert found[:10, 0].tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 0, 2]


def test_products_of_rows_of_one_half_are_right_where_pytorch_fails():
    x, src = torch.full((2, 1), 3.0).half(), torch.full((4, 1), 2.0).half()
    index = torch.tensor([1, 1, 0, 1])
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):  # of PyTorch 2.13
        torch.index_reduce(x, 0, index, src, "prod")
    assert torch.equal(tw.index_reduce(x, 0, index, src, "prod"), torch.tensor([[6], [24]]).half())


ONES, TO = torch.ones(5000, dtype=torch.bfloat16), torch.zeros(5000, dtype=torch.int64)
INTO = torch.zeros(3, dtype=torch.bfloat16)
COLUMN = torch.zeros(3, 5, dtype=torch.bfloat16)
SUMS = {
    "scatter_add": lambda x, src: tw.scatter_add(x, 0, TO, src),
    "scatter_add_": lambda x, src: tw.scatter_add_(x.clone(), 0, TO, src),
    "scatter_reduce": lambda x, src: tw.scatter_reduce(x, 0, TO, src, "sum"),
    "scatter_reduce_": lambda x, src: tw.scatter_reduce_(x.clone(), 0, TO, src, "sum"),
    "index_add": lambda x, src: tw.index_add(x, 0, TO, src),
    "index_add_": lambda x, src: tw.index_add_(x.clone(), 0, TO, src),
    "index_put": lambda x, src: tw.index_put(x, (TO,), src, True),
    "index_put_": lambda x, src: tw.index_put_(x.clone(), (TO,), src, True),
    "strided": lambda x, src: tw.index_add(COLUMN[:, 1], 0, TO, src),
    "gather": lambda x, src: torch.autograd.grad(
        tw.gather(leaf := x.clone().requires_grad_(), 0, TO), leaf, src
    )[0],
    "embedding": lambda x, src: torch.autograd.grad(
        tw.embedding(TO, leaf := x[:, None].clone().requires_grad_()), leaf, src[:, None]
    )[0][:, 0],
}


@needs_cxx
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_five_thousand_ones_are_as_many(name, differentiable):
    src = ONES.clone().requires_grad_(differentiable and name not in ("gather", "embedding"))
    exact = torch.tensor([5000.0, 0, 0]).bfloat16()
    for _ in range(HOT_CALLS + 1):
        assert torch.equal(SUMS[name](INTO, src), exact)


@needs_cxx
@pytest.mark.parametrize("differentiable", [False, True])
def test_means_and_products_are_rounded_once(differentiable):
    src = torch.full((4000,), 1.0078125).bfloat16().requires_grad_(differentiable)
    src.data[::2] = 0.9921875  # 1 - 2^-7, and 1 + 2^-7 before it: their product is 1 - 2^-14
    index = torch.zeros(4000, dtype=torch.int64)
    for _ in range(HOT_CALLS + 1):
        for reduce, exact in (("mean", 1.0), ("prod", (1 - 2.0**-14) ** 2000)):
            for call in (tw.scatter_reduce, tw.index_reduce):
                found = call(INTO, 0, index, src, reduce, include_self=False)
                assert found[0] == torch.tensor(exact).bfloat16(), (reduce, call)


BOTH = [
    f"{call.format(t=t)}!indices={spread}"
    for t in HALVES
    for spread in ("zipf", "constant")
    for call in (
        "index_add(x={t}[50,24], dim=0, index=i64[900], source={t}[900,24], alpha=-2.0)",
        "scatter_add(x={t}[50,24], dim=0, index=i64[900,24]@strides(1,0), src={t}[900,24])",
        "index_reduce(x={t}[50,24], dim=0, index=i64[900], source={t}[900,24], reduce=mean)",
        "index_reduce(x={t}[50,24], dim=0, index=i64[90], source={t}[90,24], reduce=prod, "
        "include_self=False)",
        "embedding_backward(grad={t}[900,24], index=i64[900], num_weights=50, "
        "scale_grad_by_freq=True)",
    )
]


@needs_cxx
@pytest.mark.parametrize("text", BOTH)
def test_the_first_calls_have_the_bits_of_later_ones(text):
    w = Workload.parse(text)
    tensors = w.operator.examples(w, "random", 0, "cpu")
    first, later = (i.build(i.heuristic(w, SPEC), w, SPEC)(*tensors) for i in (WIDENED, ROWS))
    assert torch.equal(first.view(torch.int16), later.view(torch.int16))


@needs_cxx
@pytest.mark.parametrize(
    ("text", "first", "later"),
    [
        ("index_add(x=bf16[90,7], dim=0, index=i64[9], source=bf16[9,7])", "sums_widened",
         "rows_cpp"),
        ("embedding_backward(grad=f16[90,7], index=i64[90], num_weights=9)", "sums_widened",
         "rows_cpp"),
        ("scatter_add(x=f16[90,7], dim=0, index=i64[9,7], src=f16[9,7])", "sums_widened",
         "sums_widened"),
        ("scatter_reduce(x=f16[90,7], dim=0, index=i64[9,7], src=f16[9,7], reduce=prod)",
         "sums_widened", "sums_widened"),
        ("scatter_reduce(x=f16[90], dim=0, index=i64[9], src=f16[9], reduce=amax)", "aten", "aten"),
        ("index_add(x=f32[90,7], dim=0, index=i64[9], source=f32[9,7])", "aten", "aten"),
        ("scatter(x=f16[90], dim=0, index=i64[9], src=f16[9])", "aten", "aten"),
        ("gather(x=f16[90], dim=0, index=i64[9])", "aten", "aten"),
    ],
)  # fmt: skip
def test_what_runs_without_records_is_chosen_by_what_is_promised(text, first, later, monkeypatch):
    nothing = evidence.OperatorRecords([])
    monkeypatch.setattr(evidence, "records_of", lambda device, op: nothing)
    w = Workload.parse(text)
    assert selection.unbuilt(w, CPU).implementation == first
    assert selection.choose(w, CPU).implementation == later


def test_an_index_out_of_range_is_named_before_anything_is_written():
    x, src = torch.zeros(6, 3).half(), torch.ones(4, 3).half()
    index = torch.tensor([0, 1, 99, 2])
    columns = index[:, None].repeat(1, 3)
    for _ in range(HOT_CALLS + 1):
        for call in (
            lambda: tw.index_add_(x, 0, index, src),
            lambda: tw.scatter_add_(x, 0, columns, src),
            lambda: tw.scatter_reduce_(x, 0, columns, src, "mean"),
            lambda: tw.embedding_backward(src, index, 6),
        ):
            with pytest.raises(IndexOutOfRange, match=r"index 99 .*out of range for 6 places"):
                call()
    assert not x.any()


def test_what_it_does_not_take_is_said_in_words():
    text = "index_add(x={t}[90,7], dim=0, index=i64[9], source={t}[9,7])"
    half, single = (Workload.parse(text.format(t=t)) for t in ("f16", "f32"))
    assert "runs on a CPU" in WIDENED.unsupported(half, DEVICES["h200"])
    assert "f32 is no half" in WIDENED.unsupported(single, SPEC)
