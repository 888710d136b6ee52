"""The record store: which record wins, what is deleted, and files of records."""

import dataclasses
import json
import math

import pytest
from recorded import BEFORE, DEVICE, NOW, SOFTMAX, by_id, duel, many, record

from tilewright.errors import InvalidArgument, StoreError
from tilewright.record import FIELDS, utc_text
from tilewright.store import Record, Store

CPU = "AMD EPYC, AVX512, 2 threads"


@pytest.fixture
def store(tmp_path):
    with Store(f"sqlite:///{tmp_path}/records.db") as store:
        yield store


# --- which record wins --------------------------------------------------------------------------


def test_a_record_comes_back_as_it_went_in(store):
    full = record(
        ci_low_us=9.5,
        ci_high_us=10.5,
        samples=31,
        resources={"registers": 64, "spill_bytes": 0},
        workspace_bytes=2**40,
        max_ulp=0.5000000000000001,
        bound_ulp=4.0,
        deterministic=True,
        message="a\nb — ü",
        code_hash="ab" * 32,
        device_info={"name": "NVIDIA H200", "sms": 132},
        distribution="zipf",
        method="graph",
        cold=False,
        final=True,
        duel="d1",
    )
    bare = Record(SOFTMAX, "softmax", "aten", {}, "unsupported", DEVICE)
    store.add([full, bare])
    assert by_id(store.query()) == by_id([full, bare])


def test_the_fastest_ok_row_of_a_duel_wins(store):
    store.add(duel("d", {"aten": 12.0, "fused": 10.0, "inductor": 11.0}))
    assert store.best(SOFTMAX, DEVICE, NOW).implementation == "fused"


@pytest.mark.parametrize("status", ["wrong_result", "slower", "timeout", "spilled"])
def test_a_row_that_is_not_ok_never_wins(store, status):
    store.add([*duel("d", {"aten": 12.0}), *duel("d", {"fused": 1.0}, status=status)])
    assert store.best(SOFTMAX, DEVICE, NOW).implementation == "aten"


def test_times_outside_a_duel_never_win(store):
    store.add(many(3))
    assert store.best(SOFTMAX, DEVICE, NOW) is None
    assert not store.load_device(DEVICE, NOW)
    assert not store.has_duels(DEVICE)


def test_the_latest_duel_decides_whatever_earlier_ones_measured(store):
    store.add(duel("new", {"aten": 20.0, "fused": 30.0}, hour=2))
    store.add(duel("old", {"fused": 10.0, "aten": 11.0}, hour=1))
    best = store.best(SOFTMAX, DEVICE, NOW)
    assert (best.implementation, best.median_us, best.prior) == ("aten", 20.0, False)


def test_a_duel_in_which_nothing_was_ok_decides_nothing(store):
    store.add(duel("old", {"fused": 10.0}, hour=1))
    store.add(duel("new", {"fused": 9.0}, hour=2, status="wrong_result"))
    assert store.best(SOFTMAX, DEVICE, NOW).duel == "old"


def test_a_duel_under_other_versions_is_a_prior_behind_every_exact_one(store):
    store.add(duel("other driver", {"fused": 1.0}, hour=5, versions=BEFORE))
    assert store.best(SOFTMAX, DEVICE, NOW).prior
    store.add(duel("this driver", {"aten": 10.0}, hour=1))
    best = store.best(SOFTMAX, DEVICE, NOW)
    assert (best.implementation, best.prior) == ("aten", False)


