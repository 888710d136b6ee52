"""Selection: which records speak for which calls, and tw.use, which overrules them."""

import re
import sqlite3
import warnings

import pytest
import torch
from dispatching import CPU, SOFTMAX, assert_softmaxes, chosen, record

import tilewright as tw
from tilewright.dispatch import evidence, selection

# --- selection -----------------------------------------------------------------------------------


def test_a_call_goes_by_the_record_without_a_distribution_then_by_the_most_common_one(store):
    text = "index_add(x=f32[50,8], dim=0, index=i64[90], source=f32[90,8])"
    for us, spread in enumerate(("constant", "zipf", "uniform"), 5):
        record(store, f"{text}!indices={spread}", "index_add_scatter_add", {}, us=us)
        assert f"took {us}.0 us" in chosen(text).reason
    record(store, f"{text}!indices=sorted", "index_add_scatter_add", {}, us=8.0)
    assert "took 7.0 us" in chosen(text).reason
    record(store, text, "index_add_index_put", {}, us=9.0)
    assert chosen(text).implementation == "index_add_index_put"


def test_without_evidence_the_vendor_runs(store):
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.source) == ("aten", "default")
    assert "no record" in choice.reason


def test_the_record_of_a_workload_decides_with_its_config(store, probe):
    record(store, SOFTMAX)
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.config, choice.source) == (
        "probe",
        probe.Config(width=2),
        "record",
    )
    assert "10.0 us" in choice.reason


def test_a_record_that_the_vendor_won_keeps_the_vendor(store, probe):
    record(store, SOFTMAX, us=30.0)
    assert (chosen(SOFTMAX).implementation, chosen(SOFTMAX).source) == ("aten", "record")


@pytest.mark.parametrize(
    "status", ["ceiling", "host", "tied", "slower", "spilled", "invalid", "wrong_result", "timeout"]
)
def test_a_record_that_is_no_measurement_of_a_winner_is_no_evidence(store, probe, status):
    for rows in range(4, 9):  # as many as the heuristic needs
        record(store, f"softmax(x=f32[{rows},16])", status=status)
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.source) == ("aten", "default")


def test_a_record_from_another_device_says_nothing(store, probe):
    record(store, SOFTMAX, device="NVIDIA Abacus, 1 SMs, 1 GiB")
    assert chosen(SOFTMAX).source == "default"


@pytest.mark.parametrize(
    "versions", [{"torch": "1.0"}, {"torch": torch.__version__, "compiler": "g++ 1.0"}]
)
def test_a_record_from_other_versions_is_a_prior_and_says_so(store, probe, versions):
    record(store, SOFTMAX, versions=versions)
    assert chosen(SOFTMAX).source == "record"
    assert "other versions" in chosen(SOFTMAX).reason


def test_without_records_no_compiler_is_started_for_its_version(store, monkeypatch):
    monkeypatch.setattr(evidence, "environment", None)
    assert chosen(SOFTMAX).source == "default"


@pytest.mark.parametrize(
    ("implementation", "config", "why"),
    [
        ("forgotten", {}, "no implementation is called forgotten now"),
        ("probe", {"height": 3}, "unknown knob 'height'"),
        ("probe", {"width": 3}, "width=3 is not one of"),
    ],
    ids=["implementation gone", "knob gone", "value gone"],
)
def test_a_record_whose_code_is_gone_is_skipped(store, probe, implementation, config, why):
    w = record(store, SOFTMAX, implementation, config)
    assert chosen(SOFTMAX).source == "default"
    ((unfit, reason),) = selection.unfit_records(w, CPU)
    assert (unfit.implementation, unfit.config) == (implementation, config)
    assert why in reason


def test_a_record_that_serves_is_not_unfit(store, probe):
    assert list(selection.unfit_records(record(store, SOFTMAX), CPU)) == []


