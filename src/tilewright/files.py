"""Files of results: written whole or not at all."""

from __future__ import annotations

import os
import shutil
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
    target = Path(os.path.realpath(path))
    if _is_special(target):
        target.write_bytes(data)
        return
    part = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _is_special(target: Path) -> bool:
    """Whether it is there and no regular file."""
    return target.exists() and not target.is_file()