@pytest.mark.parametrize("name", ["torch", "cuda", "driver"])
def test_each_of_torch_cuda_and_driver_makes_a_prior(store, name):
    store.add(duel("d", {"fused": 1.0}))
    assert store.best(SOFTMAX, DEVICE, {**NOW, name: "other"}).prior
    assert not store.best(SOFTMAX, DEVICE, {**NOW, "tilewright": "other"}).prior


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvrtc", "13.1"),
        ("nvcc", "13.0.88"),
        ("triton", "3.6.0"),
        ("compiler", "g++ (Debian 14.2.0-19) 14.2.0"),
        ("quack-kernels", "0.6.6"),
    ],
)
def test_another_compiler_makes_a_prior_and_one_that_is_not_known_does_not(store, name, version):
    other = "g++ (Debian 12.2.0-14) 12.2.0"
    store.add(duel("d", {"fused": 1.0}, versions={**NOW, name: version}))
    store.add(duel("e", {"aten": 1.0}, 1, versions={**NOW, name: other}))
    best = store.best(SOFTMAX, DEVICE, {**NOW, name: version})
    assert (best.duel, best.prior) == ("d", False)
    assert store.best(SOFTMAX, DEVICE, {**NOW, name: "later"}).prior
    without = {**NOW, name: None}
    assert [r.duel for r in store.query(versions=without)] == ["e", "d"]
    assert [r.duel for r in store.query(versions={**NOW, name: version}, limit=1)] == ["d"]
    assert store.prune(other_versions_than=without, device=DEVICE) == 0
    assert store.prune(other_versions_than={**NOW, name: version}, device=DEVICE) == 1


def test_a_record_from_before_compilers_were_told_stands(store):
    before = {name: NOW[name] for name in ("torch", "cuda", "driver")}
    store.add(duel("d", {"fused": 1.0}, versions=before))
    assert not store.best(SOFTMAX, DEVICE, NOW).prior


def test_another_device_counts_for_nothing(store):
    store.add(duel("d", {"fused": 1.0}))
    assert store.best(SOFTMAX, CPU, NOW) is None


def test_functions_of_one_name_have_winners_of_their_own(store):
    one, other = ({**NOW, "program": name} for name in ("one", "other"))
    store.add(duel("first", {"fused": 1.0}, 1, versions=one))
    store.add(duel("second", {"aten": 2.0}, 2, versions=other))
    winners = {program: r.duel for (*_, program), r in store.load_device(DEVICE, NOW).items()}
    assert winners == {"one": "first", "other": "second"}
    for program, won in winners.items():
        assert store.best(SOFTMAX, DEVICE, NOW, program).duel == won
    assert store.best(SOFTMAX, DEVICE, NOW) is None


def test_adding_configs_leaves_what_was_measured_in_place(store):
    store.add(duel("d", {"fused": 1.0}))
    store.add(many(50, config={"threads": 512}))
    store.add([record(status="compile_error", median_us=None)])
    assert store.best(SOFTMAX, DEVICE, NOW).duel == "d"
    assert len(store.query()) == 52


def test_equal_medians_are_decided_alike_in_any_order(tmp_path):
    rows = duel("d", {"fused": 1.0, "aten": 1.0, "inductor": 1.0})
    winners = []
    for i, order in enumerate((rows, rows[::-1])):
        with Store(f"sqlite:///{tmp_path}/{i}.db") as store:
            store.add(order)
            winners.append(store.best(SOFTMAX, DEVICE, NOW).implementation)
    assert winners[0] == winners[1]


def test_load_device_holds_exactly_what_best_says(store):
    for i in range(20):
        versions = BEFORE if i % 3 == 0 else NOW
        workload = f"softmax(x=f16[8,{i}])"
        times = {"aten": 10.0 + i, "fused": 20.0 - i}
        store.add(duel(f"d{i}", times, versions=versions, workload=workload))
    loaded = store.load_device(DEVICE, NOW)
    assert len(loaded) == 20
    for (op, workload, program), winner in loaded.items():
        best = store.best(workload, DEVICE, NOW)
        assert (op, program, repr(winner)) == ("softmax", "", repr(best))
    assert sum(winner.prior for winner in loaded.values()) == 7


