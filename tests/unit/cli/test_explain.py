"""explain: the choice, the candidates, and one candidate in full, for devices that are not here."""

import json
import re
from dataclasses import replace

import pytest
import torch
from dispatching import record

import tilewright as tw
from tilewright import cli
from tilewright.compile import cxx, nvrtc
from tilewright.device import DEVICES, current_device
from tilewright.dispatch import evidence
from tilewright.dispatch.dumps import dump_built
from tilewright.dispatch.selection import Forced, choose
from tilewright.impl import IMPLS
from tilewright.measure.runner import InProcess
from tilewright.op import Workload
from tilewright.profiling.explain import _forecasts, explain, show
from tilewright.record import Record
from tilewright.space import config_dict
from tilewright.store import Store
from tilewright.tune import verify_all

W = Workload.parse("layer_norm(x=f16[64,768], weight=f16[768], bias=f16[768])")
SM80, SM90 = (IMPLS[f"conv2d_weight_grad_sm{n}0"] for n in (8, 9))
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")


def test_without_records_the_vendor_runs_and_the_reason_says_so():
    found = explain(W, "cpu", measure=False)
    assert (found.chosen, found.source) == ("aten", "default")
    assert "no record" in found.reason


def test_traffic_counts_each_input_and_output_once():
    found = explain(W, "cpu", measure=False)
    assert found.read_bytes == 2 * (64 * 768 + 2 * 768)
    assert found.written_bytes == 2 * 64 * 768
    assert found.flops == 8 * 64 * 768


@pytest.mark.parametrize(("ceiling_us", "floor_us"), [(5.0, 5.0), (15.0, 10.0)])
def test_the_floor_of_a_duel_on_a_cpu_is_no_slower_than_what_won_it(store, ceiling_us, floor_us):
    record(store, str(W), "fused", us=10.0, created="2026-11-20T12:00:00.000000+00:00")
    record(store, str(W), "floor", us=ceiling_us, status="ceiling")
    assert explain(W, "cpu").floor_us == floor_us


def test_a_damaged_store_is_told_once_and_in_words(tmp_path, monkeypatch, capsys, recwarn):
    (tmp_path / "records.db").write_bytes(b"no database" * 100)
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure"]) == 1
    assert "file is not a database; move the file away" in capsys.readouterr().err
    assert not recwarn.list


def test_what_has_no_schedule_says_so():
    assert show(W, "schedule", "cpu", implementation="aten") == (
        "aten has no knobs, and so no schedule of its own"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-registers", "32"], "--max-registers caps what --show compiles: add --show"),
        (
            ["--max-registers", "32", "--show", "schedule"],
            "--max-registers caps what --show compiles: add --show",
        ),
        (["--device", "cpu", "--device-spec", "h200"], "give one of them"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(args, message, capsys):
    assert cli.main(["explain", str(W), "--no-measure", *args]) == 2
    assert message in capsys.readouterr().err


@needs_nvrtc
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_a_gpu_that_is_not_here_gets_resources_and_occupancy(device):
    found = explain(W, device_spec=device)
    fused = next(c for c in found.candidates if c.implementation == "fused")
    assert fused.unsupported is None
    assert fused.resources is not None
    assert fused.resources.spill_bytes == 0
    (held,) = fused.occupancy
    assert 0 < held.warps_fraction <= 1
    assert held.limiter in ("threads", "blocks", "registers", "shared memory")
    assert found.hard_limit_us > 0
    assert found.records == []


@needs_nvrtc
@pytest.mark.parametrize(
    ("what", "expected"),
    [("source", "__global__"), ("ptx", ".target sm_90a"), ("resources", "spill_bytes = 0")],
)
def test_show_gives_a_kernel_in_full(what, expected):
    assert expected in show(W, what, device_spec="h200")


WEIGHT_GRAD = Workload.parse(
    "conv2d_weight_grad(x=f16[8,64,56,56]@channels_last, grad_output=f16[8,64,56,56]@channels_last,"
    " kernel_size=3, padding=1)"
)


@needs_nvrtc
def test_of_a_gpu_that_is_not_here_the_choice_is_the_best_by_the_models():
    found = explain(WEIGHT_GRAD, device_spec="h200")
    times = [f["predicted_us"] for f in found.forecasts]
    assert times == sorted(times)
    assert {f["implementation"] for f in found.forecasts} >= {found.chosen, SM80.name}
    assert found.chosen == found.forecasts[0]["implementation"] == SM90.name
    assert explain(WEIGHT_GRAD, device_spec="a100").chosen == SM80.name


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "runs", "because"),
    [
        ("scatter(x=f32[900000], dim=0, index=i64[900000], src=f32[900000])",
         "scatter_buckets", "the last of several writes"),
        ("index_add(x=f32[20,64], dim=0, index=i64[50], source=f32[50,64])",
         "rows_dealt", "the same bits in every run"),
        ("scatter(x=f32[50,60]@strides(1,50), dim=0, index=i64[50,60], src=f32[50,60])",
         "scatter_tiled", "of contiguous copies"),
    ],
)  # fmt: skip
def test_of_a_gpu_that_is_not_here_what_keeps_a_promise_untuned_runs(text, runs, because):
    found = explain(Workload.parse(text), device_spec="h200")
    assert (found.chosen, found.source) == (runs, "ordered")
    assert found.reason.startswith("h200 is not measured here; untuned: ")
    assert because in found.reason


