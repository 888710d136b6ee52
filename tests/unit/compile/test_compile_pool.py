"""The pool of compilers: everything comes back, once, whatever happens to a worker."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, wait_until

from tilewright.build import CompileTask
from tilewright.compile import cxx, nvrtc, pool
from tilewright.compile.cache import Compiled, cached, compiled
from tilewright.compile.pool import CompilePool
from tilewright.errors import CacheError, CompileError, CompileTimeout

# Does what its source says, after logging that it began and before logging that it ended.
OBEDIENT_COMPILER = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "obedient 1.0"; exit; fi
for argument; do case "$argument" in *.cpp) source=$argument ;; esac; library=$argument; done
echo "$PPID $$ $(basename "$source")" >> "$OBEDIENT_LOG"
. "$source"
cp "$source" "$library"
"""


needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


def task(name, script=""):
    return CompileTask("cxx", script, (), name)


@pytest.fixture(autouse=True)
def log(monkeypatch, tmp_path):
    """Use the obedient compiler; calling the fixture gives (worker, compiler, task name) of each
    of its runs."""
    script, log = tmp_path / "obedient", tmp_path / "log"
    script.write_text(OBEDIENT_COMPILER)
    script.chmod(0o755)
    log.touch()
    monkeypatch.setenv("TILEWRIGHT_CXX", str(script))
    monkeypatch.setenv("OBEDIENT_LOG", str(log))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

    def runs():
        lines = [line.split() for line in log.read_text().splitlines()]
        return [(int(worker), int(compiler), name) for worker, compiler, name in lines]

    return runs


def test_what_was_compiled_is_counted_and_the_time_of_compilers_that_are_processes_too():
    busy = "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"
    tasks = [task("busy", busy), task("another"), task("failing", "exit 1")]
    with CompilePool(jobs=1) as workers:
        found = dict(workers.compile(tasks))
        effort = workers.effort["cxx"]
        assert effort.kernels == sum(isinstance(r, Compiled) for r in found.values()) == 2
        seconds = effort.cpu_s
        assert seconds > 0.01
        assert list(workers.compile(tasks[:1]))
        assert (effort.kernels, effort.cpu_s) == (2, seconds)  # the cache had it


def test_every_task_comes_back_compiled_from_two_workers(log):
    tasks = [task(f"t{n}", "sleep 0.2") for n in range(4)]
    with CompilePool(jobs=2) as workers:
        results = dict(workers.compile(tasks))
    assert set(results) == set(tasks)
    assert all(isinstance(result, Compiled) for result in results.values())
    assert len({worker for worker, _, _ in log()}) == 2


def test_a_duplicate_is_compiled_and_returned_once(log):
    with CompilePool(jobs=2) as workers:
        results = list(workers.compile([task("a"), task("b"), task("a"), task("a")]))
    assert sorted(t.entry for t, _ in results) == ["a", "b"]
    assert sorted(name for _, _, name in log()) == ["a.cpp", "b.cpp"]


def test_what_is_in_the_cache_starts_no_worker(monkeypatch):
    tasks = [task(f"t{n}") for n in range(5)]
    expected = {t: compiled(t) for t in tasks}
    monkeypatch.setattr(pool, "_Worker", None)
    with CompilePool(jobs=2) as workers:
        assert dict(workers.compile(tasks)) == expected


def test_workers_live_from_one_call_to_the_next(log):
    with CompilePool(jobs=1) as workers:
        for n in range(3):
            list(workers.compile([task(f"t{n}")]))
    assert len({worker for worker, _, _ in log()}) == 1


def test_tasks_may_be_made_while_others_compile(log):
    made = []

    def tasks():
        for n in range(6):
            made.append(n)
            yield task(f"t{n}")

    with CompilePool(jobs=1) as workers:
        results = workers.compile(tasks())
        next(results)
        assert len(made) < 6
        assert len(list(results)) == 5


def test_compiling_goes_on_while_a_result_is_used(log):
    with CompilePool(jobs=1) as workers:
        results = workers.compile([task("a"), task("b")])
        next(results)
        wait_until(lambda: [name for _, _, name in log()] == ["a.cpp", "b.cpp"])
        results.close()


def test_a_rejected_task_is_returned_with_its_log_and_the_others_compile():
    bad, good = task("bad", "echo no such thing; exit 1"), task("good")
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile([bad, good]))
    assert "no such thing" in str(results[bad])
    assert isinstance(results[bad], CompileError)
    assert isinstance(results[good], Compiled)


def test_a_hung_compiler_is_killed_and_the_others_compile(monkeypatch, log):
    monkeypatch.setenv("TILEWRIGHT_COMPILE_TIMEOUT", "0.5")
    hung, good = task("hung", "sleep 60"), task("good")
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile([hung, good]))
    assert isinstance(results[hung], CompileTimeout)
    assert isinstance(results[good], Compiled)
    assert not any(alive(compiler) for _, compiler, _ in log())


def for_nvrtc(lines):
    body = "".join(f"p[{i}] += sinf(p[(int)p[{i}]]);\n" for i in range(lines))
    source = f'extern "C" __global__ void endless(float* p) {{\n{body}}}'
    return CompileTask("nvrtc", source, ("--gpu-architecture=sm_80",), "endless")


def endless_for_nvrtc():
    return for_nvrtc(2000)


