"""The CUDA kernels for updates, run on a CPU: the last position wins, in every kind of kernel."""

import dataclasses

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported

from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.indices.elements._scatter import served_scatter
from tilewright.impls.indices.elements.scatter_exchange import sizes
from tilewright.impls.indices.elements.scatter_winner import launches_of
from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.ops._indexing import last_written

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)

RISING = [
    "scatter(x=f32[9000], dim=0, index=i64[5000], src=f32[5000])!indices=sorted",
    "scatter(x=f32[3000], dim=0, index=i32[7000], src=f32[7000])!donate=x!indices=sorted",
    "scatter(x=i64[9000], dim=0, index=i64[5000], src=2.0)!indices=sorted",
]


@pytest.mark.parametrize("text", RISING)
@pytest.mark.parametrize("late", [None, 4999, 1000, 0])
def test_indices_that_rise_but_for_one_are_seen_through(text, late):
    w, impl = Workload.parse(text), IMPLS["scatter_buckets"]
    x, index, *src = w.operator.examples(w, "random", 0, "cpu")
    if late is not None:
        index[late] = index[len(index) // 2]
    config = dataclasses.replace(impl.heuristic(w, DEVICE), ascending=True)
    found = OnCpu(impl, config, w)(x.clone(), index, *src)
    assert torch.equal(found, last_written(x, 0, index, src[0] if src else 2.0))


def test_an_index_out_of_range_at_the_end_of_rising_ones_is_skipped_and_reported():
    w, impl = Workload.parse(RISING[0]), IMPLS["scatter_buckets"]
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    index[-1] = 9000
    config = dataclasses.replace(impl.heuristic(w, DEVICE), ascending=True)
    assert torch.equal(OnCpu(impl, config, w)(x, index, src), last_written(x, 0, index[:-1], src))
    assert fault_reported()


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("places", "moved", "dim"),
    [([300], [7000], 0), ([300, 4], [1700, 4], 0), ([400, 7], [400, 3], 1), ([9, 30], [9, 700], 1)],
)
def test_the_winner_is_last_where_keys_carry_values_and_blocks_remember(spread, places, moved, dim):
    w = Workload.parse(
        f"scatter(x=f32{places}, dim={dim}, index=i64{moved}, src=f32{moved})!indices={spread}"
    )
    impl = IMPLS["scatter_winner"]
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    for carried, sent in ((True, 1024), (True, 0), (False, 4096)):
        config = impl.Config(items=4, carried=carried, sent=sent)
        assert impl.space(w, DEVICE).why_not(config) is None
        found = OnCpu(impl, config, w)(x, index, src)
        assert torch.equal(found, last_written(x, dim, index, src)), config
    assert not fault_reported()


@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("name", ["rows_winner", "rows_sorted"])
def test_an_index_beyond_its_batch_is_skipped_and_reported_and_meets_no_other_batch(name, flag):
    op = "scatter" if name == "rows_winner" else "scatter_add"
    w = Workload.parse(
        f"{op}(x=f32[3,5,4], dim=1, index=i64[3,40,4]@strides(40,1,0), src=f32[3,40,4]){flag}"
    )
    x, index, src = w.operator.examples(w, "integer", 0, "cpu")
    once = index[..., 0]
    once[0, 7], once[1, 39], once[2, 0] = 5, -1, 2**32
    kept = index.clamp(0, 5).where(index >= 0, 5)
    room = torch.cat([x, torch.zeros(3, 1, 4)], 1)
    expected = (
        last_written(room, 1, kept, src) if op == "scatter" else room.scatter_add(1, kept, src)
    )
    run = OnCpu(IMPLS[name], IMPLS[name].heuristic(w, DEVICE), w)
    assert torch.equal(run(x, index, src), expected[:, :5])
    assert fault_reported()


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("x", "index", "src"),
    [
        ([900], [700], [701]),
        ([3, 50, 9], [2, 70, 9], [3, 71, 9]),
        ([2, 40, 7], [2, 9, 5], [2, 9, 7]),
        ([5, 40, 7], [5, 1, 6], [5, 1, 7]),
    ],
)
def test_an_update_of_a_box_lets_the_last_position_win_under_every_config(x, index, src, spread):
    dim, impl = len(x) // 2, IMPLS["scatter_strided"]
    for end in (f"src=f32{src})", "src=2.5)!donate=x"):
        w = Workload.parse(f"scatter(x=f32{x}, dim={dim}, index=i64{index}, {end}!indices={spread}")
        given, positions, *values = w.operator.examples(w, "random", 0, "cpu")
        expected = last_written(given, dim, positions, values[0] if values else 2.5)
        for config in impl.space(w, DEVICE):
            if config.block_threads == 128:
                found = OnCpu(impl, config, w)(given.clone(), positions, *values)
                assert torch.equal(found, expected), (w, config)
    assert not fault_reported()