def test_query_filters_by_any_field(store):
    store.add([*duel("d", {"fused": 1.0}), *many(3, versions=BEFORE), record("aten", config={})])
    assert len(store.query(final=True)) == 1
    assert len(store.query(duel=None)) == 4
    assert len(store.query(versions=BEFORE)) == 3
    assert len(store.query(config={"threads": 128}, implementation="fused")) == 4
    assert len(store.query(limit=2)) == 2
    assert [r.duel for r in store.query(since="2026-11-20")][-1] == "d"
    with pytest.raises(InvalidArgument, match="records have no 'colour'; known: workload, op"):
        store.query(colour="red")


def test_numbers_that_are_not_finite_are_kept_as_none():
    strange = record(median_us=math.inf, max_ulp=math.nan)
    assert (strange.median_us, strange.max_ulp) == (None, None)


# --- deleting -----------------------------------------------------------------------------------


def test_prune_before_a_date_keeps_the_later_rows(store):
    store.add([record(created=f"2026-{m:02}-01T00:00:00.000000+00:00") for m in range(1, 7)])
    assert store.prune(before="2026-03-01") == 2
    assert len(store.query()) == 4


def test_prune_of_other_versions_keeps_these_and_other_devices(store):
    store.add([*many(3), *many(2, versions=BEFORE)])
    here = {"torch": NOW["torch"], "compiler": "g++ 14"}
    store.add([record(device=CPU, versions=here), record(device=CPU, versions=BEFORE)])
    assert store.prune(other_versions_than=NOW, device=DEVICE) == 2
    assert {r.versions["driver"] for r in store.query(device=DEVICE)} == {NOW["driver"]}
    assert len(store.query(device=CPU)) == 2
    assert store.prune(other_versions_than=here, device=CPU) == 1
    assert len(store.query(device=DEVICE)) == 3


def test_a_device_is_a_condition_beside_others(store):
    store.add([*many(3), record(device=CPU)])
    assert store.prune(before="2100-01-01", device=CPU) == 1
    assert {r.device for r in store.query()} == {DEVICE}


def test_prune_of_superseded_rows_keeps_winners_and_the_newest_of_each_candidate(store):
    for hour in range(4):
        store.add(duel(f"d{hour}", {"aten": 12.0, "fused": 10.0 + hour}, hour))
        store.add(duel(f"b{hour}", {"aten": 12.0, "fused": 10.0 + hour}, hour, versions=BEFORE))
    before = [repr(store.best(SOFTMAX, DEVICE, v)) for v in (NOW, BEFORE)]
    assert store.prune(superseded=True) == 12
    assert [repr(store.best(SOFTMAX, DEVICE, v)) for v in (NOW, BEFORE)] == before
    assert len(store.query()) == 4


def test_prune_of_superseded_rows_tells_functions_of_one_name_apart(store):
    for hour in range(2):
        for program in ("one", "other"):
            versions = {**NOW, "program": program}
            store.add(
                duel(f"{program}{hour}", {"aten": 12.0, "fused": 10.0}, hour, versions=versions)
            )
    assert store.prune(superseded=True) == 4
    assert {r.duel for r in store.query()} == {"one1", "other1"}


def test_prune_needs_to_be_told_what(store):
    for asked in ({}, {"device": DEVICE}):
        with pytest.raises(InvalidArgument, match="say what to delete"):
            store.prune(**asked)
    with pytest.raises(InvalidArgument, match="name the device that has these versions"):
        store.prune(other_versions_than=NOW)


@pytest.mark.parametrize("moment", ["yesterday", "2026-13-01", ""])
def test_a_malformed_date_is_named(store, moment):
    with pytest.raises(InvalidArgument, match="is not a date or time such as 2026-11-20"):
        store.prune(before=moment)


def test_times_compare_as_text_whatever_their_zone():
    assert utc_text("2026-11-20T01:00:00+02:00") == "2026-11-19T23:00:00.000000+00:00"
    assert utc_text("2026-11-20") == "2026-11-20T00:00:00.000000+00:00"


# --- files --------------------------------------------------------------------------------------


