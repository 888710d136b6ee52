"""Updates with indices that repeat: on a GPU what runs keeps the order of writes."""

import contextlib

import pytest
import torch

import tilewright as tw
from tilewright.device import DEVICES
from tilewright.dispatch import prepared, selection
from tilewright.errors import IndexOutOfRange
from tilewright.impl import IMPLS, Executable
from tilewright.op import Workload
from tilewright.ops._indexing import last_written, told_once
from tilewright.record import Record

H200 = DEVICES["h200"]
SUM = "index_add(x=f32[50,8], dim=0, index=i64[90], source=f32[90,8])"
GATHER = "gather(x=f32[50,8], dim=0, index=i64[90,8])"
TEXT = "scatter(x=f32[50000], dim=0, index=i64[50000], src=f32[50000])"


@pytest.mark.parametrize(
    ("text", "implementation"),
    [
        (TEXT, "scatter_winner"),
        ("scatter(x=f32[50], dim=0, index=i64[1], src=1.5)", "scatter_tiled"),
        ("scatter(x=f32[9000,7], dim=1, index=i64[9000,5], src=f32[9000,5])", "scatter_tiled"),
        ("scatter(x=f32[9000,64], dim=0, index=i64[900,64]@strides(1,0), src=f32[900,64])",
         "rows_winner"),
        ("scatter(x=f32[9000,64], dim=0, index=i64[900,64]@strides(1,0), src=2.5)", "rows_winner"),
        ("scatter(x=f32[8,90,64], dim=1, index=i64[8,1,64]@strides(1,1,0), src=f32[8,1,64])"
         "!donate=x", "scatter_strided"),
        ("scatter_add(x=f32[8,2000,64], dim=1, index=i64[8,5000,64]@strides(5000,1,0), "
         "src=f32[8,5000,64])", "rows_sorted"),
        ("scatter_reduce(x=f32[8,90,64], dim=1, index=i64[8,50,64]@strides(50,1,0), "
         "src=f32[8,50,64], reduce=amax)", "scatter_serial"),
        ("scatter(x=f32[90,7]@strides(8,1), dim=0, index=i64[9,7], src=f32[9,7])", "scatter_tiled"),
        ("scatter(x=f32[90,7,5], dim=0, index=i64[9,7,5]@strides(7,1,0), src=2.5)",
         "scatter_tiled"),
        ("scatter(x=f32[90,7], dim=0, index=i64[9,6], src=f32[9,7])", "scatter_tiled"),
        ("scatter(x=f32[90], dim=0, index=i64[9], src=f32[10])", "scatter_tiled"),
        ("scatter(x=f32[90,9,7], dim=1, index=i64[80,20,7]@strides(20,1,0), src=f32[90,20,7])",
         "scatter_strided"),
        ("scatter(x=f32[90000,9], dim=0, index=i64[90000,7], src=f32[90001,8])",
         "scatter_buckets"),
        ("scatter(x=f32[64,8192,256], dim=1, index=i64[48,16,250], src=f32[64,17,256])!donate=x",
         "scatter_strided"),
        ("scatter(x=f32[8192,50257], dim=1, index=i64[8192,1], src=1.0)!donate=x",
         "scatter_strided"),
        ("scatter(x=f32[8192,50257], dim=1, index=i64[8192,1], src=1.0)", "scatter_tiled"),
        ("scatter(x=f32[64,8192,256], dim=1, index=i64[64,16,256], src=f32[64,16,256])!donate=x",
         "scatter_strided"),
        ("scatter(x=f32[8,8192,256], dim=1, index=i64[8,900,256], src=f32[8,900,256])!donate=x",
         "scatter_buckets"),
        ("scatter(x=f32[90,7]@strides(1,90), dim=0, index=i64[9,6], src=2.5)", "scatter_tiled"),
        ("scatter(x=f32[90], dim=0, index=i64[], src=2.5)", "scatter_positions"),
        ("index_add(x=f32[90,7], dim=0, index=i64[9], source=f32[9,7])", "rows_serial"),
        ("index_add(x=f32[90,7], dim=0, index=i64[9000], source=f32[9000,7])", "integer_sums"),
        ("index_add(x=f64[90,7], dim=0, index=i64[9000], source=f64[9000,7])", "integer_sums"),
        ("index_add(x=i32[90,7], dim=0, index=i64[9], source=i32[9,7])", "rows_serial"),
        ("index_add(x=i64[90,7], dim=0, index=i64[9000], source=i64[9000,7])", "rows_sorted"),
        ("scatter_reduce(x=i32[9,70000], dim=1, index=i64[9,9000], src=i32[9,9000], reduce=prod)",
         "scatter_sorted"),
        ("scatter_add(x=f32[90,7], dim=1, index=i64[90,9], src=f32[90,9])", "scatter_tiled"),
        ("scatter_add(x=f32[90000,7], dim=0, index=i64[900,7], src=f32[900,7])", "scatter_sorted"),
        ("scatter_add(x=f32[90,50257], dim=1, index=i64[90,1], src=f32[90,1])", "scatter_serial"),
        ("index_add(x=f32[64,100000], dim=1, index=i64[200000], source=f32[64,200000])",
         "rows_sorted"),
        ("index_add(x=f32[100000,50], dim=1, index=i64[60], source=f32[100000,60])", "rows_sorted"),
        ("index_add(x=f16[3000000,50], dim=1, index=i64[60], source=f16[3000000,60])!donate=x",
         "rows_sorted"),
        ("index_reduce(x=f64[70000,50,2], dim=1, index=i32[60], source=f64[70000,60,2], "
         "reduce=prod, include_self=False)", "rows_sorted"),
        ("index_add(x=f32[10,3000001], dim=0, index=i64[60], source=f32[60,3000001])",
         "rows_sorted"),
        ("embedding_backward(grad=f32[60,3000001], index=i64[60], num_weights=10)", "rows_sorted"),
        ("scatter_add(x=f32[100000,50,8], dim=1, index=i64[100000,60,8]@strides(0,1,0), "
         "src=f32[100000,60,8])", "rows_sorted"),
        ("index_add(x=i64[1000000,1], dim=0, index=i64[1000000], source=i64[1000000,1])!donate=x",
         "rows_sorted"),
        ("index_reduce(x=f16[64,100000], dim=1, index=i64[200000], source=f16[64,200000], "
         "reduce=amax)", "rows_sorted"),
        ("index_add(x=f32[90], dim=0, index=i64[9000], source=f32[9000])", "integer_sums"),
        ("index_add(x=f64[90], dim=0, index=i64[9000], source=f64[9000])", "integer_sums"),
        (
            "scatter_add(x=f32[90000,70], dim=0, index=i64[90000,70], src=f32[90000,70])",
            "bucket_sums",
        ),
        ("scatter_add(x=f64[1000000], dim=0, index=i64[1000000], src=f64[1000000])", "bucket_sums"),
        ("scatter_add(x=f64[9000,7], dim=0, index=i64[9000,7], src=f64[9000,7])", "bucket_sums"),
        ("scatter_reduce(x=f32[30000,64], dim=0, index=i64[90000,64], src=f32[90000,64], "
         "reduce=prod)", "bucket_products"),
        ("index_add(x=f32[5000,64], dim=0, index=i64[16384], source=f32[16384,64])",
         "rows_balanced"),
        ("embedding_backward(grad=bf16[4096,1024], index=i64[4096], num_weights=2000)",
         "rows_balanced"),
        ("gather(x=f32[90000,7], dim=0, index=i64[900,7])", "gather_cuda"),
        *((f"gather(x=f32[1000,256,7,7], dim={dim}, index=i64[1000,256,7,7])", "gather_tiled")
          for dim in (0, 1)),
        *((f"gather(x=f32[1000,256,7,7], dim={dim}, index=i64[1000,256,7,7])", "gather_cuda")
          for dim in (2, 3)),
        ("gather(x=f32[1000,256,7,7], dim=0, index=i64[900,256,7,7])", "gather_cuda"),
        ("gather(x=f32[100,256,7,7], dim=0, index=i64[100,256,7,7])", "gather_cuda"),
        ("gather(x=i64[90,7]@strides(1,90), dim=1, index=i32[90,9])", "gather_cuda"),
    ],
)  # fmt: skip
def test_without_a_record_a_kernel_that_keeps_the_promise_runs(records, text, implementation):
    assert selection.choose(Workload.parse(text), "cuda:0").implementation == implementation


