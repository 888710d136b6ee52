"""The record store: every measurement, refusal and failure is a row; the winner is a query.

SQLite below the user's data folder by default; any SQLAlchemy URL shares one store among machines.

How a winner is decided, here, in selection and on the command line alike:

1. A tuning run ends in a duel: finalists and the vendor measured interleaved, under one id. Only
   rows of duels compete; the times of a search were not measured beside the vendor's.
2. The latest duel of the workload on this kind of device decides, and in it the lowest median
   among the rows with status "ok". Whoever judges the duel marks what noise cannot tell from
   something simpler "tied", and the rest "slower". Times of different duels are never compared.
   Functions of `tw.fuse` may share a name: each program has duels of its own.
3. Duels under these versions come first: torch, CUDA and driver, and the compilers and libraries
   that both know. Without one, the latest duel under others decides, and its winner is marked
   `prior`: likely still good, worth measuring again. Another kind of device counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from tilewright.database import (
    ELSEWHERE,
    JSON_FIELDS,
    RECORDS,
    create_tables,
    explained,
    open_engine,
    program_of,
    record_of,
    row_of,
    schema_version,
    sqlite_path,
)
from tilewright.environment import environment
from tilewright.errors import InvalidArgument, InvalidStore, StoreError, known_names
from tilewright.record import (
    FIELDS,
    SCHEMA,
    Record,
    append_lines,
    read_lines,
    runtime_of,
    same_runtime,
    to_json,
    utc_text,
    write_lines,
)
from tilewright.settings import settings
from tilewright.text import counted

__all__ = ["Record", "Store", "Winners", "environment"]


Key = tuple[str, str, str]
"""What a winner is the winner of: operator, workload text, program."""


class Winners(Mapping[Key, Record]):
    """Key -> winning record. A record is made when it is looked up: StoreError if it is damaged."""

    def __init__(self, rows: dict[Key, Any], runtime: str):
        self._rows, self._runtime = rows, runtime

    def __getitem__(self, key: Key) -> Record:
        return record_of(self._rows[key], self._runtime)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Store:
    """The records at one URL. Opening is lazy: reading a store that is not there finds nothing.

    Safe to share between threads; several processes may write at once.

    Args:
        url: SQLAlchemy URL; None takes `settings().store_url`.
        busy_s: how long to wait for another process that is writing.

    Every method raises StoreError for a store that cannot be read or written, saying where it
    is, what is wrong and what to do; of a damaged row, which one. A URL that is none is an
    InvalidStore, one of these.
    """

    def __init__(self, url: str | None = None, *, busy_s: float = 10.0):
        self._ready = False
        here = settings()
        url = url or here.store_url
        try:
            # Not a URL's text, in which a path would end at a question mark.
            default = URL.create("sqlite", database=str(here.records_file))
            self.url = make_url(url) if url else default
            self._engine = open_engine(self.url, busy_s)
        except (sa.exc.ArgumentError, ImportError) as error:
            shown = re.sub(r":[^:/@]*@", ":***@", url or "")
            raise InvalidStore(
                f"cannot use {shown!r} as a record store: {error}; expected a SQLAlchemy URL such "
                "as sqlite:////tmp/records.db or, with `pip install tilewright[postgres]`, "
                "postgresql+psycopg://user@host/records"
            ) from None

    @property
    def path(self) -> Path | None:
        """The SQLite file, if it is one."""
        return sqlite_path(self.url)

    def __str__(self) -> str:
        return str(self.path or self.url.render_as_string(hide_password=True))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.dispose()

    # --- writing ---------------------------------------------------------------------------

    def add(self, records: Iterable[Record]) -> int:
        """Store records and commit; returns how many were new.

        Raises:
            StoreError: it failed. The records are then kept in a file that
                `tilewright records import` reads; the message names it.
        """
        records = list(records)
        if not records:
            return 0
        try:
            return self._insert(records)
        except StoreError as error:
            raise StoreError(f"{error}\n{self._set_aside(records)}") from error

    def _insert(self, records: list[Record]) -> int:
        rows = {record.id: row_of(record) for record in records}
        with self._faults("write"):
            self._open(create=True)
            try:
                return self._insert_missing(rows)
            except sa.exc.IntegrityError:  # another process added one of them just now
                return self._insert_missing(rows)

    def _insert_missing(self, rows: dict[str, dict[str, Any]]) -> int:
        with self._engine.begin() as connection:
            ids = list(rows)
            for i in range(0, len(ids), 500):
                known = sa.select(RECORDS.c.id).where(RECORDS.c.id.in_(ids[i : i + 500]))
                for found in connection.scalars(known):
                    del rows[found]
            if rows:
                connection.execute(sa.insert(RECORDS), list(rows.values()))
        return len(rows)

    def _set_aside(self, records: list[Record]) -> str:
        """Keep records that could not be stored in a file; returns what to tell the user."""
        temporary = Path(tempfile.gettempdir()) / f"tilewright-unsaved-{os.getpid()}.jsonl"
        beside = self.path and self.path.with_name(f"{self.path.name}.unsaved-{os.getpid()}.jsonl")
        what = counted(len(records), "record")
        for path in filter(None, (beside, temporary)):
            try:
                append_lines(path, records)
            except OSError:
                continue
            return f"{what} kept in {path}: tilewright records import {path}"
        return f"{what} lost: neither {beside} nor {temporary} can be written"

    def prune(
        self,
        *,
        before: str | None = None,
        superseded: bool = False,
        other_versions_than: Mapping[str, Any] | None = None,
        device: str | None = None,
        **equal: Any,
    ) -> int:
        """Delete the rows that meet every condition given; returns how many.

        Args:
            before: created earlier than this date or time (ISO 8601, UTC unless it says else).
            superseded: a later row of the same candidate, workload, program, device, versions and
                way of measuring exists. Winners stay as they are.
            other_versions_than: measured with another torch, CUDA, driver, compiler or library
                than these, which are those of `device`: other devices have others.
            device: measured on the device with this key.
            equal: as in `query`.

        Raises:
            InvalidArgument: nothing but a device is said, or versions without their device.
        """
        if other_versions_than is not None and device is None:
            raise InvalidArgument("prune: name the device that has these versions")
        conditions = _equal(equal)
        if before is not None:
            conditions.append(RECORDS.c.created < utc_text(before))
        if other_versions_than is not None:
            runtime = runtime_of(other_versions_than)
            known = [row.runtime for row in self._select(sa.select(RECORDS.c.runtime).distinct())]
            conditions.append(
                RECORDS.c.runtime.in_([r for r in known if not same_runtime(r, runtime)])
            )
        if not conditions and not superseded:
            raise InvalidArgument(
                "prune: say what to delete: older than a date, superseded, of other versions, or "
                "with a field's value"
            )
        if device is not None:
            conditions.append(RECORDS.c.device == device)
        with self._faults("prune"):
            if not self._open():
                return 0
            with self._engine.begin() as connection:
                delete = sa.delete(RECORDS).where(*conditions)
                if not superseded:
                    return connection.execute(delete).rowcount
                ids = _superseded(connection)
                parts = [RECORDS.c.id.in_(ids[i : i + 500]) for i in range(0, len(ids), 500)]
                return sum(connection.execute(delete.where(part)).rowcount for part in parts)

    # --- reading ---------------------------------------------------------------------------

    def best(
        self, workload: str, device: str, versions: Mapping[str, Any], program: str = ""
    ) -> Record | None:
        """The winner for a workload on a device by the rule above, or None without a duel."""
        found = self._select(_dueled(device).where(RECORDS.c.workload == workload))
        rows = [row for row in found if program_of(str(row.versions)) == program]
        runtime = runtime_of(versions)
        return next(iter(Winners(_winners(rows, runtime), runtime).values()), None)

    def has_duels(self, device: str) -> bool:
        """Whether there is any winner of a device."""
        return bool(self._select(_dueled(device).limit(1)))

    def load_device(self, device: str, versions: Mapping[str, Any]) -> Winners:
        """Every winner of a device in one read: what the run-time selection keeps."""
        runtime = runtime_of(versions)
        return Winners(_winners(self._select(_dueled(device)), runtime), runtime)

    def query(
        self,
        *,
        since: str | None = None,
        versions: Mapping[str, Any] | None = None,
        limit: int | None = None,
        **equal: Any,
    ) -> list[Record]:
        """Records, newest first.

        Args:
            since: created at this date or time or later.
            versions: with the torch, CUDA, driver, compilers and libraries of these.
            limit: at most so many.
            equal: a field's name and its value: `op="softmax", status="ok", final=True`.
        """
        conditions = _equal(equal)
        if since is not None:
            conditions.append(RECORDS.c.created >= utc_text(since))
        newest_first = sa.select(RECORDS).order_by(RECORDS.c.created.desc(), RECORDS.c.id)
        statement = newest_first.where(*conditions)
        if versions is None:
            return [record_of(row) for row in self._select(statement.limit(limit))]
        runtime = runtime_of(versions)
        rows = [row for row in self._select(statement) if same_runtime(row.runtime, runtime)]
        return [record_of(row) for row in rows[:limit]]

    def names(self, field: str) -> set[str]:
        """What the records have in a field of text: of operators or implementations that are gone,
        too."""
        return {row[0] for row in self._select(sa.select(RECORDS.c[field]).distinct())}

    def _select(self, statement: sa.Select[Any]) -> list[Any]:
        with self._faults("read"):
            if not self._open():
                return []
            with self._engine.connect() as connection:
                return list(connection.execute(statement).all())

    # --- files -----------------------------------------------------------------------------

    def export(self, path: Path | str, **filters: Any) -> int:
        """Write records as JSON lines, oldest first; `filters` as in `query`. Returns how many."""
        return write_lines(Path(path), reversed(self.query(**filters)))

    def import_(self, path: Path | str) -> int:
        """Add the records of a file, all or none; returns how many were new.

        Raises:
            InvalidArgument: the file is not one that `export` wrote.
        """
        return self._insert(read_lines(Path(path)))

    # --- opening and faults ----------------------------------------------------------------

    def _open(self, create: bool = False) -> bool:
        """Whether the tables are there, after making them if `create`."""
        if self._ready:
            return True
        if self.path and not self.path.exists():
            if not create:
                return False
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._engine.connect() as connection:
            version = schema_version(connection)
        if version is None and create:
            create_tables(self._engine)
            version = SCHEMA
        if version is not None and version > SCHEMA:
            raise StoreError(
                f"the record store {self} has schema {version}, but this tilewright knows up to "
                f"{SCHEMA}: update tilewright, or {ELSEWHERE}"
            )
        self._ready = version is not None
        return self._ready

    @contextlib.contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, sqlite3.Error, OSError) as error:
            reason = explained(error, self.path and self.path.parent)
            raise StoreError(f"cannot {doing} the record store {self}: {reason}") from error


def _equal(fields: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    conditions = []
    for name, value in fields.items():
        if name not in FIELDS:
            raise InvalidArgument(f"records have no {name!r}; {known_names(name, FIELDS)}")
        conditions.append(RECORDS.c[name] == (to_json(value) if name in JSON_FIELDS else value))
    return conditions


def _dueled(device: str) -> sa.Select[Any]:
    r = RECORDS.c
    timed = r.median_us.is_not(None)
    return sa.select(RECORDS).where(r.device == device, r.final, r.status == "ok", timed)


def _winners(rows: Sequence[Any], runtime: str) -> dict[Key, Any]:
    """The rule of this module's docstring, over rows of duels whose status is "ok"; then, under
    keys of their own, the damaged ones that it cannot compare."""
    sound = [row for row in rows if _comparable(row)]
    ended: dict[tuple[str, str | None], str] = {}
    for row in sound:
        duel = row.workload, row.duel
        ended[duel] = max(ended.get(duel, ""), row.created)
    chosen: dict[Key, tuple[Any, Any]] = {}
    for row in sound:
        # The id last: equal medians are decided alike on every machine.
        merit = (
            same_runtime(row.runtime, runtime),
            ended[row.workload, row.duel],
            -row.median_us,
            row.id,
        )
        key = row.op, row.workload, program_of(row.versions)
        if key not in chosen or merit > chosen[key][0]:
            chosen[key] = merit, row
    winners = {key: row for key, (_, row) in chosen.items()}
    if len(sound) < len(rows):
        winners |= {(str(r.op), str(r.workload), r.id): r for r in rows if not _comparable(r)}
    return winners


def _comparable(row: Any) -> bool:
    texts = row.op, row.workload, row.created, row.versions, row.runtime
    return isinstance(row.median_us, float) and all(isinstance(text, str) for text in texts)


def _superseded(connection: sa.Connection) -> list[str]:
    """Ids of rows that were measured again later in the same way."""
    names = "device workload implementation config runtime method distribution cold final status"
    alike = [RECORDS.c[name] for name in names.split()]
    later_first = [RECORDS.c.created.desc(), RECORDS.c.id]
    rows = sa.select(RECORDS.c.id, RECORDS.c.versions, *alike).order_by(*later_first)
    seen, superseded = set(), []
    for id_, versions, *values in connection.execute(rows):
        one = program_of(str(versions)), *values
        if one in seen:
            superseded.append(id_)
        seen.add(one)
    return superseded
