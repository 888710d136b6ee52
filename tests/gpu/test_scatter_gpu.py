"""Kernels for indices on a GPU: right in every shape, dtype and distribution, the same bits."""

import random

import pytest
import torch

import tilewright as tw
from compile_ahead import compile_all
from indexing import cuda_kernels
from scatter_workloads import LARGE_SUM, LARGE_UPDATE, SUM, UPDATE, WORKLOADS
from tilewright.compile.faults import fault_address
from tilewright.device import spec_of
from tilewright.errors import IndexOutOfRange, NoImplementation
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.ops._indexing import last_written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")
SPREADS = ("uniform", "unique", "zipf", "sorted", "constant", "few_bins")


def supporting(w):
    return cuda_kernels(w, spec_of(0))


def cases():
    return [f"{text}!indices={spread}" for text in WORKLOADS for spread in SPREADS]


def configs(impl, w):
    """The heuristic's, and under one distribution two more."""
    more = 2 if w.distribution == "zipf" else 0
    space = impl.space(w, spec_of(0))
    return [impl.heuristic(w, spec_of(0)), *space.sample(random.Random(0), more)]


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead():
    """Everything below in parallel: one after the other it would take minutes."""
    tasks = {}
    for text in cases():
        w = Workload.parse(text)
        for impl in supporting(w):
            tasks.update((impl.task(c, w, spec_of(0)), None) for c in configs(impl, w))
    compile_all(tasks)


@pytest.mark.parametrize("text", cases())
def test_the_heuristic_and_some_other_configs_are_right(text):
    w = Workload.parse(text)
    found = supporting(w)
    assert found, text
    verifier = Verifier(w, CUDA)
    for impl in found:
        for config in configs(impl, w):
            verdict = verifier.check(impl.build(config, w, spec_of(0)))
            assert verdict.ok, f"{impl.name} {config}: {verdict.message}"
            assert verdict.deterministic or impl.races


def bits(t):
    return t.contiguous().view(torch.uint8)


ORDERED = [text for text in WORKLOADS if "!nondeterministic" not in text]


@pytest.mark.parametrize("spread", ["uniform", "zipf", "few_bins", "constant"])
@pytest.mark.parametrize("text", ORDERED)
def test_twenty_runs_give_the_same_bits(text, spread):
    w = Workload.parse(f"{text}!indices={spread}")
    tensors = w.operator.examples(w, "random", 0, CUDA)
    before = tensors[0].clone()
    for impl in supporting(w):
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        first = None
        for _ in range(20):
            if w.donated:
                tensors[0].copy_(before)
            found = bits(run(*tensors))
            first = found.clone() if first is None else first
            assert torch.equal(found, first), impl.name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (
                "rows_sorted_torch",
                f"index_add(x=f32[{n},4], dim=0, index=i64[300000], source=f32[300000,4])!donate=x",
            )
            for n in (200, 30_000, 100_000)
        ),
        ("scatter_positions", "scatter(x=f32[900,700], dim=0, index=i32[5000,60], src=2.0)"),
        ("scatter_positions", LARGE_UPDATE),
    ],
)
def test_a_call_allocates_no_more_than_is_recorded(name, text):
    w, impl = Workload.parse(text), IMPLS[name]
    run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
    tensors = w.operator.examples(w, "random", 0, CUDA)
    run(*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out = run(*tensors)
    made = 0 if w.donated else out.numel() * out.element_size()
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - held - made
    assert taken <= run.workspace_bytes + 1000
    assert taken >= run.workspace_bytes / 2


@pytest.mark.parametrize("text", [SUM, LARGE_SUM, UPDATE, LARGE_UPDATE])
def test_an_index_out_of_range_is_skipped_and_reported(text):
    w = Workload.parse(text.replace("!donate=x", ""))
    for impl in supporting(w):
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        x, index, src = w.operator.examples(w, "random", 0, CUDA)
        expected_src, expected_index = src.clone(), index.clone()
        expected = run(x, expected_index[: index.shape[0]], expected_src).clone()
        bad = index.clone()
        flat = bad.view(-1)
        again = torch.cat([torch.tensor([-1, w["x"].shape[0]], device=CUDA), flat])[: len(flat)]
        run(x, again.view(index.shape), src)
        with pytest.raises(IndexOutOfRange, match="out of range"):
            tw.check()
        tw.check()  # it is told once
        assert torch.equal(run(x, index, src), expected)


def test_a_fault_is_raised_by_a_later_call_and_the_context_lives():
    w = Workload.parse(SUM)
    impl = IMPLS["rows_sorted"]
    run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
    x, index, src = w.operator.examples(w, "random", 0, CUDA)
    index[5] = 10**9
    run(x, index, src)
    torch.cuda.synchronize()
    assert fault_address()
    with pytest.raises(IndexOutOfRange):
        run(x, index, src)
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0


@pytest.mark.parametrize("text", [SUM, UPDATE])
def test_a_call_waits_and_raises_itself_where_it_is_asked_to(text, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "1")
    w = Workload.parse(text)
    for impl in supporting(w):
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        x, index, src = w.operator.examples(w, "random", 0, CUDA)
        run(x.clone(), index, src)
        index[3] = -7
        with pytest.raises(IndexOutOfRange, match="out of range"):
            run(x, index, src)
        tw.check()


def test_without_a_record_a_bad_index_of_an_update_is_skipped_and_the_context_lives():
    x, index = torch.zeros(5, 4, device=CUDA).t(), torch.full((4, 9), 3, device=CUDA)
    index[2, 5] = 77
    for _ in range(5):  # first by what stands in, then perhaps by a kernel
        out = tw.scatter(x, 1, index, 2.5)
        with pytest.raises(IndexOutOfRange):
            tw.check()
        assert (out[:, 3] == 2.5).all()
        assert not out[:, :3].any()
    tw.check()


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "gather", "embedding_backward"])
def test_pytorchs_kernels_run_on_indices_that_were_looked_at_where_it_is_asked_for(
    name, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "1")
    tw.reload_records()
    x, index = torch.zeros(6, 3, device=CUDA), torch.tensor([0, 1, 99, 2], device=CUDA)
    whole, rows = index[:, None].expand(4, 3), torch.ones(4, 3, device=CUDA)
    args = {
        "index_add": (x, 0, index, rows),
        "scatter_add": (x, 0, whole, rows),
        "gather": (x, 0, whole),
        "embedding_backward": (rows, index, 6),
    }[name]
    for _ in range(3):
        with tw.use("aten"), pytest.raises(IndexOutOfRange, match="99 is out of range for 6"):
            getattr(tw, name)(*args)
    assert not x.any()
    monkeypatch.undo()
    tw.reload_records()