@pytest.mark.parametrize("spread", ["zipf", "sorted"])
@pytest.mark.parametrize(
    ("x", "index", "src"),
    [
        ([900], [700], [701]),
        ([3, 5, 50, 3, 9], [3, 4, 90, 3, 7], [4, 4, 91, 3, 7]),
        ([5, 40, 7], [4, 30, 7], [5, 31, 7]),
        ([5, 9, 40, 2], [4, 7, 600, 2], [4, 7, 600, 2]),
        ([4, 2100, 1], [2, 3000, 1], [2, 3000, 2]),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["bucket_sums", "scatter_buckets", "scatter_exchange", "scatter_tiled", "scatter_winner"],
)
def test_a_box_is_served_where_it_lies_by_kernels_for_contiguous_tensors(
    name, x, index, src, spread
):
    dim, impl = len(x) // 2, IMPLS[name]
    sums = not impl.serves("scatter")
    for place in ("", "!donate=x"):
        w = Workload.parse(
            f"{'scatter_add' if sums else 'scatter'}(x=f32{x}, dim={dim}, index=i64{index}, "
            f"src=f32{src}){place}!indices={spread}"
        )
        given, positions, values = w.operator.examples(w, "integer", 0, "cpu")
        moved = values[tuple(map(slice, index))]
        expected = (
            given.scatter_add(dim, positions, moved)
            if sums
            else last_written(given, dim, positions, moved)
        )
        run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
        for _ in range(2):
            assert torch.equal(run(given.clone(), positions, values), expected), w
        wide = any(n < m for d, (n, m) in enumerate(zip(index, x, strict=True)) if d != dim)
        copies = [launch for launch in run.executable.launches if launch.entry == "beyond"]
        assert bool(copies) == (wide and not place)
    assert not fault_reported()


@pytest.mark.parametrize("place", ["", "!donate=x"])
@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("bucket_integers", "i32", "sum"),
        ("bucket_products", "f32", "prod"),
        ("bucket_extremes", "f64", "amin"),
    ],
)
def test_reductions_of_a_box_are_served_where_it_lies(name, dtype, how, place):
    impl = IMPLS[name]
    w = Workload.parse(
        f"scatter_reduce(x={dtype}[5,9,40,2], dim=2, index=i64[4,7,600,2], "
        f"src={dtype}[4,8,600,2], reduce={how}){place}!indices=zipf"
    )
    run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
    verdict = Verifier(w, torch.device("cpu")).check(run)
    assert verdict.ok, verdict.message
    assert not fault_reported()


