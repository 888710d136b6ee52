"""The record store: which record wins, that nothing is lost, and what each fault says."""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import sqlite3
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from tilewright import database
from tilewright.errors import InvalidArgument, StoreError
from tilewright.record import FIELDS, SCHEMA, append_lines, read_lines, utc_text
from tilewright.store import Record, Store

DEVICE = "NVIDIA H200, 132 SMs, 140 GiB"
NOW = {"torch": "2.11.0", "cuda": "13.0", "driver": "580.95.05", "nvrtc": "13.0"}
BEFORE = {**NOW, "driver": "570.10.01"}
SOFTMAX = "softmax(x=f16[8,768])"


def record(implementation="fused", median_us=10.0, **given):
    defaults = {
        "workload": SOFTMAX,
        "op": "softmax",
        "config": {"threads": 128},
        "status": "ok",
        "device": DEVICE,
        "versions": NOW,
    }
    return Record(implementation=implementation, median_us=median_us, **{**defaults, **given})


def duel(name, times, hour=0, **given):
    return [
        record(
            implementation,
            median_us,
            final=True,
            duel=name,
            created=f"2026-11-20T{hour:02}:00:00.000000+00:00",
            **given,
        )
        for implementation, median_us in times.items()
    ]


def many(count, **given):
    return [record(median_us=float(i), **given) for i in range(1, count + 1)]


def by_id(records):
    return {r.id: r for r in records}


@pytest.fixture
def store(tmp_path):
    with Store(f"sqlite:///{tmp_path}/records.db") as store:
        yield store


@pytest.fixture
def open_folder():
    """A folder that another user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextlib.contextmanager
def unprivileged():
    """Root may write anywhere, so it steps down to see what others see."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


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


def test_another_device_counts_for_nothing(store):
    store.add(duel("d", {"fused": 1.0}))
    assert store.best(SOFTMAX, "AMD EPYC, AVX512, 2 threads", NOW) is None


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
    for (op, workload), winner in loaded.items():
        best = store.best(workload, DEVICE, NOW)
        assert (op, repr(winner)) == ("softmax", repr(best))
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


def test_prune_of_other_versions_keeps_these(store):
    store.add([*many(3), *many(2, versions=BEFORE)])
    assert store.prune(other_versions_than=NOW) == 2
    assert {r.versions["driver"] for r in store.query()} == {NOW["driver"]}


def test_prune_of_superseded_rows_keeps_winners_and_the_newest_of_each_candidate(store):
    for hour in range(4):
        store.add(duel(f"d{hour}", {"aten": 12.0, "fused": 10.0 + hour}, hour))
        store.add(duel(f"b{hour}", {"aten": 12.0, "fused": 10.0 + hour}, hour, versions=BEFORE))
    before = [repr(store.best(SOFTMAX, DEVICE, v)) for v in (NOW, BEFORE)]
    assert store.prune(superseded=True) == 12
    assert [repr(store.best(SOFTMAX, DEVICE, v)) for v in (NOW, BEFORE)] == before
    assert len(store.query()) == 4


def test_prune_needs_to_be_told_what(store):
    with pytest.raises(InvalidArgument, match="say what to delete"):
        store.prune()


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
    with pytest.raises(StoreError, match=r"cannot write .*missing/records.jsonl: No such file"):
        store.export(tmp_path / "missing" / "records.jsonl")
    assert [p for p in tmp_path.rglob("*") if "jsonl" in p.name] == []


def line(**changes):
    whole = {name: getattr(record(), name) for name in FIELDS}
    return json.dumps({k: v for k, v in {**whole, **changes}.items() if v is not ...})


HEADER = '{"tilewright_records":1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: not JSON"),
        ("PK\x03\x04", ":1: not JSON"),
        ('{"rows": []}', ":1: expected the header"),
        ('{"tilewright_records": 99}', "schema 99, but this tilewright reads up to 1: update"),
        (f'{HEADER}\n{{"op": ', ":2: not JSON"),
        (f"{HEADER}\n[1]", ":2: expected a record"),
        (f"{HEADER}\n{line()}\n{line(op=...)}", ":3: the record has no 'op'"),
        (f"{HEADER}\n{line(colour=1)}", ":2: unknown field 'colour'; known: workload"),
        (f"{HEADER}\n{line(median_us='fast')}", "median_us='fast' should be float or NoneType"),
        (f"{HEADER}\n{line(samples=True)}", "samples=True should be int"),
        (f"{HEADER}\n{line(config=None)}", "config=None should be dict"),
        (f"{HEADER}\n{line(created='soon')}", "'soon' is not a date"),
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
    assert str(file) in str(caught.value) or "soon" in message
    assert store.query() == []


