"""Calls in several threads: first ones beside prepared ones, and beside each other."""

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dispatching import SOFTMAX, record
from torch.nn import functional as F

import tilewright as tw
from tilewright.dispatch.keyed_locks import KeyedLocks
from tilewright.dispatch.prepared import state
from tilewright.fakes import traces_here, tracing_lock
from tilewright.impls.fused import graph_of

OTHER = "softmax(x=f32[8,99])"
WAIT_S = 30.0
"""A thread that another one holds up for so long waits for it."""


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def building(store, probe, monkeypatch):
    """Records for a softmax of 8 x 16 and of 8 x 99, each build of which calls what a test sets."""
    record(store, SOFTMAX)
    record(store, OTHER)
    build = type(probe).build

    def held(self, config, w, device):
        held.before()
        return build(self, config, w, device)

    held.before = lambda: None
    monkeypatch.setattr(type(probe), "build", held)
    return held


def test_threads_get_their_results_and_build_once(store, probe):
    record(store, SOFTMAX)
    inputs = [torch.randn(8, 16) for _ in range(8)]
    outputs = [None] * len(inputs)
    start = threading.Barrier(len(inputs))

    def work(i):
        start.wait()
        for _ in range(50):
            outputs[i] = tw.softmax(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for x, y in zip(inputs, outputs, strict=True):
        assert torch.equal(y, F.softmax(x, -1))
    assert probe.builds == 1


def test_a_prepared_call_does_not_wait_for_what_another_thread_builds(building, pool):
    x = torch.randn(8 * 16 + 1)[1:].view(8, 16)
    assert x.data_ptr() % 16  # it is looked up by a key, under the lock that all threads share
    tw.softmax(x)
    begun, go_on = threading.Event(), threading.Event()

    def before():
        begun.set()
        assert go_on.wait(WAIT_S)

    building.before = before
    first = pool.submit(tw.softmax, torch.randn(8, 99))
    assert begun.wait(WAIT_S)
    try:
        assert torch.equal(pool.submit(tw.softmax, x).result(WAIT_S / 2), F.softmax(x, -1))
        assert not first.done()
    finally:
        go_on.set()
    first.result(WAIT_S)


def test_different_calls_build_side_by_side(building, pool):
    both = threading.Barrier(2)
    building.before = lambda: both.wait(WAIT_S)
    inputs = [torch.randn(8, 16), torch.randn(8, 99)]
    for x, y in zip(inputs, pool.map(tw.softmax, inputs), strict=True):
        assert torch.equal(y, F.softmax(x, -1))


def test_who_waits_for_a_build_that_fails_builds_anew(building, probe, pool):
    asked, tries = threading.Event(), []

    def before():
        tries.append(len(tries))
        if len(tries) == 1:
            asked.wait(0.2)  # another thread may come and wait
            raise tw.CompileError("out of luck")

    building.before = before

    def call(x):
        with tw.use("probe"):
            return tw.softmax(x)

    x = torch.randn(8, 16)
    calls = [pool.submit(call, x) for _ in range(2)]
    asked.set()
    failed = [c for c in calls if c.exception(WAIT_S) is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].exception(), tw.CompileError)
    assert torch.equal(call(x), F.softmax(x, -1))
    assert (len(tries), probe.builds) == (2, 1)


def test_what_was_begun_before_everything_was_forgotten_is_not_kept(building, probe, pool):
    begun, go_on = threading.Event(), threading.Event()

    def before():
        begun.set()
        assert go_on.wait(WAIT_S)

    building.before = before
    first = pool.submit(tw.softmax, torch.randn(8, 16))
    assert begun.wait(WAIT_S)
    state.forget()
    go_on.set()
    first.result(WAIT_S)
    assert not state.built
    assert not state.prepared["softmax"]
    tw.softmax(torch.randn(8, 16))
    assert (probe.builds, len(state.built)) == (2, 1)


def test_gradients_of_a_function_are_made_once_by_threads_that_ask_at_once(
    records_of_its_own, pool
):
    @tw.fuse
    def halved_square(x):
        return x * x / 2

    start = threading.Barrier(4)

    def gradient(x):
        start.wait(WAIT_S)
        halved_square(x).sum().backward()
        return x.grad

    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
    for x, grad in zip(inputs, pool.map(gradient, inputs), strict=True):
        assert torch.equal(grad, x.detach())
    assert len([w for w, *_ in state.built if w.op == "halved_square_backward"]) == 1


def rescaling(factor, traced=lambda: None):
    @tw.fuse
    def rescaled(x):
        traced()
        return x * factor

    return rescaled


def test_a_function_fused_anew_while_the_old_one_is_traced_runs_its_own_graph(
    records_of_its_own, pool
):
    begun, go_on = threading.Event(), threading.Event()

    def traced():
        begun.set()
        assert go_on.wait(WAIT_S)

    old, x = rescaling(2.0, traced), torch.randn(4, 8)
    w = tw.Workload.parse("rescaled(x=f32[4,8])")
    graph = pool.submit(graph_of, w)
    assert begun.wait(WAIT_S)
    new = rescaling(3.0)
    go_on.set()
    stale = graph.result(WAIT_S)
    assert graph_of(w) is graph_of(w) is not stale
    assert torch.equal(new(x), x * 3.0)
    with pytest.raises(tw.InvalidArgument, match="another function was fused"):
        old(x)


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_first_call_of_a_function_that_is_fused_anew_meanwhile_is_refused(
    records_of_its_own, pool, differentiated
):
    begun, go_on = threading.Event(), threading.Event()

    def traced():
        begun.set()
        assert go_on.wait(WAIT_S)

    x = torch.randn(4, 8, requires_grad=differentiated)
    call = pool.submit(rescaling(2.0, traced), x)
    assert begun.wait(WAIT_S)
    new = rescaling(3.0)
    go_on.set()
    with pytest.raises(tw.InvalidArgument, match="another function was fused"):
        call.result(WAIT_S)
    y = new(x)
    assert torch.equal(y, x * 3.0)
    if differentiated:
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0))


# --- locks by key ------------------------------------------------------------------------------


def test_a_key_is_held_by_one_thread_at_a_time_and_forgotten_after_the_last(pool):
    locks, inside, most = KeyedLocks(), [], []

    def work(key):
        with locks.holding(key), locks.holding(key):
            inside.append(key)
            most.append(inside.count(key))
            inside.remove(key)

    list(pool.map(work, ["a", "b"] * 200))
    assert max(most) == 1
    assert not locks._locks
    assert not locks._users


def test_a_thread_that_traces_does_not_wait_for_a_key(pool):
    locks = KeyedLocks()

    def hold():
        with tracing_lock(), locks.holding("key"):
            return True

    with locks.holding("key"):
        assert pool.submit(hold).result(WAIT_S)


def test_a_module_that_another_thread_has_imported_by_half_says_that_nobody_traces(monkeypatch):
    with tracing_lock():
        assert traces_here()
        name = "torch._dynamo.convert_frame"
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        assert not traces_here()
