"""Random masks that follow from a seed alone: Philox4x32-10, indexed by the element.

Element i (flat, in row-major order) of the n-th mask that a function draws is word i % 4 of
Philox(key = seed, counter = (i // 4, n)), and it is kept where that word is below a threshold. So a
mask does not depend on which thread computes which element, on layout or dtype, and a backward
computes it again instead of reading it.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS = 10
WORD = 1 << 32
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = WORD - 1
_VMAP_MODES = torch._C.DispatchKeySet(
    torch._C._parse_dispatch_key("VmapMode")  # type: ignore[arg-type]  # there is such a key
).add(torch._C.DispatchKey.FuncTorchVmapMode)


_OF_DRAWS = tuple(
    getattr(torch.ops.aten, f"{kind}{in_place}").default
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for in_place in ("", "_")
)
"""What PyTorch composes of draws and arithmetic."""


def philox(seed: Tensor, counter: Sequence[Tensor | int]) -> tuple[Any, ...]:
    """The four words of each counter, as int64 below 2^32.

    Args:
        seed: int64, a scalar: the key, its low word first.
        counter: four words, int64 tensors of one shape (or numbers), below 2^32.
    """
    key = [seed & _LOW, (seed >> 32) & _LOW]
    x: list[Any] = list(counter)
    for r in range(ROUNDS):
        k = [(key[w] + r * _WEYL[w]) & _LOW for w in (0, 1)]
        # A product of two words fills 64 bits; int64 wraps, and keeps all of them.
        p, q = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        x = [((q >> 32) & _LOW) ^ x[1] ^ k[0], q & _LOW, ((p >> 32) & _LOW) ^ x[3] ^ k[1], p & _LOW]
    return tuple(x)


def _philox_bernoulli(seed: Tensor, call: int, threshold: int, shape: Sequence[int]) -> Tensor:
    size = math.prod(shape)
    blocks = torch.arange((size + 3) // 4, device=seed.device)
    words = philox(seed, (blocks & _LOW, blocks >> 32, torch.full_like(blocks, call), 0))
    return (torch.stack(words, -1).reshape(-1)[:size] < threshold).reshape(shape)


_library = torch.library.Library("tilewright", "FRAGMENT")
_library.define("philox_bernoulli(Tensor seed, int call, int threshold, SymInt[] shape) -> Tensor")
_library.impl("philox_bernoulli", _philox_bernoulli, "CompositeExplicitAutograd")
philox_bernoulli = torch.ops.tilewright.philox_bernoulli.default
"""(seed, call, threshold, shape) -> booleans, True with probability threshold / 2^32. `seed` is an
int64 scalar; `call` numbers the masks of one function."""


@torch.library.impl(_library, "philox_bernoulli", "Meta")
def _philox_bernoulli_meta(seed: Tensor, call: int, threshold: int, shape: Sequence[int]) -> Tensor:
    return seed.new_empty(shape, dtype=torch.bool)


class Seeded(TorchDispatchMode):
    """Inside, dropout and Bernoulli draws of a fixed probability come from `seed`.

    Other random functions stay PyTorch's. Works eagerly, on fake tensors and in traces.

    Attributes:
        calls: how many masks were drawn.
    """

    def __init__(self, seed: Tensor):
        super().__init__()
        self.seed, self.calls = seed, 0
        self._batching: list[Any] = []

    def __enter__(self) -> Self:
        # Nothing here is random, so gradients in batches, in which PyTorch refuses draws, have it.
        self._batching.append(torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES))
        self._batching[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._batching.pop().__exit__(*raised)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        aten = torch.ops.aten
        if function is aten.bernoulli_.float:
            return args[0].copy_(self._mask(*args[:2]))
        if function is aten.bernoulli.p:
            return self._mask(*args[:2]).to(args[0].dtype)
        if function is aten.native_dropout.default and args[2] is not False:
            mask = self._mask(args[0], 1.0 - args[1])
            scale = 1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0
            return args[0] * mask.to(args[0].dtype) * scale, mask
        if function in _OF_DRAWS:  # as it comes where autograd's keys are left out
            with self:
                return function.decompose(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _mask(self, like: Tensor, probability: float = 0.5) -> Tensor:
        threshold = round(probability * WORD)
        if threshold in (0, WORD):
            self.calls += 0 < probability < 1  # a draw that all pass, or none
            return torch.full_like(like, threshold > 0, dtype=torch.bool)
        self.calls += 1
        return philox_bernoulli(self.seed, self.calls - 1, threshold, like.shape)
