"""Plug-ins are found by listing folders: adding one is adding a file.

Each kind (ops, impls, devices, strategies, suites) is a folder of this package, plus a folder of
the same name below each of `settings().plugin_dirs`. Importing a file registers what it defines;
modules whose name starts with an underscore are shared code, not plug-ins.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from tilewright.errors import InvalidArgument
from tilewright.settings import plugin_dirs

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one kind, loaded on first use.

    Iterating gives the names in alphabetical order, so results never depend on import order.
    """

    def __init__(self, kind: str, noun: str):
        self.kind, self.noun = kind, noun
        self._things: dict[str, T] = {}
        self._loaded: set[str] = set()

    def add(self, name: str, thing: T) -> T:
        assert name not in self._things or self._things[name] is thing, f"{self.noun} {name} twice"
        self._things[name] = thing
        return thing

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
        if "" not in self._loaded:
            self._loaded.add("")
            package = importlib.import_module(f"tilewright.{self.kind}")
            for info in pkgutil.iter_modules(package.__path__):
                if not info.name.startswith("_"):
                    importlib.import_module(f"{package.__name__}.{info.name}")
        for folder in plugin_dirs():
            if str(folder) not in self._loaded:
                self._loaded.add(str(folder))
                for path in sorted((folder / self.kind).glob("[!_]*.py")):
                    _import_file(f"tilewright_plugins.{self.kind}.{path.stem}", path)


def _import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
