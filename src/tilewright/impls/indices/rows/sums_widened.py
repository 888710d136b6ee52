"""Sums of halves on a CPU by PyTorch's kernels for fp32, rounded once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impl import CPU, Executable, Implementation, allocate
from tilewright.impls._in_place import Written
from tilewright.impls.indices.rows._rows import OPERATORS, named_source
from tilewright.op import Workload
from tilewright.ops._indexing import places_of_x, refuse_out_of_range
from tilewright.tensor_spec import HALVES, TensorSpec

SORTED, STARTED = 16, 100_000
"""What it costs to sort an index, and to begin with that, in elements widened and rounded. 8 rows
of bf16[20000,2000] take 0.05 ms, all of its rows 120 (AMD EPYC, 2 threads, d23b4d8)."""


class SumsWidened(Implementation):
    """Takes every layout and compiles nothing, so that halves are not rounded at each addition
    where no kernel of ours is built, yet or at all.

    Makes fp32 copies of what is added and of those rows (or elements) of the table that the index
    names; of the whole table where it is so small that sorting the index costs more.
    """

    name, backend, op = "sums_widened", "aten", OPERATORS
    stands_in = True

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cpu":
            return f"it runs on a CPU, not on {device.name}"
        if w.main.dtype not in HALVES:
            return f"{w.main.dtype} is no half, and aten sums it as it is"
        if not w.promises_more(device.kind):
            return "a maximum or minimum is no sum: aten has nothing to round"
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return WidenedExecutable(w)


class WidenedExecutable(Executable):
    def __init__(self, w: Workload):
        self._w, self._in_place, self._written = w, "x" in w.donated, Written(w)
        self._places = places_of_x(w) if "x" in w.tensors else w["num_weights"]
        self._scatters, index = w.op.startswith("scatter"), w["index"]
        self._elements = self._scatters and not _names_rows(index, w["dim"])
        one_each = self._elements or not self._scatters
        indices = index.numel if one_each else math.prod(index.shape[w["dim"] :][:1])
        source, out = w[named_source(w)].numel, w.outputs[0]
        added = index.numel if self._scatters else source
        self._whole = not out.rank or out.numel <= SORTED * indices + added + STARTED
        if self._whole:
            converted = 8 * indices if self._scatters and index.dtype == "i32" else 0
            sums = _bytes_of_sums(w, out.numel, source, self._places)
            self.workspace_bytes = converted + sums
        elif index.numel:
            rows = min(indices, out.numel if self._elements else self._places)
            table = rows * added // indices
            sums = _bytes_of_sums(w, table, added, rows) + (2 * table if "x" in w.tensors else 0)
            kept = (26 if self._elements else 16) * indices  # names, positions, places, their terms
            self.workspace_bytes = kept + max(16 * indices, sums)  # sorting, or what comes behind

    def __call__(self, *tensors: Tensor) -> Tensor:
        w = self._w
        given = w.call(tensors)
        self._written.refuse_shared([t.data_ptr() for t in tensors])
        refuse_out_of_range(w.op, given["index"], self._places)
        if self._whole:
            sums = self._sums(**given)
            return given["x"].copy_(sums) if self._in_place else sums.to(w.main.torch_dtype)
        out = given.pop("x", None)
        if not self._in_place:
            made = allocate(w.outputs[0], CPU)
            out = made.zero_() if out is None else made.copy_(out)
        if w["index"].numel:
            self._into_named(out, **given)
        return out

    def _into_named(self, out: Tensor, index: Tensor, dim: int = 0, **given: Any) -> None:
        """Sums in the rows or elements of `out` that the index names."""
        if self._scatters:
            index, src = map(torch.atleast_1d, (index, given["src"]))
            box = [slice(n) for n in index.shape]
            src = src[tuple(box)]
            if self._elements:
                out, dim, index, src = _as_elements(out, dim, index, src)
            else:
                index = index[tuple(slice(None) if d == dim else 0 for d in range(index.dim()))]
                box[dim] = slice(None)
                out = out[tuple(box)]
            given["src"] = src
        named, position = index.unique(return_inverse=True)
        if self._scatters:
            line = [-1 if d == dim else 1 for d in range(src.dim())]
            position = position.view(line).expand(src.shape)
        if "padding_idx" in given:
            padding = (named == given["padding_idx"]).nonzero()
            given["padding_idx"] = int(padding) if padding.numel() else -1
            given["num_weights"] = named.numel()
        else:
            # index_select would make a strided table contiguous first
            given |= {"x": out[(*[slice(None)] * dim, named)], "dim": dim}
        sums = self._sums(index=position, **given)
        out.index_copy_(dim, named.long(), sums.to(out.dtype))

    def _sums(self, **given: Any) -> Tensor:
        """The operator's result on widened tensors, not rounded yet."""
        wide = {
            n: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in given.items()
        }
        if mean := wide.get("scale_grad_by_freq", False):
            wide["scale_grad_by_freq"] = False
        out: Tensor = self._w.operator.reference(**wide)
        if mean:  # divided once, as by rows_cpp: PyTorch divides each term
            terms = torch.bincount(given["index"].reshape(-1), minlength=given["num_weights"])
            out /= terms.clamp_min(1)[:, None]
        return out


def _bytes_of_sums(w: Workload, table: int, added: int, rows: int) -> int:
    """What is made for sums, besides what is given: both of them widened and the sums, and where
    terms are counted, ones and counts of the same shapes.

    Args:
        table, added, rows: elements of the table, those added to it, and the table's rows.
    """
    args = dict(w.args)
    mean = args.get("reduce") == "mean"
    of_table = 4 * (1 + ("x" in w.tensors)) + 5 * mean
    terms = 20 * rows if args.get("scale_grad_by_freq") else 0
    return of_table * table + 4 * (1 + mean) * added + terms


def _names_rows(index: TensorSpec, dim: int) -> bool:
    """Whether a scatter's index is one for each row, or for each part of one."""
    strided = zip(index.shape, index.real_strides, strict=True)
    return all(d == dim or n == 1 or stride == 0 for d, (n, stride) in enumerate(strided))


def _as_elements(
    x: Tensor, dim: int, index: Tensor, src: Tensor
) -> tuple[Tensor, int, Tensor, Tensor]:
    """A scatter of as many elements into x's memory as one dim."""
    places = index.long() * x.stride(dim)
    for d, n in enumerate(index.shape):
        if d != dim:
            line = [-1 if d == other else 1 for other in range(x.dim())]
            places += (torch.arange(n) * x.stride(d)).view(line)
    memory = x.as_strided((TensorSpec.of(x).storage_elements,), (1,))
    return memory, 0, places.reshape(-1), src.reshape(-1)
