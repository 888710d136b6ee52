"""Kernels for indices on a CPU, and what in-place forms keep."""

import time

import pytest
import torch
from hypothesis import given, settings

import tilewright as tw
from indexing import gathers
from tilewright.device import DEVICES, spec_of
from tilewright.errors import IndexOutOfRange
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows.rows_cpp import METHODS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

ROWS, GATHER = IMPLS["rows_cpp"], IMPLS["gather_cpp"]
CPU = torch.device("cpu")

CPU_WORKLOADS = [
    "index_add(x=f32[40,64], dim=0, index=i64[90], source=f32[90,64])!indices=sorted",
    "embedding_backward(grad=f32[900,7], index=i32[900], num_weights=50, padding_idx=3)"
    "!indices=sorted",
    "index_add(x=f64[2,40,5], dim=1, index=i64[7], source=f64[2,7,5])!donate=x!indices=constant",
    "index_add(x=f32[40,64], dim=0, index=i64[900], source=f32[900,64])!donate=x!indices=zipf",
    "index_add(x=bf16[40,37], dim=0, index=i32[900], source=bf16[900,37], alpha=-2.0)",
    "index_add(x=i64[6,9,5], dim=1, index=i64[40], source=i64[6,40,5])!indices=constant",
    "index_reduce(x=f64[40,37], dim=0, index=i64[90], source=f64[90,37], reduce=prod)",
    "index_reduce(x=i32[40,7], dim=0, index=i64[90], source=i32[90,7], reduce=mean)",
    "index_reduce(x=f32[40,7], dim=0, index=i64[20], source=f32[20,7], reduce=amax, "
    "include_self=False)",
    "index_reduce(x=f16[40,7], dim=0, index=i64[90], source=f16[90,7], reduce=amin)",
    "scatter_add(x=f32[40,64], dim=0, index=i64[90,64]@strides(1,0), src=f32[90,64])",
    "embedding_backward(grad=f32[9,10,37], index=i64[9,10], num_weights=50, padding_idx=3)",
    "embedding_backward(grad=f16[90,37], index=i64[90], num_weights=50, "
    "scale_grad_by_freq=True)!indices=zipf",
    "index_add(x=bf16[70000,3], dim=0, index=i32[900], source=bf16[900,3])!donate=x"
    "!indices=few_bins",
    "index_add(x=f32[5000000,2], dim=0, index=i64[70000], source=f32[70000,2])!donate=x",
    "embedding_backward(grad=f16[90,5], index=i64[90], num_weights=3000, padding_idx=7, "
    "scale_grad_by_freq=True)!indices=zipf",
]


@pytest.mark.parametrize("text", CPU_WORKLOADS)
def test_every_method_is_right_with_any_number_of_threads(text):
    w, spec = Workload.parse(text), spec_of(None)
    verifier = Verifier(w, CPU)
    configs = list(ROWS.space(w, spec))
    assert ROWS.heuristic(w, spec) in configs
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for config in configs:
                verdict = verifier.check(ROWS.build(config, w, spec))
                assert verdict.ok, f"{config}: {verdict.message}"
    finally:
        torch.set_num_threads(before)


def workspace_bytes(method, places, count, dtype="f32", columns=2):
    table, source = f"{dtype}[{places},{columns}]", f"{dtype}[{count},{columns}]"
    w = Workload.parse(f"index_add(x={table}, dim=0, index=i64[{count}], source={source})")
    config = ROWS.space(w, spec_of(None)).config({"method": method, "threads": "all"})
    return ROWS.build(config, w, spec_of(None)).workspace_bytes


def test_what_a_method_keeps_is_told_and_is_of_the_indices_where_places_are_many():
    many, few = 10_000_000, 1000
    assert workspace_bytes("columns", many, few) == 0
    assert workspace_bytes("owners", many, few) == 8 * few
    assert 24 * few <= workspace_bytes("sorted", many, few, "bf16") <= 24 * few + 8
    assert workspace_bytes("sorted", few, few, "bf16") <= 24 * (few + 1)
    tables = 4 * 2 * few * torch.get_num_threads()
    assert workspace_bytes("private", few, many) == tables


