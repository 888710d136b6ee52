"""Kernels for indices: C++ ones run, CUDA ones are compiled for every architecture."""

import random
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tilewright as tw
from allocations import peak_bytes
from indexing import gathers
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch import selection
from tilewright.errors import IndexOutOfRange, NoImplementation
from tilewright.impl import IMPLS
from tilewright.impls._indexed import Launch, TorchCall, most_bytes
from tilewright.impls.rows_cpp import METHODS
from tilewright.impls.rows_sorted_torch import COUNTERS, TorchSort
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.suite import SUITES

ROWS, GATHER = IMPLS["rows_cpp"], IMPLS["gather_cpp"]
CPU = torch.device("cpu")
GPUS = [d for d in DEVICES.values() if d.kind == "cuda"]
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")

# --- the CPU -------------------------------------------------------------------------------------

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


# --- CUDA ----------------------------------------------------------------------------------------

GATHERS = ("gather_cuda", "gather_tiled")
CUDA_WORKLOADS = [
    "index_add(x=f32[1000,64], dim=0, index=i64[1000000], source=f32[1000000,64])!donate=x",
    "embedding_backward(grad=bf16[32768,4096], index=i32[32768], num_weights=128256)",
    "index_add(x=f32[2449029,100], dim=0, index=i64[6000000], source=f32[6000000,100])"
    "!nondeterministic",
    "embedding_backward(grad=f64[32768,768], index=i32[32768], num_weights=30522)!nondeterministic",
    "index_add(x=f32[400000,256], dim=0, index=i64[200000], source=f32[200000,256])!donate=x",
    "index_add(x=bf16[2,768], dim=0, index=i64[65536], source=bf16[65536,768])",
    "embedding_backward(grad=f32[65536,768], index=i64[65536], num_weights=2)",
    "index_reduce(x=f64[20,7,3], dim=1, index=i64[20], source=f64[20,20,3], reduce=mean)",
    "scatter(x=f32[1000,256,7,7], dim=0, index=i64[1000,256,7,7], src=f32[1000,256,7,7])",
    "scatter(x=f32[1000,256,7,7], dim=1, index=i64[1000,256,7,7], src=f32[1000,256,7,7])",
    "scatter(x=f16[1000,256,7,7], dim=3, index=i64[1000,256,7,7], src=2.5)",
    "scatter_reduce(x=bf16[90,31], dim=0, index=i64[50,31], src=bf16[50,31], reduce=mean)",
    "scatter_add(x=f32[100000,256], dim=0, index=i64[100000,256], src=f32[100000,256])",
    "scatter_reduce(x=f64[90,31], dim=0, index=i64[50,30], src=f64[50,31], reduce=prod)",
    "scatter_add(x=f64[1000000], dim=0, index=i64[1000000], src=f64[1000000])",
    "scatter_add(x=i64[1000000], dim=0, index=i64[1000000], src=i64[1000000])",
    "scatter_add(x=i32[100000,256], dim=0, index=i64[100000,256], src=i32[100000,256])!donate=x",
    "scatter_reduce(x=f32[30000,64], dim=0, index=i64[100000,64], src=f32[100000,64], reduce=prod)",
    "scatter_reduce(x=f16[9,90000], dim=1, index=i32[9,900000], src=f16[9,900000], reduce=prod, "
    "include_self=False)!donate=x",
    "scatter_reduce(x=f64[30000,64], dim=0, index=i64[100000,64], src=f64[100000,64], reduce=amin)",
    "index_reduce(x=f16[9000,64], dim=0, index=i64[9000], source=f16[9000,64], reduce=prod)",
    "index_reduce(x=f64[9000,64], dim=0, index=i64[9000], source=f64[9000,64], reduce=prod)",
    "scatter(x=f32[100000000], dim=0, index=i64[100000000], src=f32[100000000])",
    "scatter(x=i64[100000,256], dim=0, index=i64[100000,256], src=i64[100000,256])",
    "scatter(x=bf16[64,8192,8,128], dim=1, index=i64[64,1,8,128]@strides(1,1,0,0), "
    "src=bf16[64,1,8,128])!donate=x",
    "scatter_add(x=f32[8,20000,64], dim=1, index=i64[8,50000,64]@strides(50000,1,0), "
    "src=f32[8,50000,64])",
    "scatter_reduce(x=f64[8,20000,7], dim=1, index=i32[8,50000,7]@strides(50000,1,0), "
    "src=f64[8,50000,7], reduce=prod)",
    "scatter(x=f32[100000,256], dim=0, index=i64[100000,250], src=f32[100000,256])",
    "scatter_add(x=f32[100000,256], dim=0, index=i64[100000,250], src=f32[100000,256])",
    "scatter(x=f32[1000,256,7,7], dim=1, index=i64[900,256,7,7], src=f32[1000,256,7,7])",
    "scatter_add(x=bf16[1000,256,7,7], dim=1, index=i32[1000,256,6,7], src=bf16[1000,256,7,7])",
    "scatter(x=f32[1000000], dim=0, index=i64[500000], src=f32[1000000])",
    "scatter(x=f16[64,8192,9,128], dim=1, index=i32[48,16,9,120], src=2.5)!donate=x",
    "scatter(x=bf16[8192,50257], dim=1, index=i64[8192,1], src=1.0)!donate=x",
    "scatter(x=f64[9,40,5,6,7], dim=2, index=i64[8,39,50,5,6], src=f64[8,39,51,5,7])",
    "scatter(x=bf16[100000,256], dim=0, index=i64[100000,256]@strides(1,0), src=bf16[100000,256])",
    "gather(x=f32[1000,256,7,7], dim=0, index=i64[1000,256,7,7])",
    "gather(x=bf16[128256,4096], dim=0, index=i32[32768,4096]@strides(1,0))",
    "gather(x=f32[3000000000], dim=0, index=i64[3000000000])",
    "gather(x=i64[90,31]@strides(1,90), dim=-1, index=i64[80,50])",
]


