"""Memory around and behind results: guarded, filled with poison, and their own."""

import threading

import pytest
import torch

import tilewright as tw
from tilewright.impl import allocate, allocator
from tilewright.impls._vendor import vendor
from tilewright.measure.guard import GUARD_BYTES, POISONS, guarded
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_poison_is_nan_first_and_large_then(dtype):
    spec = TensorSpec(dtype, (3, 5))
    for poison, seen in zip(POISONS, (torch.isnan, lambda t: t.abs() > 1e4), strict=True):
        with guarded(poison):
            t = allocate(spec, CPU)
        assert seen(t).all()


def test_guarded_memory_keeps_layout_and_alignment():
    spec = TensorSpec("f16", (2, 3, 4, 5), (60, 1, 15, 3))
    with guarded(POISONS[0]):
        t = allocate(spec, CPU)
    assert TensorSpec.of(t) == spec


@pytest.mark.parametrize("shift", [-1, -GUARD_BYTES, 15, 15 + GUARD_BYTES - 1])
def test_a_single_byte_written_outside_is_found(shift):
    with guarded(POISONS[0]) as memory:
        t = allocator.empty_strided((15,), (1,), dtype=torch.uint8, device=CPU)
        t.zero_()
        assert memory.damage() is None
        t.as_strided((1,), (1,), t.storage_offset() + shift).zero_()
        place = f"{shift - 15} bytes past its end" if shift > 0 else "before its start"
        assert place in memory.damage()


def test_other_threads_allocate_as_before_and_several_may_guard_at_once():
    plain = allocator.on
    inside, done = threading.Barrier(3), threading.Barrier(3)
    found = {}

    def work(name, poison):
        with guarded(poison) if poison else threading.Lock():
            inside.wait()
            t = allocator.empty_strided((4,), (1,), dtype=torch.uint8, device=CPU)
            found[name] = (t.storage_offset(), t.tolist())
            done.wait()

    plan = {"a": 0x11, "b": 0x22, "none": 0}
    threads = [threading.Thread(target=work, args=item) for item in plan.items()]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found["a"] == (GUARD_BYTES, [0x11] * 4)
    assert found["b"] == (GUARD_BYTES, [0x22] * 4)
    assert found["none"][0] == 0
    assert allocator.on is plain


def test_an_input_written_between_its_rows_is_refused_and_restored():
    w = Workload.parse("rms_norm(x=f32[4,8]@strides(12,1))")
    verifier = Verifier(w, CPU)

    def executable(x):
        out = vendor(w)(x)
        x.as_strided((1,), (1,), x.storage_offset() + 9).fill_(3.0)
        return out

    assert "between the elements of an input" in verifier.check(executable).message
    assert verifier.check(vendor(w)).ok


def test_an_output_is_no_memory_of_another_output_nor_of_an_input(forgets_functions):
    tw.fuse(lambda x: (x * 2, x + x), name="twice")
    w, _ = OPS["twice"].workload_of(torch.zeros(5, 7))
    verifier = Verifier(w, CPU)

    def shared(x):
        out = allocate(w.outputs[0], CPU).copy_(2 * x)
        return out, out

    assert verifier.check(shared).message == "returned the memory of its output 0 as its output 1"
    into = verifier.check(lambda x: (x.mul_(2), 2 * x))
    assert into.message == "returned the memory of x as its output 0"


def test_pytorch_may_return_its_argument_where_it_does_so_itself(forgets_functions):
    tw.fuse(lambda x, y: (x, x * y), name="passed_on")
    x = torch.zeros(5, 7)
    w, _ = OPS["passed_on"].workload_of(x, x)
    assert Verifier(w, CPU).check(lambda x, y: (x, x * y)).message == ""


def test_an_input_whose_elements_changed_places_was_modified():
    w = Workload.parse("softmax(x=f32[3,40000])")

    def turned(x):
        out = x.softmax(-1)
        words = x.view(torch.int64)
        words[:, [7, 9]] = words[:, [9, 7]]
        return out

    assert "modified its input x" in Verifier(w, CPU).check(turned).message