def test_few_of_many_places_have_keys_in_a_table_of_at_most_32_bytes_an_index():
    impl = IMPLS["scatter_strided"]
    for positions in ([48, 16, 256], [64, 3, 256]):
        w = Workload.parse(
            f"scatter(x=f32[64,8192,256], dim=1, index=i64{positions}, src=f32{positions})!donate=x"
        )
        assert impl.suits(w, DEVICE)
        config = impl.heuristic(w, DEVICE)
        assert config.named
        assert config.hashed
        _, workspace = impl.launches(w, impl.served(w), config, DEVICE)
        assert 16 * w["index"].numel <= workspace.bytes <= 32 * w["index"].numel


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("scatter_strided", {}),
        ("scatter_strided", {"named": True}),
        ("scatter_strided", {"named": True, "hashed": True}),
        ("scatter_exchange", {}),
        ("scatter_tiled", {}),
        ("scatter_winner", {}),
        ("scatter_winner", {"launches": 1}),
    ],
)
def test_of_an_update_of_a_box_what_is_out_of_range_is_skipped_and_reported(name, knobs):
    w = Workload.parse("scatter(x=f32[9,4], dim=0, index=i64[70,3], src=f32[71,4])")
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    index[5], index[-1] = 9, -1
    kept = [i for i in range(69) if i != 5]
    expected = last_written(x, 0, index[kept], src[kept])
    impl = IMPLS[name]
    assert torch.equal(OnCpu(impl, impl.Config(**knobs), w)(x, index, src), expected)
    assert fault_reported()


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "text",
    [
        "x=f32[5000], dim=0, index=i64[9000], src=f32[9000]",
        "x=f32[700,7], dim=0, index=i32[1200,7], src=f32[1200,7]",
        "x=f64[2,90,8], dim=1, index=i64[2,900,8], src=f64[2,900,8]",
        "x=i32[20000], dim=0, index=i64[9000], src=2.0",
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_winner_in_one_launch_may_take_several_turns(text, spread, in_place, monkeypatch):
    few = dataclasses.replace(DEVICE, sms=2)
    monkeypatch.setattr(cuda_on_cpu, "DEVICE", few)
    impl = IMPLS["scatter_winner"]
    w = Workload.parse(f"scatter({text}){'!donate=x' * in_place}!indices={spread}")
    x, index, *src = w.operator.examples(w, "random", 0, "cpu")
    expected = last_written(x, w["dim"], index, src[0] if src else 2.0)
    for threads, sent, carried in ((256, 1024, False), (1024, 0, False), (512, 4096, True)):
        config = impl.Config(0, 1, threads, carried and bool(src) and w.main.itemsize == 4, sent, 1)
        launch, *others = launches_of(served_scatter(w), config, few)
        assert not others
        assert launch.meets
        assert max(w.main.numel, w["index"].numel) > 2 * threads * launch.grid[0]
        assert torch.equal(OnCpu(impl, config, w)(x.clone(), index, *src), expected), config


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "text",
    [
        "x=f32[5000], dim=0, index=i64[9000], src=f32[9000]",
        "x=f32[300,7], dim=0, index=i32[1200,7], src=f32[1200,7]",
        "x=f64[2,90,5], dim=1, index=i64[2,900,5], src=f64[2,900,5]",
        "x=i32[20000], dim=0, index=i64[9000], src=2.0",
    ],
)
def test_blocks_that_exchange_what_they_read_may_take_several_chunks(text, spread, monkeypatch):
    few = dataclasses.replace(DEVICE, sms=2)
    monkeypatch.setattr(cuda_on_cpu, "DEVICE", few)
    impl = IMPLS["scatter_exchange"]
    w = Workload.parse(f"scatter({text})!indices={spread}")
    x, index, *src = w.operator.examples(w, "random", 0, "cpu")
    expected = last_written(x, w["dim"], index, src[0] if src else 2.0)
    chunks = set()
    for threads, sent in ((256, 1024), (256, 0), (512, 4096)):
        config = impl.Config(block_threads=threads, blocks=2, sent=sent)
        assert impl.space(w, few).why_not(config) is None
        chunks.add(sizes(w, config, few).chunks)
        assert torch.equal(OnCpu(impl, config, w)(x, index, *src), expected), config
    assert max(chunks) > 4
