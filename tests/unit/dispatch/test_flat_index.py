"""Several index tensors as one flat index: by PyTorch's operators, and by one launch of a kernel,
here on a CPU."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import DEVICE, library_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.compile import cxx, nvrtc
from tilewright.device import DEVICES
from tilewright.dispatch.indices import flat_index as dispatch
from tilewright.dispatch.indices.flat_index import by_operators, flat_index
from tilewright.errors import CompilerMissing
from tilewright.impls.indices._flat_index import (
    ENTRY,
    MOST_AXES,
    MOST_TENSORS,
    THREADS,
    FlatIndex,
    serves,
)
from tilewright.tensor_spec import DTYPES, TensorSpec

needs_compilers = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
SIZES = (21, 3, 2600, 2**31 + 5)
MARGIN = 2 * THREADS


def exact(indices, sizes):
    """The flat index by Python's integers, -1 where an index is out of range."""
    columns = [i.tolist() for i in (t.reshape(-1) for t in torch.broadcast_tensors(*indices))]
    found = []
    for places in zip(*columns, strict=True):
        flat = 0
        for place, size in zip(places, sizes, strict=True):
            flat = flat * size + place % size if -size <= place < size and flat >= 0 else -1
        found.append(flat)
    return found


# --- by operators --------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kinds", [["int64"] * 4, ["int32", "int64", "int32", "int64"]])
def test_several_indices_are_made_one_by_six_operations_for_each(kinds):
    given = [
        torch.randint(-min(n, 9000), min(n, 9000), (5, 7), dtype=getattr(torch, kind))
        for n, kind in zip(SIZES, kinds, strict=True)
    ]
    given[1] = given[1][:1]  # broadcast
    given[2] = given[2].clone()
    given[2][0, :3] = torch.tensor([2600, -2601, 2600])
    with Counted() as counted:
        found = by_operators(given, SIZES)
    assert counted.calls <= 6 * len(SIZES) + kinds.count("int32")
    assert found.view(-1).tolist() == exact(given, SIZES)
    assert flat_index(given, SIZES, torch.Size([5, 7])).tolist() == exact(given, SIZES)


# --- by a kernel ---------------------------------------------------------------------------------


def on_cpu(indices, sizes, backwards=False, wide=False):
    """What the kernel makes, which writes nothing beside it."""
    flat = FlatIndex([TensorSpec.of(i) for i in indices], sizes, DEVICE)
    memory = torch.full((flat.count + 2 * MARGIN,), -7, dtype=flat.dtype)
    out = memory[MARGIN:-MARGIN]
    source = flat.task.source
    if wide:
        assert "POSITION u32" in source
        source = source.replace("POSITION u32", "POSITION u64")
    library = library_of(source)
    library.go_backwards(backwards)
    args = flat.arguments(indices, out)
    if flat.count:
        run(library, ENTRY, flat.kernel.signature, flat.grid, THREADS, args)
    assert (memory[:MARGIN] == -7).all()
    assert (memory[MARGIN + flat.count :] == -7).all()
    return out