@pytest.mark.parametrize("text", ["{bad", "[1]"])
@pytest.mark.parametrize("field", ["config", "versions", "device_info"])
def test_damaged_rows_are_skipped_with_one_warning_and_others_stand(store, probe, field, text):
    others = "softmax(x=f32[8,16000])"
    for workload in (SOFTMAX, "softmax(x=f32[8,17])", others):
        record(store, workload)
    with sqlite3.connect(store.path) as connection:
        damage = f"UPDATE records SET {field} = ? WHERE workload != ?"
        connection.execute(damage, (text, others))
    with pytest.warns(RuntimeWarning, match=r"a record is not used: the row \w+") as told:
        assert (chosen(SOFTMAX).source, chosen(others).source) == ("default", "record")
    assert len(told) == 1
    assert re.search(rf"is damaged: {field}=\S+ should be dict; delete it", str(told[0].message))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("median_us", "soon"), ("workload", b"\xff"), ("op", b"\xff"), ("created", b"\xff")),
        *(("versions", b"\xff"), ("message", b"\xff"), ("samples", "many"), ("runtime", b"\xff")),
        *(("resources", 3.5), ("config", "[" * 200_000)),
    ],
)
def test_so_are_rows_with_a_value_of_another_type(store, probe, column, value):
    others = "softmax(x=f32[8,16000])"
    for workload in (SOFTMAX, others):
        record(store, workload)
    with sqlite3.connect(store.path) as connection:
        damage = f"UPDATE records SET {column} = ? WHERE workload != ?"
        connection.execute(damage, (value, others))
    with warnings.catch_warnings(record=True) as told:
        assert (chosen(SOFTMAX).source, chosen(others).source) == ("default", "record")
    problem = re.escape(f"{column}={repr(value)[:80]} should be ")
    assert [bool(re.search(problem, str(t.message))) for t in told] == [True] * (column != "op")


def test_a_record_that_the_implementation_now_refuses_is_skipped(store, probe):
    record(store, SOFTMAX)
    probe.refusal = "not today"
    assert chosen(SOFTMAX).source == "default"


def test_a_record_of_what_is_only_compared_with_is_skipped(store, probe, monkeypatch):
    record(store, SOFTMAX)
    assert chosen(SOFTMAX).source == "record"
    monkeypatch.setattr(probe, "only_compared", lambda w: "a yardstick", raising=False)
    assert chosen(SOFTMAX).source == "default"


def test_what_compilers_make_of_an_update_is_only_compared_with(store):
    updates, sums = (
        f"{name}(x=f32[40], dim=0, index=i64[90], src=f32[90])"
        for name in ("scatter", "scatter_add")
    )
    for workload in (updates, sums):
        record(store, workload, "inductor")
    assert chosen(sums).implementation == "inductor"
    assert chosen(updates).implementation == "aten"  # whose last write wins on a CPU


@pytest.mark.parametrize(
    "near", ["softmax(x=f32[4,16])", "softmax(x=f32[8,12])", "softmax(x=f32[2,8,16])"]
)
def test_the_nearest_workload_lends_its_config(store, probe, near):
    record(store, SOFTMAX)
    record(store, "softmax(x=f32[16,31])", config={"width": 4})
    choice = chosen(near)
    assert (choice.implementation, choice.source) == ("probe", "nearest")
    assert choice.config == probe.Config(width=2)
    assert SOFTMAX in choice.reason


@pytest.mark.parametrize(
    "far",
    [
        "softmax(x=f32[8,40])",
        "softmax(x=f32[64,16])",
        "softmax(x=f16[8,16])",
        "softmax(x=f32[8,16], dim=-2)",
        "softmax(x=f32[8,16]@align4)",
        "softmax(x=f32[8,16]@strides(32,1))",
    ],
)
def test_a_workload_of_another_bucket_says_nothing(store, probe, far):
    record(store, SOFTMAX)
    assert chosen(far).source == "default"


def test_a_nearest_config_that_does_not_fit_is_passed_over(store, probe):
    record(store, SOFTMAX)
    record(store, "softmax(x=f32[8,24])", config={"width": 4})
    probe.widths = (1, 4)
    assert chosen("softmax(x=f32[8,17])").config == probe.Config(width=4)


