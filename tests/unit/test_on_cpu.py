"""What ends a launch of an emulated kernel, and what it leaves to the next one."""

import ctypes

import pytest

from on_cpu import GivenUp, fails, library
from tilewright.compile import cxx

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason="no C++ compiler")
KERNELS = {
    "sums": "__syncthreads(); sync_group(3, 64); found[blockIdx.x] += threadIdx.x;",
    "never": "if (threadIdx.x < 63) __syncthreads(); else while (true) give_way();",
    "half_a_group": "if (threadIdx.x < 32) sync_group(3, 64);",
    "waits_for_nobody": "while (*(volatile u32*)found < 1) {}",
    "waits_long": "for (int i = 0; i < 900; ++i) give_way(); found[blockIdx.x] += threadIdx.x;",
    "deep": "volatile char much[STACK_BYTES - 256]; for (auto& c : much) c = 1;",
    "never_written": "volatile char some[4096]; for (auto& c : some) found[blockIdx.x] += c;",
}
BLOCKS, THREADS = 2, 64
SUM = THREADS * (THREADS - 1) // 2


@pytest.fixture(scope="module")
def run():
    doors = [
        f"static void {name}(u32* found) {{ {body} }}\n"
        f'extern "C" const char* run_{name}(void** args) {{'
        f" return launch(body_of({name}, args), {{{{{BLOCKS}, 1, 1}}, {THREADS}, nullptr, 0}}); }}"
        for name, body in KERNELS.items()
    ]
    named = "using u32 = unsigned;"
    emulated = library("\n".join([named, *doors]), [f"run_{name}" for name in KERNELS])

    def launched(name):
        found = (ctypes.c_uint32 * BLOCKS)()
        pointer = ctypes.c_void_p(ctypes.addressof(found))
        args = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        getattr(emulated, f"run_{name}")(args)
        return list(found)

    return launched


@pytest.mark.parametrize("name", ["never", "half_a_group", "waits_for_nobody"])
def test_who_waits_for_what_never_comes_is_given_up_and_leaves_nothing_behind(run, name):
    with pytest.raises(GivenUp, match=r"thread \d+ of block 0: waits for what never comes"):
        run(name)
    assert fails(lambda: run(name))
    assert run("sums") == [SUM] * BLOCKS


def test_who_waits_long_goes_on(run):
    assert run("waits_long") == [SUM] * BLOCKS


def test_a_stack_too_small_is_told(run):
    with pytest.raises(GivenUp, match="more than 65280 bytes of stack"):
        run("deep")
    assert run("sums") == [SUM] * BLOCKS


def test_what_was_never_written_is_the_same_in_every_launch(run):
    found = run("never_written")
    assert found[0] == 0
    run("waits_long")
    assert run("never_written") == found
