"""CUDA kernels for indices: compiled for every architecture, and what they take and refuse."""

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from allocations import peak_bytes
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch import selection
from tilewright.errors import NoImplementation
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch, TorchCall, most_bytes, source_text
from tilewright.impls.indices.rows.rows_sorted_torch import COUNTERS, TorchSort
from tilewright.op import Workload
from tilewright.suite import SUITES

CPU = torch.device("cpu")
GPUS = [d for d in DEVICES.values() if d.kind == "cuda"]
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")

COMMON, PRODUCTS = source_text({}, "common.cuh"), source_text({}, "rows/product.cuh")
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


CUDA_CASES = [
    (impl, w, device)
    for w in map(Workload.parse, CUDA_WORKLOADS)
    for impl in IMPLS.values()
    if impl.backend == "cuda" and impl.serves(w.op)
    for device in GPUS
    if impl.unsupported(w, device) is None
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("impl", "w", "device"), CUDA_CASES, ids=lambda v: getattr(v, "name", str(v))
)
def test_the_heuristic_config_compiles_without_spills(impl, w, device):
    assert impl.space(w, device).why_not(impl.heuristic(w, device)) is None
    task = without_those_of_another_case(impl, w, device)
    if task is None:
        return
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", compiled(task).log)]
    assert len(spills) == task.source.count("__global__")
    assert not any(spills)


def untuned_task(impl, w, device):
    return impl.task(impl.heuristic(w, device), w, device)


def without_those_of_another_case(impl, w, device):
    """The task, without kernels that the test compiles of the same text and macros for another
    implementation; None if that are all. Kernels that multiply rows take seconds each."""
    task = untuned_task(impl, w, device)
    if impl.name == "rows_sorted" and (IMPLS["rows_unique"], w, device) in CUDA_CASES:
        other = untuned_task(IMPLS["rows_unique"], w, device)
        assert macros_of(task) <= macros_of(other)
        assert other.source.partition(COMMON)[2].startswith(task.source.partition(COMMON)[2])
        return None
    if impl.name == "rows_sorted_torch" and (IMPLS["rows_sorted"], w, device) in CUDA_CASES:
        other = untuned_task(IMPLS["rows_sorted"], w, device)
        own, of_rows = task.source.split(PRODUCTS)
        names = {line.split()[1] for line in macros_of(task) - macros_of(other)}
        if names == {"KEY", "LEAST"} and not any(n in of_rows for n in names):
            assert of_rows == other.source.split(PRODUCTS)[1]
            return replace(task, source=own, entry="write_keys")
    return task


def macros_of(task):
    return set(task.source.partition(COMMON)[0].splitlines())


@needs_nvrtc
@pytest.mark.parametrize("name", sorted({impl.name for impl, _, _ in CUDA_CASES}))
def test_any_config_compiles(name):
    """What is emulated elsewhere is not compiled there."""
    impl, draw = IMPLS[name], random.Random(name)
    served = [(w, device) for i, w, device in CUDA_CASES if i is impl]
    for w, device in draw.sample(served, 3):
        config = draw.choice(list(impl.space(w, device)))
        assert compiled(impl.task(config, w, device)).resources.registers > 0


SUITES_OF_INDICES = (
    "rows_embedding", "rows_few", "rows_gnn", "rows_unique", "scatter_moe",
    "rows_small", "scatter_large", "scatter_maskrcnn", "scatter_dtypes", "scatter_sums", "gather",
    "scatter_partial", "scatter_crossover", "rows_batched",
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
def test_what_pytorchs_sort_allocates_is_told_beside_the_workspaces_buffers(places, bytes_each):
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