@st.composite
def index_tensors(draw):
    """Of any layouts, that broadcast, and the sizes of what they point into."""
    kinds = draw(
        st.sampled_from([("i64",), ("i32",), ("i64", "i32"), ("i32", "i64", "i64", "i32")])
    )
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 11]), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    sizes, indices = [], []
    for kind in kinds:
        ends = torch.iinfo(DTYPES[kind])
        sizes.append(draw(st.sampled_from([1, 5, 2600, ends.max // 2**20, 2**31 - 1, 2**31 + 5])))
        if math.prod(sizes) >= 2**63:
            sizes[-1] = 1
        own = [1 if draw(st.integers(0, 3)) == 0 else n for n in shape]
        own = own[draw(st.integers(0, len(own))) if draw(st.integers(0, 3)) == 0 else 0 :]
        near = min(sizes[-1], ends.max)
        t = torch.randint(-near, near, own, generator=generator, dtype=DTYPES[kind])
        edges = [
            near - 1,
            -near,
            min(near, ends.max),
            max(-near - 1, ends.min),
            *(ends.min, ends.max),
        ]
        if draw(st.booleans()):
            where = torch.randint(7, own, generator=generator) == 0
            t[where] = torch.tensor(edges, dtype=t.dtype)[torch.arange(int(where.sum())) % 6]
        indices.append(laid_out(t, draw(st.sampled_from(["contiguous", "turned", "steps", "one"]))))
    return indices, sizes


def laid_out(t, layout):
    """The same in memory of another order, with gaps, or expanded from its first elements."""
    if layout == "turned":
        back = (*reversed(range(t.dim())),)
        return t.permute(back).contiguous().permute(back)
    if layout == "steps":
        return t.repeat_interleave(3, -1)[..., ::3] if t.dim() else t
    return t[:1].expand(t.shape) if layout == "one" and t.dim() else t


@needs_compilers
@settings(max_examples=120)
@given(index_tensors(), st.booleans())
def test_the_kernel_makes_what_operators_make(given, backwards):
    indices, sizes = given
    found = on_cpu(indices, sizes, backwards)
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    expected = by_operators(indices, sizes).expand(shape).reshape(-1)
    if len(indices) == 1:  # which operators leave out of range as it is
        expected = torch.where(expected < sizes[0], expected, -1).clamp(min=-1)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert found.tolist() == exact(indices, sizes)


@needs_compilers
@pytest.mark.parametrize("wide", [False, True])
def test_several_blocks_of_several_axes_make_it(wide):
    indices = [torch.arange(7)[:, None, None], torch.arange(-40, 40)[None, :, None]]
    indices.append(torch.arange(-3, 6, dtype=torch.int32))
    found = on_cpu(indices, (7, 40, 5), wide=wide)
    assert len(found) > 10 * THREADS
    assert found.tolist() == exact(indices, (7, 40, 5))


def test_axes_that_lie_behind_one_another_are_one():
    whole = TensorSpec("i64", (5, 1, 6, 7))
    turned = TensorSpec("i64", (5, 1, 6, 7), (1, 5, 5, 30))

    def axes(*indices):
        task = FlatIndex(indices, (9,) * len(indices), DEVICE).task
        return int(task.source.split("#define AXES ")[1].split()[0])

    assert axes(whole) == axes(whole, whole) == axes(whole, TensorSpec("i64", (5, 1, 1, 1))) - 1
    assert axes(whole, turned) == 3
    assert axes(TensorSpec("i64", ())) == 1


@needs_compilers
def test_nothing_is_made_of_nothing():
    empty = torch.empty(3, 0, dtype=torch.int64)
    flat = FlatIndex([TensorSpec.of(empty), TensorSpec("i32", (3, 1))], (4, 5), DEVICE)
    assert flat.count == 0


KINDS = {
    "window": [TensorSpec("i64", (1, 1, 2600, 212))] * 4,
    "one": [TensorSpec("i32", (900,))],
    "grid": [TensorSpec("i64", (50, 1)), TensorSpec("i32", (50,))],
    "axes": [
        TensorSpec("i64", (2, 1) * 7),
        *(TensorSpec("i32", (1, 2) * 7), TensorSpec("i64", (2,) * 14)),
    ],
    "wide": [TensorSpec("i64", (2, 1)), TensorSpec("i64", (2**31,))],
    "many": [TensorSpec("i64", (900,))] * MOST_TENSORS,
}


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_compiles_without_spills_and_without_a_stack(kind, device):
    indices = KINDS[kind]
    assert serves(max(len(i.shape) for i in indices), len(indices))
    resources = FlatIndex(indices, (2,) * len(indices), DEVICES[device]).kernel.compiled.resources
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers <= (96 if kind == "many" else 40)


def test_what_launches_have_no_room_for_is_left_to_operators():
    assert serves(MOST_AXES, MOST_TENSORS)
    assert not serves(MOST_AXES + 1, 2)
    assert not serves(1, MOST_TENSORS + 1)


# --- which of them -------------------------------------------------------------------------------


class Kernel:
    """In place of FlatIndex on a GPU."""

    made = 0

    def __init__(self, *call):
        Kernel.made += 1

    def load(self, device_index):
        pass

    def __call__(self, indices):
        return "launched"


def of_a_gpu(t):
    """An index tensor that says so."""
    operations = {
        n: getattr(t, n) for n in ("dtype", "shape", "stride", "dim", "numel", "data_ptr")
    }
    return SimpleNamespace(device=torch.device("cuda:0"), **operations)


@pytest.fixture
def fake(monkeypatch):
    """What flat_index does with indices on a GPU, whose operators are not there."""
    Kernel.made = 0
    for name, value in {
        "FlatIndex": Kernel,
        "device_spec_of": lambda device: DEVICE,
        "_built": {},
        "_given_up": set(),
        "by_operators": lambda indices, sizes: torch.tensor(0),
    }.items():
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    indices = [of_a_gpu(torch.arange(4)), of_a_gpu(torch.arange(4).int())]
    return lambda sizes=(5, 6): flat_index(indices, sizes, torch.Size([4]))


def test_on_a_gpu_one_launch_makes_it_and_is_built_once(fake):
    assert [fake(), fake(), fake((6, 5))] == ["launched"] * 3
    assert Kernel.made == 2


def test_while_a_graph_is_captured_only_what_is_built_is_launched(fake, monkeypatch):
    assert fake() == "launched"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fake() == "launched"
    assert fake((6, 5)).tolist() == [0] * 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert fake((6, 5)) == "launched"


def test_after_disable_operators_make_it(fake, monkeypatch):
    monkeypatch.setattr(dispatch.state, "enabled", False)
    assert fake().tolist() == [0] * 4


@pytest.mark.parametrize("stage", ["__init__", "load", "__call__"])
def test_what_cannot_be_built_or_launched_is_said_once_and_left_to_operators(
    fake, monkeypatch, stage
):
    def fails(*call):
        raise CompilerMissing("no NVRTC")

    monkeypatch.setattr(Kernel, stage, fails)
    with pytest.warns(RuntimeWarning, match="PyTorch's operators make one index .* no NVRTC"):
        assert fake().tolist() == [0] * 4
    monkeypatch.setattr(Kernel, stage, lambda *call: pytest.fail("it is tried again"))
    with warnings.catch_warnings(action="error"):
        assert fake().tolist() == [0] * 4
