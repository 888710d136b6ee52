"""The record store: that nothing is lost, and what each fault says."""

import contextlib
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
from recorded import DEVICE, NOW, SOFTMAX, duel, many, record

from tilewright import database
from tilewright.errors import StoreError
from tilewright.record import SCHEMA, Record, append_lines, read_lines
from tilewright.store import Store


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


# --- one at a time -------------------------------------------------------------------------------


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


def test_a_home_of_any_name_holds_the_records(tmp_path, monkeypatch):
    home = tmp_path / "what? #1 %20"
    monkeypatch.delenv("TILEWRIGHT_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    with Store() as store:
        store.add([Record("softmax(x=f32[4,4])", "softmax", "aten", {}, "ok", "cpu")])
        assert store.path == home / "tilewright" / "records.db"
    assert store.path.exists()
    assert [p.name for p in tmp_path.iterdir()] == [home.name]


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


@pytest.mark.parametrize(
    "url", ["sqlite:///file:r.db?mode=ro&uri=true", "sqlite:///r.db?mode=ro", "sqlite:///file:r.db"]
)
def test_a_uri_of_sqlites_own_is_refused_not_read_as_a_path(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="of SQLite a path alone is taken"):
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
        with pytest.raises(StoreError, match="1 record kept in"):
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


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container, or who is not root, may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_loses_no_record(small_disk):
    with Store(f"sqlite:///{small_disk}/records.db") as store:
        with pytest.raises(StoreError, match=r"full|I/O|space") as caught:  # noqa: PT012
            for i in range(100):
                store.add(many(20, op=f"op{i}"))
        stored = len(store.query())
        assert stored > 0
    kept = read_lines(aside(caught))
    aside(caught).unlink()
    assert {r.op for r in kept} == {f"op{stored // 20}"}
    assert len(kept) == 20


def test_a_disk_without_room_for_a_log_is_not_called_read_only(small_disk):
    url = f"sqlite:///{small_disk}/records.db"
    with Store(url) as store:
        store.add(many(1))
    with (small_disk / "rest").open("ab", buffering=0) as rest, contextlib.suppress(OSError):
        while True:
            rest.write(bytes(1024))
    with Store(url) as store:
        assert len(store.query()) == 1
        with pytest.raises(StoreError, match="the disk is full; free some space") as caught:
            store.add(many(1, op="later"))
    aside(caught).unlink()


def test_nowhere_to_keep_records_is_said_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "records.db").write_text("not a database, not a database")

    def full(path, records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewright.store.append_lines", full)
    with (
        Store(f"sqlite:///{tmp_path}/records.db") as store,
        pytest.raises(StoreError, match="2 records lost: neither"),
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
