"""Plain kernels that copy, read or write: what the ceilings of a device are measured with.

Several variants of each; the fastest at a size is the ceiling there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.compile.launch import CudaKernel
from tilewright.device import spec_of
from tilewright.errors import CacheError, CompileError
from tilewright.impl import CompileTask
from tilewright.measure.ceilings_kernels_cpu import cpu_calls

Call = Callable[..., Any]
BLOCK_THREADS = 256
UNROLLS = (1, 2, 4, 8)
"""16-byte vectors that a thread has in flight: few fill the machine when a transfer is small,
many keep it full when it is large."""

SOURCE = r"""
// A block moves one tile of 256 * U vectors; thread t takes vectors t, t + 256, ...
template <int U> __device__ __forceinline__ void load(uint4 (&v)[U], const uint4* x, long long n) {
    const long long first = (long long)blockIdx.x * (256 * U) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < U; ++u) {
        const long long i = first + u * 256;
        v[u] = i < n ? x[i] : make_uint4(0, 0, 0, 0);
    }
}

template <int U> __device__ __forceinline__ void store(const uint4 (&v)[U], uint4* y, long long n) {
    const long long first = (long long)blockIdx.x * (256 * U) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < U; ++u) {
        const long long i = first + u * 256;
        if (i < n) y[i] = v[u];
    }
}

#define KERNELS(U)                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                           \
    copy_##U(const uint4* __restrict__ x, uint4* __restrict__ y, long long n) {                 \
        uint4 v[U];                                                                             \
        load<U>(v, x, n);                                                                       \
        store<U>(v, y, n);                                                                      \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                           \
    read_##U(const uint4* __restrict__ x, uint4* __restrict__ y, long long n) {                 \
        uint4 v[U];                                                                             \
        load<U>(v, x, n);                                                                       \
        unsigned all = 0xffffffffu;                                                             \
        for (int u = 0; u < U; ++u) all &= v[u].x & v[u].y & v[u].z & v[u].w;                   \
        if (all == 0xffffffffu) y[0] = v[0]; /* never so, but the compiler cannot know */       \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                           \
    write_##U(const uint4* __restrict__ x, uint4* __restrict__ y, long long n) {                \
        uint4 v[U];                                                                             \
        for (int u = 0; u < U; ++u) v[u] = make_uint4(1, 2, 3, 4);                              \
        store<U>(v, y, n);                                                                      \
    }

KERNELS(1) KERNELS(2) KERNELS(4) KERNELS(8)

extern "C" __global__ void empty_1(const uint4* x, uint4* y, long long n) {}
"""


def stream_calls(device: torch.device) -> dict[str, Call]:
    """Callables of one float32 tensor, a multiple of 16 bytes, by name.

    Names start with what the callable does to the tensor: "copy", "read" (into nothing), "write"
    (as many bytes as the tensor has) or "empty". PyTorch's own kernels are among them; without a
    compiler that works, or a folder for what it compiles, they are the only ones.
    """
    calls: dict[str, Call] = {
        "copy aten": lambda x: x.clone(),
        "read aten sum": lambda x: x.sum(),
        "write aten": lambda x: torch.empty_like(x).fill_(1.0),
    }
    if device.type == "cpu":
        calls["read aten amax"] = lambda x: x.amax()
        calls["empty aten"] = lambda x: torch.empty(16)
        with contextlib.suppress(CompileError, CacheError):
            calls.update(cpu_calls())
        return calls
    if nvrtc.missing() is None:
        with contextlib.suppress(CacheError):
            return {**calls, **_own_calls(device)}
    return {**calls, "empty aten": lambda x: torch.empty(1, device=device).fill_(1.0)}


def stream_task(arch: str) -> CompileTask:
    return CompileTask("nvrtc", SOURCE, nvrtc.flags_for(arch), "copy_1")


def _own_calls(device: torch.device) -> dict[str, Call]:
    index = torch.cuda.current_device() if device.index is None else device.index
    binary = compiled(stream_task(spec_of(index).arch))

    def call(kind: str, unroll: int) -> Call:
        kernel = CudaKernel(binary, f"{kind}_{unroll}", "PPq")

        def run(x: Tensor) -> Tensor:
            out = torch.empty_like(x) if kind in ("copy", "write") else x.new_empty(4)
            vectors = x.nbytes // 16
            blocks = 1 if kind == "empty" else -(-vectors // (BLOCK_THREADS * unroll))
            stream = torch.cuda.current_stream(x.device).cuda_stream
            kernel.launch(
                (blocks, 1, 1), (BLOCK_THREADS, 1, 1), 0, stream, index,
                x.data_ptr(), out.data_ptr(), vectors,
            )  # fmt: skip
            return out

        return run

    calls = {f"{k} {u}": call(k, u) for k in ("copy", "read", "write") for u in UNROLLS}
    return {**calls, "empty 1": call("empty", 1)}
