"""What there is to name: operators, implementations, suites, strategies and devices.

A kind is imported when it is asked for: only operators and implementations need torch.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.impl import Implementation
    from tilewright.op import Op


def operators() -> list[dict[str, Any]]:
    from tilewright.op import OPS

    return [
        {"name": o.name, "signature": signature(o), "summary": first_paragraph(o.__doc__)}
        for o in OPS.values()
    ]


def implementations() -> list[dict[str, Any]]:
    """`operators` is None for those that serve every operator."""
    from tilewright.impl import IMPLS

    found = IMPLS.values()
    in_file = Counter(type(i).__module__ for i in found)
    return [
        {
            "name": i.name,
            "backend": i.backend,
            "operators": i.operators and list(i.operators),
            "summary": _of_implementation(i, alone=in_file[type(i).__module__] == 1),
        }
        for i in found
    ]


def suites() -> list[dict[str, Any]]:
    from tilewright.suite import SUITES

    found = []
    for s in SUITES.values():
        summary, source = first_and_rest(s.doc)
        found.append(
            {"name": s.name, "workloads": len(s.texts), "summary": summary, "source": source}
        )
    return found


def strategies() -> list[dict[str, Any]]:
    from tilewright.search import STRATEGIES

    return [{"name": s, "summary": first_paragraph(STRATEGIES[s].__doc__)} for s in STRATEGIES]


def devices() -> list[dict[str, Any]]:
    from tilewright.device import DEVICES

    return [asdict(d) for d in DEVICES.values()]


KINDS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    f.__name__: f for f in (operators, implementations, suites, strategies, devices)
}


def signature(o: Op) -> str:
    """As workloads are written: `softmax(x, dim=-1)`."""
    from tilewright.text import value_text

    told = [
        name if p.default is p.empty else f"{name}={value_text(p.default)}"
        for name, p in o.parameters.items()
    ]
    return f"{o.name}({', '.join(told)})"


def first_paragraph(doc: str | None) -> str:
    return first_and_rest(doc)[0]


def first_and_rest(doc: str | None) -> tuple[str, str]:
    """A docstring's first paragraph, and what follows it, each as one line."""
    first, _, rest = inspect.cleandoc(doc or "").partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())


def _of_implementation(i: Implementation, alone: bool) -> str:
    """Its file says what it does, and its class so where a file has several."""
    file = sys.modules[type(i).__module__].__doc__
    return first_paragraph(file if alone else type(i).__doc__) or first_paragraph(file)