def cuda_cases():
    for text in CUDA_WORKLOADS:
        w = Workload.parse(text)
        for impl in IMPLS.values():
            if impl.backend == "cuda" and impl.serves(w.op):
                yield from ((impl, w, d) for d in GPUS if impl.unsupported(w, d) is None)


@needs_nvrtc
@pytest.mark.parametrize(
    ("impl", "w", "device"), list(cuda_cases()), ids=lambda v: getattr(v, "name", str(v))
)
def test_the_heuristic_config_compiles_without_spills(impl, w, device):
    config = impl.heuristic(w, device)
    assert impl.space(w, device).why_not(config) is None
    log = compiled(impl.task(config, w, device)).log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spills
    assert not any(spills)


SUITES_OF_INDICES = (
    "rows_embedding", "rows_few", "rows_gnn", "rows_unique", "scatter_moe",
    "rows_small", "scatter_large", "scatter_maskrcnn", "scatter_dtypes", "scatter_sums", "gather",
    "scatter_partial", "rows_batched",
)  # fmt: skip


@pytest.mark.parametrize("suite", SUITES_OF_INDICES)
def test_a_kernel_of_ours_serves_every_workload_of_the_suites(suite):
    for w in SUITES[suite].workloads():
        found = [i for i in IMPLS.values() if i.backend == "cuda" and i.serves(w.op)]
        for device in GPUS:
            assert any(i.unsupported(w, device) is None for i in found), w


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[4], dim=0, index=i64[3]@strides(2), source=f32[3])", "not contiguous"),
        ("scatter_add(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])", "go separate ways"),
        ("scatter_add(x=f32[9,4], dim=1, index=i64[9,3], src=f32[9,3])", "go separate ways"),
        (
            "scatter_add(x=f32[2,3,9,4], dim=2, index=i64[2,3,5,4]@strides(5,0,1,0), "
            "src=f32[2,3,5,4])",
            "go separate ways",
        ),
        ("index_add(x=f32[4,0], dim=0, index=i64[3], source=f32[3,0])", "nothing to compute"),
    ],
)
def test_what_the_sort_does_not_take_is_said_in_words(text, words):
    assert words in IMPLS["rows_sorted"].unsupported(Workload.parse(text), DEVICES["h200"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scatter_add(x=f32[4,2], dim=0, index=i64[3,2]@strides(1,0), src=f32[3,2])", "whole rows"),
        ("index_add(x=f32[4,1], dim=0, index=i64[3], source=f32[3,1])", "rows, not elements"),
        ("scatter_add(x=f32[], dim=0, index=i64[1], src=f32[1])", "is a scalar"),
        ("scatter_add(x=f32[5], dim=0, index=i64[], src=f32[])", "is a scalar"),
        ("index_add(x=f32[200000], dim=0, index=i64[], source=f32[1])", "is a scalar"),
        ("scatter_add(x=f32[4,3]@strides(1,4), dim=0, index=i64[3,3], src=f32[3,3])", "contiguous"),
        (
            "scatter_add(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4]@strides(2000000000,1))",
            "4000000003 apart exceed 32 bits",
        ),
    ],
)
def test_what_the_sort_of_elements_does_not_take_is_said_in_words(text, words):
    assert words in IMPLS["scatter_sorted"].unsupported(Workload.parse(text), DEVICES["h200"])


