"""Plain C++ kernels that copy, read or write with all threads: ceilings of a CPU.

PyTorch's own take a page fault for every 4 KiB of a large fresh output. These ask for pages of
2 MiB, as a good kernel does, and store through the caches or past them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import torch
from torch import Tensor

from tilewright.compile.cache import compiled
from tilewright.compile.cxx import DEFAULT_FLAGS
from tilewright.compile.launch import CppFunction
from tilewright.impl import CompileTask, allocator
from tilewright.measure.timing_cpu import LARGEST_KEPT_BYTES

PARALLEL_BYTES = 128 << 10
"""From here on all threads share the work; waking them would outweigh less."""

SOURCE = r"""
namespace {

constexpr i64 PIECE = 16 * 1024;  // floats of one work item
enum Kind { COPY, READ, WRITE };

template <Kind K, bool Past> u32 block(const float* x, float* y, i64 begin, i64 end) {
  Vec<u32> any = {};
  i64 i = begin;
  for (; i + LANES <= end; i += LANES) {
    Vec<float> v = {};
    if constexpr (K == WRITE) v = v + 1.0f;
    else v = load(x + i, All{});
    if constexpr (K == READ) any |= (Vec<u32>)v;
    else if constexpr (Past) stream(y + i, v, All{});
    else store(y + i, v, All{});
  }
  u32 all = 0;
  for (int k = 0; k < LANES; ++k) all |= any[k];
  for (; i < end; ++i) {
    u32 bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    if constexpr (K == READ) all |= bits;
    else y[i] = K == WRITE ? 1.0f : x[i];
  }
  return all;
}

template <Kind K, bool Past> void run(const float* x, float* y, i64 n, i64 threads, i64 huge) {
  if (huge) advise_huge_pages(y, n * (i64)sizeof(float));
  const i64 blocks = (n + PIECE - 1) / PIECE;
  u32 all = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : all)
  {
#pragma omp for schedule(static)
    for (i64 b = 0; b < blocks; ++b) {
      const i64 begin = b * PIECE, end = begin + PIECE < n ? begin + PIECE : n;
      all |= block<K, Past>(x, y, begin, end);
    }
    if (Past) finish_streams();
  }
  if (K == READ) __builtin_memcpy(y, &all, sizeof all);
}

}  // namespace

#define ENTRY(NAME, KIND, PAST)                                                                 \
  extern "C" void NAME(const float* x, float* y, i64 n, i64 threads, i64 huge) {               \
    run<KIND, PAST>(x, y, n, threads, huge);                                                    \
  }
ENTRY(copy_cached, COPY, false)
ENTRY(copy_past, COPY, true)
ENTRY(read_cached, READ, false)
ENTRY(write_cached, WRITE, false)
ENTRY(write_past, WRITE, true)
"""


def stream_task() -> CompileTask:
    prelude = resources.files("tilewright").joinpath("kernels/prelude.hpp").read_text()
    return CompileTask(
        "cxx", f"#define TW_WORD_BYTES 4\n{prelude}{SOURCE}", DEFAULT_FLAGS, "stream"
    )


def cpu_calls() -> dict[str, Callable[[Tensor], Tensor]]:
    """Callables of one float32 tensor, by name; a name starts with its kind.

    Raises:
        CompileError: no C++ compiler is here, or it does not work.
    """
    binary = compiled(stream_task())

    def call(name: str) -> Callable[[Tensor], Tensor]:
        function = CppFunction(binary, name, "PPqqq")

        def run(x: Tensor) -> Tensor:
            shape = (1,) if name.startswith("read") else (x.numel(),)
            out = allocator.empty_strided(shape, (1,), dtype=x.dtype, device=x.device)
            threads = torch.get_num_threads() if x.nbytes >= PARALLEL_BYTES else 1
            fresh = x.nbytes >= LARGEST_KEPT_BYTES and len(out) > 1
            function(x.data_ptr(), out.data_ptr(), x.numel(), threads, fresh)
            return out

        return run

    names = ("copy_cached", "copy_past", "read_cached", "write_cached", "write_past")
    return {name.replace("_", " own "): call(name) for name in names}