def test_a_record_that_aten_won_on_indices_without_repetition_does_not_bring_it_back(records):
    for name, us in (("aten", 5.0), ("scatter_winner", 9.0)):
        w = Workload.parse(f"{TEXT}!indices={'unique' if name == 'aten' else 'zipf'}")
        config = {} if name == "aten" else {"slab": 0, "items": 1, "block_threads": 256}
        records.append(
            Record(str(w), "scatter", name, config, "ok", "x", us, versions={}, final=True)
        )
    choice = selection.choose(Workload.parse(TEXT), "cuda:0")
    assert (choice.implementation, choice.source) == ("scatter_winner", "record")


def test_a_record_of_pytorchs_atomic_sums_does_not_bring_them_back(records, monkeypatch):
    records.append(Record(SUM, "index_add", "aten", {}, "ok", "x", 5.0, versions={}, final=True))
    w = Workload.parse(SUM)
    assert selection.choose(w, "cuda:0").implementation == "rows_serial"
    assert selection.choose(w, "cpu").implementation == "aten"
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    assert selection.choose(w, "cuda:0").implementation == "rows_serial"
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "0")
    assert selection.choose(w, "cuda:0").implementation == "aten"


ATOMIC = {"lanes": 4, "vec": 2, "items": 1, "unrolled": 2, "bulk": False}
SERIAL = {"lanes": 4, "vec": 4, "unrolled": 8, "positions": 16}


