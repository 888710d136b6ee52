"""Plug-ins are found by listing folders: adding one is adding a file.

Each kind (ops, impls, devices, strategies, suites) is a folder of this package, plus a folder of
the same name below each of `settings().plugin_dirs`. Importing a file registers what it defines;
modules whose name starts with an underscore are shared code, not plug-ins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from tilewright.errors import InvalidArgument, PluginError, known_names
from tilewright.settings import plugin_dirs

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind, loaded on first use.

    Iterating gives the names in alphabetical order, so results never depend on import order.
    A plug-in that cannot be imported, or a folder that is not there, makes every look-up raise
    PluginError: a list without it would hide it. Threads may look up at once.
    """

    def __init__(self, kind: str, noun: str, hint: str = ""):
        self.kind, self.noun, self._hint = kind, noun, hint
        self._things: dict[str, T] = {}
        self._loaded: set[str] = set()
        self._lock = threading.RLock()
        self._loading = False
        self._when_removed: list[Callable[[str], None]] = []

    def add(self, name: str, thing: T) -> T:
        assert name not in self._things or self._things[name] is thing, f"{self.noun} {name} twice"
        self._things[name] = thing
        return thing

    def remove(self, name: str) -> None:
        """Take back what `add` added, if anything; for things that a person makes at run time."""
        self._things.pop(name, None)
        for forget in self._when_removed:
            forget(name)

    def when_removed(self, forget: Callable[[str], None]) -> None:
        """Have a function called with each name that is taken back: it knows things by name too."""
        self._when_removed.append(forget)

    def get(self, name: str) -> T | None:
        self._load()
        return self._things.get(name)

    def holds(self, name: str, thing: T) -> bool:
        """Whether the thing, which was here once, still has the name: what was loaded since is no
        matter, so that unlike other look-ups it reads no settings."""
        return self._things.get(name) is thing

    def __getitem__(self, name: str) -> T:
        found = self.get(name)
        if found is None:
            raise self.unknown(name)
        return found

    def unknown(self, name: str, recorded: Iterable[str] | None = None) -> InvalidArgument:
        """The error for a name that is neither here nor, where records are asked for, `recorded`:
        for these a thing need not be here."""
        command = f"tilewright list {self.noun}s"  # strategies are few
        names = known_names(name, sorted({*self, *(recorded or ())}), command)
        hint = self._hint if recorded is None else "; no record has it"
        return InvalidArgument(f"unknown {self.noun} {name!r}; {names}{hint}")

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._things

    def __iter__(self):
        self._load()
        return iter(sorted(self._things))

    def values(self) -> list[T]:
        return [self[name] for name in self]

    def _load(self) -> None:
        folders = [("", None), *((str(folder), folder) for folder in plugin_dirs())]
        if all(name in self._loaded for name, _ in folders):
            return
        with self._lock:
            if self._loading:  # a plug-in that looks around while it is imported
                return
            self._loading = True
            try:
                for name, folder in folders:
                    if name not in self._loaded:
                        self._import_all(folder)
                        self._loaded.add(name)
            finally:
                self._loading = False

    def _import_all(self, folder: Path | None) -> None:
        """The plug-ins of a folder, or the package's own."""
        if folder is not None:
            if not folder.is_dir():
                raise PluginError(
                    f"TILEWRIGHT_PLUGINS names {folder}, which is no folder; "
                    "correct it or take it out"
                )
            for path in sorted((folder / self.kind).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                if not any(part.startswith("_") for part in parts):
                    _import_file(".".join(("tilewright_plugins", *parts)), path)
            return
        _import_package(f"tilewright.{self.kind}")


def _import_package(name: str) -> None:
    """All modules of a package and of those in it, but for those that plug-ins share."""
    package = importlib.import_module(name)
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        inner = f"{name}.{info.name}"
        if info.ispkg:
            _import_package(inner)
        else:
            importlib.import_module(inner)


@functools.cache
def _import_file(name: str, path: Path) -> None:
    """Import a plug-in once.

    Raises:
        PluginError: it failed; every time, since what it registered before cannot be taken back.
    """
    if path in _failed:
        raise PluginError(_failed[path])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a plug-in raises
        del sys.modules[name]
        _failed[path] = (
            f"plug-in {path} cannot be imported: {type(error).__name__}: {error}; "
            "correct it, or take its folder out of TILEWRIGHT_PLUGINS"
        )
        raise PluginError(_failed[path]) from error


_failed: dict[Path, str] = {}
imported: list[str] = []
"""What `import_source` was given: processes that measure import it, too."""


def import_source(source: str) -> bool:
    """Import a person's .py file or module, as Python runs it: its folder comes first on the path,
    for a module the present one.

    Returns:
        Whether it ran just now, and not before.

    Raises:
        InvalidArgument: there is no such file or module, or another has its name.
        PluginError: it raised.
    """
    as_path = source.endswith(".py") or os.sep in source
    path = Path(source).resolve()
    if not (path.is_file() and path.suffix == ".py" if as_path else all(source.split("."))):
        raise InvalidArgument(
            f"{source}: there is no such Python file; give the path of one, or a dotted module"
        )
    name, folder = (path.stem, str(path.parent)) if as_path else (source, os.getcwd())
    known = name in sys.modules
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a person's file raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise InvalidArgument(
                f"{source}: there is no module {missing!r}, looked for in {folder} and where "
                "Python's modules are; give the path of its file, such as folder/file.py"
            ) from None
        lines = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename}:{f.lineno}" for f in lines if f.filename.startswith(folder)]
        where = f" ({own[-1]})" if own else ""
        raise PluginError(
            f"{source} cannot be imported: {type(error).__name__}: {error}{where}; correct it"
        ) from error
    if as_path and Path(module.__file__ or "").resolve() != path:
        raise InvalidArgument(
            f"{source}: another module is named {name!r} ({module.__file__}); rename the file"
        )
    found = str(path) if as_path else source
    if found not in imported:
        imported.append(found)
    return not known