def test_of_a_gpu_that_is_not_here_what_stands_in_for_aten_runs_where_nothing_of_ours_does():
    n = 3 * 2**30
    w = Workload.parse(f"scatter(x=f32[{n}], dim=0, index=i64[{n}], src=f32[{n}])")
    found = explain(w, device_spec="h200")
    assert (found.chosen, found.source) == ("scatter_positions", "default")
    assert found.reason == "no own implementation supports it on h200"


@needs_nvrtc
def test_a_row_of_the_model_has_the_expected_time_the_measured_one_and_registers():
    spec = DEVICES["h200"]
    untuned = SM90.heuristic(WEIGHT_GRAD, spec)
    built = SM90.build(untuned, WEIGHT_GRAD, spec)
    config = config_dict(replace(untuned, split_k=2))
    resources = {"registers": 99}
    timed = Record(
        str(WEIGHT_GRAD), WEIGHT_GRAD.op, SM90.name, config, "ok", median_us=12.5,
        resources=resources, device="h200",
    )  # fmt: skip
    found = {str(f["config"]): f for f in _forecasts(SM90, WEIGHT_GRAD, spec, [timed])}
    measured, first = found[str(config)], found[str(config_dict(untuned))]
    assert (measured["measured_us"], measured["registers"], measured["slices"]) == (12.5, 99, 2)
    assert (first["measured_us"], first["registers"]) == (None, built.resources.registers)
    names = ("tile", "waves", "tail", "slices", "workspace_bytes", "predicted_us")
    assert all(name in f for f in found.values() for name in names)


STEM = (
    "conv2d_weight_grad(x=f16[8,3,64,64]@channels_last, "
    "grad_output=f16[8,64,32,32]@channels_last, kernel_size=7, stride=2, padding=3)"
)


def of_groups(n, kernel):
    return (
        "conv2d_weight_grad(x=f16[9,64,14,14]@channels_last, "
        f"grad_output=f16[9,64,14,14]@channels_last, kernel_size={kernel}, "
        f"padding={kernel // 2}, groups={n})"
    )


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("narrow", STEM),
        ("narrow_sm90", STEM),
        ("grouped", of_groups(16, 3)),
        *((f"depthwise{kind}", of_groups(64, 5)) for kind in ("", "_mma", "_sm90", "_fma_sm90")),
    ],
)
def test_the_table_tells_how_kernels_that_walk_rows_are_split(name, text):
    w, spec = Workload.parse(text), DEVICES["h200"]
    impl = IMPLS[f"conv2d_weight_grad_{name}"]
    config = impl.heuristic(w, spec)
    told, kernel = _forecasts(impl, w, spec, [])[0], impl.build(config, w, spec)
    assert (told["slices"], told["tiles"], 1) == kernel.grid
    assert told["workspace_bytes"] == kernel.workspace_bytes
    assert 0 <= told["tail"] < 1
    assert told["waves"] * spec.sms >= told["slices"] * told["tiles"] / 32 > 0
    assert (told["predicted_us"] is not None) == (name == "depthwise_fma_sm90")


