"""Config spaces: the knobs of an implementation, their values, and what fits together."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from tilewright.errors import InvalidArgument, known_names

C = TypeVar("C")


def param(*values: Any, default: Any = None, counts: bool = False, own: bool = False) -> Any:
    """Declare one knob of a Config dataclass; the first value is its default.

    Args:
        counts: any number from 1 fits that the constraint lets pass; listed are those worth trying.
        own: what is chosen for one workload says nothing of others: see `lent`.
    """
    first = values[0] if default is None else default
    return field(default=first, metadata={"values": values, "counts": counts, "own": own})


def lent(config: C) -> C:
    """The config for another workload than that which it was tuned for."""
    own = {f.name: f.default for f in fields(config) if f.metadata.get("own")}  # type: ignore[arg-type]
    return replace(config, **own)  # type: ignore[type-var]


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
        pinned: knobs that a caller gave values: they take no others, even if they count something.

    It is finite and enumerates in a fixed order; a config is in the space if and only if each
    value is listed, or is that of a knob that counts, and the constraint passes.
    """

    def __init__(
        self,
        config_type: type[C],
        values: Mapping[str, Sequence[Any]] | None = None,
        constraint: Callable[[C], str | None] = lambda config: None,
        pinned: Collection[str] = (),
    ):
        self.config_type = config_type
        self.constraint = constraint
        self.pinned = tuple(pinned)
        self.counts = {
            f.name
            for f in fields(config_type)  # type: ignore[arg-type]
            if f.metadata.get("counts") and f.name not in pinned
        }
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
        for name in self.unlisted(config):
            value, listed = getattr(config, name), self.values[name]
            if name not in self.counts or type(value) is not int or value < 1:
                told = f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
                return f"{told} is not one of {', '.join(map(str, listed))}"
        return self.constraint(config)

    def unlisted(self, config: C) -> list[str]:
        """The knobs with other values than those listed."""
        given = ((name, getattr(config, name), listed) for name, listed in self.values.items())
        return [name for name, value, listed in given if not _is_among(value, listed)]

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
            for value in _beside(getattr(config, name), listed):
                near = replace(config, **{name: value})  # type: ignore[type-var]
                if self.constraint(near) is None:
                    around.append(near)
        return around

    def nearest(self, config: C) -> C | None:
        """The config, with the first listed values that fit where it has others, if any do."""
        names = self.unlisted(config)
        for values in itertools.product(*(self.values[name] for name in names)):
            near = replace(config, **dict(zip(names, values, strict=True)))  # type: ignore[type-var]
            if near in self:
                return near
        return None

    def restricted(self, chosen: Mapping[str, Sequence[Any]]) -> ConfigSpace[C]:
        """The space with some knobs pinned to `chosen` values (`--param NAME=VALUES`)."""
        for name in chosen:
            if name not in self.values:
                raise InvalidArgument(
                    f"unknown knob {name!r} of {self.config_type.__name__}; "
                    f"{known_names(name, self.values)}"
                )
            kinds = {type(value) for value in self.values[name]}
            for value in chosen[name]:
                if type(value) not in kinds:
                    known = ", ".join(map(str, self.values[name]))
                    raise InvalidArgument(f"{name}={value!r} is not of the kind of {known}")
        pinned = dict.fromkeys((*self.pinned, *chosen))
        values, fits = {**self.values, **chosen}, self.constraint
        strange = [n for n, asked in chosen.items() if not _are_among(asked, self.values[n])]
        if strange:
            fits = _of_any_values(self.constraint, strange)
        return ConfigSpace(self.config_type, values, fits, pinned)

    def config(self, given: Mapping[str, Any]) -> C:
        """The config with these values (others at their default). Raises InvalidArgument."""
        for name in given:
            if name not in self.values:
                raise InvalidArgument(f"unknown knob {name!r}; {known_names(name, self.values)}")
        return self.config_type(**given)


def _of_any_values(
    constraint: Callable[[C], str | None], names: Sequence[str]
) -> Callable[[C], str | None]:
    """The constraint where these knobs may have values that it knows nothing of."""

    def fits(config: C) -> str | None:
        try:
            return constraint(config)
        except (LookupError, ArithmeticError):
            told = ", ".join(f"{n}={getattr(config, n)}" for n in names)
            return f"{told} is of no use here"

    return fits


def _is_among(value: Any, listed: Sequence[Any]) -> bool:
    """1.0 and True are not among whole numbers, though they equal one."""
    return value in listed and type(value) is type(listed[listed.index(value)])


def _are_among(values: Sequence[Any], listed: Sequence[Any]) -> bool:
    return all(_is_among(v, listed) for v in values)


def _beside(value: Any, listed: Sequence[Any]) -> list[Any]:
    """The one or two values next to it; those of a number that is not listed are next in size."""
    if value in listed:
        i = listed.index(value)
        return [*listed[max(i - 1, 0) : i], *listed[i + 1 : i + 2]]
    less, more = ([v for v in listed if (v > value) == is_more] for is_more in (False, True))
    return [*sorted(less)[-1:], *sorted(more)[:1]]
