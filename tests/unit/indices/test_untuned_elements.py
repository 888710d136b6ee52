"""Which kernel of ours takes updates and sums of separate elements where no record speaks: it goes
by how many there are, and in place by how few of all places they can name."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.device import DEVICES
from tilewright.dispatch import prepared, selection
from tilewright.impl import IMPLS, OWN_BACKENDS, implementations
from tilewright.impls.indices._indexed import streamed_us
from tilewright.impls.indices.elements._scatter import bound
from tilewright.impls.indices.elements._updates import CELLS_FIRST, MOST_FIRST
from tilewright.impls.indices.elements.scatter_buckets import PLACES_IN_PLACE
from tilewright.op import Workload
from tilewright.suite import SUITES

H200, CUDA = DEVICES["h200"], torch.device("cuda:0")
MOST_PLACES_OF_A_TILE = H200.shared_bytes_per_block // 8
"""Of an update of fp32, which scatter_tiled could hold."""


def chosen(text):
    return selection.choose(Workload.parse(text), CUDA).implementation


@pytest.mark.parametrize(
    ("x", "index", "src", "more", "expected"),
    [
        ([34725600], "[551200]", "f32[551200]", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]@strides(2)", "f32[551200]", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "f32[551200]@strides(0)", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "2.5", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "f32[551200]", "", "scatter_buckets"),
        ([25000000], "[551200]", "f32[551200]", "!donate=x", "scatter_buckets"),
        ([40000, 65536], "[512,65536]", "f32[512,65536]", "!donate=x", "scatter_buckets"),
    ],
)
def test_an_update_in_place_of_few_of_many_places_looks_at_those_alone(
    records, x, index, src, more, expected
):
    """But where there are more elements than it numbers."""
    assert chosen(f"scatter(x=f32{x}, dim=0, index=i64{index}, src={src}){more}") == expected


@pytest.mark.parametrize(
    ("workload", "fast", "slow"),
    [
        (
            "scatter_add(x=f32[90000000], dim=0, index=i64[2097152], src=f32[2097152])!donate=x",
            "bucket_sums",
            "scatter_sorted",
        ),
        (
            "scatter_add(x=f32[500,2400], dim=0, index=i64[500,2400], src=f32[500,2400])",
            "integer_sums",
            "scatter_tiled",
        ),
    ],
    ids=["launches of a sort beside all places", "a chain of positions beside all elements"],
)
def test_what_memory_takes_counts_for_more_where_it_is_slower(workload, fast, slow):
    w = Workload.parse(workload)
    for device, expected in (("h200", fast), ("a100", slow)):
        untuned = [i.name for i in implementations(w) if i.takes_untuned(w, DEVICES[device])]
        assert expected in untuned
        assert (slow if expected == fast else fast) not in untuned


def test_times_of_memory_are_as_they_were_measured_on_an_h200():
    assert streamed_us(95.3, H200) == 95.3
    half = dataclasses.replace(H200, dram_bytes_per_s=H200.dram_bytes_per_s / 2)
    assert streamed_us(95.3, half) == 2 * 95.3


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ([1000, 256, 7, 7], 0, "scatter_tiled"),
        ([3, 1000, 5000], 1, "scatter_tiled"),
        ([3000, 256, 7, 7], 0, "scatter_buckets"),  # a thread would hold too many elements
        ([1000, 1000], 0, "scatter_buckets"),  # a block for each SM, not two
    ],
)
def test_an_update_is_one_pass_where_each_sm_has_two_blocks_that_hold_their_tiles(
    records, shape, dim, expected
):
    assert chosen(f"scatter(x=f32{shape}, dim={dim}, index=i64{shape}, src=f32{shape})") == expected


@pytest.mark.parametrize(
    ("dtype", "x", "index", "expected"),
    [
        *(("f32", [n], [n], "scatter_tiled") for n in (50, 4096)),
        *(("f32", [n], [n], "scatter_winner") for n in (5000, 50000, 100000, 500000)),
        ("f32", [1000000], [1000000], "scatter_buckets"),
        *(("f32", [n], [32768], "scatter_winner") for n in (2048, 2**19)),
        ("f32", [2**14], [2**18], "scatter_buckets"),
        ("f32", [2**22], [2**18], "scatter_buckets"),
        *((dtype, [512, 64], [512, 64], "scatter_tiled") for dtype in ("f16", "f32", "f64")),
        ("f32", [32, 64], [512, 64], "scatter_tiled"),
        ("f32", [1024, 64], [64, 64], "scatter_winner"),
        ("f32", [8192, 64], [512, 64], "scatter_winner"),
        ("f32", [4096, 64], [4096, 64], "scatter_buckets"),
        ("f64", [32768], [32768], "scatter_buckets"),  # keys carry no more than four bytes
        ("f64", [1024, 64], [64, 64], "scatter_tiled"),
    ],
)
def test_an_update_is_what_takes_least_by_uniform_indices_and_the_worst_there_are(
    records, dtype, x, index, expected
):
    """As scatter_crossover and scatter_maskrcnn have them."""
    assert chosen(f"scatter(x={dtype}{x}, dim=0, index=i64{index}, src={dtype}{index})") == expected


@pytest.mark.parametrize(
    ("op", "dtype", "rows", "more", "expected"),
    [
        *(
            ("scatter_reduce", d, 100000, ", reduce=amax", "bucket_extremes")
            for d in ("f32", "i64")
        ),
        ("scatter_reduce", "f32", 99999, ", reduce=amin", "scatter_sorted"),
        *(("scatter_add", d, 15625, "", "bucket_integers") for d in ("i32", "i64")),
        ("scatter_add", "i64", 15624, "", "scatter_sorted"),
    ],
)
def test_maxima_and_sums_of_integers_go_by_buckets_from_what_was_timed_on(
    records, op, dtype, rows, more, expected
):
    text = f"x={dtype}[30000,64], dim=0, index=i64[{rows},64], src={dtype}[{rows},64]{more}"
    assert chosen(f"{op}({text})") == expected


@pytest.mark.parametrize(
    ("batches", "rows", "flag", "expected"),
    [
        (64, 1, "!donate=x", "scatter_strided"),
        (64, 1, "", "rows_winner"),
        (64, 2, "!donate=x", "rows_winner"),
        (65, 1, "!donate=x", "rows_winner"),  # more than were measured
    ],
)
def test_a_row_in_place_of_each_batch_is_written_by_one_launch(
    records, batches, rows, flag, expected
):
    index = f"i64[{batches},{rows},8,128]@strides({rows},1,0,0)"
    x, src = f"bf16[{batches},8192,8,128]", f"bf16[{batches},{rows},8,128]"
    assert chosen(f"scatter(x={x}, dim=1, index={index}, src={src}){flag}") == expected


@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
@pytest.mark.parametrize(
    ("x", "index", "expected"),
    [
        *(([n], [4096], "integer_sums") for n in (256, 4096)),
        ([65536], [4096], "bucket_sums"),
        ([2**19], [4096], "scatter_sorted"),  # more places than were measured
        *(([n], [32768], "bucket_sums") for n in (2048, 32768, 2**19)),
        *(([n, 64], [64, 64], "integer_sums") for n in (4, 64)),
        ([1024, 64], [64, 64], "bucket_sums"),
        ([64, 64], [40, 64], "scatter_tiled"),
        ([1024, 64], [40, 64], "scatter_serial"),
        *(([n, 64], [512, 64], "bucket_sums") for n in (32, 512, 8192)),
    ],
)
def test_a_sum_is_what_takes_least_by_uniform_indices_and_the_worst_there_are(
    records, dtype, x, index, expected
):
    """As scatter_crossover has them."""
    text = f"scatter_add(x={dtype}{x}, dim=0, index=i64{index}, src={dtype}{index})"
    assert chosen(text) == expected


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2048, 9000), st.sampled_from([16, 64, 100]), st.integers(4, 400))
def test_an_update_of_columns_goes_as_that_of_its_elements_as_one_column_does(
    records, rows, columns, places
):
    """As index_put makes one of them where each dim of x has an index tensor."""
    taken = [
        chosen(f"scatter(x=f32{x}, dim=0, index=i64{index}, src=f32{index})!donate=x")
        for x, index in (
            ([rows * places, columns], [rows, columns]),
            ([rows * places * columns], [rows * columns]),
        )
    ]
    few = "scatter_strided" if places >= PLACES_IN_PLACE else "scatter_buckets"
    if rows * columns <= MOST_FIRST and rows * places * columns <= CELLS_FIRST:
        few = "scatter_winner"
    assert taken[1] == few
    if rows * places > MOST_PLACES_OF_A_TILE:
        assert taken[0] == few


@pytest.mark.parametrize(
    ("dtype", "places", "positions", "flag", "expected"),
    [
        *((d, 1000000, 1000000, "", "bucket_sums") for d in ("f16", "bf16", "f32", "f64")),
        ("f32", 60000, 60000, "", "bucket_sums"),
        ("f32", 90, 900000, "", "integer_sums"),
        ("f32", 30000, 30000, "", "integer_sums"),
        *(("f32", 2**19, n, "!donate=x", "bucket_sums") for n in (12000, 32768, 100000)),
        ("f32", 2**19, 32768, "", "bucket_sums"),
        ("f64", 2**19, 32768, "!donate=x", "bucket_sums"),
        ("f32", 2**17, 32768, "!donate=x", "bucket_sums"),
        ("f64", 2**17, 32768, "!donate=x", "bucket_sums"),
        ("f32", 2**19, 4000, "!donate=x", "scatter_sorted"),
        ("f32", 2**26, 32768, "!donate=x", "rows_sorted"),
        ("f32", 2**26, 32768, "", "scatter_sorted"),
        ("f32", 34725600, 551200, "!donate=x", "rows_sorted"),
        ("f32", 2**27, 2**18, "!donate=x", "rows_sorted"),
        ("f32", 2**27, 2**18, "", "bucket_sums"),
        ("f32", 2**27, 2**22, "!donate=x", "bucket_sums"),
        ("i64", 999999, 999999, "", "scatter_sorted"),
    ],
)
def test_index_add_of_one_dim_goes_as_scatter_add_does(
    records, dtype, places, positions, flag, expected
):
    text = f"x={dtype}[{places}], dim=0, index=i64[{positions}]"
    src = f"{dtype}[{positions}]"
    assert chosen(f"scatter_add({text}, src={src}){flag}") == expected
    for source in (src, f"{src}, alpha=2"):
        assert chosen(f"index_add({text}, source={source}){flag}") == expected
    taken = chosen(f"index_add({text}, source={src}@strides(0)){flag}")
    assert taken == ("scatter_sorted" if expected == "rows_sorted" else expected)


@pytest.mark.parametrize(
    ("dtype", "positions", "src", "reduce", "expected"),
    [
        *(("f32", n, n, "amax", "rows_sorted") for n in (5000, 32768, 2**20)),
        *(("f32", n, n, "amax", "scatter_sorted") for n in (4096, 2**21)),
        ("bf16", 32768, 32768, "mean", "rows_sorted"),
        ("f64", 32768, 32768, "amax", "scatter_sorted"),  # has no elements sorted, either
        ("f64", 32768, 32768, "prod", "scatter_sorted"),
        *(("f32", n, n, "prod", "bucket_products") for n in (8192, 32768)),
        ("f32", 8191, 8191, "prod", "scatter_sorted"),
        ("f32", 32768, 32768, "prod, include_self=False", "bucket_products"),
        ("f32", 32768, 40000, "amax", "scatter_sorted"),  # no rows of the index's
    ],
)
def test_reductions_of_one_dim_that_are_sorted_have_positions_or_elements_sorted(
    records, dtype, positions, src, reduce, expected
):
    text = f"x={dtype}[{2**19}], dim=0, index=i64[{positions}], src={dtype}[{src}]"
    assert chosen(f"scatter_reduce({text}, reduce={reduce})!donate=x") == expected


def test_products_that_are_few_for_all_the_places_are_sorted(records):
    text = "dim=0, index=i64[8192], src=f32[8192], reduce=prod"
    assert chosen(f"scatter_reduce(x=f32[{2**25}], {text})!donate=x") == "bucket_products"
    assert chosen(f"scatter_reduce(x=f32[{2**26}], {text})!donate=x") == "scatter_sorted"


@pytest.mark.parametrize(
    ("places", "positions", "private"),
    [(512, 2**14, True), (513, 2**14, False), (512, 2**14 + 1, False), (256, 2**14 + 1, True)],
)
def test_few_elements_are_added_in_tables_of_blocks_where_32_share_a_place(
    places, positions, private
):
    w = Workload.parse(
        f"scatter_add(x=f32[{places}], dim=0, index=i64[{positions}], src=f32[{positions}])"
    )
    assert IMPLS["integer_sums"].heuristic(w, H200).private == private


@given(st.integers(1, 2**31))
def test_a_binary_is_for_an_eighth_more_positions_at_most(length):
    assert length <= bound(length) <= length * 1.125
    assert bound(bound(length)) == bound(length)
    assert len({bound(n) for n in range(length, 2 * length, max(1, length // 64))}) <= 9


def test_index_put_of_many_sizes_compiles_so_many_kernels_and_then_takes_one_for_any_shape(
    records, built, monkeypatch
):
    """Each of so many places; positions of up to twice as many share eight binaries."""
    sources = set()

    def compiles(w, device, choice):
        impl = IMPLS[choice.implementation]
        if impl.any_shape:
            return False
        source = impl.task(choice.config, w, H200).source
        sources.add(source)
        return len(sources) > known

    monkeypatch.setattr(prepared, "_compiles", compiles)

    def ran(places, positions):
        text = f"x=f32[{places}], dim=0, index=i64[{positions}], source=f32[{positions}]"
        w = Workload.parse(f"index_add({text})!donate=x")
        return prepared._runnable(w, torch.device("cuda:0"), None)[0]()

    for positions in range(2**18 + 1, 2**19 + 1, 5801):
        known = len(sources)
        assert ran(900000, positions) == "bucket_sums"
    assert len(sources) == prepared.state.compiled["index_add", torch.device("cuda:0")] == 8
    names = []
    for places in range(500000, 500040):
        known = len(sources)
        names.append(ran(places, 200000))
    free = prepared.FREE_COMPILATIONS - 8
    assert names == ["bucket_sums"] * free + ["rows_sorted"] * (40 - free)
    assert IMPLS["rows_sorted"].any_shape
    prepared.state.compiled.clear()


INDEXED = [
    name for name in SUITES if any(w.operator.indexed is not None for w in SUITES[name].workloads())
]


@pytest.mark.parametrize("name", INDEXED)
def test_a_workload_of_a_suite_is_taken_by_one_implementation_and_no_other(name):
    for w in SUITES[name].workloads():
        if w.operator.indexed is None:
            continue
        own = (i for i in implementations(w) if i.backend in OWN_BACKENDS)
        taken_by = [i.name for i in own if i.takes_untuned(w, H200)]
        assert len(taken_by) == 1, (str(w), taken_by)