FAR = 2**31 + 2**20
FAR_ROWS = FAR // 64


@pytest.mark.parametrize(
    ("text", "served"),
    [
        (f"index_add(x=f16[{FAR_ROWS},64], dim=0, index=i64[50], source=f16[50,64])!donate=x",
         "rows_sorted"),
        (f"index_add(x=f16[50,64], dim=0, index=i64[{FAR_ROWS}], source=f16[{FAR_ROWS},64])",
         "rows_sorted"),
        (f"embedding_backward(grad=f16[50,64], index=i64[50], num_weights={FAR_ROWS})",
         "rows_sorted"),
        (f"gather(x=f16[{FAR}], dim=0, index=i64[50])", "gather_cuda"),
        (f"scatter_add(x=f16[50], dim=0, index=i32[{FAR}], src=f16[{FAR}])", None),
        (f"scatter_add(x=f16[2,{FAR // 2}], dim=1, index=i64[2,50], src=f16[2,50])", None),
        (f"scatter(x=f16[{FAR}], dim=0, index=i64[50], src=f16[50])", None),
    ],
)  # fmt: skip
def test_beyond_two_to_the_31_elements_a_kernel_serves_rows_and_elements_are_refused_in_words(
    text, served
):
    w = Workload.parse(text)
    refused = {
        i.name: i.unsupported(w, DEVICES["h200"])
        for i in IMPLS.values()
        if i.backend == "cuda" and i.op and i.serves(w.op)
    }
    if served is not None:
        assert refused[served] is None
    else:
        assert None not in refused.values()
        assert any("exceed" in why and "32 bits" in why for why in refused.values())
    for name, why in refused.items():
        numbers = [int(n) for n in re.findall(r"(\d+) apart exceed 32 bits", why or "")]
        assert all(n >= 2**31 - 1 for n in numbers), (name, why)


@pytest.mark.parametrize("suite", SUITES_OF_INDICES)
def test_what_a_kernel_takes_of_workspace_is_what_is_documented(suite):
    """Bytes for each element of x of the passes for winners, else for each index."""
    winners = {"scatter_winner": 8, "scatter_strided": 4, "rows_winner": 4}
    bounds = {**winners, "scatter_buckets": 24, "rows_bins": 24}
    device = DEVICES["h200"]
    for w in SUITES[suite].workloads():
        for impl in IMPLS.values():
            if impl.name not in (*bounds, "scatter_tiled", "rows_atomic", *GATHERS):
                continue
            if not impl.serves(w.op) or impl.unsupported(w, device) is not None:
                continue
            built = impl.build(impl.heuristic(w, device), w, device)
            bound, moved = bounds.get(impl.name, 0), w["index"].numel
            if impl.name in winners:
                assert built.workspace_bytes < bound * w.main.numel + 256, w
            else:
                assert built.workspace_bytes <= (bound and most_bytes(bound, moved)), (impl.name, w)


