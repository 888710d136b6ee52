"""The weight-gradient kernels of mma.sync and plain multiply-adds, run on a CPU.

See cuda_on_cpu.hpp for threads, tensor_cores_on_cpu.hpp for instructions, and blocks_on_cpu.hpp for
blocks that wait for one another.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from pathlib import Path

import torch

from on_cpu import FIBERS, HEADER, built_for_a_cpu, library
from tilewright.device import DEVICES
from tilewright.impl import Executable
from tilewright.impls.weight_gradient import _layout as layout
from tilewright.impls.weight_gradient._layout import Converted

DECLARED, DEFINED = (
    [Path(__file__).with_name(f"{n}_on_cpu.{kind}").read_text() for n in ("tensor_cores", "blocks")]
    for kind in ("hpp", "cpp")
)
DEVICE = DEVICES["h200"]
ALIGNED = 128
"""Bytes; structures that kernels take by value are aligned to 64."""

_ASM = re.compile(r'asm(?: volatile)?\(((?:\s*(?:"[^"]*"|[A-Z]+))+)(.*?)\);', re.S)
_OPERAND = re.compile(r'"[=+]?\w"\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)')


class OnCpu(Executable):
    """An implementation's executable whose kernels run on CPU tensors.

    Args:
        fault: (text, replacement) in the kernels' source.
        device: what slices are cut for.
    """

    def __init__(self, impl, config, w, fault=("", ""), device=DEVICE):
        self.executable = kernels = built_for_a_cpu(impl, config, w, device)
        if isinstance(kernels, Converted):
            kernels = kernels.kernel
            for conversion in (self.executable.before, self.executable.after):
                for _, transposition in conversion.launches:
                    on_cpu(transposition)
        source = impl.task(config, w, device).source
        assert fault[0] in source
        library = _library(source.replace(*fault) if fault[0] else source)
        for name, entry in (("kernel", "weight_grad"), ("add", "add_all_slices")):
            setattr(kernels, name, _Kernel(library, entry, getattr(kernels, name)))
        self.workspace_bytes = self.executable.workspace_bytes

    def __call__(self, *tensors):
        return self.executable(*tensors)


def on_cpu(transposition):
    """Have conversions between layouts run on CPU tensors."""
    library = _library(transposition.task.source)
    transposition.kernel = _Kernel(library, layout.ENTRY, transposition.kernel)


class _Kernel:
    def __init__(self, library, entry, kernel):
        self._run = getattr(library, f"on_cpu_{entry}")
        self._signature = kernel.signature

    def launch(
        self, grid, block, shared_bytes, stream, index, *args,
        cluster=1, cooperative=False, overlapping=False,
    ):  # fmt: skip
        packed = [_packed(code, arg) for code, arg in zip(self._signature, args, strict=True)]
        addresses = (ctypes.c_void_p * len(packed))(*(address for address, _ in packed))
        shape = (ctypes.c_int * 3)(*grid)
        together = cluster if cooperative or cluster > 1 else 0
        self._run(shape, block[0], addresses, ctypes.c_size_t(shared_bytes), together)


def _packed(code, arg):
    """Address of the argument's bytes, and what keeps them."""
    content = arg if code == "T" else struct.pack(code, arg)
    memory = ctypes.create_string_buffer(len(content) + ALIGNED)
    address = -(-ctypes.addressof(memory) // ALIGNED) * ALIGNED
    ctypes.memmove(address, content, len(content))
    return address, memory


@functools.cache
def _library(source):
    entries = re.findall(r'extern "C" __global__[^{]*?(\w+)\(\w[^()]*\)\s*\{', source)
    plain = _ASM.sub(_call, source).replace("waits = true;", "waits = true, give_way();")
    plain = plain.replace('extern "C" __global__', "static")
    plain = re.sub(
        r"extern __shared__ __align__\(\d+\) unsigned char memory\[\];",
        "unsigned char* memory = dynamic_shared;",
        plain,
    )
    doors = {
        f"on_cpu_{entry}": f'extern "C" const char* on_cpu_{entry}'
        "(const int* g, int threads, void** args, size_t bytes, int together) {\n"
        "  blockDim = {(unsigned)threads, 1, 1}, dynamic_bytes = bytes;\n"
        "  backwards = !backwards;\n"
        "  const Launch l = {{g[0], g[1], g[2]}, threads, dynamic_shared, bytes};\n"
        f"  const Body kernel = body_of({entry}, args);\n"
        "  return together ? launch_in_turn(kernel, l, together) : launch(kernel, l);\n}\n"
        for entry in entries
    }
    defined = (
        f"#define SHARED_BYTES {DEVICE.shared_bytes_per_block}\n"
        f"#define BRAIN {int('#define DTYPE bf16' in source)}\n"
    )
    start = "\n".join([HEADER, defined, *DECLARED])
    own = "\n".join([FIBERS, *DEFINED])
    return library("\n".join([plain, *doors.values()]), list(doors), start, own)


def _call(found):
    """`asm("name %0, %1;" : outputs : inputs)` as a call of ptx::name."""
    text = re.match(r'\s*"([^"]*)"', found[1])[1]
    if not text:  # for the compiler alone
        return ";"
    name = "unpack" if text.startswith("{") else re.match(r"[\w.:]+", text)[0].strip(".")
    name = re.sub(r"[.:]+", "_", name)
    return f"ptx::{name}({', '.join(_OPERAND.findall(found[2]))});"


def without_a_gpu(monkeypatch, module):
    """Streams and counters for executables that run here."""
    zeros = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(module.counters, "address", lambda *args: zeros.data_ptr())
    return zeros
