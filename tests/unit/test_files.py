"""Files of results: what stands at their path afterwards."""

import os
import stat
import threading

import pytest

from tilewright.files import check_writable, write_whole


@pytest.fixture(autouse=True)
def umask_022():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path):
    write_whole(tmp_path / "new", "text")
    assert mode(tmp_path / "new") == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_a_file_that_was_there_keeps_its_permissions(tmp_path):
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(0o600)
    write_whole(path, b"new")
    assert (path.read_text(), mode(path)) == ("new", 0o600)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_leads_to_the_new_content(tmp_path, there):
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "text")
    assert pipe.is_fifo()  # before the reader is waited for: it would wait for ever
    reader.join(10)
    assert read == ["text"]


def test_standard_output_that_is_a_pipe_is_written_to_by_its_name():
    reading, writing = os.pipe()
    name = f"/dev/fd/{writing}"
    check_writable(name)
    write_whole(name, "text")
    assert os.read(reading, 10) == b"text"
    os.close(reading)
    os.close(writing)


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    with pytest.raises(OSError):
        write_whole(tmp_path / "missing" / "file", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_what_can_be_written_is_told_beforehand_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path in ("new", "file", "pipe", "missing/folder/new"):
        check_writable(tmp_path / path)
    for path in (tmp_path, tmp_path / "file" / "below", "/proc/new.json"):
        with pytest.raises(OSError):
            check_writable(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "pipe"]