def within_48_bytes(w, *names):
    device = DEVICES["h200"]
    for impl in (IMPLS[n] for n in names or ("rows_sorted", "rows_sorted_torch")):
        assert impl.unsupported(w, device) is None, w
        p = impl.served(w)
        config = impl.heuristic(w, device)
        for c in (config, *impl.space(w, device).sample(random.Random(0), 20)):
            sort = impl.sort(p, c)
            bound = most_bytes(48, p.count) + (COUNTERS if isinstance(sort, TorchSort) else 0)
            assert impl.workspace(w, c).bytes + sort.allocated_bytes <= bound, (w, c)
        steps, workspace = impl.launches(w, p, config, device)
        assert workspace.bytes == impl.workspace(w, config).bytes
        allocated = [step.bytes for step in steps if isinstance(step, TorchCall)]
        assert sum(allocated) == impl.sort(p, config).allocated_bytes
        shared_bytes = [step.shared_bytes for step in steps if isinstance(step, Launch)]
        assert max(shared_bytes) <= device.shared_bytes_per_block


@pytest.mark.parametrize(
    "suite", ["rows_embedding", "rows_few", "rows_gnn", "rows_unique", "scatter_moe"]
)
def test_a_sum_of_rows_takes_at_most_48_bytes_of_workspace_per_index(suite):
    for w in SUITES[suite].workloads():
        within_48_bytes(w)


@pytest.mark.parametrize(("places", "bytes_each"), [(255, 9), (256, 19), (65535, 19), (65536, 21)])
def test_what_pytorchs_sort_allocates_is_told_beside_the_parts_of_the_workspace(places, bytes_each):
    w = Workload.parse(
        f"index_add(x=f32[{places},4], dim=0, index=i64[50000], source=f32[50000,4])!donate=x"
    )
    impl, device = IMPLS["rows_sorted_torch"], DEVICES["h200"]
    config = impl.heuristic(w, device)
    more = impl.build(config, w, device).workspace_bytes - impl.workspace(w, config).bytes
    assert 0 <= more - bytes_each * 50_000 <= 2**14


@pytest.mark.parametrize(
    "text",
    [
        "scatter(x=f32[90000], dim=0, index=i64[50000], src=f32[50000])",
        "scatter(x=f32[90000], dim=0, index=i32[500000], src=f32[500000])!donate=x",
        "scatter(x=f64[900,70], dim=0, index=i64[5000,60], src=f64[5000,70])!donate=x",
        "scatter(x=f16[900,70]@strides(1,900), dim=0, index=i32[5000,70]@strides(1,0), "
        "src=f16[5000,70])",
        "scatter(x=f16[3,900,70], dim=1, index=i64[2,5000,7], src=2.0)",
        "scatter(x=f64[900,70], dim=-1, index=i64[0], src=f64[3])!donate=x",
        "scatter(x=f16[], dim=0, index=i64[], src=2.0)",
        "scatter(x=f32[70], dim=0, index=f32[0], src=2.0)!donate=x",
    ],
)
def test_records_tell_what_is_allocated_where_pytorchs_operators_keep_the_order(text):
    w = Workload.parse(text)
    run = IMPLS["scatter_positions"].build(None, w, DEVICES["h200"])
    tensors = w.operator.examples(w, "random", 0, "cpu")
    run(*tensors)  # which makes the words that it reports by
    made = 0 if "x" in w.donated else w.outputs[0].numel * w.main.itemsize
    taken = peak_bytes(lambda: run(*tensors)) - made
    assert 0.9 * run.workspace_bytes - 100 <= taken <= run.workspace_bytes + 100