@needs_nvrtc
def test_a_register_cap_makes_the_compiler_spill_and_the_estimate_stands_beside():
    wide = Workload.parse("layer_norm(x=f32[64,4096], weight=f32[4096])")
    config = {"row_threads": 64, "moments": "two_pass", "parameters": "reload", "cluster": 1}
    free, capped = (
        dict(
            line.split(" = ")
            for line in show(
                wide, "resources", device_spec="h200", config=config, max_registers=cap
            ).splitlines()
        )
        for cap in (None, 40)
    )
    assert int(capped["registers"]) <= 40 < int(free["registers"])
    assert int(capped["spill_bytes"]) > 0
    assert int(free["estimated_registers"]) == 4096 // 64 + 40


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        (
            "lerp(x=f32[8192,4096], end=f32[4096], weight=0.3)",
            {"vector": 4, "block_threads": 256, "vectors_per_thread": 2},
            ["blocks = 16384, 15.5 waves", "at most 16 warps for each scheduler, 65,536 bytes"],
        ),
        (
            "layer_norm(x=f16[8192,4096], weight=f16[4096], bias=f16[4096])",
            {
                "row_threads": 512,
                "stages": 2,
                "parameters": "registers",
                "min_blocks": 1,
                "rows_per_thread": 1,
                "rematerialize": False,
            },
            ["blocks = 264, persistent", "at most 8 warps for each scheduler, 32,768 bytes"],
        ),
        (
            "layer_norm(x=f16[8192,65536])",
            {
                "row_threads": 512,
                "cluster": 8,
                "stages": 2,
                "min_blocks": 1,
                "moments": "two_pass",
                "rematerialize": False,
            },
            ["blocks = 392, persistent, in clusters of 8", "at most 12 warps for each scheduler, "],
        ),
        (
            "softmax(x=f16[64,1000,49], dim=1)",
            {
                "vector": 1,
                "lanes": 32,
                "shares": 8,
                "turns": 1,
                "unroll": 4,
                "splits": 1,
                "storage": "reread",
            },
            ["blocks = 128, 0.2 waves", "at most 2 warps for each scheduler, 2,048 bytes"],
        ),
    ],
)
def test_the_grid_and_what_a_full_sm_may_choose_from_are_shown(text, config, expected):
    w = Workload.parse(text)
    shown = show(w, "resources", device_spec="h200", implementation="fused", config=config)
    assert all(part in shown for part in expected), shown


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (
            "layer_norm_backward(grad_output=f16[8192,768], x=f16[8192,768], mean=f32[8192,1],"
            " rstd=f32[8192,1], weight=f16[768])",
            ["fused", "finish"],
        ),
        ("softmax(x=f32[4,2000000])", ["fused", *(f"fused{k}" for k in range(1, 5))]),
    ],
)
def test_each_kernel_of_several_has_its_resources_and_the_row_the_most_of_any(text, entries):
    w, fused, spec = Workload.parse(text), IMPLS["fused"], DEVICES["h200"]
    shown = show(w, "resources", device_spec="h200", implementation="fused")
    _, *parts = re.split(r"^launch \d: ", shown, flags=re.M)
    assert [part.split("\n")[0] for part in parts] == entries
    registers = [int(re.search(r"^registers = (\d+)", part, re.M)[1]) for part in parts]
    assert all("limited by" in part for part in parts)
    assert all(re.search(r"^blocks = \d+, ", part, re.M) for part in parts)
    assert all("warps for each scheduler" in part for part in parts)
    assert parts[0].count("bytes of loads") == 1
    assert len(set(registers)) > 1
    assert fused.build(fused.heuristic(w, spec), w, spec).resources.registers == max(registers)
    facts = next(
        c for c in explain(w, device_spec="h200").candidates if c.implementation == "fused"
    )
    assert facts.resources.registers == max(registers)
    assert len(facts.occupancy) == len(entries)


