"""CUDA kernels for indices, run on a CPU launch by launch; see cuda_on_cpu.hpp."""

from __future__ import annotations

import ctypes
import functools
import re
import struct

import torch

from on_cpu import built_for_a_cpu, library
from tilewright.compile.faults import fault_address
from tilewright.device import DEVICES
from tilewright.impl import Executable, allocate
from tilewright.impls.indices._indexed import TorchCall

DEVICE = DEVICES["h200"]
IN_BULK = """  for (u32 i = 0; i < elements; ++i) add_to(at + i, slot[i]);
}
template <int LATER> static void await_read() {}
static void await_added() {}
static void show_copy_engine() {}
#endif"""
SHARED_WORDS = DEVICE.shared_bytes_per_block // 4


class OnCpu(Executable):
    """An implementation's kernels on CPU tensors.

    Out-of-range indices set the flag that `tw.check()` looks at, as on a GPU.
    """

    def __init__(self, impl, config, w):
        self.executable = built_for_a_cpu(impl, config, w, DEVICE)
        self._library = library_of(impl.task(config, w, DEVICE).source)
        self._out, self._calls = w.outputs[0], 0

    def __call__(self, *tensors):
        """Threads and blocks take their turns forwards, and in every second call backwards."""
        self._library.go_backwards(ctypes.c_bool(self._calls % 2 == 1))
        self._calls += 1
        in_place = self.executable.in_place
        out = tensors[0] if in_place else allocate(self._out, torch.device("cpu"))
        counters = (ctypes.c_uint32 * self.executable.counters)()
        given = [*map(torch.Tensor.data_ptr, tensors)], out, _fault(), ctypes.addressof(counters)
        values = self.executable.values(*given)
        for launch, pick in zip(self.executable.launches, self.executable.picks, strict=True):
            args = pick(values)
            if isinstance(launch, TorchCall):
                launch.run(*args)
                continue
            self._run(launch, args)
            assert not any(counters), "the counters are not left zeros"
        return out

    def _run(self, launch, args):
        entry, signature, grid, threads, shared_bytes = launch[:5]
        how = "launch_together" if launch.meets else "launch"
        run(self._library, entry, signature, grid, threads, args, shared_bytes, how)


def run(library, entry, signature, grid, threads, args, shared_bytes=0, how="launch"):
    """Launch a kernel of a library; a structure that it takes by value is bytes."""
    packed = [
        ctypes.create_string_buffer(arg if code == "T" else struct.pack(code, arg).ljust(8, b"\0"))
        for code, arg in zip(signature, args, strict=True)
    ]
    addresses = (ctypes.c_void_p * len(packed))(*map(ctypes.addressof, packed))
    assert shared_bytes <= DEVICE.shared_bytes_per_block
    door = getattr(library, f"{how}_{entry}")
    door((ctypes.c_int * 3)(*grid), threads, addresses, ctypes.c_size_t(shared_bytes))


def _fault():
    """Where kernels report; without a GPU nothing can be pinned, and nothing need be."""
    if torch.cuda.is_available():
        return fault_address()
    return _unpinned().data_ptr()


@functools.cache
def _unpinned():
    return torch.zeros(1, dtype=torch.int32)


def fault_reported():
    """Whether a kernel has met an index out of range since this was asked last."""
    told = bool(_unpinned())
    _unpinned().zero_()
    return told


@functools.cache
def library_of(source):
    """What launches the kernels of a source."""

    def in_bits(rounds):
        return f"return {{half_bits(x, {str(bool(rounds[1])).lower()})}};"

    entries = re.findall(r'extern "C" __global__ .*? void (\w+)\(', source)
    plain = source.replace('extern "C" __global__', "static")
    plain = re.sub(
        r'float f; asm\("cvt.f32.f16.*?return f;', "return half_value(h.bits, false);", plain
    )
    plain = re.sub(r'b?f16 h; asm\("cvt.rn.(b?)f16.f32.*?return h;', in_bits, plain)
    plain = re.sub(r'asm volatile\("prefetch.*', ";", plain)
    plain = re.sub(r'asm volatile\("fence.*', ";", plain)
    plain = re.sub(r"(?s)(TW_DEVICE void add_bulk.*?\{\n).*?\n#endif", r"\1" + IN_BULK, plain)
    memory = f"alignas(16) static u32 shared[{SHARED_WORDS}];"
    declared = "extern __shared__ __align__(16) u32 shared[];"
    plain = plain.replace(declared, memory) if declared in plain else f"{plain}\n{memory}"
    doors = {
        f"{how}_{e}": f'extern "C" const char* {how}_{e}'
        "(const int* g, int threads, void** args, size_t bytes) { "
        f"return {how}(body_of({e}, args), {{{{g[0], g[1], g[2]}}, threads, shared, bytes}}); }}"
        for e in entries
        for how in ("launch", "launch_together")
    }
    direction = 'extern "C" void go_backwards(bool now) { backwards = now; }'
    return library("\n".join([plain, direction, *doors.values()]), list(doors))