@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("shape", ["[100000,256]", "[30,40,5]"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_a_sum_of_separate_elements_takes_no_more(dtype, shape, flag):
    x = f"{dtype}{shape}"
    w = Workload.parse(f"scatter_add(x={x}, dim=0, index=i64{shape}, src={x}){flag}")
    within_48_bytes(w, "scatter_sorted")


@settings(max_examples=25)
@given(
    st.sampled_from([1, 7, 600, 50_000]),
    st.sampled_from([1, 40, 3_000, 10**8]),
    st.sampled_from([1, 90, 1_366, 5_000, 200_000, 10**7]),
    st.sampled_from([1, 37, 768, 7_168, 150_000]),
    st.sampled_from(["f32", "bf16", "f64"]),
    st.sampled_from(["", "!donate=x"]),
)
def test_a_sum_of_rows_of_any_shape_takes_no_more(outer, places, count, columns, dtype, flag):
    assume(outer * max(places, count) * columns < 2**40)
    x, source = f"{dtype}[{outer},{places},{columns}]", f"{dtype}[{outer},{count},{columns}]"
    w = Workload.parse(f"index_add(x={x}, dim=1, index=i64[{count}], source={source}){flag}")
    within_48_bytes(w)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[9,4], dim=0, index=i64[3], source=f32[3,4])", "say !nondeterministic"),
        (
            "index_add(x=bf16[9,4], dim=0, index=i64[3], source=bf16[3,4])!nondeterministic",
            "each addition would be rounded to bf16",
        ),
        (
            "index_reduce(x=f32[9,4], dim=0, index=i64[3], source=f32[3,4], reduce=mean)",
            "other reductions",
        ),
    ],
)
def test_what_atomic_sums_do_not_take_is_said_in_words(text, words):
    assert words in IMPLS["rows_atomic"].unsupported(Workload.parse(text), DEVICES["h200"])


def test_integers_have_one_sum_in_any_order():
    w = Workload.parse("index_add(x=i64[9,4], dim=0, index=i64[3], source=i64[3,4])")
    assert IMPLS["rows_atomic"].unsupported(w, DEVICES["h200"]) is None


@pytest.mark.parametrize(
    ("places", "columns", "taken"),
    [(16, 32, "rows_bins"), (20, 64, "rows_bins"), (64, 32, "rows_sorted"), (21, 4, "rows_sorted")],
)
def test_untuned_sums_into_a_handful_of_places_take_bins(places, columns, taken):
    w = Workload.parse(
        f"index_add(x=f32[{places},{columns}], dim=0, index=i64[1000000], "
        f"source=f32[1000000,{columns}])!donate=x"
    )
    assert selection._untuned(w, DEVICES["h200"], "heuristic", "").implementation == taken


def test_atomic_sums_are_chosen_by_name_but_not_under_the_deterministic_mode():
    w = Workload.parse("index_add(x=f32[90,64], dim=0, index=i64[300], source=f32[300,64])")
    named = selection.Forced("rows_atomic", (("lanes", 8), ("vec", 4), ("unrolled", 4)))
    device = DEVICES["h200"]
    chosen = selection._explicit(w, CPU, device, named)
    assert (chosen.implementation, chosen.config.unrolled) == ("rows_atomic", 4)
    assert selection._untuned(w, device, "heuristic", "").implementation == "rows_dealt"
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(NoImplementation, match="differ from run to run"):
            selection._explicit(w, CPU, device, named)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scatter(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])", "go separate ways"),
        ("scatter(x=f32[9,4], dim=0, index=i64[3,4]@strides(1,0), src=f32[4,4])", "longer"),
        (
            "scatter(x=i64[9,4], dim=0, index=i64[3,4]@strides(1,0), src=9007199254740993)",
            "may be no fp64",
        ),
    ],
)
def test_what_copies_of_rows_do_not_take_is_said_in_words(text, words):
    assert words in IMPLS["rows_winner"].unsupported(Workload.parse(text), DEVICES["h200"])


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
