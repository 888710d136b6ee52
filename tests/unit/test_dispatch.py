"""Selection, the public functions and what makes them leave the fast path."""

import copy
import errno
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cache
from tilewright.device import spec_of
from tilewright.dispatch import prepared, selection
from tilewright.dispatch.call import as_called
from tilewright.environment import environment
from tilewright.impl import IMPLS, Executable, Implementation
from tilewright.op import OPS
from tilewright.record import Record
from tilewright.space import ConfigSpace, config_dict, param

CPU = torch.device("cpu")
SOFTMAX = "softmax(x=f32[8,16])"


class ProbeExecutable(Executable):
    def __init__(self, probe, w):
        self.probe, self.w = probe, w

    def __call__(self, *tensors, scalars=None):
        if self.probe.launch_error:
            raise tw.LaunchError(self.probe.launch_error)
        self.probe.runs += 1
        args = self.w.call(tensors)
        if scalars is not None:
            assert self.probe.takes_scalars
            args.update(zip(self.w.scalars, scalars, strict=True))
        return self.w.operator.reference(**args)


@pytest.fixture
def probe(store):
    """An implementation that counts its builds and runs, and fails when told to."""

    class Probe(Implementation):
        name, backend = "probe", "cpp"
        builds, runs, built_with = 0, 0, None
        build_error, launch_error, refusal = "", "", None
        widths = (1, 2, 4)

        @dataclass(frozen=True)
        class Config:
            width: int = param(1, 2, 4)

        def unsupported(self, w, device):
            return self.refusal

        def space(self, w, device):
            return ConfigSpace(self.Config, {"width": self.widths})

        def heuristic(self, w, device):
            return self.Config(width=1)

        def build(self, config, w, device):
            self.builds += 1
            self.built_with = config
            if self.build_error:
                raise tw.CompileError(self.build_error)
            return ProbeExecutable(self, w)

    yield IMPLS["probe"]
    del IMPLS._things["probe"]


def record(store, text, implementation="probe", config=None, us=10.0, **more):
    """The winner of a duel against aten, which took 20 us."""
    key, info, versions = environment(CPU)
    w = tw.Workload.parse(text)
    common = {"status": "ok", "device": key, "device_info": info, "versions": versions}
    common |= {"final": True, "duel": text, **more}
    if config is None:
        config = {"width": 2} if implementation == "probe" else {}
    rows = [Record(str(w), w.op, implementation, config, median_us=us, **common)]
    if implementation != "aten":
        rows.append(Record(str(w), w.op, "aten", {}, median_us=20.0, **common))
    store.add(rows)
    tw.reload_records()
    return w


def assert_softmaxes(*inputs):
    for x in inputs:
        assert torch.equal(tw.softmax(x), F.softmax(x, -1))


def chosen(text):
    return selection.choose(tw.Workload.parse(text), CPU)


# --- selection -----------------------------------------------------------------------------------


def test_a_call_goes_by_the_record_without_a_distribution_then_by_the_most_common_one(store):
    text = "index_add(x=f32[50,8], dim=0, index=i64[90], source=f32[90,8])"
    for us, spread in enumerate(("constant", "zipf", "uniform"), 5):
        record(store, f"{text}!indices={spread}", "index_add_scatter_add", {}, us=us)
        assert f"took {us} us" in chosen(text).reason
    record(store, f"{text}!indices=sorted", "index_add_scatter_add", {}, us=8.0)
    assert "took 7 us" in chosen(text).reason
    record(store, text, "index_add_index_put", {}, us=9.0)
    assert chosen(text).implementation == "index_add_index_put"


def test_without_evidence_the_vendor_runs(store):
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.source) == ("aten", "default")
    assert "no record" in choice.reason


def test_the_record_of_a_workload_decides_with_its_config(store, probe):
    record(store, SOFTMAX)
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.config, choice.source) == (
        "probe",
        probe.Config(width=2),
        "record",
    )
    assert "10 us" in choice.reason


