"""The public functions: calls, errors and gradients."""

import copy
import errno
import pickle
import subprocess
import sys

import pytest
import torch
from dispatching import CPU, SOFTMAX, assert_softmaxes, record
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cache, cxx
from tilewright.device import spec_of
from tilewright.dispatch import prepared, selection
from tilewright.dispatch.call import as_called
from tilewright.impl import IMPLS
from tilewright.op import OPS
from tilewright.space import config_dict

# --- calls ---------------------------------------------------------------------------------------


def test_a_recorded_implementation_is_built_once_and_run_each_time(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    for _ in range(5):
        assert torch.equal(tw.softmax(x), F.softmax(x, -1))
    assert (probe.builds, probe.runs) == (1, 5)


def test_a_shape_without_a_record_of_its_own_is_built_when_it_comes_back(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 17)
    for _ in range(prepared.HOT_CALLS - 1):
        tw.softmax(x)
    assert probe.builds == 0
    tw.softmax(x)
    assert (probe.builds, probe.runs) == (1, 1)


def test_keywords_in_any_order_reach_their_parameters(store, probe):
    record(store, "layer_norm(x=f32[8,16], weight=f32[16], bias=f32[16])")
    x, a, b = torch.randn(8, 16), torch.randn(16), torch.randn(16)
    for _ in range(2):
        expected = F.layer_norm(x, (16,), a, b)
        assert torch.equal(tw.layer_norm(x, (16,), a, b), expected)
        assert torch.equal(tw.layer_norm(x, bias=b, weight=a), expected)
        assert torch.equal(tw.layer_norm(bias=b, input=x, weight=a), expected)
        assert torch.equal(tw.layer_norm(x, [16], bias=a, weight=b), F.layer_norm(x, (16,), b, a))
    assert probe.builds == 1


def test_the_same_tensor_twice_and_two_tensors_share_no_order(store, probe):
    record(store, "lerp(x=f32[16], end=f32[16], weight=f32[16])")
    x, y, z = torch.randn(16), torch.randn(16), torch.rand(16)
    assert torch.equal(tw.lerp(x, weight=x, end=x), torch.lerp(x, x, x))
    assert torch.equal(tw.lerp(x, weight=z, end=y), torch.lerp(x, y, z))
    assert probe.runs == 2


def test_a_number_that_changes_with_each_call_builds_once(store, probe):
    probe.takes_scalars = True
    record(store, "lerp(x=f32[16], end=f32[16], weight=0.5)")
    x, y = torch.randn(16), torch.randn(16)
    for i in range(20):
        assert torch.equal(tw.lerp(x, weight=i / 20, end=y), torch.lerp(x, y, i / 20))
        assert torch.equal(tw.lerp(y, x, i / 20), torch.lerp(y, x, i / 20))
    assert (probe.builds, probe.runs) == (1, 40)


def test_a_number_baked_into_a_kernel_is_not_built_for_each_call(store, probe):
    record(store, "lerp(x=f32[16], end=f32[16], weight=0.5)")
    x, y = torch.randn(16), torch.randn(16)
    for i in range(20):
        assert torch.equal(tw.lerp(x, y, i / 20), torch.lerp(x, y, i / 20))
    assert (probe.builds, probe.runs) == (1, 1)


@pytest.mark.parametrize("shape", [16, (16,), [16], torch.Size([16])])
def test_normalized_shape_takes_every_form(shape):
    x = torch.randn(8, 16)
    for _ in range(2):
        assert torch.equal(tw.layer_norm(x, shape), F.layer_norm(x, (16,)))
    x.requires_grad_()
    assert torch.equal(tw.layer_norm(x, shape), F.layer_norm(x, (16,)))


@pytest.mark.parametrize("call_softmax", [tw.softmax, F.softmax])
def test_softmax_casts_first(call_softmax):
    x = torch.randn(8, 16, dtype=torch.float16)
    y = call_softmax(input=x, dim=0, dtype=torch.float64)
    assert torch.equal(y, F.softmax(x.double(), 0))
    assert torch.equal(call_softmax(x, -1, dtype=torch.float32), F.softmax(x.float(), -1))


def test_a_failed_build_warns_once_and_the_vendor_runs(store, probe):
    record(store, SOFTMAX)
    probe.build_error = "line 3: expected ';'"
    x = torch.randn(8, 16)
    with pytest.warns(RuntimeWarning, match="expected ';'") as caught:
        assert_softmaxes(x, x, x)
    assert (len(caught), probe.builds) == (1, 1)


@pytest.mark.parametrize("folder", ["a file", "full"])
def test_a_cache_that_cannot_be_written_warns_once_and_the_vendor_runs(
    store, tmp_path, monkeypatch, folder
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    if folder == "full":
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

        def no_space(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(cache, "write_whole", no_space)
    w = tw.Workload.parse(SOFTMAX)
    config = config_dict(IMPLS["fused"].heuristic(w, spec_of(None)))
    record(store, SOFTMAX, "fused", config)
    with pytest.warns(RuntimeWarning, match="CacheError.*TILEWRIGHT_CACHE_DIR") as caught:
        assert_softmaxes(*(torch.randn(8, 16) for _ in range(3)))
    assert len(caught) == 1


def test_a_failed_first_launch_warns_once_and_the_vendor_runs(store, probe):
    record(store, SOFTMAX)
    probe.launch_error = "too many threads"
    x = torch.randn(8, 16)
    with pytest.warns(RuntimeWarning, match="too many threads") as caught:
        assert_softmaxes(x, x, x)
    assert len(caught) == 1


def test_nothing_is_built_during_graph_capture_and_one_warning_says_so(store, probe, monkeypatch):
    record(store, SOFTMAX)
    record(store, "softmax(x=f32[8,99])")
    w = tw.Workload.parse(SOFTMAX)
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(prepared.state, "warned_of_capture", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choose = selection.choose
    monkeypatch.setattr(selection, "choose", lambda w, device, forced: choose(w, CPU, forced))
    texts = (SOFTMAX, SOFTMAX, "softmax(x=f32[8,99])")
    with pytest.warns(RuntimeWarning, match="graph capture") as caught:
        choices = [prepared._runnable(tw.Workload.parse(text), cuda, None)[1] for text in texts]
    assert choices == [None] * 3
    assert (len(caught), probe.builds) == (1, 0)
    built = prepared.state.built[w, cuda, None] = (lambda x: x, choose(w, CPU))
    assert prepared._runnable(w, cuda, None) is built
    prepared.state.forget()


@pytest.mark.parametrize("call", [tw.softmax, lambda x: tw.softmax(input=x)], ids=["place", "name"])
def test_with_another_number_of_threads_other_records_decide(store, probe, call):
    before = torch.get_num_threads()
    x = torch.randn(8, 16)

    def runs(threads):
        torch.set_num_threads(threads)
        ran = probe.runs
        for _ in range(4):  # found by key, then by guards
            assert torch.equal(call(x), F.softmax(x, -1))
        return probe.runs - ran

    try:
        torch.set_num_threads(2)
        record(store, SOFTMAX)
        assert [runs(threads) for threads in (2, 1, 2, 1)] == [4, 0, 4, 0]
        assert spec_of(None).threads == 1
        assert probe.builds == 1
    finally:
        torch.set_num_threads(before)


def test_disabled_every_operator_is_pytorch(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    tw.softmax(x)
    tw.disable()
    try:
        assert torch.equal(tw.softmax(x), F.softmax(x, -1))
        assert probe.runs == 1
    finally:
        tw.enable()
    tw.softmax(x)
    assert probe.runs == 2


def test_disabled_by_the_environment():
    code = "from tilewright.dispatch.prepared import state; print(state.enabled)"
    env = {"TILEWRIGHT_ENABLED": "0", "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr


def test_prepared_calls_are_bounded(store, monkeypatch):
    monkeypatch.setattr(prepared, "MAX_KEYS", 4)
    for n in range(1, 20):
        tw.softmax(torch.randn(n))
    assert len(prepared.state.prepared["softmax"]) <= 4


def test_a_call_as_written_takes_the_choice_of_the_store_it_names(store, probe, monkeypatch):
    w, x = record(store, SOFTMAX), torch.randn(8, 16)
    monkeypatch.setenv("TILEWRIGHT_STORE", "sqlite:////nowhere/records.db")
    for call in as_called(str(store.url), w, [[x], [x]]):
        assert torch.equal(call(), F.softmax(x, -1))
    assert probe.runs == 2


def test_a_call_that_came_before_leaves_for_pytorch_where_it_must(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    for _ in range(3):
        tw.softmax(x)
    assert len(prepared.state.recent["softmax"].kept) == 1
    assert probe.runs == 3
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.softmax(x).dtype == F.softmax(x, -1).dtype
    y = torch.func.vmap(tw.softmax)(x.expand(3, 8, 16))
    assert torch.equal(y[0], F.softmax(x, -1))
    x.requires_grad_()
    assert tw.softmax(x).requires_grad
    assert probe.runs == 3
    tw.reload_records()
    assert not prepared.state.recent["softmax"].kept


def test_a_negative_zero_is_not_taken_for_zero():
    x, index = torch.ones(4), torch.tensor([0, 1])
    for value in (-0.0, 0.0) * 4:
        found = tw.scatter(x, 0, index, value)
        assert torch.equal(found.signbit(), torch.scatter(x, 0, index, value).signbit())


def test_calls_with_nan_are_prepared_once():
    x, index = torch.ones(4), torch.tensor([0, 1])
    results = [tw.scatter(x, 0, index, float("nan")) for _ in range(3)]
    before = len(prepared.state.prepared["scatter"])
    results += [tw.scatter(x, 0, index, float("nan")) for _ in range(3)]
    assert len(prepared.state.prepared["scatter"]) == before
    assert all(out[:2].isnan().all() for out in results)


@pytest.mark.parametrize("value", [2**53 + 1, -(2**60) - 1])
def test_whole_numbers_beyond_fp64_are_pytorchs(value):
    x, index = torch.ones(4, dtype=torch.int64), torch.tensor([0, 1])
    for _ in range(4):
        assert torch.equal(tw.scatter(x, 0, index, value), torch.scatter(x, 0, index, value))
        added = tw.index_add(x, 0, index, x[:2], alpha=value)
        assert torch.equal(added, torch.index_add(x, 0, index, x[:2], alpha=value))


def test_a_list_may_be_changed_between_calls():
    x, shape = torch.randn(2, 8, 16), [16]
    for _ in range(5):
        tw.layer_norm(x, shape)
    shape[:] = [8, 16]
    torch.testing.assert_close(tw.layer_norm(x, shape), F.layer_norm(x, [8, 16]))


# --- errors --------------------------------------------------------------------------------------

X = torch.randn(4, 8)
BAD_CALLS = [
    ("layer_norm", (X, (9,)), {}, r"normalized_shape=\[9\] does not end x's shape \[4, 8\]"),
    ("layer_norm", (X, (8,), X[0].double()), {}, "weight is f64 beside x of f32"),
    ("layer_norm", (X,), {"wieght": X}, "wieght"),
    ("rms_norm", (X, (8,), torch.randn(7)), {}, r"weight has shape \[7\]"),
    ("softmax", (X, 2), {}, "dim=2 is out of range"),
    ("softmax", (X, {}), {}, "dim={} should be int"),
    ("softmax", (X.long(),), {}, "x is i64"),
    ("softmax", ("x",), {}, "x=x should be"),
    ("softmax", (X, "1"), {}, "dim='1' should be int"),
    ("softmax", (X.numpy(),), {}, "x is of type ndarray and should be .*Tensor"),
    ("lerp", (X, X), {}, "weight"),
    ("lerp", (X, X[:, :7], 0.5), {}, "do not broadcast"),
    ("lerp", (X, X.half(), 0.5), {}, "end is f16, but x is f32"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "message"), BAD_CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_bad_call_is_refused_in_words(name, args, kwargs, message, grad):
    if grad and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        args = (args[0].clone().requires_grad_(), *args[1:])
        if (name, len(args)) == ("softmax", 1):
            return
    with pytest.raises(tw.InvalidArgument, match=message) as caught:
        getattr(tw, name)(*args, **kwargs)
    assert str(caught.value).startswith(f"{name}: ")
    assert len(str(caught.value)) < 300


def test_a_sparse_tensor_gets_pytorchs_answer():
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        tw.softmax(X.to_sparse())


# --- gradients -----------------------------------------------------------------------------------


def wide(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


DIFFERENTIABLE = {
    "layer_norm": lambda: (wide(2, 2, 3), (2, 3), wide(2, 3), wide(2, 3)),
    "layer_norm without parameters": lambda: (wide(3, 5), (5,)),
    "rms_norm": lambda: (wide(3, 5), (5,), wide(5)),
    "softmax": lambda: (wide(3, 5), 0),
    "lerp": lambda: (wide(3, 1), wide(2, 1, 5), wide(3, 5)),
    "lerp by a number": lambda: (wide(3, 1), wide(1, 5), 0.3),
    "lerp of a constant": lambda: (torch.randn(3, dtype=torch.float64), wide(2, 3), 0.7),
    "bias_layer_norm": lambda: (wide(2, 3), *(wide(3) for _ in range(4))),
    "add_layer_norm": lambda: (wide(2, 3), wide(2, 3), wide(3), wide(3)),
    "add_rms_norm": lambda: (wide(2, 3), wide(2, 3), wide(3)),
}


@pytest.mark.parametrize("forced", ["aten", "probe", "fused"])
@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_gradients_and_their_gradients_are_correct(probe, case, forced):
    if forced == "fused" and cxx.missing() is not None:
        pytest.skip(str(cxx.missing()))
    public = getattr(tw, case.split()[0])
    args = DIFFERENTIABLE[case]()
    with tw.use(forced):
        assert torch.autograd.gradcheck(public, args)
        assert torch.autograd.gradgradcheck(public, args)
    assert (probe.runs > 0) == (forced == "probe")


@pytest.mark.parametrize("forced", [None, "probe"])
def test_a_tensor_passed_twice_gets_both_gradients(probe, forced):
    x = wide(4)
    with tw.use(forced or "aten"):
        tw.lerp(x, x, x).sum().backward()
    expected = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected)


def test_gradients_need_no_second_forward_unless_forced(store, probe):
    record(store, SOFTMAX)
    y = tw.softmax(torch.randn(8, 16, requires_grad=True))
    assert "SoftmaxBackward" in y.grad_fn.name()
    assert probe.runs == 0


# --- the public face -----------------------------------------------------------------------------


def test_every_operator_is_an_attribute_with_its_documentation():
    for name in OPS:
        if OPS[name].fused:  # by a test before this one
            continue
        public = getattr(tw, name)
        assert name in dir(tw)
        assert public.__doc__ == OPS[name].__doc__
        assert public.__name__ == name
        assert next(iter(public.__signature__.parameters)) == next(iter(OPS[name].parameters))


def test_public_functions_copy_and_pickle():
    assert copy.deepcopy(tw.softmax) is tw.softmax
    assert pickle.loads(pickle.dumps(tw.layer_norm)) is tw.layer_norm


def test_an_unknown_attribute_lists_the_operators():
    with pytest.raises(AttributeError, match=r"no attribute 'sofmax'.*softmax"):
        tw.sofmax


def test_importing_the_package_loads_no_torch():
    code = "import sys, tilewright; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_a_plug_in_operator_is_an_attribute(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "thrice.py").write_text(
        "from torch import Tensor\n"
        "from tilewright.op import op\n\n\n"
        "@op(flops=lambda w: w.main.numel)\n"
        "def thrice(x: Tensor) -> Tensor:\n"
        '    """Three times x."""\n'
        "    return x * 3\n"
    )
    code = (
        "import torch, tilewright as tw\n"
        "assert torch.equal(tw.thrice(torch.ones(3)), torch.full((3,), 3.0))\n"
        "assert torch.equal(torch.ops.tilewright.thrice(torch.ones(3)), torch.full((3,), 3.0))\n"
        "print(tw.thrice.__doc__)"
    )
    monkeypatch.setenv("TILEWRIGHT_PLUGINS", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "Three times x.", out.stderr