@needs_nvrtc
def test_a_hung_nvrtc_is_killed_with_its_worker_and_the_others_compile(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_COMPILE_TIMEOUT", "0.2")
    hung, good = endless_for_nvrtc(), task("good")
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile([hung, good]))
    assert isinstance(results[hung], CompileTimeout)
    assert "nvrtc was still compiling endless after 0.2 s" in str(results[hung])
    assert isinstance(results[good], Compiled)


def test_a_crashed_worker_is_replaced_and_its_task_reported(log):
    fatal, good = task("fatal", "kill -SEGV $PPID; sleep 1"), task("good")
    with CompilePool(jobs=1) as workers:
        results = dict(workers.compile([fatal, good]))
    assert isinstance(results[fatal], CompileError)
    assert "crashed compiling fatal: SIGSEGV" in str(results[fatal])
    assert isinstance(results[good], Compiled)
    assert len({worker for worker, _, _ in log()}) == 2


def test_a_worker_that_died_while_idle_is_replaced(log):
    with CompilePool(jobs=1) as workers:
        list(workers.compile([task("a")]))
        worker = log()[0][0]
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not alive(worker))
        ((_, result),) = workers.compile([task("b")])
    assert isinstance(result, Compiled)


def test_leaving_the_results_early_stops_what_was_running(log):
    with CompilePool(jobs=2) as workers:
        results = workers.compile([task("quick"), task("slow", "sleep 60")])
        next(results)
        wait_until(lambda: len(log()) == 2)
        results.close()
        slow = next(compiler for _, compiler, name in log() if name == "slow.cpp")
        wait_until(lambda: not alive(slow))
        assert len(list(workers.compile([task("next")]))) == 1


@needs_nvrtc
def test_leaving_does_not_wait_for_nvrtc_which_no_signal_reaches(log, monkeypatch):
    with CompilePool(jobs=2) as workers:
        results = workers.compile([task("quick"), endless_for_nvrtc()])
        next(results)
        time.sleep(0.5)  # it is deep inside by now
        with monkeypatch.context() as patched:
            patched.setattr(pool, "_GRACE_S", 60.0)
            started = time.monotonic()
            results.close()
            assert time.monotonic() - started < 30.0
        assert len(list(workers.compile([task("next")]))) == 1


@needs_nvrtc
def test_what_nvrtc_is_at_when_nobody_waits_any_more_is_finished_and_its_worker_kept(log):
    left = for_nvrtc(40)
    with CompilePool(jobs=1) as workers:
        results = workers.compile([task("a"), left])
        next(results)
        results.close()
        assert len(list(workers.compile([task("b")]))) == 1
        assert len({worker for worker, _, _ in log()}) == 1
        assert cached(left)


@needs_nvrtc
def test_what_was_begun_ahead_is_compiled_once_by_who_waits_for_it(monkeypatch):
    begun = []
    give = CompilePool._give
    monkeypatch.setattr(
        CompilePool, "_give", lambda pool, tasks: begun.extend(tasks) or give(pool, tasks)
    )
    first, second = for_nvrtc(30), for_nvrtc(31)
    with CompilePool(jobs=1) as workers:
        workers.ahead([first, second])  # one worker takes one
        assert begun == [first]
        results = dict(workers.compile([second, first]))
    assert begun == [first, second]
    assert all(isinstance(result, Compiled) for result in results.values())


def test_only_what_ends_by_itself_is_begun_ahead(log):
    with CompilePool(jobs=1) as workers:
        workers.ahead([task("a")])
        assert not workers._busy
    assert not log()


@needs_nvrtc
def test_what_lingers_too_long_is_stopped_for_who_waits(monkeypatch):
    monkeypatch.setattr(pool, "_LINGER_S", 0.3)
    with CompilePool(jobs=1) as workers:
        workers.ahead([endless_for_nvrtc()])
        assert len(list(workers.compile([task("next")]))) == 1


def test_a_cache_that_cannot_be_written_ends_the_call(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with CompilePool(jobs=1) as workers, pytest.raises(CacheError, match="TILEWRIGHT_CACHE_DIR"):
        list(workers.compile([task("a")]))


SCRIPT = """
from tilewright.build import CompileTask
from tilewright.compile.pool import CompilePool
tasks = [CompileTask("cxx", "sleep 60", (), f"t{n}") for n in range(2)]
with CompilePool(jobs=2) as workers:
    list(workers.compile(tasks))
"""


def test_an_interrupted_script_leaves_no_process_behind(log, tmp_path):
    """The script has no __main__ guard either: workers must not run it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(log()) == 2)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    pids = [pid for worker, compiler, _ in log() for pid in (worker, compiler)]
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_workers_end_when_their_script_is_killed(log, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("sleep 60", "sleep 0.5"))
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")])
    wait_until(lambda: len(log()) == 2)
    process.kill()
    process.wait()
    workers = [worker for worker, _, _ in log()]
    wait_until(lambda: not any(alive(worker) for worker in workers))


def test_a_worker_imports_no_torch():
    code = "import sys; from tilewright.compile import pool; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_real_libraries_compile_in_the_pool(monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CXX")
    source = 'extern "C" int answer() { return %d; }'
    tasks = [CompileTask("cxx", source % n, cxx.DEFAULT_FLAGS, "answer") for n in range(2)]
    with CompilePool(jobs=2) as workers:
        results = dict(workers.compile(tasks))
    assert results == {t: compiled(t) for t in tasks}