def test_a_record_that_the_vendor_won_keeps_the_vendor(store, probe):
    record(store, SOFTMAX, us=30.0)
    assert (chosen(SOFTMAX).implementation, chosen(SOFTMAX).source) == ("aten", "record")


@pytest.mark.parametrize(
    "status", ["ceiling", "host", "tied", "slower", "spilled", "invalid", "wrong_result", "timeout"]
)
def test_a_record_that_is_no_measurement_of_a_winner_is_no_evidence(store, probe, status):
    for rows in range(4, 9):  # as many as the heuristic needs
        record(store, f"softmax(x=f32[{rows},16])", status=status)
    choice = chosen(SOFTMAX)
    assert (choice.implementation, choice.source) == ("aten", "default")


def test_a_record_from_another_device_says_nothing(store, probe):
    record(store, SOFTMAX, device="NVIDIA Abacus, 1 SMs, 1 GiB")
    assert chosen(SOFTMAX).source == "default"


def test_a_record_from_other_versions_is_a_prior_and_says_so(store, probe):
    record(store, SOFTMAX, versions={"torch": "1.0"})
    assert chosen(SOFTMAX).source == "record"
    assert "other versions" in chosen(SOFTMAX).reason


@pytest.mark.parametrize(
    ("implementation", "config"),
    [("forgotten", {}), ("probe", {"height": 3}), ("probe", {"width": 3})],
    ids=["implementation gone", "knob gone", "value gone"],
)
def test_a_record_whose_code_is_gone_is_skipped(store, probe, implementation, config):
    record(store, SOFTMAX, implementation, config)
    assert chosen(SOFTMAX).source == "default"


def test_a_record_that_the_implementation_now_refuses_is_skipped(store, probe):
    record(store, SOFTMAX)
    probe.refusal = "not today"
    assert chosen(SOFTMAX).source == "default"


@pytest.mark.parametrize(
    "near", ["softmax(x=f32[4,16])", "softmax(x=f32[8,12])", "softmax(x=f32[2,8,16])"]
)
def test_the_nearest_workload_lends_its_config(store, probe, near):
    record(store, SOFTMAX)
    record(store, "softmax(x=f32[16,31])", config={"width": 4})
    choice = chosen(near)
    assert (choice.implementation, choice.source) == ("probe", "nearest")
    assert choice.config == probe.Config(width=2)
    assert SOFTMAX in choice.reason


@pytest.mark.parametrize(
    "far",
    [
        "softmax(x=f32[8,40])",
        "softmax(x=f32[64,16])",
        "softmax(x=f16[8,16])",
        "softmax(x=f32[8,16], dim=-2)",
        "softmax(x=f32[8,16]@align4)",
        "softmax(x=f32[8,16]@strides(32,1))",
    ],
)
def test_a_workload_of_another_bucket_says_nothing(store, probe, far):
    record(store, SOFTMAX)
    assert chosen(far).source == "default"


def test_a_nearest_config_that_does_not_fit_is_passed_over(store, probe):
    record(store, SOFTMAX)
    record(store, "softmax(x=f32[8,24])", config={"width": 4})
    probe.widths = (1, 4)
    assert chosen("softmax(x=f32[8,17])").config == probe.Config(width=4)


def test_the_heuristic_runs_where_it_won_everywhere(store, probe):
    for n in (16, 256, 4096):
        assert chosen("softmax(x=f32[1000,50257])").source == "default"
        record(store, f"softmax(x=f32[8,{n}])")
    choice = chosen("softmax(x=f32[1000,50257])")
    assert (choice.implementation, choice.config, choice.source) == (
        "probe",
        probe.Config(width=1),
        "heuristic",
    )
    record(store, "softmax(x=f32[8,65536])", us=30.0)
    assert chosen("softmax(x=f32[1000,50257])").source == "default"


