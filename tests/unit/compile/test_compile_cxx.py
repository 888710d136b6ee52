"""The C++ compiler: what it makes, what its refusals say, and what happens when it hangs."""

import ctypes
import math
import subprocess
import sys
import time

import pytest
from processes import alive, wait_until

from tilewright.compile import cxx
from tilewright.errors import CacheError, CompileError, CompilerMissing, CompileTimeout

ADD = 'extern "C" int add(int a, int b) { return a + b; }'


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Write a shell script and use it as the compiler; it answers --version by itself."""

    def use(script, name="fake-compiler"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{name} 1.0" && exit\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("TILEWRIGHT_CXX", str(path))
        return path

    return use


def test_a_compiled_function_computes(tmp_path):
    binary, _ = cxx.compile_shared(ADD, cxx.DEFAULT_FLAGS, "add")
    (tmp_path / "add.so").write_bytes(binary)
    assert ctypes.CDLL(str(tmp_path / "add.so")).add(2, 40) == 42


def test_a_function_that_needs_nothing_of_cpps_library_is_not_linked_to_it(tmp_path):
    source = """#include <math.h>
    extern "C" double total(const double* x, long n) {
      double sum = 0;
      #pragma omp parallel for reduction(+ : sum)
      for (long i = 0; i < n; ++i) sum += exp(x[i]);
      return sum;
    }"""
    flags = (*cxx.DEFAULT_FLAGS, "-fno-exceptions", cxx.WITHOUT_CXX_LIBRARY)
    binary, _ = cxx.compile_shared(source, flags, "total")
    assert b"libstdc++" not in binary
    (tmp_path / "total.so").write_bytes(binary)
    total = ctypes.CDLL(str(tmp_path / "total.so")).total
    total.restype = ctypes.c_double
    assert total((ctypes.c_double * 3)(0, 0, 1), ctypes.c_long(3)) == 2 + math.e


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("Debian clang version 14.0.6", "-nostdlib++ x.cpp"),
        ("g++ (Debian 12.2.0-14) 12.2.0", "-nodefaultlibs x.cpp -lm -lgcc -lc -lgcc"),
        ("x86_64-linux-gnu-g++-13 (GCC) 13.1", "-nodefaultlibs x.cpp -lm -lgcc -lc -lgcc"),
        ("Intel(R) oneAPI DPC++/C++ Compiler 2024.0.0 (2024.0.0.20231017)", "x.cpp"),
    ],
)
def test_each_compiler_is_told_in_its_words_to_leave_out_cpps_library(
    fake, version, words, monkeypatch
):
    fake('for a; do echo "$(basename -- $a)"; done | tr "\\n" " "; exit 1')
    monkeypatch.setattr(cxx, "_version", lambda command: version)
    with pytest.raises(CompileError) as raised:
        cxx.compile_shared(ADD, ("-g", cxx.WITHOUT_CXX_LIBRARY), "x")
    assert f"-g {words} -o x.so" in str(raised.value)


def test_a_sanitizers_library_stays_linked(fake, monkeypatch):
    fake('for a; do echo "$(basename -- $a)"; done | tr "\\n" " "; exit 1')
    monkeypatch.setattr(cxx, "_version", lambda command: "g++ (Debian 12.2.0-14) 12.2.0")
    with pytest.raises(CompileError, match=r"-fsanitize=undefined x\.cpp -o x\.so"):
        cxx.compile_shared(ADD, ("-fsanitize=undefined", cxx.WITHOUT_CXX_LIBRARY), "x")


def test_warnings_come_back_in_the_log():
    _, log = cxx.compile_shared(ADD + "\n#warning slow path", cxx.DEFAULT_FLAGS, "add")
    assert "slow path" in log


def test_a_rejection_carries_the_compilers_log():
    with pytest.raises(CompileError, match=r"rejected add .*-O3(.|\n)*undeclared"):
        cxx.compile_shared("int x = undeclared;", cxx.DEFAULT_FLAGS, "add")


def test_the_chosen_compiler_is_used_and_its_log_shown(fake):
    fake('echo "out of cheese" >&2; exit 3')
    assert cxx.version() == "fake-compiler 1.0"
    with pytest.raises(CompileError, match=r"exit code 3:\nout of cheese"):
        cxx.compile_shared(ADD, (), "add")


def test_the_chosen_compiler_may_have_arguments(fake, monkeypatch):
    path = fake('echo "got $1"; exit 1')
    monkeypatch.setenv("TILEWRIGHT_CXX", f"{path} -wrapped")
    with pytest.raises(CompileError, match="got -wrapped"):
        cxx.compile_shared(ADD, (), "add")


def test_a_compiler_that_writes_nothing_is_an_error(fake):
    fake("exit 0")
    with pytest.raises(CompileError, match="exit code 0"):
        cxx.compile_shared(ADD, (), "add")


def test_a_hung_compiler_is_killed_with_its_children(fake, monkeypatch, tmp_path):
    fake(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("TILEWRIGHT_COMPILE_TIMEOUT", "0.3")
    started = time.monotonic()
    with pytest.raises(CompileTimeout, match=r"after 0\.3 s .*TILEWRIGHT_COMPILE_TIMEOUT"):
        cxx.compile_shared(ADD, (), "add")
    assert time.monotonic() - started < 5
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))


def test_an_interrupt_kills_the_compiler(fake, tmp_path):
    fake(f"echo $$ > {tmp_path}/compiler; exec sleep 60")
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tilewright.compile import cxx; cxx.compile_shared('', (), 'add')",
        ],
        stderr=subprocess.DEVNULL,
    )
    file = tmp_path / "compiler"
    wait_until(lambda: file.exists() and file.read_text())
    time.sleep(0.5)  # the compiler runs a little before Popen returns to its caller
    process.send_signal(2)
    process.wait(10)
    assert not alive(int(file.read_text()))


def test_without_a_compiler_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("TILEWRIGHT_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"apt install g\+\+"):
        cxx.compile_shared(ADD, (), "add")
    assert "apt install g++" in (cxx.missing() or "")


def test_clang_serves_where_gcc_is_not(fake, monkeypatch, tmp_path):
    fake("", name="clang++")
    monkeypatch.delenv("TILEWRIGHT_CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cxx.version() == "clang++ 1.0"


def test_a_chosen_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="TILEWRIGHT_CXX=no-such-compiler"):
        cxx.version()


def test_a_chosen_compiler_that_cannot_run_is_missing(fake):
    fake("").write_bytes(b"\x00\x01 no program")
    with pytest.raises(CompilerMissing, match="cannot be run"):
        cxx.version()


def test_a_temporary_folder_that_is_gone_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cxx.tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(CacheError, match=r"gone.*TMPDIR"):
        cxx.compile_shared(ADD, cxx.DEFAULT_FLAGS, "add")
