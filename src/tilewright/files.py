"""Files of results: written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file so that whoever reads it finds the old content or all of the new.

    A symlink stays one: the file it leads to is replaced. A pipe or device is written to, as
    nothing else can be done with it. A file that was there keeps its permissions.

    Raises:
        OSError: it cannot be written; what was there is as before.
    """
    data = content.encode() if isinstance(content, str) else content
    if _is_special(path):
        Path(path).write_bytes(data)
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Raise the OSError that `write_whole`, after making missing folders, would end in.

    By trying, since permissions do not tell of read-only file systems, nor stop root.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _is_special(path):
        return
    folder = next(parent for parent in target.parents if parent.exists())
    with tempfile.TemporaryFile(dir=folder):
        pass


def _is_special(path: str | Path) -> bool:
    """Whether it is there and no regular file. Links are followed by the system, not by their text,
    which is of no file where /dev/stdout is a pipe."""
    return os.path.exists(path) and not os.path.isfile(path)