@pytest.mark.parametrize("takes_scalars", [True, False])
def test_another_number_is_the_same_workload_to_kernels_that_take_it(store, probe, takes_scalars):
    probe.takes_scalars = takes_scalars
    record(store, "lerp(x=f32[64], end=f32[64], weight=0.25)")
    choice = chosen("lerp(x=f32[64], end=f32[64], weight=0.75)")
    expected = ("probe", "record") if takes_scalars else ("aten", "default")
    assert (choice.implementation, choice.source) == expected


def test_an_empty_workload_runs_on_the_vendor(store, probe):
    record(store, "softmax(x=f32[0,16])")
    assert chosen("softmax(x=f32[0,16])").implementation == "aten"
    with tw.use("probe"):
        assert tw.softmax(torch.empty(0, 16)).shape == (0, 16)
    assert probe.runs == 0


def test_an_unreadable_store_warns_once_and_the_vendor_runs(tmp_path, monkeypatch):
    bad = tmp_path / "records.db"
    bad.write_bytes(b"this is not a database" * 100)
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{bad}")
    tw.reload_records()
    x = torch.randn(8, 16)
    with pytest.warns(RuntimeWarning, match="not a database") as caught:
        assert_softmaxes(x, x[:4])
    assert len(caught) == 1
    monkeypatch.undo()
    tw.reload_records()


# --- use -----------------------------------------------------------------------------------------