def test_export_and_import_carry_everything_and_twice_is_once(store, tmp_path):
    store.add([*many(5), *duel("d", {"fused": 1.0}), record(config={"a": True, "b": "x"})])
    file = tmp_path / "records.jsonl"
    assert store.export(file) == 7
    with Store(f"sqlite:///{tmp_path}/other.db") as other:
        assert other.import_(file) == 7
        assert other.import_(file) == 0
        assert by_id(other.query()) == by_id(store.query())


def test_export_takes_the_filters_of_query(store, tmp_path):
    store.add([*many(5), *duel("d", {"fused": 1.0})])
    assert store.export(tmp_path / "finals.jsonl", final=True) == 1


def test_an_export_that_fails_leaves_no_half_file(store, tmp_path):
    store.add(many(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*file/records.jsonl: File exists"):
        store.export(tmp_path / "file" / "records.jsonl")
    assert [p for p in tmp_path.rglob("*") if "jsonl" in p.name] == []


def line(**changes):
    whole = {name: getattr(record(), name) for name in FIELDS}
    return json.dumps({k: v for k, v in {**whole, **changes}.items() if v is not ...})


HEADER = '{"tilewright_records":1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: expected the header"),
        ("PK\x03\x04", ":1: expected the header"),
        ('{\n "rows": []\n}', "is this a file of `tilewright records export`?"),
        ('{"rows": []}', ":1: expected the header"),
        ('{"tilewright_records": 99}', "schema 99, but this tilewright reads up to 1: update"),
        (f'{HEADER}\n{{"op": ', ":2: not JSON"),
        pytest.param(f"{HEADER}\n{'[' * 200_000}", ":2: not JSON", id="a deep record"),
        pytest.param("[" * 200_000, ":1: expected the header", id="a deep header"),
        (f"{HEADER}\n[1]", ":2: expected a record"),
        (f"{HEADER}\n{line()}\n{line(op=...)}", ":3: the record has no 'op'"),
        (f"{HEADER}\n{line(colour=1)}", ":2: unknown field 'colour'; known: workload"),
        (f"{HEADER}\n{line(median_us='fast')}", "median_us='fast' should be float or NoneType"),
        (f"{HEADER}\n{line(samples=True)}", "samples=True should be int"),
        (f"{HEADER}\n{line(config=None)}", "config=None should be dict"),
        (f"{HEADER}\n{line(created='soon')}", ":2: 'soon' is not a date"),
        (f"{HEADER}\n{line(created='0001-01-01T00:00:00+14:00')}", "+14:00' is not a date"),
        (f"{HEADER}\n{line(created='2999-01-01')}", "is still to come"),
        (f"{HEADER}\n{line(status='good')}", ":2: unknown status 'good'; known: ok, tied"),
        (f"{HEADER}\n{line(config={'rows': [1]})}", "config: rows=[1] should be one value"),
        (f"{HEADER}\n{line(median_us=-1.0)}", "median_us=-1.0 should be 0 or more"),
        (f"{HEADER}\n{line(samples=10**30)}", "and less than 2^63"),
        (f"{HEADER}\n{line(message=chr(0xD800))}", "half of a character"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_its_line_and_changes_nothing(
    store, tmp_path, text, message
):
    file = tmp_path / "records.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        store.import_(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert store.query() == []


def test_importing_a_missing_or_binary_file_is_an_invalid_argument(store, tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot read records from .*none\.jsonl"):
        store.import_(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"cannot read records from .*binary"):
        store.import_(tmp_path / "binary")


def test_two_records_differ_by_content_alone():
    one = record(created="2026-11-20T00:00:00.000000+00:00")
    assert one.id == dataclasses.replace(one).id
    assert one.id == dataclasses.replace(one, prior=True).id
    for name, value in [("median_us", 10.5), ("versions", BEFORE), ("distribution", "zipf")]:
        assert dataclasses.replace(one, **{name: value}).id != one.id
