"""Whether an executable computes what the operator's reference does.

An executable is run on several examples (see examples.py) with poisoned, guarded memory for its
outputs and workspace. Each element it returns must lie between the least and the greatest value
that a correct implementation in the operator's arithmetic can return (see error_bound.py); its
largest error, where rounding chose nothing, may not exceed twice PyTorch's plus one ulp; it may
write nothing but its own memory, and must return the same bits twice.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright import registry
from tilewright.errors import VerificationError
from tilewright.impl import Executable, allocate
from tilewright.impls._vendor import vendor as vendor_of
from tilewright.measure.batch import Batch, find_batch
from tilewright.measure.error_rules_convolution import rounded_to_tf32
from tilewright.measure.examples import Example, kinds, make_example, memory_span
from tilewright.measure.expected import LIKE, Expected, Mismatch, bits, expect, first_true
from tilewright.measure.guard import POISONS, guarded
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec, same_layout

RACING_RUNS = 5
"""Of PyTorch, where a workload lets results differ from run to run: the error of each is the draw
of a lot, and the largest of so many is what an implementation is held against."""

DRAWS, FEWEST_DRAWS, DRAWN_ELEMENTS = 32, 4, 2**27
"""Before an error is refused for being larger than PyTorch's, PyTorch's is the largest of so many
draws: that of a product of many factors is the draw of a lot, and many elements may share the error
of a few sums. Of large workloads there are as many as have so many elements."""


@dataclass(frozen=True)
class Accuracy:
    """How far one output is from others on random inputs, at most, in ulps as in `Verdict`.

    Attributes:
        ulp, vendor_ulp: the executable's and PyTorch's own distance from the fp64 truth.
        apart_ulp: the distance of the two from one another.
        vendor_within: whether PyTorch's result keeps the bound by itself; where it does not, the
            bound was widened to hold it.
        differing: the share of elements, 0 to 1, in which the two differ at all.
        misrounded, vendor_misrounded: the share that is not what the truth rounds to.
    """

    ulp: float
    vendor_ulp: float
    apart_ulp: float
    vendor_within: bool
    differing: float
    misrounded: float
    vendor_misrounded: float


@dataclass(frozen=True)
class Verdict:
    """What verification found.

    Attributes:
        max_ulp: largest error on random inputs, in ulps of the output at the truth; elements
            below the mean magnitude count in ulps of that. inf if the executable failed before
            it was measured.
        bound_ulp: largest error that was allowed on the same inputs.
        integer_exact: whether integer inputs gave the exact result; None where the operator does
            not promise one.
        deterministic: whether two runs on the same inputs gave the same bits.
        message: empty if ok, else what is wrong, with the coordinate and both values.
        outputs: of each floating output that was measured.
        ran: whether it could be built and run at all; the numbers mean nothing where it could not.
    """

    ok: bool
    max_ulp: float
    bound_ulp: float
    integer_exact: bool | None
    deterministic: bool
    message: str
    outputs: tuple[Accuracy, ...] = ()
    ran: bool = True

    @staticmethod
    def not_run(message: str) -> Verdict:
        """Of what could not be built or run, for the reason that is told."""
        return Verdict(False, float("inf"), 0.0, None, False, message, ran=False)


@dataclass
class _Findings:
    max_ulp: float = float("inf")
    integer_exact: bool | None = None
    deterministic: bool = True
    may_race: bool = False
    outputs: tuple[Accuracy, ...] = ()


@dataclass
class _Case:
    example: Example
    checksums: list[int]
    expected: list[Expected]
    drawn_again: bool = False


class Verifier:
    """Checks executables of one workload.

    Inputs, truth and intervals are computed once, in fp64 on the device itself, and kept.

    Args:
        w: the workload.
        device: where executables run.
        seed: of the example inputs; the same seed gives the same inputs.
        vendor: PyTorch's result as a function of the tensors; by default the reference, eagerly.

    Raises:
        NoErrorRule: the reference uses an operation without an error rule.
    """

    def __init__(
        self,
        w: Workload,
        device: torch.device,
        seed: int = 0,
        vendor: Callable[..., Tensor | tuple[Tensor, ...]] | None = None,
    ):
        self._w, self._device, self._seed = w, torch.device(device), seed
        self._vendor = vendor = vendor or vendor_of(w)
        random = make_example(w, "random", None, seed, self._device)
        with _without_search():
            self._batch = find_batch(w, random.tensors) if w.outputs[0].numel else Batch()
        self._aliases = set[tuple[int, int]]()
        self._cases = [self._case(random, vendor)]
        for kind in list(kinds(w, self._batch))[1:]:
            example = make_example(w, kind, self._batch, seed, self._device)
            self._cases.append(self._case(example, vendor))
        self.bound_ulp = max(e.bound_ulp for e in self._cases[0].expected)

    def check(self, executable: Executable, may_race: bool = False) -> Verdict:
        """Run the executable on every example, until something is wrong.

        Whatever the executable raises is passed on.

        Args:
            may_race: two runs may differ, as PyTorch's own kernels for repeated indices do.
        """
        found = _Findings(may_race=may_race)
        message = next(self._problems(executable, found), "")
        return Verdict(
            not message,
            found.max_ulp,
            self.bound_ulp,
            found.integer_exact,
            found.deterministic,
            message,
            found.outputs,
        )

    def _case(self, example: Example, vendor: Callable[..., Any]) -> _Case:
        outputs = self._by_vendor(vendor, example)
        w, tensors, batch = self._w, example.tensors, self._batch
        if example.slices is not None:
            tensors, outputs = (batch.select(ts, example.slices) for ts in (tensors, outputs))
            w = batch.workload(w, len(example.slices))
            batch = Batch(batch.dim, len(example.slices))
        with _without_search():
            expected = expect(w, batch, tensors, outputs, example.kind == "random", example.slack)
        if example.kind == "random" and "nondeterministic" in self._w.flags:
            for _ in range(RACING_RUNS - 1):
                for e, out in zip(expected, self._by_vendor(vendor, example), strict=True):
                    if e.truth is not None:
                        e.vendor_ulp = max(e.vendor_ulp, e.worst_ulp(out))
        return _Case(example, [_checksum(t) for t in example.tensors], expected)

    def _by_vendor(self, vendor: Callable[..., Any], example: Example) -> list[Tensor]:
        given = self._for_vendor(example)
        outputs = _as_tuple(vendor(*given))
        self._aliases |= set(_aliases(given, outputs))
        return [_in_layout(out, s) for out, s in zip(outputs, self._w.outputs, strict=True)]

    def _for_vendor(self, example: Example) -> list[Tensor]:
        """Operands already rounded to TF32 where that is allowed: PyTorch may use it or not."""
        given = self._given(example)
        if not dict(self._w.args).get("allow_tf32"):
            return given
        wide = self._w.operator.wide
        return [
            t if name in wide else rounded_to_tf32(t)
            for name, t in zip(self._w.tensors, given, strict=True)
        ]

    def _problems(self, executable: Executable, found: _Findings) -> Iterator[str]:
        for case in self._cases:
            outputs = yield from self._run(executable, case, POISONS[0])
            yield from self._mismatches(case, outputs, found)
            if case.example.kind == "random":
                yield from self._accuracy(case, outputs, found)
                again = yield from self._run(executable, case, POISONS[1])
                yield from self._mismatches(case, again, found)
                yield from self._differences(outputs, again, found)

    def _run(
        self, executable: Executable, case: _Case, poison: int
    ) -> Generator[str, None, tuple[Tensor, ...]]:
        """The outputs of one run, after problems with anything but their values."""
        with guarded(poison) as memory:
            given = self._given(case.example)
            outputs = _as_tuple(executable(*given))
            damage = memory.damage()
        if damage:
            yield damage
        for name, out in zip(self._destinations, outputs, strict=False):
            if out.data_ptr() != given[self._place_of(name)].data_ptr():
                yield f"returned memory of its own, not the donated {name}"
        yield from self._misfits(outputs)
        yield from self._shared(given, outputs)
        yield from self._modified(case)
        return outputs

    def _shared(self, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[str]:
        """Outputs in the memory of an argument that is not donated, or of another output; where
        PyTorch's are, too, they may be."""
        for i, other in _aliases(given, outputs):
            if i < len(self._destinations) or (i, other) in self._aliases:
                continue
            names = [*self._w.tensors, *(f"its output {k}" for k in range(i))]
            yield f"returned the memory of {names[other]} as its output {i}"

    @property
    def _destinations(self) -> tuple[str, ...]:
        return self._w.operator.destinations(self._w)

    def _place_of(self, name: str) -> int:
        return list(self._w.tensors).index(name)

    def _given(self, example: Example) -> list[Tensor]:
        """The example's tensors; what is written in place is a copy, guarded where others are."""
        given = list(example.tensors)
        for name in self._destinations:
            i = self._place_of(name)
            given[i] = allocate(self._w.tensors[name], self._device).copy_(given[i])
        return given

    def _misfits(self, outputs: Sequence[Tensor]) -> Iterator[str]:
        specs = self._w.outputs
        if len(outputs) != len(specs):
            yield f"returned {len(outputs)} tensors, expected {len(specs)}"
        for out, spec in zip(outputs, specs, strict=True):
            right = tuple(out.shape) == spec.shape and out.dtype == spec.torch_dtype
            if not right or not same_layout(spec.shape, out.stride(), spec.real_strides):
                yield f"returned {TensorSpec.of(out)}, expected {spec}"
            if out.device.type != self._device.type:
                yield f"returned a tensor on {out.device}, expected {self._device}"

    def _modified(self, case: _Case) -> Iterator[str]:
        """An input that was written to, after all inputs are restored for whoever comes next."""
        tensors = case.example.tensors
        if [_checksum(t) for t in tensors] == case.checksums:
            return
        kind = case.example.kind
        fresh = make_example(self._w, kind, self._batch, self._seed, self._device).tensors
        message = "wrote to the memory between the elements of an input"
        for name, t, before in zip(self._w.tensors, tensors, fresh, strict=True):
            changed = (t != before) & ~(t.isnan() & before.isnan())
            if changed.any():
                index = first_true(changed)
                was, now = float(before[index]), float(t[index])
                message = (
                    f"modified its input {name} at {_place(index)}: {was:.6g} became {now:.6g}"
                )
            memory_span(t).copy_(memory_span(before))
        case.checksums[:] = [_checksum(t) for t in tensors]
        yield message

    def _mismatches(
        self, case: _Case, outputs: Sequence[Tensor], found: _Findings
    ) -> Iterator[str]:
        slices, batch = case.example.slices, self._batch
        integer = case.example.kind == "integer" and all(e.exact for e in case.expected)
        for out, expected in zip(outputs, case.expected, strict=True):
            part = out if slices is None else batch.select([out], slices)[0]
            mismatch = expected.mismatch(part)
            if mismatch is None:
                continue
            if integer:
                found.integer_exact = False
            if case.example.kind == "random":
                found.max_ulp = mismatch.ulp
            yield self._text(mismatch, case.example, part.numel())
        if integer:
            found.integer_exact = True

    def _accuracy(self, case: _Case, outputs: Sequence[Tensor], found: _Findings) -> Iterator[str]:
        measured = [
            (expected.worst_ulp(out), expected, out)
            for out, expected in zip(outputs, case.expected, strict=True)
            if expected.truth is not None
        ]
        found.max_ulp = max((ulp for ulp, _, _ in measured), default=0.0)
        found.outputs = tuple(
            Accuracy(
                ulp,
                expected.vendor_ulp,
                expected.apart_ulp(out),
                not expected.widened,
                expected.differing(out),
                expected.misrounded(out),
                expected.vendor_misrounded,
            )
            for ulp, expected, out in measured
        )
        if found.may_race:
            return  # PyTorch's, measured by another run of itself
        for ulp, expected, out in measured:
            # An fp64 truth shares PyTorch's own fp64 errors: it cannot say which is better.
            if out.dtype == torch.float64 or ulp <= _allowed(expected):
                continue
            self._draw_again(case)  # many elements may share a few errors
            if ulp > (allowed := _allowed(expected)):
                text = self._text(expected.worst(out, allowed), case.example, out.numel())
                yield f"{text}; PyTorch's largest error is {expected.vendor_ulp:.3g} ulp"

    def _draw_again(self, case: _Case) -> None:
        """Take the largest error of PyTorch on other random inputs, too; once."""
        if case.drawn_again:
            return
        case.drawn_again = True
        elements = max(1, *(t.numel() for t in case.example.tensors))
        draws = max(min(DRAWS, DRAWN_ELEMENTS // elements), FEWEST_DRAWS)
        for seed in range(self._seed + 1, self._seed + draws):
            example = make_example(self._w, "random", None, seed, self._device)
            others = self._case(example, self._vendor).expected
            for e, other in zip(case.expected, others, strict=True):
                e.vendor_ulp = max(e.vendor_ulp, other.vendor_ulp)

    def _differences(
        self, first: Sequence[Tensor], second: Sequence[Tensor], found: _Findings
    ) -> Iterator[str]:
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            own = i not in {output for output, _ in self._aliases}
            if own and a.numel() and a.data_ptr() == b.data_ptr():
                yield "returned the same memory from two calls"
            if torch.equal(bits(a), bits(b)):
                continue
            found.deterministic = False
            if "nondeterministic" not in self._w.flags and not found.may_race:
                index = first_true(bits(a) != bits(b))
                values = f"{float(a[index]):.9g}, then {float(b[index]):.9g}"
                yield f"two runs on the same inputs differ at {_place(index)}: {values}"

    def _text(self, mismatch: Mismatch, example: Example, elements: int) -> str:
        index, dim = list(mismatch.index), self._batch.dim
        if example.slices is not None:
            index[dim] = int(example.slices[index[dim]])
        text = mismatch.text(_place(tuple(index)))
        if mismatch.count > 1:
            text += f", one of {mismatch.count} such elements of {elements}"
        return text if example.kind == "random" else f"{text} (on {example.kind} inputs)"


@contextlib.contextmanager
def _without_search() -> Iterator[None]:
    """cuDNN takes its own first choice for the truth: it would time its fp64 kernels for each shape
    that occurs, which is run a few times at most."""
    searches, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searches


def verification_error(
    w: Workload,
    implementation: str,
    config: str,
    verdict: Verdict,
    seed: int,
    device: str | None = None,
) -> VerificationError:
    """The error for a verdict that is not ok.

    Args:
        implementation: its name, as in records.
        config: as the command line takes it, `tile_m=128,split_k=8`; empty without tunables.
        seed: of the verifier.
        device: as the caller named it, if he did.
    """
    with_config = f" with {config.replace(',', ' ')}" if config else ""
    what = "is wrong" if verdict.ran else "did not run"
    flags = f" --impl {implementation}" + (f" --config {config}" if config else "")
    flags += f" --device {device}" if device else ""
    return VerificationError(
        f"{w.op}.{implementation} {what} on {w}{with_config}: {verdict.message} (seed {seed})\n"
        f'  reproduce: tilewright verify {import_flags(w)}"{w}"{flags} --seed {seed}'
    )


def import_flags(w: Workload) -> str:
    """What a command line needs before a workload of a person's function, with a space behind it;
    empty for other operators, and where no file was named."""
    sources = registry.imported if w.operator.fused else ()
    return "".join(f"--import {shlex.quote(source)} " for source in sources)


def _allowed(expected: Expected) -> float:
    """In ulps. What PyTorch has rounded once, as its variances of fp32 on a CPU, may have been
    computed in fp64, which says nothing of what fp32 can do."""
    allowed = 2 * expected.vendor_ulp + 1
    if expected.lo.dtype == torch.float32 and expected.vendor_ulp <= 0.5:
        return max(allowed, LIKE * expected.bound_ulp)
    return allowed


def _as_tuple(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _aliases(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Which output is the memory of which tensor given, or, counted behind them, of which output
    before it."""
    for i, out in enumerate(outputs):
        for other, t in enumerate([*given, *outputs[:i]]):
            if out.numel() and out.data_ptr() == t.data_ptr():
                yield i, other


def _in_layout(t: Tensor, spec: TensorSpec) -> Tensor:
    if same_layout(spec.shape, t.stride(), spec.real_strides):
        return t
    out = into = spec.empty(t.device)
    for dim, stride in enumerate(spec.real_strides):  # of elements that share memory, the first
        if stride == 0 and t.shape[dim] > 1:
            into, t = into.narrow(dim, 0, 1), t.narrow(dim, 0, 1)
    into.copy_(t)
    return out


def _checksum(t: Tensor) -> int:
    """Of all memory behind `t`, gaps included."""
    raw = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    words = raw.numel() // 8 * 8
    whole = raw[:words].view(torch.int64)
    rows = len(whole) // _COLUMNS
    table, rest = whole[: rows * _COLUMNS].view(rows, _COLUMNS), whole[rows * _COLUMNS :]
    sums = table.sum(0), table.sum(1), rest, raw[words:].long()
    return hash(tuple(torch.stack([(_odd(t) * t).sum() for t in sums]).tolist()))


_COLUMNS = 4093


def _odd(t: Tensor) -> Tensor:
    """A factor for each place, so that it matters where a number stands."""
    return torch.arange(len(t), device=t.device).mul_(2).add_(1)


def _place(index: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, index))})"