def test_importing_a_missing_or_binary_file_is_an_invalid_argument(store, tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot read records from .*none\.jsonl"):
        store.import_(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"cannot read records from .*binary"):
        store.import_(tmp_path / "binary")


# --- faults -------------------------------------------------------------------------------------


def aside(error) -> Path:
    """The file that the message names."""
    return Path(str(error.value).rsplit("tilewright records import ", 1)[1])


def test_reading_a_store_that_is_not_there_finds_nothing_and_makes_nothing(tmp_path):
    with Store(f"sqlite:///{tmp_path}/a/b/records.db") as store:
        assert store.query() == []
        assert store.best(SOFTMAX, DEVICE, NOW) is None
        assert store.prune(superseded=True) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_first_record_makes_the_folder_and_the_file_in_write_ahead_mode(tmp_path):
    with Store(f"sqlite:///{tmp_path}/a/b/records.db") as store:
        assert store.add(many(1)) == 1
    with sqlite3.connect(tmp_path / "a/b/records.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_default_url_is_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path}/mine.db")
    with Store() as store:
        assert store.path == tmp_path / "mine.db"


def test_a_store_in_memory_works():
    with Store("sqlite://") as store:
        store.add(many(3))
        assert len(store.query()) == 3


@pytest.mark.parametrize("url", ["records.db", "oracle9://x", "postgresql+nodriver://host/db"])
def test_a_url_that_is_none_is_refused_with_an_example(url):
    with pytest.raises(StoreError, match="expected a SQLAlchemy URL such as sqlite:////tmp"):
        Store(url)


@pytest.mark.parametrize("scheme", ["sqlite", "postgresql+psycopg", "nonsense"])
def test_a_password_is_never_shown(scheme):
    with pytest.raises(StoreError) as caught:
        Store(f"{scheme}://user:secret@localhost:1/records").query()
    assert "secret" not in str(caught.value)
    assert "localhost" in str(caught.value)


def test_a_file_that_is_no_database_is_named_left_alone_and_the_records_kept(tmp_path):
    path = tmp_path / "records.db"
    path.write_bytes(b"these are not records at all" * 100)
    with Store(f"sqlite:///{path}") as store:
        with pytest.raises(StoreError, match=r"records\.db: file is not a database; move"):
            store.best(SOFTMAX, DEVICE, NOW)
        with pytest.raises(StoreError, match="TILEWRIGHT_STORE") as caught:
            store.add(many(2))
        with pytest.raises(StoreError):
            store.add(many(3, op="other"))
    assert path.read_bytes().startswith(b"these are not records")
    assert aside(caught).parent == tmp_path
    with Store(f"sqlite:///{tmp_path}/new.db") as fresh:
        assert fresh.import_(aside(caught)) == 5


def test_a_damaged_database_is_reported_not_read_half(tmp_path):
    path = tmp_path / "records.db"
    with Store(f"sqlite:///{path}") as store:
        store.add(many(300))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 8192))
    with Store(f"sqlite:///{path}") as store, pytest.raises(StoreError, match="malformed; move"):
        store.query()


def test_a_store_of_a_newer_tilewright_is_refused_not_changed(store):
    store.add(many(1))
    with store._engine.begin() as connection:
        connection.execute(sa.update(database.SCHEMA_TABLE).values(version=SCHEMA + 1))
    with Store(str(store.url)) as again:
        with pytest.raises(StoreError, match="schema 2, but this tilewright knows up to 1: update"):
            again.query()
        with pytest.raises(StoreError, match="records are kept in"):
            again.add(many(1))


def test_a_read_only_folder_is_read_but_not_written(open_folder):
    path = open_folder / "records.db"
    with Store(f"sqlite:///{path}") as store:
        store.add(duel("d", {"fused": 1.0}))
    path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    open_folder.chmod(0o555)
    with unprivileged(), Store(f"sqlite:///{path}") as store:
        assert store.best(SOFTMAX, DEVICE, NOW).implementation == "fused"
        with pytest.raises(StoreError, match="readonly database; make the file and") as caught:
            store.add(many(1))
        assert aside(caught).parent == Path(tempfile.gettempdir())
        assert len(read_lines(aside(caught))) == 1
    aside(caught).unlink()


def test_a_read_only_file_in_a_writable_folder_is_read_but_not_written(open_folder):
    path = open_folder / "records.db"
    with Store(f"sqlite:///{path}") as store:
        store.add(duel("d", {"fused": 1.0}))
    path.chmod(0o444)
    open_folder.chmod(0o777)
    with unprivileged(), Store(f"sqlite:///{path}") as store:
        assert store.best(SOFTMAX, DEVICE, NOW).implementation == "fused"
        with pytest.raises(StoreError, match="readonly database") as caught:
            store.add(many(1))
    assert aside(caught).parent == open_folder