def test_the_heuristic_runs_where_it_won_everywhere(store, probe):
    for n in (16, 256, 4096):
        assert chosen("softmax(x=f32[1000,50257])").source == "default"
        record(store, f"softmax(x=f32[8,{n}])")
    choice = chosen("softmax(x=f32[1000,50257])")
    assert (choice.implementation, choice.config, choice.source) == (
        "probe",
        probe.Config(width=1),
        "heuristic",
    )
    assert chosen("softmax(x=f32[1000,50257]@strides(60000,1))").source == "default"
    record(store, "softmax(x=f32[8,65536])", us=30.0)
    assert chosen("softmax(x=f32[1000,50257])").source == "default"


@pytest.mark.parametrize("takes_scalars", [True, False])
def test_another_number_is_the_same_workload_to_kernels_that_take_it(store, probe, takes_scalars):
    probe.takes_scalars = takes_scalars
    record(store, "lerp(x=f32[64], end=f32[64], weight=0.25)")
    choice = chosen("lerp(x=f32[64], end=f32[64], weight=0.75)")
    expected = ("probe", "record") if takes_scalars else ("aten", "default")
    assert (choice.implementation, choice.source) == expected


def test_an_empty_workload_runs_on_the_vendor(store, probe):
    record(store, "softmax(x=f32[0,16])")
    assert chosen("softmax(x=f32[0,16])").implementation == "aten"
    with tw.use("probe"):
        assert tw.softmax(torch.empty(0, 16)).shape == (0, 16)
    assert probe.runs == 0


def test_an_unreadable_store_warns_once_and_the_vendor_runs(tmp_path, monkeypatch):
    bad = tmp_path / "records.db"
    bad.write_bytes(b"this is not a database" * 100)
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{bad}")
    tw.reload_records()
    x = torch.randn(8, 16)
    with pytest.warns(RuntimeWarning, match="not a database") as caught:
        assert_softmaxes(x, x[:4])
    assert len(caught) == 1
    monkeypatch.undo()
    tw.reload_records()


# --- use -----------------------------------------------------------------------------------------


def test_use_wins_over_records(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    with tw.use("aten"):
        tw.softmax(x)
    assert probe.runs == 0
    tw.softmax(x)
    assert probe.runs == 1


def test_use_takes_a_config_and_ends_with_its_block(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", {"width": 4}):
        tw.softmax(x)
    assert probe.built_with == probe.Config(width=4)
    tw.softmax(x)
    assert probe.runs == 1


def test_use_without_a_config_takes_the_recorded_one_then_the_heuristics(store, probe):
    record(store, SOFTMAX)
    with tw.use("probe"):
        tw.softmax(torch.randn(8, 16))
        assert probe.built_with == probe.Config(width=2)
        tw.softmax(torch.randn(8, 99))
        assert probe.built_with == probe.Config(width=1)


def test_use_for_one_operator_leaves_the_others(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", op="softmax"):
        tw.rms_norm(x)
        assert probe.runs == 0
        tw.softmax(x)
        assert probe.runs == 1
        with tw.use("aten"):
            tw.softmax(x)
        assert probe.runs == 1


def test_use_of_an_unknown_name_is_refused_at_once():
    with pytest.raises(tw.InvalidArgument, match="unknown implementation 'fuzed'"), tw.use("fuzed"):
        pass
    with pytest.raises(tw.InvalidArgument, match="unknown operator"), tw.use("aten", op="sofmax"):
        pass


def test_use_of_an_implementation_that_refuses_says_why(store, probe):
    probe.refusal = "rows are too odd"
    with tw.use("probe"), pytest.raises(tw.NoImplementation, match="rows are too odd"):
        tw.softmax(torch.randn(8, 16))


def test_use_of_a_config_that_does_not_fit_says_why(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", {"width": 3}), pytest.raises(tw.InvalidArgument, match="width=3"):
        tw.softmax(x)
    with tw.use("probe", {"depth": 3}), pytest.raises(tw.InvalidArgument, match="'depth'"):
        tw.softmax(x)


def test_a_forced_build_that_fails_is_an_error(store, probe):
    probe.build_error = "syntax"
    with tw.use("probe"), pytest.raises(tw.CompileError, match="syntax"):
        tw.softmax(torch.randn(8, 16))