def test_use_wins_over_records(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    with tw.use("aten"):
        tw.softmax(x)
    assert probe.runs == 0
    tw.softmax(x)
    assert probe.runs == 1


def test_use_takes_a_config_and_ends_with_its_block(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", {"width": 4}):
        tw.softmax(x)
    assert probe.built_with == probe.Config(width=4)
    tw.softmax(x)
    assert probe.runs == 1


def test_use_without_a_config_takes_the_recorded_one_then_the_heuristics(store, probe):
    record(store, SOFTMAX)
    with tw.use("probe"):
        tw.softmax(torch.randn(8, 16))
        assert probe.built_with == probe.Config(width=2)
        tw.softmax(torch.randn(8, 99))
        assert probe.built_with == probe.Config(width=1)


def test_use_for_one_operator_leaves_the_others(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", op="softmax"):
        tw.rms_norm(x)
        assert probe.runs == 0
        tw.softmax(x)
        assert probe.runs == 1
        with tw.use("aten"):
            tw.softmax(x)
        assert probe.runs == 1


def test_use_of_an_unknown_name_is_refused_at_once():
    with pytest.raises(tw.InvalidArgument, match="unknown implementation 'fuzed'"), tw.use("fuzed"):
        pass
    with pytest.raises(tw.InvalidArgument, match="unknown operator"), tw.use("aten", op="sofmax"):
        pass


def test_use_of_an_implementation_that_refuses_says_why(store, probe):
    probe.refusal = "rows are too odd"
    with tw.use("probe"), pytest.raises(tw.NoImplementation, match="rows are too odd"):
        tw.softmax(torch.randn(8, 16))


def test_use_of_a_config_that_does_not_fit_says_why(store, probe):
    x = torch.randn(8, 16)
    with tw.use("probe", {"width": 3}), pytest.raises(tw.InvalidArgument, match="width=3"):
        tw.softmax(x)
    with tw.use("probe", {"depth": 3}), pytest.raises(tw.InvalidArgument, match="'depth'"):
        tw.softmax(x)


def test_a_forced_build_that_fails_is_an_error(store, probe):
    probe.build_error = "syntax"
    with tw.use("probe"), pytest.raises(tw.CompileError, match="syntax"):
        tw.softmax(torch.randn(8, 16))


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

        monkeypatch.setattr(cache, "_replace", no_space)
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
    call = as_called(str(store.url), w, [x])
    assert torch.equal(call(), F.softmax(x, -1))
    assert probe.runs == 1


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


def test_a_negated_view_is_not_taken_for_its_memory(store, probe):
    z = torch.randn(8, 16, dtype=torch.complex64)
    with tw.use("probe"):
        assert torch.equal(tw.softmax(z.imag), F.softmax(z.imag, -1))
        runs = probe.runs
        assert z.conj().imag.is_neg()
        assert torch.equal(tw.softmax(z.conj().imag), F.softmax(-z.imag, -1))
        assert probe.runs == runs


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


# --- leaving the fast path -----------------------------------------------------------------------


@pytest.fixture
def always_probe(probe):
    with tw.use("probe"):
        yield probe


def test_fake_tensors_get_fake_results(always_probe):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(8, 16))
        y = tw.layer_norm(x)
    assert type(y) is type(x)
    assert y.shape == (8, 16)
    assert always_probe.runs == 0


def test_meta_tensors_get_meta_results():
    y = tw.softmax(torch.empty(8, 16, device="meta"))
    assert (y.device.type, y.shape) == ("meta", (8, 16))


def test_a_tensor_subclass_sees_pytorchs_function(always_probe):
    class Named(torch.Tensor):
        pass

    y = tw.softmax(torch.randn(8, 16).as_subclass(Named))
    assert type(y) is Named
    assert always_probe.runs == 0


def test_vmap_maps(always_probe):
    x, w = torch.randn(3, 8, 16), torch.randn(3, 16)
    y = torch.vmap(lambda x, w: tw.rms_norm(x, (16,), w))(x, w)
    torch.testing.assert_close(y, torch.stack([F.rms_norm(a, (16,), b) for a, b in zip(x, w)]))  # noqa: B905
    assert always_probe.runs == 0


def test_functional_gradients(always_probe):
    x = torch.randn(8, 16, dtype=torch.float64)
    found = torch.func.grad(lambda x: tw.softmax(x).square().sum())(x)
    expected = torch.func.grad(lambda x: F.softmax(x, -1).square().sum())(x)
    torch.testing.assert_close(found, expected)


def test_forward_mode_gradients_are_kept(always_probe):
    x, t = torch.randn(8, 16), torch.randn(8, 16)
    with torch.autograd.forward_ad.dual_level():
        y = tw.softmax(torch.autograd.forward_ad.make_dual(x, t))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    _, expected = torch.func.jvp(lambda x: F.softmax(x, -1), (x,), (t,))
    torch.testing.assert_close(tangent, expected)


def test_autocast_has_the_dtypes_that_pytorch_gives(always_probe):
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    v = torch.randn(16)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.softmax(x).dtype == F.softmax(x, -1).dtype
        assert tw.layer_norm(x, 16, v, v).dtype == F.layer_norm(x, (16,), v, v).dtype
    assert always_probe.runs == 0


def test_autocast_below_torch_compile_has_the_dtypes_that_pytorch_gives(store, probe):
    record(store, "softmax(x=bf16[8,16])")

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return tw.softmax(x)

    x = torch.randn(8, 16, dtype=torch.bfloat16)
    y, targets = graph_of(run, x)
    assert y.dtype == run(x).dtype
    assert not any("tilewright" in target for target in targets)


def test_a_dispatch_mode_sees_pytorchs_operators(always_probe):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        tw.softmax(torch.randn(8, 16))
    assert "aten._softmax.default" in seen


def test_a_function_mode_sees_pytorchs_functions(always_probe):
    from torch.overrides import TorchFunctionMode

    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 16)
    with Spy():
        tw.softmax(x)
    assert F.softmax in seen


def test_a_default_device_does_not_leave_the_fast_path(always_probe):
    x = torch.randn(8, 16)
    with torch.device("cpu"):
        tw.softmax(x)
    assert always_probe.runs == 1


def test_parameters_without_a_need_for_gradients_stay_on_the_fast_path(always_probe):
    x, w = torch.randn(8, 16), torch.nn.Parameter(torch.randn(16))
    with torch.no_grad():
        y = tw.rms_norm(x, (16,), w)
        torch.testing.assert_close(y, F.rms_norm(x, (16,), w))
    with torch.inference_mode():
        tw.rms_norm(x, (16,), w)
    assert always_probe.runs == 2
    assert not y.requires_grad


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
}


