"""Plug-ins are found by listing folders: adding one is adding a file.

Each kind (ops, impls, devices, strategies, suites) is a folder of this package, plus a folder of
the same name below each of `settings().plugin_dirs`. Importing a file registers what it defines;
modules whose name starts with an underscore are shared code, not plug-ins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
import threading
from pathlib import Path
from typing import Generic, TypeVar

from tilewright.errors import InvalidArgument, PluginError
from tilewright.settings import plugin_dirs

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind, loaded on first use.

    Iterating gives the names in alphabetical order, so results never depend on import order.
    A plug-in that cannot be imported makes every look-up raise PluginError: a list without it would
    hide it. Threads may look up at once.
    """

    def __init__(self, kind: str, noun: str):
        self.kind, self.noun = kind, noun
        self._things: dict[str, T] = {}
        self._loaded: set[str] = set()
        self._lock = threading.RLock()
        self._loading = False

    def add(self, name: str, thing: T) -> T:
        assert name not in self._things or self._things[name] is thing, f"{self.noun} {name} twice"
        self._things[name] = thing
        return thing

    def remove(self, name: str) -> None:
        """Take back what `add` added, if anything; for things that a person makes at run time."""
        self._things.pop(name, None)

    def __getitem__(self, name: str) -> T:
        self._load()
        if name not in self._things:
            known = ", ".join(sorted(self._things))
            raise InvalidArgument(f"unknown {self.noun} {name!r}; known: {known}")
        return self._things[name]

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
            for path in sorted((folder / self.kind).glob("[!_]*.py")):
                _import_file(f"tilewright_plugins.{self.kind}.{path.stem}", path)
            return
        package = importlib.import_module(f"tilewright.{self.kind}")
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                importlib.import_module(f"{package.__name__}.{info.name}")


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
