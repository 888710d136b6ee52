"""tilewright: PyTorch operators as fast as the machine allows, with proof.

Every registered operator is a function of this module, in PyTorch's own signature:

    import tilewright as tw
    y = tw.layer_norm(x, (768,), weight, bias)

Importing this module loads neither torch nor an operator; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import Any

from tilewright import errors

__version__ = "0.1.0.dev0"

_FOUND_IN = {
    "DeviceSpec": "tilewright.device",
    "TensorSpec": "tilewright.tensor_spec",
    "Workload": "tilewright.op",
    "check": "tilewright.compile.faults",
    "conv2d": "tilewright.dispatch.convolution",
    "choose": "tilewright.dispatch.selection",
    "disable": "tilewright.dispatch.prepared",
    "embedding": "tilewright.dispatch.indices.embedding",
    "fuse": "tilewright.dispatch.functions.fuse",
    "enable": "tilewright.dispatch.prepared",
    "index_put": "tilewright.dispatch.indices.put",
    "index_put_": "tilewright.dispatch.indices.put",
    "reload_records": "tilewright.dispatch.prepared",
    "use": "tilewright.dispatch.selection",
    **{
        name: "tilewright.errors"
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TilewrightError)
    },
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _FOUND_IN:
        found = getattr(importlib.import_module(_FOUND_IN[name]), name)
    else:
        found, may_change = _operator(name)
        if may_change:
            return found
    globals()[name] = found
    return found


def _operator(name: str) -> tuple[Any, bool]:
    """The operator, and whether another may get its name: one of tw.fuse."""
    from tilewright.dispatch.call import operators
    from tilewright.errors import known_names
    from tilewright.op import OPS

    base = name.removesuffix("_")
    if name not in OPS and (base == name or base not in OPS or OPS[base].inplace is None):
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; {known_names(name, OPS)}"
        )
    return operators[name], name in OPS and OPS[name].fused


def __dir__() -> list[str]:
    from tilewright.op import OPS

    return sorted({*globals(), *_FOUND_IN, *OPS})
