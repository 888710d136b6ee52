"""Kernels that are compiled in one go are those that each would be alone."""

import ctypes
import json
import struct
from dataclasses import replace

import pytest

from tilewright.build import CompileTask
from tilewright.compile import cache, nvrtc, pool, together
from tilewright.compile.cache import cached, compiled, compiled_together
from tilewright.compile.pool import CompilePool
from tilewright.device import DEVICES
from tilewright.errors import CompileError, CompileTimeout
from tilewright.fusion.cuda.kernel import prelude, tiles_prelude
from tilewright.impl import IMPLS
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
NORM = "layer_norm(x={0}[64,1028], weight={0}[1028], bias={0}[1028])"
GRADIENT = (
    "layer_norm_backward(grad_output=f16[64,512], x=f16[64,512], mean=f32[64,1], rstd=f32[64,1], "
    "weight=f16[512])"
)
KINDS = {
    "pointwise": ("lerp(x=f32[64,768], end=f32[64,768], weight=f32[64,1])",),
    "rows": (NORM.format("f16"), "softmax(x=bf16[64,1000])"),
    "columns": (GRADIENT,),
    "tiles": ("softmax(x=f32[8,96,40], dim=1)",),
    "functions": ("softmax(x=f64[64,300])", NORM.format("f64")),
}  # fmt: skip
"""Several kernels a call, slow paths that are functions, and those of one."""
START = "__device__ float twice(float x) { return 2 * x; }\n"


def task(name, body, start=START, **more):
    source = f'{start}extern "C" __global__ void {name}(float* p) {{ {body} }}'
    flags = ("--gpu-architecture=sm_90a", "--ptxas-options=-v")
    return replace(CompileTask("nvrtc", source, flags, name, len(start)), **more)


SOUND = [task("k", f"*p = twice({n}.5f);") for n in range(3)]
REJECTED = task("k", "undeclared(p);")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


def tasks_of(texts, spec, most=2):
    fused, found = IMPLS["fused"], {}
    for text in texts:
        w = Workload.parse(text)
        configs = [fused.heuristic(w, spec), *fused.promising(w, spec)]
        found.update(dict.fromkeys(fused.task(c, w, spec) for c in configs[: most + 1]))
    return list(found)


