"""What a reference takes: its parameters, and the arguments of a call by their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from tilewright.errors import InvalidType, known_names
from tilewright.tensor_spec import TensorSpec
from tilewright.text import value_text

Value = Any
"""An argument of a workload: TensorSpec, None, bool, int, float, str, or a tuple of
numbers or strings."""

_KNOWN = re.compile(r"(?:(?:torch\.)?Tensor|float|int|bool|str|None|tuple|list|[][|., ])*")
"""Annotations that arguments are held against; a person's function may have any other."""
MOST_TOLD = 80
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Signature:
    """The parameters of operator `name`.

    Attributes:
        parameters: in the reference's order; annotations as text, "" where there is none, or one
            that says more than this package knows.
        aliases: PyTorch's keyword for a parameter where it differs.
        keywords: what the public function takes besides, by keyword alone.
    """

    name: str
    parameters: Mapping[str, inspect.Parameter]
    aliases: Mapping[str, str]
    keywords: tuple[str, ...]

    @classmethod
    def of(
        cls,
        reference: Callable[..., Any],
        name: str,
        aliases: Mapping[str, str],
        keywords: tuple[str, ...],
    ) -> Signature:
        found = inspect.signature(reference).parameters.values()
        parameters = {p.name: p.replace(annotation=_annotation(p)) for p in found}
        return cls(name, parameters, aliases, keywords)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by the reference's names, in its order; some may be missing.

        Raises:
            InvalidType: too many arguments, an unknown name, or one given twice.
        """
        names = list(self.parameters)
        if len(args) > len(names):
            raise InvalidType(
                f"{self.name}: {len(args)} positional arguments, but there are {len(names)}: "
                f"{', '.join(names)}"
            )
        bound = dict(zip(names, args, strict=False))
        for keyword, value in kwargs.items():
            name = self.aliases.get(keyword, keyword)
            if name not in names:
                raise self._unknown(keyword, (*names, *self.keywords))
            if name in bound:
                raise InvalidType(f"{self.name}: argument {name!r} is given twice")
            bound[name] = value
        return {n: bound[n] for n in names if n in bound}

    def complete(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """All arguments of a workload in declaration order, with defaults filled in.

        Raises:
            InvalidType: an unknown name, an argument is missing, or not what its annotation says.
        """
        unknown = [n for n in given if n not in self.parameters]
        if unknown:
            raise self._unknown(unknown[0], self.parameters)
        args: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            value = given.get(name, parameter.default)
            if value is inspect.Parameter.empty:
                raise InvalidType(f"{self.name}: argument {name!r} is missing")
            kind = parameter.annotation
            if kind and value is not parameter.default and not _admits(kind, value):
                told = f"{self.name}: {_told(name, value)} should be {kind}"
                number = "Tensor" in kind and isinstance(value, (int, float))
                raise InvalidType(f"{told}: torch.tensor({value})" if number else told)
            args[name] = tuple(value) if isinstance(value, list) else value
        return args

    def _unknown(self, name: str, names: Iterable[str]) -> InvalidType:
        return InvalidType(f"{self.name}: unknown argument {name!r}; {known_names(name, names)}")


def of_python(value: Any) -> Any:
    """A number of numpy as one of Python; other values as they are."""
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    kind = type(value)
    is_bool = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")  # no Real
    return bool(value) if is_bool else value


def _told(name: str, value: Any) -> str:
    """`name=value`; what would read like a value of another type is quoted, and what fills lines is
    told by its type."""
    if isinstance(value, str) and not value.isidentifier():
        return f"{name}={value!r}"
    text = value_text(value)
    if len(text) > MOST_TOLD:
        return f"{name} is of type {type(value).__name__} and"
    return f"{name}={text}"


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text if _KNOWN.fullmatch(text) else ""


def _admits(kind: str, value: Value) -> bool:
    if value is None:
        return "None" in kind
    if isinstance(value, TensorSpec):
        return "Tensor" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, (int, float)):
        return "float" in kind or ("int" in kind and isinstance(value, int))
    if isinstance(value, (tuple, list)):
        kinds = {type(v) for v in value}
        numbers = {int, float} if re.search(r"(tuple|list)\[float", kind) else {int}
        flags = {bool} if "bool" in kind else set()
        fits = kinds <= ({str} if "str" in kind else numbers | flags)
        return fits and ("tuple" in kind or "list" in kind)
    return isinstance(value, str) and "str" in kind