def of_atomic_sums(text):
    flagged = f"{text}!nondeterministic"
    return Record(
        flagged, "index_add", "rows_atomic", ATOMIC, "ok", "x", 4, versions={}, final=True
    )


def test_atomic_sums_of_ours_run_by_a_record_where_the_settings_allow_other_bits(
    records, monkeypatch
):
    w, larger = Workload.parse(SUM), Workload.parse(SUM.replace("90", "100"))
    records += [
        of_atomic_sums(SUM),
        Record(SUM, "index_add", "rows_serial", SERIAL, "ok", "x", 5.0, versions={}, final=True),
    ]
    assert selection.choose(w, "cuda:0").implementation == "rows_serial"
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    choice = selection.choose(w, "cuda:0")
    assert (choice.implementation, choice.source) == ("rows_atomic", "record")
    assert selection.choose(larger, "cuda:0").implementation == "rows_atomic"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert selection.choose(w, "cuda:0").implementation == "rows_serial"


def test_a_record_of_the_workload_itself_serves_where_none_of_atomic_sums_does(
    records, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    other = SUM.replace("90", "100")
    records += [
        of_atomic_sums(other),
        Record(SUM, "index_add", "rows_serial", SERIAL, "ok", "x", 5.0, versions={}, final=True),
    ]
    choice = selection.choose(Workload.parse(SUM), "cuda:0")
    assert (choice.implementation, choice.source) == ("rows_serial", "record")


def test_three_winners_in_any_order_bring_their_heuristic_where_settings_allow_it(
    records, monkeypatch
):
    records += [of_atomic_sums(SUM.replace("90", str(rows))) for rows in (100, 110, 120)]
    w = Workload.parse(SUM.replace("90", "30000"))
    assert selection.choose(w, "cuda:0").source == "ordered"
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    choice = selection.choose(w, "cuda:0")
    assert (choice.implementation, choice.source) == ("rows_atomic", "heuristic")


def test_what_sums_in_any_order_gives_way_under_the_deterministic_mode(records, monkeypatch):
    """Also where it was built outside that mode, for the same shape."""
    records.append(of_atomic_sums(SUM))
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    w, device, ran = Workload.parse(SUM), torch.device("cuda:0"), []
    built = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name in ("rows_atomic", "rows_serial"):
        monkeypatch.setattr(
            type(IMPLS[name]),
            "build",
            lambda self, *how: built.append(self.name) or Recording(self.name, ran),
        )
    run = prepared._build(w, device, selection.choose(w, device))
    run(torch.zeros(1))
    assert (built, ran) == (["rows_atomic"], ["rows_atomic"])
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            run(torch.zeros(1))
    finally:
        torch.use_deterministic_algorithms(False)
    run(torch.zeros(1))
    assert built == ["rows_atomic", "rows_serial"]
    assert ran == ["rows_atomic", "rows_serial", "rows_serial", "rows_atomic"]


class Recording(Executable):
    any_device_current = True

    def __init__(self, name, ran):
        self.name, self.ran = name, ran

    def __call__(self, *tensors):
        self.ran.append(self.name)


@pytest.mark.parametrize("text", [SUM.replace("f32", "i32"), GATHER])
def test_pytorchs_kernels_that_die_of_an_index_run_by_a_record_where_indices_are_trusted(
    records, text, monkeypatch
):
    w = Workload.parse(text)
    records.append(Record(text, w.op, "aten", {}, "ok", "x", 5.0, versions={}, final=True))
    assert selection.choose(w, "cuda:0").source == "ordered"
    assert selection.choose(w, "cpu").implementation == "aten"
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "0")
    assert selection.choose(w, "cuda:0").implementation == "aten"