@pytest.mark.parametrize("forced", [None, "probe"])
@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_gradients_and_their_gradients_are_correct(probe, case, forced):
    public = getattr(tw, case.split()[0])
    args = DIFFERENTIABLE[case]()
    with tw.use(forced or "aten"):
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


# --- torch.compile -------------------------------------------------------------------------------


def graph_of(function, *inputs, **options):
    """The aten-level target of every call that Dynamo captured, without graph breaks."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, fullgraph=True, **options)(*inputs)
    targets = [str(n.target) for gm in graphs for n in gm.graph.nodes if n.op == "call_function"]
    return out, targets


def test_a_tuned_operator_is_one_node_below_torch_compile(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    y, targets = graph_of(lambda x: tw.softmax(x, dim=-1) + 1, x)
    assert targets[0] == "tilewright.softmax"
    assert probe.runs == 1
    torch.testing.assert_close(y, F.softmax(x, -1) + 1)


def test_a_tuned_operator_survives_ahead_of_time_autograd(store, probe):
    record(store, SOFTMAX)
    x, w = torch.randn(8, 16), torch.randn(16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: tw.softmax(x) * w, backend="aot_eager", fullgraph=True)
    compiled(x, w).sum().backward()
    assert probe.runs == 1
    torch.testing.assert_close(w.grad, F.softmax(x, -1).sum(0))


def test_an_untuned_operator_is_pytorchs_own_below_torch_compile(store, probe):
    x = torch.randn(8, 16)
    y, targets = graph_of(lambda x: tw.layer_norm(x) + 1, x)
    assert "layer_norm" in targets[0]
    assert "tilewright" not in targets[0]
    torch.testing.assert_close(y, F.layer_norm(x, (16,)) + 1)


def test_a_tuned_operator_that_needs_gradients_is_pytorchs_own_below_torch_compile(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16, requires_grad=True)
    y, targets = graph_of(lambda x: tw.softmax(x), x)
    assert not any("tilewright" in target for target in targets)
    y.square().sum().backward()
    assert x.grad is not None


def test_symbolic_shapes_trace_without_a_break(store, probe):
    record(store, SOFTMAX)
    x = torch.randn(8, 16)
    y, _ = graph_of(lambda x, s: tw.lerp(tw.softmax(x), x, s), x, 0.3, dynamic=True)
    torch.testing.assert_close(y, torch.lerp(F.softmax(x, -1), x, 0.3))


@pytest.mark.parametrize("name", list(OPS))
def test_custom_operators_are_well_formed(name, probe):
    op, x, v = OPS[name], torch.randn(4, 8), torch.randn(8)
    args = {
        "layer_norm": (x, None, v, v),
        "rms_norm": (x, [8], v),
        "softmax": (x,),
        "lerp": (x, v, 0.5),
        "bias_layer_norm": (x, v, v, v, v),
        "conv2d_weight_grad": (torch.randn(1, 2, 4, 4), torch.randn(1, 3, 2, 2), [3, 3]),
        "conv2d_weight_bias_grad": (torch.randn(1, 2, 4, 4), torch.randn(1, 3, 2, 2), [3, 3]),
    }
    if name not in args:
        pytest.skip(f"no arguments are listed for {op.name}")
    getattr(tw, name)
    packet = getattr(torch.ops.tilewright, name)
    target = packet.overload1 if name == "lerp" else packet.default
    torch.library.opcheck(target, args[name])
    first, *rest = args[name]
    torch.library.opcheck(target, (first.requires_grad_(), *rest))


# --- the public face -----------------------------------------------------------------------------


def test_every_operator_is_an_attribute_with_its_documentation():
    for name in OPS:
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