def sections(cubin):
    """Of an ELF file of 64 bits, by name."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, at + n * size) for n in range(count)]
    found = {}
    for name, _, _, _, offset, length in heads:
        text = ctypes.string_at(cubin[heads[names][4] + name :]).decode()
        found[text] = cubin[offset : offset + length]
    return found


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize("kind", KINDS)
def test_machine_code_and_resources_are_those_of_kernels_made_alone(kind, device):
    tasks = tasks_of(KINDS[kind], DEVICES[device])
    assert len(tasks) > 1
    found = compiled_together(tasks)
    assert len({one.path for one in found}) == 1
    assert [cached(task) for task in tasks] == found
    joined = sections(found[0].path.read_bytes())
    for task, one in zip(tasks, found, strict=True):
        binary, log = nvrtc.compile_cubin(task.source, task.flags, task.entry)
        alone = sections(binary)
        kernels = {name for name in alone if name.startswith(".text.")}
        assert {f".text.{name}" for name in one.symbols} == kernels
        for name, symbol in one.symbols.items():
            assert joined[f".text.{symbol}"] == alone[f".text.{name}"]
        assert one.resources == cache.call_resources(log, task.entry)
        assert not any(symbol in one.log for symbol in one.symbols.values())


def test_all_that_graphs_share_is_in_front():
    whole = {"\n".join([prelude(), tiles_prelude()]), prelude()}
    starts = {
        task.source[: task.shared]
        for texts in KINDS.values()
        for task in tasks_of(texts, DEVICES["h200"], most=0)
    }
    assert starts == whole


@pytest.mark.parametrize(
    "other",
    [
        replace(SOUND[1], flags=("--gpu-architecture=sm_80",)),
        replace(SOUND[1], shared=0),
        task("k", "*p = twice(1);", START.replace("2 *", "x +")),
        replace(SOUND[1], compiler="cxx"),
    ],
    ids=["flags", "nothing shared", "start", "compiler"],
)
def test_what_differs_in_more_than_its_kernels_is_made_alone(other):
    assert together.may_join(*SOUND[:2])
    assert not together.may_join(SOUND[0], other)
    assert not together.may_join(other, other) or other.shared


def test_an_entry_has_the_key_that_it_has_alone(monkeypatch, tmp_path):
    keys = [one.key for one in compiled_together(SOUND)]
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "another"))
    assert [compiled(task).key for task in SOUND] == keys


def test_one_that_is_rejected_leaves_the_others():
    first, rejected, last = compiled_together([SOUND[0], REJECTED, SOUND[1]])
    assert isinstance(rejected, CompileError)
    assert "undeclared" in str(rejected)
    assert [first, last] == [cached(SOUND[0]), cached(SOUND[1])]
    assert not first.symbols


def test_a_damaged_binary_is_made_again_for_each_of_its_tasks():
    found = compiled_together(SOUND)
    found[0].path.write_bytes(b"damaged")
    assert [cached(task) for task in SOUND] == [None] * 3
    again = [compiled(task) for task in SOUND]
    assert [one.resources for one in again] == [one.resources for one in found]


# ---- in the pool ---------------------------------------------------------------------------------


def given_out(monkeypatch):
    """How many tasks workers are given at a time."""
    sizes, give = [], CompilePool._give
    monkeypatch.setattr(
        CompilePool, "_give", lambda pool, tasks: sizes.append(len(tasks)) or give(pool, tasks)
    )
    return sizes


def test_workers_get_one_first_then_more_and_share_what_is_left(monkeypatch):
    sizes = given_out(monkeypatch)
    tasks = [task("k", f"*p = twice({n}.5f);") for n in range(20)]
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile(iter(tasks)))
        assert workers.effort["nvrtc"].kernels == 20
    assert sizes == [1, 2, 4, 8, 5]
    assert results == {t: cached(t) for t in tasks}
    sizes.clear()
    others = [task("k", f"*p = twice({n}.25f);") for n in range(7)]
    with CompilePool(jobs=2) as workers:
        assert len(list(workers.compile(others))) == 7
    assert sizes[:3] == [1, 1, 2]
    assert max(sizes) == 2


def test_what_cannot_be_joined_or_is_known_is_left_out(monkeypatch):
    sizes = given_out(monkeypatch)
    compiled(SOUND[1])
    alone = [replace(t, shared=0, source=t.source.replace("twice", "twice ")) for t in SOUND]
    mixed = [task("k", "*p = 1;"), SOUND[0], SOUND[1], alone[0], SOUND[2], *alone[1:]]
    with CompilePool(jobs=1) as workers:
        assert {t for t, _ in workers.compile(mixed)} == set(mixed)
    assert sum(sizes) == len(mixed) - 1
    assert all(cached(t) for t in mixed)


def test_one_that_is_rejected_in_the_pool_leaves_the_others():
    tasks = [*SOUND, REJECTED, task("k", "*p = 7;")]
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile(tasks))
    assert isinstance(results.pop(REJECTED), CompileError)
    assert results == {t: cached(t) for t in tasks if t is not REJECTED}


def test_tasks_of_a_worker_that_dies_are_made_one_by_one(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_COMPILE_TIMEOUT", "0.2")
    sizes = given_out(monkeypatch)
    endless = task("k", "".join(f"p[{i}] += sinf(p[(int)p[{i}]]);" for i in range(2000)))
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile([SOUND[0], endless, *SOUND[1:]]))
    assert sizes[:4] == [1, 2, 1, 1]
    assert isinstance(results.pop(endless), CompileTimeout)
    assert results == {t: cached(t) for t in SOUND}


def test_what_was_begun_with_others_is_given_to_who_waits_for_it():
    tasks = [task("k", f"*p = twice({n}.5f);") for n in range(6)]
    with CompilePool(jobs=1) as workers:
        results = workers.compile(tasks)
        next(results)
        (job,) = workers._busy.values()
        assert len(job.tasks) == 2
        results.close()
        last = job.tasks[-1]
        assert dict(workers.compile([last])) == {last: cached(last)}


def test_a_description_names_what_was_compiled():
    compiled_together(SOUND)
    (description,) = [
        json.loads(path.read_text())
        for path in pool.settings().cache_dir.rglob("*.json")
        if cache._key(SOUND[2], cache._COMPILERS["nvrtc"]) in path.name
    ]
    assert description["symbols"] == {"k": "k_2"}
