"""Generated CUDA kernels, run on a CPU: what they compute is tested where there is no GPU.

The kernels are those that NVRTC gets; functions of the prelude that are written in PTX are replaced
(`REPLACED`). Threads do not run at once, but in one order and then in the other, so that a missing
barrier gives other bits in two runs. Blocks run one after the other; where they meet on the way,
they run again and again, from the start to the next meeting, and to the end once all have come to
the last. Blocks of a cluster take turns whenever none of one's threads can go on.
"""

import ctypes
import functools
import math
import re
from functools import partial
from pathlib import Path

import torch

from on_cpu import FIBERS, HEADER, PER_BLOCK, library
from tilewright.compile.counters import COUNTERS
from tilewright.device import DEVICES
from tilewright.fusion.cuda import program_source, target
from tilewright.fusion.cuda.finishing import FINISH
from tilewright.fusion.cuda.kernel import ENTRY, prelude
from tilewright.fusion.staged import Staged, graphs_of
from tilewright.fusion.stored import Stored
from tilewright.impl import allocator
from tilewright.impls.fused import InStages, graph_of
from tilewright.tensor_spec import DTYPES

MEMORY = Path(__file__).with_name("emulated.hpp").read_text()
OWN = Path(__file__).with_name("emulated.cpp").read_text()
CLUSTERS = Path(__file__).with_name("clusters_on_cpu.cpp").read_text()
SHARED_BYTES = DEVICES["h200"].shared_bytes_per_block
CPU = torch.device("cpu")
PERSISTENT_BLOCKS = 3
REPLACED = {
    r"TW_DEVICE float widen\(f16 h\).*": """
TW_DEVICE float widen(f16 h) { return cast_bits<_Float16>(h.bits); }""",
    r"TW_DEVICE u32 pack\(f16, float a, float b\) \{[^}]*\}": """
TW_DEVICE u32 pack(f16, float a, float b) {
  return cast_bits<u16>((_Float16)a) | (u32)cast_bits<u16>((_Float16)b) << 16;
}""",
    r"TW_DEVICE u32 pack\(bf16, float a, float b\) \{[^}]*\}": """
TW_DEVICE u16 to_bf16(float a) {
  const u32 u = __float_as_uint(a);
  return a != a ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
TW_DEVICE u32 pack(bf16, float a, float b) { return to_bf16(a) | (u32)to_bf16(b) << 16; }""",
    r"(?s)#define TW_HALF_OP.*?#endif": """
#define TW_HALF_OP(name, op) template <class H> TW_DEVICE u32 name(H h, u32 a, u32 b) { \\
  return pack(h, low(h, a) op low(h, b), high(h, a) op high(h, b)); }
TW_HALF_OP(half_add, +)
TW_HALF_OP(half_sub, -)
TW_HALF_OP(half_mul, *)""",
    r"(?s)TW_DEVICE float max_nan\(.*?\n\}": """
TW_DEVICE float max_nan(float a, float b) { return a != a || b != b ? a + b : fmaxf(a, b); }""",
    r"(?s)TW_DEVICE float min_nan\(.*?\n\}": """
TW_DEVICE float min_nan(float a, float b) { return a != a || b != b ? a + b : fminf(a, b); }""",
    r"(?s)TW_HALF_OP\(half_max, f16.*?(?=TW_FUNCTION2)": """
template <class H> TW_DEVICE u32 half_max(H h, u32 a, u32 b) {
  return pack(h, max_nan(low(h, a), low(h, b)), max_nan(high(h, a), high(h, b)));
}
template <class H> TW_DEVICE u32 half_min(H h, u32 a, u32 b) {
  return pack(h, min_nan(low(h, a), low(h, b)), min_nan(high(h, a), high(h, b)));
}
TW_DEVICE float power_of_two(float a) {  // of which what is no normal number is zero
  const float r = exp2f(a);
  return r < 0x1p-126f ? 0 : r;
}
""",
    r"(?s)TW_DEVICE float near_reciprocal\(.*?\n\}": """
TW_DEVICE float near_reciprocal(float a) {  // off by one, but where no step mends that
  const bool all_ones = (__float_as_uint(a) & 0x7fffff) == 0x7fffff;
  return __uint_as_float(__float_as_uint(1 / a) ^ !all_ones);
}""",
    r"(?s)template <bool STREAM> TW_DEVICE Quad fetch.*?(?=template <int BYTES> struct Unit;)": """
template <bool STREAM, class U> TW_DEVICE U fetch(const U* p) { touch(p, sizeof(U)); return *p; }
""",
    r"(?s)template <int BYTES> TW_DEVICE void copy_async.*?\n\}": """
template <int BYTES> TW_DEVICE void copy_async(u64 to, const void* from) {
  touch(from, BYTES);
  std::memcpy((void*)to, from, BYTES);
}""",
    r"(?s)// ---- barriers in shared memory.*?(?=// ---- a queue)": """
struct Barrier { int bytes; short told, round; };
TW_DEVICE u64 shared_address(const void* p) { return (u64)p; }
static Barrier& barrier_at(u64* b) { return *(Barrier*)b; }
static void settle(Barrier& b) { if (b.told && b.bytes == 0) b.told = 0, ++b.round; }
TW_DEVICE void barrier_init(u64* b) { *b = 0; }
TW_DEVICE void barriers_known() { __syncthreads(); }
TW_DEVICE void barrier_expect(u64* b, u32 bytes) {
  barrier_at(b).bytes += bytes, barrier_at(b).told = 1;
  settle(barrier_at(b));
}
#pragma GCC visibility push(hidden)
void copy_bulk(void* to, const void* from, u32 bytes, u64* arrived);
void barrier_wait(u64* b, u32 parity);
#pragma GCC visibility pop
""",
    r"(?s)struct Gram.*?(?=struct Barrier)": """
struct Gram { float sum, squares; };
template <class H, int N> TW_DEVICE void add_halves(Gram& g, int, const Vec<H, N>& x) {
  for (int i = 0; i < N; ++i) g.sum += widen(x[i]), g.squares += widen(x[i]) * widen(x[i]);
}
TW_DEVICE bool moments_of(const Gram& g, float count, float inverse, Moments<float>& found) {
  const float squares = reduce_warp<Sum, 32>(g.squares), sum = reduce_warp<Sum, 32>(g.sum);
  found = {average(sum, count, inverse), squares - sum * (sum * inverse)};
  return squares <= 4.0f * found.m2 && squares < TW_INFINITY;
}
""",
    r"TW_DEVICE void group_sync.*": """
TW_DEVICE void group_sync(int group, int threads) { sync_group(group, threads); }""",
    r"(?s)TW_DEVICE void meet\(.*?\n\}": """
TW_DEVICE void meet(u32* counter, u32 blocks, u32 times = 1) {
  __syncthreads();
  if (times == comes_to && threadIdx.x == 0) atomicAdd(counter, 1u);
  if (times == comes_to) end();
  if (threadIdx.x == 0 && *counter < times * blocks) give_up("waits for blocks that do not come");
  __syncthreads();
}""",
    r"(?s)TW_DEVICE void put_away\(Quad.*?TW_DEVICE void put_away\(U\* p, U q\) \{": """
template <class U> TW_DEVICE void put_away(U* p, U q) { touch(p, sizeof(U));""",
    r"(?s)template <int WIDE> TW_DEVICE void read_words.*?\n\}\ntemplate.*?\n\}": """
template <int WIDE> TW_DEVICE void read_words(u64* words, const u64* p) {
  if ((long)p % (8 * WIDE)) give_up("reads %d words at %p", WIDE, p);
  for (int i = 0; i < WIDE; ++i) words[i] = p[i];
}
template <int WIDE> TW_DEVICE void write_words(u64* p, const u64* words) {
  if ((long)p % (8 * WIDE)) give_up("writes %d words at %p", WIDE, p);
  for (int i = 0; i < WIDE; ++i) p[i] = words[i];
}""",
    r"(?s)template <int N> TW_DEVICE bool have_come.*?\n\}": """
template <int N> TW_DEVICE bool have_come(const u64 (&words)[N]) {
  for (u64 w : words)
    if (!(u32)w) give_up("waits for what comes later");  // for ever, were there no other block
  return true;
}""",
    r"T load_one\(const T\* p\) \{": "T load_one(const T* p) { touch(p, sizeof(T));",
    r"\*\(\(U\*\)p \+ i\) = held": "touch((U*)p + i, sizeof(U)), *((U*)p + i) = held",
    r"p\[i \* stride\] = x\[i\];": "touch(p + i * stride, sizeof(T)), p[i * stride] = x[i];",
    r"(?s)// ---- clusters.*": """
#pragma GCC visibility push(hidden)
u32 cluster_rank();
void barriers_ready();
long way_to_block(u32 rank);  // from what is here to the same there
// `memory` is the shared memory of the block that asks for it.
const char* launch_clusters(Body kernel, const Launch& l, int blocks, void* (*memory)());
#pragma GCC visibility pop
TW_DEVICE void barriers_made() {}
template <class T> TW_DEVICE T* of_block(T* local, u32 rank) {
  return (T*)((char*)local + way_to_block(rank));
}
template <class T> TW_DEVICE void store_remote(T* local, u64* barrier, u32 rank, T value) {
  *of_block(local, rank) = value;
  Barrier& told = barrier_at(of_block(barrier, rank));
  told.bytes -= sizeof(T);
  settle(told);
}
""",
}