def test_an_environment_variable_shows_what_is_built_for_a_call(monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_SHOW", "schedule, ptx ,wrong,")
    _, spec = current_device("cpu")
    dump_built(IMPLS["fused"], IMPLS["fused"].heuristic(W, spec), W, spec)
    schedule, ptx, wrong = (record.getMessage() for record in caplog.records)
    assert "threads = " in schedule
    assert str(W) in schedule
    assert "is for CUDA kernels" in ptx
    assert "cannot show 'wrong'; use one of source, ptx" in wrong


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_a_call_shows_its_kernel_when_it_is_built_and_not_again(monkeypatch, caplog):
    monkeypatch.setenv("TILEWRIGHT_SHOW", "schedule")
    x = torch.randn(3, 41)
    with tw.use("fused"):
        for _ in range(2):
            tw.softmax(x)
    (shown,) = (record.getMessage() for record in caplog.records)
    assert shown.startswith("schedule of fused on ")
    assert "softmax(x=f32[3,41]" in shown
    assert "threads = " in shown


@needs_nvrtc
def test_a_given_config_is_the_one_shown():
    vectors = {
        show(W, "schedule", device_spec="h200", config={"vector": v}).splitlines()[0]
        for v in (2, 4)
    }
    assert vectors == {"vector = 2", "vector = 4"}


@needs_nvrtc
@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--config", "vector=3"], 2, "vector=3 is not one of"),
        (["--config", "no_such=3"], 2, "unknown knob 'no_such'"),
        (["--impl", "no_such"], 2, "unknown implementation 'no_such'"),
        (["--impl", "aten", "--show", "source"], 2, "generates no source of its own"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_values(args, code, message, capsys):
    assert cli.main(["explain", str(W), "--device-spec", "h200", *args]) == code
    assert message in capsys.readouterr().err


def test_ptx_of_a_cpu_kernel_is_refused_with_a_remedy(capsys):
    assert cli.main(["explain", str(W), "--device", "cpu", "--show", "ptx"]) == 2
    assert "--device-spec h200" in capsys.readouterr().err


def test_what_was_recorded_is_shown_with_decimal_gigabytes_a_second(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    with Store() as store:
        record(store, str(W), "inductor", us=9.877)  # 101376 bytes read, 98304 written
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (heads,) = (line for line in shown if "recorded" in line)
    rows = [line.split() for line in shown if line.strip().startswith(("inductor ", "aten "))]
    assert "GB/s" in heads
    assert [row for row in rows if row[0] == "inductor" and "20" in row[1:]]
    assert [row for row in rows if row[0] == "aten" and "10" in row[1:]]


def test_a_record_that_serves_no_more_is_named_with_its_reason(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    with Store() as store:
        record(store, str(W), "fused", {"lengths": 3})
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure"]) == 0
    shown = capsys.readouterr().out
    assert "fused (lengths=3), is not used: unknown knob 'lengths'" in shown
    (unfit,) = explain(W, "cpu", measure=False).unfit
    assert unfit["config"] == {"lengths": 3}


@pytest.mark.parametrize("told", [{}, {"fought": 3, "disturbed": 5.0}])
def test_it_is_said_of_the_latest_duel_if_it_was_disturbed(capsys, told):
    with Store() as store:
        record(store, str(W), "floor", {"tried": "fused", **told}, status="ceiling", duel="last")
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure"]) == 0
    said = "the latest duel was disturbed: its candidates took 5 times" in capsys.readouterr().out
    assert said == bool(told)


def test_knobs_are_in_the_order_of_their_declaration_in_every_table(capsys):
    spec = current_device("cpu")[1]
    config = config_dict(IMPLS["fused"].heuristic(W, spec))
    alphabetical = dict(sorted(config.items()))
    assert list(alphabetical) != list(config)
    with Store() as store:
        record(store, str(W), "fused", {"a_knob_that_is_gone": 1, **alphabetical})
    (unfit,) = explain(W, "cpu", measure=False).unfit
    assert list(unfit["config"]) == [*config, "a_knob_that_is_gone"]
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure"]) == 0
    shown = ",".join(f"{name}={value}" for name, value in config.items())
    assert capsys.readouterr().out.count(shown) == 3  # candidate, unfit record, recorded row


def test_a_store_that_is_named_decides_what_runs_and_is_left_again(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'others.db'}"
    monkeypatch.setattr(evidence, "_loaded", {})
    with Store(url) as store:
        record(store, str(W), "inductor", us=9.877)
    found = explain(W, "cpu", store_url=url, measure=False)
    assert (found.chosen, found.source) == ("inductor", "record")
    assert found.records
    assert explain(W, "cpu", measure=False).chosen == "aten"


def test_what_is_shown_is_chosen_by_the_store_that_is_named(tmp_path, monkeypatch):
    url, w = f"sqlite:///{tmp_path / 'others.db'}", Workload.parse("softmax(x=f32[8,16])")
    spec = current_device("cpu")[1]
    monkeypatch.setattr(evidence, "_loaded", {})
    untuned = IMPLS["fused"].heuristic(w, spec)
    winner = replace(untuned, split_rows=not untuned.split_rows)
    with Store(url) as store:
        record(store, str(w), "fused", config_dict(winner), us=0.5)
    assert f"split_rows = {winner.split_rows}" in show(w, "schedule", "cpu", store_url=url)
    assert f"split_rows = {untuned.split_rows}" in show(w, "schedule", "cpu")


def test_a_cache_that_cannot_be_written_is_named_by_what_needs_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = explain(Workload.parse("softmax(x=f32[9,17])"), "cpu", measure=False)
    reasons = {c.implementation: c.unsupported for c in found.candidates}
    assert "set TILEWRIGHT_CACHE_DIR to a folder that can be written" in reasons["fused"]
    assert reasons["aten"] is None


@needs_nvrtc
def test_a_row_that_nothing_holds_is_on_its_way_in_part():
    """Where it is read again, `unroll` vectors of each thread are; copied, all of it is."""
    w = Workload.parse("softmax(x=bf16[3,200000])")
    config = {"row_threads": 1024, "rows_per_block": 1, "vector": 8, "min_blocks": 1, "unroll": 2}
    told = show(w, "resources", device_spec="a100", config={**config, "storage": "reread"})
    assert f" {2 * 1024 * 16:,} bytes of loads" in told
    w = Workload.parse("softmax(x=bf16[300,65536])")
    told = show(w, "resources", device_spec="a100", config={**config, "storage": "shared"})
    assert f" {65536 * 2:,} bytes of loads" in told


def test_a_config_given_in_part_is_completed_alike_wherever_it_is_given():
    w, spec = Workload.parse("softmax(x=f32[8,16])"), current_device("cpu")[1]
    config = replace(IMPLS["fused"].heuristic(w, spec), split_rows=True)
    assert config != IMPLS["fused"].space(w, spec).config({"split_rows": True})
    found = explain(w, "cpu", implementation="fused", config={"split_rows": True}, measure=False)
    assert next(c.config for c in found.candidates if c.implementation == "fused") == config_dict(
        config
    )
    assert choose(w, "cpu", Forced("fused", (("split_rows", True),))).config == config
    with InProcess("cpu") as runner:
        ((_, verified, _),) = verify_all(w, "fused", {"split_rows": True}, runner=runner)
    assert verified == config_dict(config)


def test_json_holds_what_the_tables_show(capsys):
    assert cli.main(["explain", str(W), "--device", "cpu", "--no-measure", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["workload"] == str(W)
    assert {c["implementation"] for c in content["candidates"]} >= {"aten", "inductor", "fused"}
