"""Config spaces: the knobs of an implementation, their values, and what fits together."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from tilewright.errors import InvalidArgument

C = TypeVar("C")


def param(*values: Any, default: Any = None) -> Any:
    """Declare one knob of a Config dataclass; the first value is its default."""
    return field(default=values[0] if default is None else default, metadata={"values": values})


@dataclass(frozen=True)
class NoConfig:
    """The config of an implementation that has no knobs."""


def config_dict(config: Any) -> dict[str, Any]:
    return asdict(config)


def config_text(config: Any) -> str:
    """`tile_m=128,split_k=8`: the form that `--config` takes."""
    return ",".join(f"{n}={v}" for n, v in asdict(config).items())


class ConfigSpace(Generic[C]):
    """Every config of one implementation for one workload and device.

    Args:
        config_type: a frozen dataclass whose fields are declared with `param`.
        values: replaces the declared values of some knobs.
        constraint: config -> None if it fits, else a reason in words.

    It is finite and enumerates in a fixed order; a config is in the space if and only if each
    value is listed and the constraint passes.
    """

    def __init__(
        self,
        config_type: type[C],
        values: Mapping[str, Sequence[Any]] | None = None,
        constraint: Callable[[C], str | None] = lambda config: None,
    ):
        self.config_type = config_type
        self.constraint = constraint
        self.values: dict[str, tuple[Any, ...]] = {
            f.name: tuple(f.metadata["values"])
            for f in fields(config_type)  # type: ignore[arg-type]
        }
        for name, listed in (values or {}).items():
            self.values[name] = tuple(listed)

    @property
    def size_unconstrained(self) -> int:
        return math.prod(len(v) for v in self.values.values())

    def __iter__(self) -> Iterator[C]:
        for combination in itertools.product(*self.values.values()):
            config = self.config_type(**dict(zip(self.values, combination, strict=True)))
            if self.constraint(config) is None:
                yield config

    def __contains__(self, config: object) -> bool:
        return isinstance(config, self.config_type) and self.why_not(config) is None

    def why_not(self, config: C) -> str | None:
        """None if the config is in the space, else the reason in words."""
        for name, listed in self.values.items():
            if (value := getattr(config, name)) not in listed:
                return f"{name}={value} is not one of {', '.join(map(str, listed))}"
        return self.constraint(config)

    def sample(self, rng: random.Random, count: int) -> list[C]:
        """Up to `count` distinct configs, drawn uniformly."""
        if self.size_unconstrained <= 20_000:
            configs = list(self)
            return rng.sample(configs, min(count, len(configs)))
        found: dict[C, None] = {}
        for _ in range(200 * count):
            if len(found) == count:
                break
            config = self.config_type(**{n: rng.choice(v) for n, v in self.values.items()})
            if self.constraint(config) is None:
                found.setdefault(config)
        return list(found)

    def neighbours(self, config: C) -> list[C]:
        """Configs of the space that differ from `config` in one knob, by one step."""
        around = []
        for name, listed in self.values.items():
            i = listed.index(getattr(config, name))
            for j in (i - 1, i + 1):
                if 0 <= j < len(listed):
                    near = replace(config, **{name: listed[j]})  # type: ignore[type-var]
                    if self.constraint(near) is None:
                        around.append(near)
        return around

    def restricted(self, chosen: Mapping[str, Sequence[Any]]) -> ConfigSpace[C]:
        """The space with some knobs pinned to `chosen` values (`--param NAME=VALUES`)."""
        for name in chosen:
            if name not in self.values:
                known = ", ".join(self.values) or "none"
                raise InvalidArgument(
                    f"unknown knob {name!r} of {self.config_type.__name__}; known: {known}"
                )
        return ConfigSpace(self.config_type, {**self.values, **chosen}, self.constraint)

    def config(self, given: Mapping[str, Any]) -> C:
        """The config with these values (others at their default). Raises InvalidArgument."""
        unknown = [n for n in given if n not in self.values]
        if unknown:
            raise InvalidArgument(f"unknown knob {unknown[0]!r}; known: {', '.join(self.values)}")
        return self.config_type(**given)