def test_a_few_halves_into_many_places_look_at_no_place_that_is_not_named():
    """By the kernel that later calls have, as by the one that the first ones do without."""
    x, index = torch.zeros(20_000_000, dtype=torch.bfloat16), torch.tensor([7, 19_999_999, 7])
    w = Workload.parse("index_add(x=bf16[20000000], dim=0, index=i64[3], source=bf16[3])!donate=x")
    run = ROWS.build(ROWS.heuristic(w, spec_of(None)), w, spec_of(None))
    source, spans = torch.ones(3, dtype=torch.bfloat16), []
    for _ in range(5):
        start = time.perf_counter()
        run(x, index, source)
        spans.append(time.perf_counter() - start)
    assert x[7] == 10
    assert x[-1] == 5
    assert x.count_nonzero() == 2
    assert min(spans) < 1e-2  # to count all places takes 20 ms and more


@settings(max_examples=12)
@given(gathers())
def test_a_gather_of_any_shape_and_strides_is_pytorchs(w):
    x, index = w.operator.examples(w, "random", 0, "cpu")
    for config in GATHER.space(w, spec_of(None)):
        found = GATHER.build(config, w, spec_of(None))(x, index)
        assert torch.equal(found, torch.gather(x, w["dim"], index.long()))


def test_a_place_to_gather_from_that_is_out_of_range_is_named():
    w = Workload.parse("gather(x=f32[40,64], dim=0, index=i64[900,64])")
    x, index = w.operator.examples(w, "random", 0, "cpu")
    index[17, 5] = 40
    for config in GATHER.space(w, spec_of(None)):
        with pytest.raises(IndexOutOfRange, match=r"index 40 at \[17, 5\] is out of range for 40"):
            GATHER.build(config, w, spec_of(None))(x, index)


def test_an_index_out_of_range_is_named_and_nothing_is_written():
    w = Workload.parse(CPU_WORKLOADS[3])
    run = ROWS.build(ROWS.heuristic(w, spec_of(None)), w, spec_of(None))
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    index[17] = 40
    index[500] = -1
    before = x.clone()
    with pytest.raises(IndexOutOfRange, match="index 40 at position 17 is out of range for 40"):
        run(x, index, source)
    assert torch.equal(x, before)
    with pytest.raises(IndexError):
        run(x, index, source)


def test_a_call_goes_through_the_kernel_that_is_asked_for():
    x, source = torch.randn(40, 64), torch.randn(900, 64)
    index = torch.randint(40, (900,))
    with tw.use("rows_cpp"):
        torch.testing.assert_close(
            tw.index_add(x, 0, index, source), torch.index_add(x, 0, index, source)
        )
        index[3] = 99
        with pytest.raises(IndexOutOfRange):
            tw.index_add(x, 0, index, source)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha", [1.0, -2.0])
def test_zeros_have_the_signs_of_pytorchs(method, alpha):
    x, source = torch.full((9, 8), -0.0), torch.full((90, 8), -0.0)
    index = torch.arange(90) % 5
    for old, new in ((-0.0, -0.0), (-0.0, 0.0), (0.0, -0.0)):
        x.fill_(old)
        source.fill_(new)
        with tw.use("rows_cpp", {"method": method, "threads": "all"}):
            found = tw.index_add(x, 0, index, source, alpha)
        expected = torch.index_add(x, 0, index, source, alpha=alpha)
        assert torch.equal(found.signbit(), expected.signbit()), (old, new)


