"""Tables, rows and engines below the record store, and what their faults mean to a person."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import re
import sqlite3
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL

from tilewright.errors import StoreError
from tilewright.record import (
    FIELDS,
    SCHEMA,
    TYPES,
    Record,
    as_dict,
    misfit,
    runtime_of,
    same_runtime,
    to_json,
)

JSON_FIELDS = frozenset(name for name, types in TYPES.items() if dict in types)
_COLUMN_TYPES = {str: sa.Text, float: sa.Double, int: sa.BigInteger, bool: sa.Boolean}
METADATA = sa.MetaData()
SCHEMA_TABLE = sa.Table(
    "tilewright_schema", METADATA, sa.Column("version", sa.Integer, primary_key=True)
)
RECORDS = sa.Table(
    "records",
    METADATA,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("runtime", sa.Text, nullable=False),
    *(
        sa.Column(
            name,
            sa.Text if name in JSON_FIELDS else _COLUMN_TYPES[TYPES[name][0]],
            nullable=type(None) in TYPES[name],
        )
        for name in FIELDS
    ),
    sa.Index("records_by_workload", "device", "op", "workload"),
    sa.Index("records_by_duel", "device", "final", "status"),
)


def row_of(record: Record) -> dict[str, Any]:
    row = as_dict(record)
    for name in JSON_FIELDS:
        if row[name] is not None:
            row[name] = to_json(row[name])
    return {"id": record.id, "runtime": runtime_of(record.versions), **row}


def record_of(row: Any, runtime: str | None = None) -> Record:
    """The record of a row, `prior` if it was measured under another runtime than asked for.

    Raises StoreError for a row that something else than this package wrote or damaged.
    """
    values = {name: getattr(row, name) for name in FIELDS}
    for name in JSON_FIELDS:
        if values[name] is not None:
            values[name] = _decoded(values[name])
    problem = misfit(values)
    if not isinstance(row.runtime, str):
        problem = f"runtime={row.runtime!r} should be str"
    if problem:
        raise StoreError(
            f"the row {row.id} ({row.implementation} on {row.workload}) is damaged: {problem}; "
            f"delete it in the store's database: DELETE FROM records WHERE id = '{row.id}'"
        )
    prior = runtime is not None and not same_runtime(row.runtime, runtime)
    return Record(**values, prior=prior)


def _decoded(text: Any) -> Any:
    """The object that a column holds as text; what holds none is left as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def program_of(versions: str) -> str:
    """`Record.program` by the text of its versions, as `row_of` has it."""
    found = re.search(r'"program":"([^"]*)"', versions)
    return found[1] if found else ""


def open_engine(url: URL, busy_s: float) -> sa.Engine:
    """Raises sqlalchemy's ArgumentError for a URI of SQLite's own, which would read as a path."""
    if path := sqlite_path(url):
        if url.query or str(path).startswith("file:"):
            raise sa.exc.ArgumentError("of SQLite a path alone is taken, without file: or a query")
        return sa.create_engine(url, creator=functools.partial(_connect_sqlite, path, busy_s))
    if url.get_backend_name() == "sqlite":  # one connection, or each would have its own memory
        arguments = {"check_same_thread": False}
        return sa.create_engine(url, poolclass=sa.StaticPool, connect_args=arguments)
    return sa.create_engine(url, pool_pre_ping=True)


def sqlite_path(url: URL) -> Path | None:
    named = url.database not in (None, "", ":memory:")
    return Path(url.database or "") if url.get_backend_name() == "sqlite" and named else None


def _connect_sqlite(path: Path, busy_s: float) -> sqlite3.Connection:
    def connect(mode: str) -> sqlite3.Connection:
        uri = f"file:{urllib.parse.quote(str(path))}?{mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=busy_s, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    try:
        return connect("mode=rwc")
    except sqlite3.OperationalError:
        # Write-ahead logging needs a file beside the store even to read it. Where that cannot be
        # made, nobody is writing either, and the file may be read as it is.
        if not path.exists():
            raise
        return connect("immutable=1")


def schema_version(connection: sa.Connection) -> int | None:
    if not sa.inspect(connection).has_table(SCHEMA_TABLE.name):
        return None
    return connection.scalar(sa.select(sa.func.max(SCHEMA_TABLE.c.version)))


def create_tables(engine: sa.Engine) -> None:
    """Make the tables; several processes may do so at once."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            with contextlib.suppress(sa.exc.OperationalError):  # locked: another one is at it
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    with engine.begin() as connection:
        for table in METADATA.sorted_tables:
            connection.execute(sa.schema.CreateTable(table, if_not_exists=True))
            for index in table.indexes:
                connection.execute(sa.schema.CreateIndex(index, if_not_exists=True))
    with contextlib.suppress(sa.exc.IntegrityError), engine.begin() as connection:
        connection.execute(sa.insert(SCHEMA_TABLE).values(version=SCHEMA))


ELSEWHERE = "set TILEWRIGHT_STORE to another place, such as sqlite:////tmp/records.db"
_REMEDIES = (
    ("not a database", f"move the file away, or {ELSEWHERE}"),
    ("malformed", f"move the file away (`sqlite3 FILE .recover` may save it), or {ELSEWHERE}"),
    ("readonly", f"make the file and its folder writable, or {ELSEWHERE}"),
    ("read-only", f"make the file and its folder writable, or {ELSEWHERE}"),
    ("ermission denied", f"make the file and its folder writable, or {ELSEWHERE}"),
    ("unable to open", f"make the file and its folder writable, or {ELSEWHERE}"),
    ("locked", "wait for the process that is writing, or end it"),
    ("is full", f"free some space, or {ELSEWHERE}"),
    ("No space", f"free some space, or {ELSEWHERE}"),
    ("disk I/O", f"check the disk (a network folder cannot hold SQLite), or {ELSEWHERE}"),
)


WAL_BYTES = 1 << 16
"""More than what SQLite keeps beside a store that it opens for writing."""


def explained(error: Exception, folder: Path | None = None) -> str:
    """What went wrong in the database's own words, and what to do about it.

    Args:
        folder: of an SQLite file: it calls one read-only that it cannot write for want of space.
    """
    what = str(getattr(error, "orig", None) or error)
    if folder and any(part in what for part in ("readonly", "disk I/O")) and _is_full(folder):
        what = "the disk is full"
    for part, remedy in _REMEDIES:
        if part in what:
            return f"{what}; {remedy}"
    return f"{what}; check that it can be reached, or {ELSEWHERE}"


def _is_full(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(WAL_BYTES))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False