def test_a_folder_that_cannot_be_made_is_named(open_folder):
    open_folder.chmod(0o555)
    with unprivileged(), Store(f"sqlite:///{open_folder}/sub/records.db") as store:
        assert store.query() == []
        with pytest.raises(StoreError, match=r"cannot write .*Permission denied.*; make") as caught:
            store.add(many(1))
    aside(caught).unlink()


def test_a_store_locked_for_long_is_reported_and_readable_meanwhile(tmp_path):
    path = tmp_path / "records.db"
    with Store(f"sqlite:///{path}", busy_s=0.2) as store:
        store.add(many(1))
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        assert len(store.query()) == 1
        begin = time.monotonic()
        with pytest.raises(StoreError, match="locked; wait for the process that is wr") as caught:
            store.add(many(2, op="other"))
        assert time.monotonic() - begin >= 0.2
        writer.execute("ROLLBACK")
        writer.close()
        assert store.import_(aside(caught)) == 2


def test_a_full_database_keeps_what_was_there_and_the_new_records_in_a_file(store):
    store.add(many(1))
    store.close()

    def limit(connection, _):
        connection.execute("PRAGMA max_page_count=20")

    sa.event.listen(store._engine, "connect", limit)
    with pytest.raises(StoreError, match="disk is full; free some space") as caught:
        store.add(many(1000, op="other"))
    assert len(store.query()) == 1
    sa.event.remove(store._engine, "connect", limit)
    store.close()
    assert store.import_(aside(caught)) == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_loses_no_record(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container may not mount a file system")
    try:
        with Store(f"sqlite:///{disk}/records.db") as store:
            with pytest.raises(StoreError, match=r"full|I/O|space") as caught:  # noqa: PT012
                for i in range(100):
                    store.add(many(20, op=f"op{i}"))
            stored = len(store.query())
            assert stored > 0
        kept = read_lines(aside(caught))
        aside(caught).unlink()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert {r.op for r in kept} == {f"op{stored // 20}"}
    assert len(kept) == 20


def test_nowhere_to_keep_records_is_said_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "records.db").write_text("not a database, not a database")

    def full(path, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewright.store.append_lines", full)
    with (
        Store(f"sqlite:///{tmp_path}/records.db") as store,
        pytest.raises(StoreError, match="2 records are lost: neither"),
    ):
        store.add(many(2))


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "aside.jsonl"
    append_lines(file, many(2))
    before = file.read_text()
    real = Path.open

    @contextlib.contextmanager
    def half(self, mode="r"):
        with real(self, mode) as opened:
            yield opened
            opened.write("half a li")
            opened.flush()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", half)
        with pytest.raises(OSError, match="No space"):
            append_lines(file, many(1))
    assert file.read_text() == before
    assert len(read_lines(file)) == 2


# --- several writers, and interruption ----------------------------------------------------------


def write_some(url, name, batches):
    with Store(url, busy_s=60) as store:
        for i in range(batches):
            store.add(many(5, implementation=name, code_hash=str(i)))


def write_until_killed(url):
    with Store(url) as store:
        for i in range(10**6):
            store.add([record(code_hash=str(i))])


SPAWN = multiprocessing.get_context("spawn")


def test_processes_may_create_and_write_one_store_at_once(tmp_path):
    url = f"sqlite:///{tmp_path}/records.db"
    writers = [SPAWN.Process(target=write_some, args=(url, f"w{i}", 20)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    with Store(url) as store:
        assert len(store.query()) == 300


def test_a_killed_writer_loses_nothing_that_was_added(tmp_path):
    url = f"sqlite:///{tmp_path}/records.db"
    writer = SPAWN.Process(target=write_until_killed, args=(url,))
    writer.start()
    with Store(url) as store:
        deadline = time.monotonic() + 60
        while len(store.query()) < 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        writer.kill()
        writer.join()
        hashes = sorted(int(r.code_hash) for r in store.query())
        assert hashes == list(range(len(hashes)))
        assert len(hashes) >= 20
        assert store.add(many(1)) == 1


def test_two_records_differ_by_content_alone():
    one = record(created="2026-11-20T00:00:00.000000+00:00")
    assert one.id == dataclasses.replace(one).id
    assert one.id == dataclasses.replace(one, prior=True).id
    for name, value in [("median_us", 10.5), ("versions", BEFORE), ("distribution", "zipf")]:
        assert dataclasses.replace(one, **{name: value}).id != one.id