def test_gradients_are_pytorchs():
    x, source = torch.randn(5, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    index = torch.randint(5, (9,))
    for call in (tw.index_add, torch.index_add):
        call(x, 0, index, source).square().sum().backward()
        if call is tw.index_add:
            mine = x.grad.clone(), source.grad.clone()
            x.grad = source.grad = None
    assert torch.equal(mine[0], x.grad)
    assert torch.equal(mine[1], source.grad)


def test_what_is_written_in_place_counts_as_changed():
    table, x = torch.randn(6, 4), torch.randn(6, 4, requires_grad=True)
    index, source = torch.arange(3), torch.randn(3, 4)
    product = x * table  # keeps the table for backward
    with tw.use("rows_cpp"):
        tw.index_add_(table, 0, index, source)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        with torch.inference_mode():
            inferred = torch.zeros(6, 4)
            tw.index_add_(inferred, 0, index, source)
        with pytest.raises(RuntimeError, match="inference tensor is written in place outside"):
            tw.index_add_(inferred, 0, index, source)
    assert torch.equal(inferred[:3], source)


def test_columns_of_one_matrix_are_no_shared_memory():
    whole, index = torch.randn(9, 8), torch.arange(9) % 3
    expected = whole.clone()
    expected[:, :4].index_add_(0, index, expected[:, 4:])
    with tw.use("rows_cpp"):
        tw.index_add_(whole[:, :4], 0, index, whole[:, 4:])
        assert torch.equal(whole, expected)
        with pytest.raises(ValueError, match="shares memory"):
            tw.index_add_(whole[:, :5], 0, index, whole[:, 3:])


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "scatter_reduce"])
def test_scalars_among_the_arguments_are_refused_by_every_kernel(name):
    more = ", reduce=sum" if name.endswith("reduce") else ""
    for index, src in (("[]", "[]"), ("[1]", "[]"), ("[]", "[1]")):
        w = Workload.parse(f"{name}(x=f32[5], dim=0, index=i64{index}, src=f32{src}{more})")
        for impl in IMPLS.values():
            if impl.backend == "cuda" and impl.serves(name):
                assert "scalar" in impl.unsupported(w, DEVICES["h200"]), impl.name


def test_check_finds_nothing_where_no_gpu_was_used():
    tw.check()


# --- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["aten", "rows_cpp"])
def test_an_in_place_form_writes_to_its_first_tensor_and_returns_it(implementation):
    x, source, index = torch.randn(40, 64), torch.randn(900, 64), torch.randint(40, (900,))
    expected = torch.index_add(x, 0, index, source)
    for turn in (expected, torch.index_add(expected, 0, index, source)):  # anew, then prepared
        with tw.use(implementation):
            assert tw.index_add_(x, 0, index, source) is x
        torch.testing.assert_close(x, turn)
    with tw.use(implementation):  # the other form is prepared on its own
        assert tw.index_add(x, 0, index, source) is not x


def test_an_in_place_form_under_autograd_and_torch_compile_is_pytorchs():
    x, source = torch.zeros(5, 3), torch.randn(9, 3, requires_grad=True)
    tw.index_add_(x, 0, torch.randint(5, (9,)), source).sum().backward()
    assert torch.equal(source.grad, torch.ones(9, 3))
    index, values = torch.tensor([[0, 1, 0]]), torch.tensor([[1.0, 2.0, 3.0]])
    compiled_call = torch.compile(lambda t: tw.scatter_(t, 0, index, values), backend="eager")
    assert torch.equal(compiled_call(torch.zeros(2, 3)), torch.tensor([[1.0, 0, 3], [0, 2, 0]]))


def test_operators_without_an_in_place_form_have_none():
    for name in ("softmax_", "gather_", "nonsense_"):
        with pytest.raises(AttributeError):
            getattr(tw, name)


def test_memory_shared_with_what_is_written_in_place_is_refused():
    whole = torch.randn(80, 64)
    index = torch.randint(40, (40,))
    with tw.use("rows_cpp"):
        with pytest.raises(ValueError, match="x is written in place and shares memory with source"):
            tw.index_add_(whole[:40], 0, index, whole[20:60])
        tw.index_add_(whole[:40], 0, index, whole[40:])
    w = Workload.parse("index_add(x=f32[4,8]@strides(0,1), dim=0, index=i64[3], source=f32[3,8])")
    w = w.operator.workload(flags=["donate=x"], **dict(w.args))
    assert ROWS.unsupported(w, spec_of(None)) == "rows of x share memory"