def test_without_a_record_an_update_keeps_the_order_of_writes():
    x, src = torch.zeros(500, device=CUDA), torch.arange(90000.0, device=CUDA)
    index = torch.randint(500, (90000,), device=CUDA)
    expected = last_written(x, 0, index, src)
    for _ in range(5):  # first by what stands in, then by a kernel
        assert torch.equal(tw.scatter(x, 0, index, src), expected)
    rows = torch.arange(90000.0 * 8, device=CUDA).view(90000, 8)
    table = torch.zeros(500, 8, device=CUDA)
    expected = last_written(table, 0, index[:, None].expand(90000, 8), rows)
    for _ in range(5):
        assert torch.equal(tw.index_put(table, (index,), rows), expected)


@pytest.mark.parametrize("text", [LARGE_SUM, UPDATE, LARGE_UPDATE])
def test_a_captured_call_replays_on_new_data_and_another_stream(text):
    w = Workload.parse(text.replace("!donate=x", ""))
    for impl in supporting(w):
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        tensors = w.operator.examples(w, "random", 0, CUDA)
        run(*tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*tensors)
        for t, fresh in zip(tensors, w.operator.examples(w, "random", 1, CUDA), strict=True):
            t.copy_(fresh)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.replay()
            expected = run(*tensors)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("spread", ["uniform", "constant"])
