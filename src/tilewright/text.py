"""Texts for people, written and read without torch; first the grammar of a workload.

workload := name "(" [argument ("," argument)*] ")" flag*
argument := name "=" (tensor | scalar | list)
scalar   := number | "None" | "True" | "False" | word
list     := "[" [scalar ("," scalar)*] "]"
tensor   := dtype "[" sizes "]" ("@channels_last" | "@strides(" sizes ")" | "@align" n)*
flag     := "!" name ["=" names]
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tilewright.errors import InvalidArgument

_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_TENSOR = re.compile(r"([a-z]+\d*)\[([\d,\s]*)\]((?:@\w+(?:\([\d,\s-]*\))?)*)")
_LAYOUT = re.compile(r"@(\w+?)(?:\(([\d,\s-]*)\)|(\d+))?(?=@|$)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_CONSTANTS = {"None": None, "True": True, "False": False}
FLAGS = ("nondeterministic", "relaxed")
LIST_FLAGS = ("donate",)
VALUE_FLAGS = {
    "indices": ("uniform", "zipf", "unique", "balanced", "sorted", "few_bins", "constant"),
}
"""What a flag of this name may be: `!indices=zipf` says how the values of an index are spread."""
_EXAMPLE = "layer_norm(x=f16[8192,5140], weight=f16[5140])"


def split_flags(text: str) -> tuple[str, tuple[str, ...]]:
    call, *flags = text.strip().split("!")
    return call, tuple(flag.strip() for flag in flags)


def canonical_flags(name: str, flags: Iterable[str], tensors: Sequence[str]) -> tuple[str, ...]:
    """Flags of operator `name` in one order, each once, lists in the order of its `tensors`.

    Raises:
        InvalidArgument: an unknown flag, or one that lists something else than tensor arguments.
    """
    found = set()
    for flag in flags:
        key, equals, listed = (part.strip() for part in flag.partition("="))
        if key in LIST_FLAGS:
            names = [n.strip() for n in listed.split(",")]
            if not set(names) <= set(tensors):
                known = ", ".join(tensors)
                raise InvalidArgument(
                    f"{name}: '!{key}={listed}' should name tensor arguments: {known}"
                )
            found.add(f"{key}={','.join(n for n in tensors if n in names)}")
        elif key in VALUE_FLAGS:
            if listed not in VALUE_FLAGS[key]:
                known = ", ".join(VALUE_FLAGS[key])
                raise InvalidArgument(f"{name}: '!{key}={listed}' should be one of {known}")
            found.add(f"{key}={listed}")
        elif key in FLAGS and not equals:
            found.add(key)
        else:
            known = ", ".join(
                [f"!{f}" for f in FLAGS]
                + [f"!{f}=NAMES" for f in LIST_FLAGS]
                + [f"!{f}={'|'.join(values)}" for f, values in VALUE_FLAGS.items()]
            )
            raise InvalidArgument(f"{name}: unknown flag '!{flag}'; known: {known}")
    return tuple(sorted(found))


def parse_call(text: str, tensor_spec: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Split `op(name=value, ...)` into the operator's name and its arguments.

    Raises:
        InvalidArgument: the text does not follow the grammar; the message quotes the part.
    """
    match = _CALL.fullmatch(text)
    if not match:
        raise InvalidArgument(f"cannot read workload {text!r}; expected the form {_EXAMPLE}")
    name, inside = match.groups()
    given: dict[str, Any] = {}
    for part in _split_arguments(inside):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidArgument(
                f"{name}: argument {part.strip()!r} has no name; write name=value"
            )
        key = key.strip()
        if key in given:
            raise InvalidArgument(f"{name}: argument {key!r} is given twice")
        given[key] = parse_value(f"{name}: {key}", value.strip(), tensor_spec)
    return name, given


def _split_arguments(inside: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(inside):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append(inside[start:i])
            start = i + 1
    parts.append(inside[start:])
    return [p for p in parts if p.strip()]


def parse_value(where: str, text: str, tensor_spec: Callable[..., Any]) -> Any:
    if match := _TENSOR.fullmatch(text):
        return _parse_tensor(tensor_spec, where, *match.groups())
    try:
        if text.startswith("[") and text.endswith("]"):
            listed = text[1:-1].strip()
            return tuple(_scalar(part.strip()) for part in listed.split(",")) if listed else ()
        return _scalar(text)
    except ValueError:
        raise InvalidArgument(
            f"{where}={text!r} is neither a tensor such as f16[8192,768], a number nor a list of "
            "numbers or words"
        ) from None


def _scalar(text: str) -> Any:
    """Raises ValueError."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    if _WORD.fullmatch(text):
        return text
    raise ValueError(text)


def value_text(value: Any) -> str:
    """What `parse_value` reads."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _parse_tensor(
    tensor_spec: Callable[..., Any], where: str, dtype: str, sizes: str, layouts: str
) -> Any:
    shape = _ints(where, sizes)
    strides: tuple[int, ...] | None = None
    options: dict[str, int] = {}
    for kind, listed, digits in _LAYOUT.findall(layouts):
        if kind == "channels_last" and not listed and len(shape) == 4:
            _, c, h, w = shape
            strides = (h * w * c, 1, w * c, c)
        elif kind == "strides" and listed:
            strides = _ints(where, listed)
        elif kind == "align" and digits in ("1", "2", "4", "8", "16"):
            options["align"] = int(digits)
        else:
            raise InvalidArgument(
                f"{where}: layout {layouts!r} is not one of @channels_last (rank 4), "
                "@strides(10280,1), @align8"
            )
    try:
        return tensor_spec(dtype, shape, strides, **options)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None


def _ints(where: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(",") if n.strip())
    except ValueError:
        raise InvalidArgument(f"{where}: [{text}] should be a list of whole numbers") from None


def counted(count: int, noun: str) -> str:
    """`1 record`, `2 records`"""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration_text(us: float) -> str:
    """Microseconds in the unit that reads best."""
    if us < 1:
        return f"{us:.2g} us"
    if us < 1000:
        return f"{us:.1f} us"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