class Emulated(Stored):
    """A graph's kernels under a schedule."""

    def __init__(self, graph, config, device, w):
        super().__init__(graph, w)
        self.dtypes = graph.scalars
        self.again, self.offsets = graph.again, graph.offsets_bytes
        self.temporaries, self.launches = [], []
        self.clusters: dict[str, int] = {}
        """By kernel: blocks of a cluster."""
        self.counters = torch.zeros(COUNTERS // 2, dtype=torch.int64)
        if target.one_pass(graph, device) is None:
            source, program, stages = program_source.emit(graph, config, device)
            self.temporaries = [(t.numel, t.torch_dtype) for t in program.temporaries]
            for n, s in enumerate(stages):
                self.plan(f"kernel{n}::{s.entry}", s.buffers, s.launch, s.count, s)
        else:
            source = self.plan_one_pass(graph, config, device)
        self.calls = 0
        entries = [entry for entry, *_ in self.launches]
        self.library = _library(source, entries, [self.clusters.get(e, 1) for e in entries])

    def plan(self, entry, buffers, launch, count, stage=None):
        """Note a launch: its kernel, grid, block, buffers, and the numbers before the scalars."""
        counts = (launch or stage).counters
        assert counts <= COUNTERS
        turns = [self.counters.data_ptr()] if counts else []
        if launch is None:
            numbers = [*turns, *stage.extents]
            if stage.finishes:
                before, (blocks, _), *_ = self.launches[-1]
                numbers = [blocks // self.clusters[before]]
            grid = stage.blocks, stage.samples
            launched = (entry, grid, stage.block_threads, buffers, numbers)
            self.launches += self.until_each_meeting(launched, stage.meetings)
            return
        blocks = math.ceil(count / launch.per_block) * launch.blocks_per_row
        if launch.persistent:
            blocks = math.ceil(min(blocks, PERSISTENT_BLOCKS) / launch.multiple) * launch.multiple
        grid = blocks * launch.cluster, launch.samples
        numbers = [count, *turns, *launch.extents]
        launched = (entry, grid, launch.block_threads, buffers, numbers)
        self.launches += self.until_each_meeting(launched, int(launch.meets))
        self.clusters[entry] = launch.cluster

    @staticmethod
    def until_each_meeting(launched, meetings):
        return [(*launched, meeting) for meeting in (*range(1, meetings + 1), 0)]

    def plan_one_pass(self, graph, config, device):
        source, launch = target.emit(graph, config, device)
        rows = target.one_pass(graph, device)
        count = math.prod(rows.space[a] for a in (rows.kept if rows.reduced else graph.kept))
        inputs, outputs = len(graph.inputs), len(graph.outputs)
        finish, partials = launch.finish, inputs + outputs
        if launch.outputs is None:
            self.plan(ENTRY, range(partials), launch, count)
            return source
        first = [*range(inputs), *(inputs + k for k in launch.outputs), partials]
        self.plan(ENTRY, first, launch, count)
        clusters = self.launches[0][1][0] // launch.cluster
        partials = clusters * launch.samples * launch.partials
        self.temporaries = [(partials, DTYPES[launch.partial_dtype])]
        if finish is None:
            return source
        second = [inputs + outputs, *finish.inputs, *(inputs + k for k in finish.outputs)]
        grid = finish.blocks, launch.samples
        self.launches.append((FINISH, grid, finish.block_threads, second, [clusters], 0))
        return source

    def __call__(self, *tensors, scalars=None):
        empty = partial(allocator.empty_strided, device=CPU)
        outs = [empty(shape, strides, dtype=dtype) for shape, strides, dtype in self.outputs]
        workspace = [empty((n,), (1,), dtype=dtype) for n, dtype in self.temporaries]
        every = [*tensors, *outs, *workspace]
        first = [t.data_ptr() for t in every]
        end = [t.data_ptr() + _span(t) * t.element_size() for t in every]
        read = [*tensors, *(tensors[i] for i in self.again)]
        given = [t.data_ptr() + offset for t, offset in zip(read, self.offsets, strict=True)]
        given += [*self.addresses(outs), *(t.data_ptr() for t in workspace)]
        self.library.go_backwards(ctypes.c_bool(self.calls % 2 == 1))
        self.calls += 1
        longs = ctypes.c_long * len(every)
        self.library.know_memory(len(every), longs(*first), longs(*end))
        values = self.scalars if scalars is None else self.scalars_of(scalars)
        kinds = {"f32": ctypes.c_float, "f64": ctypes.c_double}
        numbers = [kinds[d](v) for d, v in zip(self.dtypes, values, strict=True)]
        for n, (_, grid, threads, buffers, counts, meeting) in enumerate(self.launches):
            pointers = [ctypes.c_void_p(given[b]) for b in buffers]
            args = [*pointers, *map(ctypes.c_int64, counts), *numbers]
            packed = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
            self.library.come_to(meeting)
            getattr(self.library, f"run{n}")(*grid, threads, packed)
        assert not self.counters.any(), "blocks counted, and the counter was not put back"
        return outs[0] if len(outs) == 1 else tuple(outs)


def emulated(w, device):
    """The kernels of a workload under the schedules that run untuned."""
    graph = graph_of(w)
    built = [Emulated(g, target.heuristic(g, device), device, w) for g in graphs_of(graph)]
    return InStages(built, graph) if isinstance(graph, Staged) else built[0]


def _span(t):
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


@functools.cache
def _start(several):
    """What kernels begin with, those of `several` blocks that wait for one another apart."""
    start = prelude()
    for pattern, new in REPLACED.items():
        start, count = re.subn(pattern, lambda _, new=new: new, start)
        assert count == 1, pattern
    start = re.sub(r"asm volatile\((?:[^()]|\([^()]*\))*\);", "", start)
    memory = f"alignas(16) static PER_BLOCK Quad on_chip[{SHARED_BYTES // 16}];"
    return "\n".join([PER_BLOCK if several else "", HEADER, MEMORY, start, memory])


def _library(source, entries, clusters):
    body = source.removeprefix(prelude()).replace("extern __shared__ Quad on_chip[];", "")
    doors = [
        f'extern "C" const char* run{n}(int grid, int samples, int threads, void** args) {{'
        f" return {'launch_clusters' if blocks > 1 else 'launch'}(body_of({entry}, args),"
        " Launch{{grid, samples, 1}, threads, on_chip, sizeof on_chip}"
        f"{f', {blocks}, []() -> void* {{ return on_chip; }}' if blocks > 1 else ''}); }}"
        for n, (entry, blocks) in enumerate(zip(entries, clusters, strict=True))
    ]
    names, several = [f"run{n}" for n in range(len(entries))], max(clusters) > 1
    own = [FIBERS, OWN, *([CLUSTERS] if several else [])]
    return library("\n".join([body, *doors]), names, _start(several), "\n".join(own))