def test_integers_added_in_one_launch_have_the_bits_of_four(spread, private):
    text = "x=f32[150,64], dim=0, index=i64[60000], source=f32[60000,64]"
    w, impl = Workload.parse(f"index_add({text})!indices={spread}"), IMPLS["integer_sums"]
    four, one = (
        impl.build(impl.Config(256, 1, private, launches), w, spec_of(0)) for launches in (4, 1)
    )
    sets = [w.operator.examples(w, "random", seed, CUDA) for seed in range(2)]
    expected = [four(*tensors) for tensors in sets]
    one(*sets[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [one(*tensors) for tensors in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    for _ in range(20):
        found = []
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(one(*tensors))
        graph.replay()
        torch.cuda.synchronize()
        for results in (found, captured):
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("flag", ["", "!donate=x"])
def test_a_sum_captured_on_indices_that_do_not_repeat_is_right_where_they_do(flag):
    text = "x=f32[9000,96], dim=0, index=i64[5000], source=f32[5000,96]"
    w = Workload.parse(f"index_add({text}){flag}!indices=unique")
    for impl in supporting(w):
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        x, index, source = w.operator.examples(w, "integer", 0, CUDA)
        run(x.clone(), index, source)
        torch.cuda.synchronize()
        table, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(table, index, source)
        for repeated in (index.clone(), index // 9, torch.full_like(index, 7), index.clone()):
            table.copy_(x)
            index.copy_(repeated)
            graph.replay()
            assert torch.equal(out, torch.index_add(x, 0, index, source))


def test_the_public_operator_runs_the_kernel_that_is_asked_for():
    w = Workload.parse(SUM)
    x, index, source = w.operator.examples(w, "random", 0, CUDA)
    with tw.use("rows_sorted"):
        found = tw.index_add(x, 0, index, source)
    torch.testing.assert_close(found, torch.index_add(x, 0, index, source), rtol=1e-4, atol=1e-3)


def test_atomic_sums_are_for_who_names_them_and_never_under_the_deterministic_mode():
    x, source = torch.zeros(300, 64, device=CUDA), torch.randn(50000, 64, device=CUDA)
    index = torch.randint(300, (50000,), device=CUDA)
    exact = x.double().index_add(0, index, source.double())
    with tw.use("rows_atomic"):
        found = tw.index_add(x, 0, index, source)
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-2)
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(NoImplementation, match="deterministic"):
                tw.index_add(x, 0, index, source)
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("spread", ["uniform", "zipf", "constant"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "i64"])
def test_pieces_of_rows_may_be_added_in_bulk(dtype, spread):
    w = Workload.parse(
        f"index_add(x={dtype}[900,260], dim=0, index=i64[9001], source={dtype}[9001,260])"
        f"!donate=x!indices={spread}!nondeterministic"
    )
    impl, verifier = IMPLS["rows_atomic"], Verifier(w, CUDA)
    found = [c for c in impl.space(w, spec_of(0)) if c.bulk]
    assert found or spec_of(0).capability < 90
    for config in found[:: max(len(found) - 1, 1)]:
        verdict = verifier.check(impl.build(config, w, spec_of(0)))
        assert verdict.ok, f"{config}: {verdict.message}"


@pytest.mark.parametrize(
    "moved",
    [
        "index_add({x}, index=i64[4000], source=f32[4000,64])",
        "scatter({x}, index=i64[4000,64]@strides(1,0), src=f32[4000,64])",
        "scatter({x}, index=i64[4000,64], src=f32[4000,64])",
    ],
)
@pytest.mark.alone
def test_elements_beyond_32_bits_are_reached_and_no_others(moved, needs_memory):
    needs_memory(12e9)
    w = Workload.parse(moved.format(x="x=f32[36000000,64], dim=0") + "!donate=x")
    source = torch.randn(4000, 64, device=CUDA)
    places = w["x"].shape[0] - 1 - torch.arange(4000, device=CUDA) // 2
    index = places[:, None].expand(4000, 64)
    if w["index"].strides is None:
        index = places if w.op == "index_add" else index.contiguous()
    pairs = source.view(2000, 2, 64).flip(0)
    expected = pairs.sum(1) if w.op == "index_add" else pairs[:, 1]
    found = supporting(w)
    assert found
    for impl in found:
        x = torch.zeros(w["x"].shape, device=CUDA)
        impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))(x, index, source)
        torch.testing.assert_close(x[-2000:], expected)
        assert not x[:-2000].any(), impl.name
        del x


@pytest.mark.parametrize(
    "moved",
    [
        "gather({x}, dim=1, index={i})",
        "scatter({x}, dim=1, index={i}, src=f16[2,1080000000])!donate=x",
        "scatter({x}, dim=0, index={i}, src=f16[2,1080000000])!donate=x",
        "scatter({x}, dim=1, index={i}, src=2.5)!donate=x",
    ],
)
@pytest.mark.alone
def test_positions_beyond_32_bits_are_reached(moved, needs_memory):
    needs_memory(45e9)
    n = 1_080_000_000  # two lines of which have more than 2^31 elements
    w = Workload.parse(moved.format(x=f"x=f16[2,{n}]", i=f"i32[2,{n}]"))
    line = torch.arange(n, device=CUDA, dtype=torch.int32)
    index = torch.stack([line, line.flip(0)])  # places in order, and the other way around
    if w["dim"] == 0:
        index = torch.stack([line % 2, line % 2])  # of two writes to a place, the second stands
    src = torch.stack([(line % 2039).half(), (line % 1999).half()])
    del line
    found = supporting(w)
    assert found
    for impl in found:
        run = impl.build(impl.heuristic(w, spec_of(0)), w, spec_of(0))
        out = run(src, index) if w.op == "gather" else None
        if out is None:
            x = torch.zeros(2, n, dtype=torch.float16, device=CUDA)
            out = run(x, index, src) if "src" in w.tensors else run(x, index)
        if "src" not in w.tensors and w.op == "scatter":
            assert (out == 2.5).all()
        elif w["dim"] == 0:
            assert torch.equal(out[0, ::2], src[1, ::2])
            assert torch.equal(out[1, 1::2], src[1, 1::2])
            assert not out[0, 1::2].any()
            assert not out[1, ::2].any()
        else:
            assert torch.equal(out[0], src[0])
            assert torch.equal(out[1], src[1].flip(0))
        out = x = None
        torch.cuda.empty_cache()