def test_on_a_cpu_pytorch_keeps_the_order_itself(records):
    assert selection.choose(Workload.parse(TEXT), "cpu").implementation == "aten"


def test_until_a_shape_comes_back_nothing_is_compiled_and_the_order_is_kept(records, monkeypatch):
    asked = []
    monkeypatch.setattr(
        prepared, "_build", lambda w, d, choice: asked.append(choice.implementation)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    w = Workload.parse(TEXT)
    for _ in range(prepared.HOT_CALLS):
        prepared._runnable(w, torch.device("cuda:0"), None)
    assert asked == ["scatter_positions"] * (prepared.HOT_CALLS - 1) + ["scatter_winner"]
    prepared.state.forget()


def test_until_a_shape_comes_back_indices_are_looked_at_before_pytorchs_gather(
    records, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        prepared, "_build", lambda w, d, choice: asked.append(choice.implementation)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    w = Workload.parse(GATHER)
    x, index = w.operator.examples(w, "random", 0, "cpu")
    index[3, 4] = 50
    for _ in range(prepared.HOT_CALLS - 1):
        run, _ = prepared._runnable(w, torch.device("cuda:0"), None)
        assert run(x, index)[3, 4] == 0
        with pytest.raises(IndexOutOfRange):
            tw.check()
    prepared._runnable(w, torch.device("cuda:0"), None)
    assert asked == ["gather_cuda"]
    prepared.state.forget()


@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("src", ["f32[30,3]", "2.5"])
def test_the_stand_in_lets_the_last_position_win_in_any_layout(flag, src):
    w = Workload.parse(f"scatter(x=f32[5,4]@strides(7,1), dim=0, index=i64[30,3], src={src}){flag}")
    tensors = w.operator.examples(w, "random", 0, "cpu")
    expected = w.operator.truth(w, tensors)[0].float()
    impl = IMPLS["scatter_positions"]
    found = impl.build(impl.heuristic(w, H200), w, H200)(*tensors)
    assert torch.equal(found, expected)
    assert (found is tensors[0]) is bool(flag)
    assert found.is_contiguous() is not bool(flag)  # a new one, as torch.scatter lays it out


@pytest.mark.parametrize(
    "text",
    [
        "scatter(x=f32[5,4], dim=0, index=i64[30,4], src=f32[30,4])",
        "scatter(x=f32[5,4], dim=0, index=i32[30,4]@strides(1,0), src=2.5)!donate=x",
        "scatter(x=f32[9], dim=0, index=i64[30], src=f32[30])",
    ],
)
def test_the_stand_in_skips_indices_out_of_range_and_a_later_call_tells(text):
    w = Workload.parse(text)
    x, index, *src = w.operator.examples(w, "random", 0, "cpu")
    once = told_once(index).clamp_(max=3)
    once[7], once[29] = -1, 2**31 - 1
    kept = torch.cat([index[:7], index[8:29]])
    value = torch.cat([src[0][:7], src[0][8:29]]) if src else 2.5
    expected = last_written(x.clone(), 0, kept, value)
    impl = IMPLS["scatter_positions"]
    run = impl.build(impl.heuristic(w, H200), w, H200)
    assert torch.equal(run(x.clone(), index, *src), expected)
    with pytest.raises(IndexOutOfRange, match="its write was skipped"):
        run(x, index, *src)
    once[7], once[29] = 0, 0
    run(x, index, *src)
    tw.check()


def test_where_it_is_asked_for_indices_are_looked_at_before_pytorchs_kernel_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "1")
    monkeypatch.setattr(prepared, "races", lambda w, device: False)
    for text in (SUM, "embedding_backward(grad=f32[90,8], index=i64[90], num_weights=50)"):
        w = Workload.parse(text)
        tensors = w.operator.examples(w, "random", 0, "cpu")
        run = prepared._vendor(w, torch.device("cuda:0"))
        run(*tensors)
        tensors[1][3] = 50
        with pytest.raises(IndexOutOfRange, match="index 50 is out of range for 50 places"):
            run(*tensors)


# --- sums under torch.use_deterministic_algorithms -----------------------------------------------


def test_a_sum_is_built_at_its_first_call_since_what_ran_until_then_would_have_other_bits(
    records, built
):
    run, choice = prepared._runnable(Workload.parse(SUM), torch.device("cuda:0"), None)
    assert run() == choice.implementation == "rows_serial"
    assert len(built) == 1


def test_sums_of_many_shapes_compile_so_many_kernels_and_then_take_one_for_any_shape(
    records, built, monkeypatch
):
    monkeypatch.setattr(prepared, "_compiles", lambda *call: "tiled" in call[2].implementation)
    ran = []
    for n in range(prepared.FREE_COMPILATIONS + 3):
        w = Workload.parse(
            f"scatter_add(x=f32[90,{n + 7}], dim=1, index=i64[90,9], src=f32[90,9])!donate=x"
        )
        ran.append(prepared._runnable(w, torch.device("cuda:0"), None)[0]())
    free = prepared.FREE_COMPILATIONS
    assert ran == ["scatter_tiled"] * free + ["scatter_sorted"] * 3
    prepared.state.compiled.clear()


def test_in_a_graph_that_is_captured_first_pytorchs_sum_is_kept_with_a_warning(
    records, built, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(prepared.state, "warned_of_capture", False)
    with pytest.warns(RuntimeWarning, match="call it once before capturing"):
        _, choice = prepared._runnable(Workload.parse(SUM), torch.device("cuda:0"), None)
    assert choice is None
    assert built == []


@pytest.fixture
def racing(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_NONDETERMINISTIC", "1")
    monkeypatch.setenv("TILEWRIGHT_CHECK_INDICES", "0")


def test_aten_gives_way_to_a_kernel_of_ours_under_the_deterministic_mode(records, built, racing):
    w = Workload.parse(SUM)
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    run, choice = prepared._runnable(w, torch.device("cuda:0"), None)
    assert choice.implementation == "aten"
    expected = torch.index_add(x, 0, index, source)
    assert torch.equal(run(x, index, source), expected)
    torch.use_deterministic_algorithms(True)
    for _ in range(prepared.HOT_CALLS - 1):  # a shape that comes once is not worth compiling for
        assert torch.equal(run(x, index, source), expected)
    assert built == []
    assert run(x, index, source) == run(x, index, source) == "rows_serial"
    assert len(built) == 1
    torch.use_deterministic_algorithms(False)
    assert torch.equal(run(x, index, source), expected)


def test_the_deterministic_mode_leaves_to_aten_what_no_kernel_of_ours_takes(records, built, racing):
    w = Workload.parse(SUM.replace("f32[50,8]", "f32[50,8]@strides(1,50)"))
    tensors = w.operator.examples(w, "random", 0, "cpu")
    run, _ = prepared._runnable(w, torch.device("cuda:0"), None)
    torch.use_deterministic_algorithms(True)
    for _ in range(5):
        assert torch.equal(run(*tensors), w.operator.reference(*w.call(tensors).values()))
    assert built == []
