// Elementwise scatter in one launch whose blocks meet once: each block has some of the positions and
// some of the places, and sends what it reads to the blocks whose places are named.
//
// 1. split: a chunk of CHUNK positions is put in the order of the blocks that its elements go to, in
//    shared memory, and written as entries in one piece, with the length of the run for each block.
// 2. settle, behind a barrier of the grid: a block gathers the runs sent to it from all chunks. The
//    last position of each slot wins by a maximum in shared memory, whatever the order they come in,
//    and slots are written in the order of memory.
//
// Places are dealt out to blocks in segments of SEGMENT neighbours, in turn: indices that rise, or
// crowd in one region, so spread over all blocks as random ones do. What is left are places that
// repeat: where a sample of its positions has such, a block sends the last position of a place alone.
//
// Elements and cells are numbered in the order of their boxes (boxes.cuh), in which positions of one cell
// rise.
// CARRIED: entries hold the elements' values, else winners fetch them.

#define POSITIONS ((u32)((u64)OUTER * LENGTH * INNER))
#define CELLS ((u32)((u64)OUTER * PLACES * INNER))
#define SLOTS ((CELLS + SEGMENT * GRID - 1) / (SEGMENT * GRID) * SEGMENT)
#define CHUNK ((POSITIONS + 32 * CHUNKS - 1) / (32 * CHUNKS) * 32)
#define ITEMS ((int)((CHUNK + THREADS - 1) / THREADS))
#define WARPS (THREADS / 32)
#define RUNS ((CHUNKS + WARPS - 1) / WARPS)  // of a warp
#define BATCH 10
#define NOWHERE 0xffffffffu
#define SAMPLE_REPEATS 2  // lanes of a block, of as many as there are, from which on it thins out

extern __shared__ __align__(16) u32 shared[];

// Value, slot and position in the chunk, from the upper bits down.
template <bool VALUE> struct Entries { typedef u64 Entry; };
template <> struct Entries<false> { typedef u32 Entry; };
typedef Entries<CARRIED>::Entry Entry;

// Shared memory of a block. What settling needs is apart from what splitting needs, so that it can be
// made ready while others are awaited.
struct Memory {
  Entry* staged;       // CHUNK, in the order of blocks
  u32* value;          // of each slot: the old one, then the winner's
  u32* order;          // of each slot: the winner's number plus one, or zero
  u32* next;           // for each block, and one more
  u32 *cell, *latest;  // a table of SENT entries
  u32* of_warp;        // 32 words
};
TW_DEVICE Memory memory_at(u32* start) {
  Memory m;
  m.staged = (Entry*)start;
  m.value = start + CHUNK * (sizeof(Entry) / 4);
  m.order = m.value + (CARRIED ? SLOTS : 0);
  m.next = m.order + SLOTS;
  m.cell = m.next + GRID + 1;
  m.latest = m.cell + SENT;
  m.of_warp = m.latest + SENT;
  return m;
}

// Cell `slot` of a block, which may lie beyond the last one.
TW_DEVICE u32 cell_of(u32 slot) { return (slot / SEGMENT * GRID + blockIdx.x) * SEGMENT + slot % SEGMENT; }
// Where x has a cell, and src the element that has this number.
TW_DEVICE u64 place_address(u32 cell) {
  return X_DENSE ? cell : in_x(cell / ((u32)PLACES * INNER), cell / INNER % PLACES, cell % INNER);
}
TW_DEVICE u64 source_address(u32 number) {
  return SOURCE_DENSE ? number : in_source(number / ((u32)LENGTH * INNER), number / INNER % LENGTH, number % INNER);
}
TW_DEVICE u32 block_of(u32 cell) { return cell / SEGMENT % GRID; }
TW_DEVICE u32 slot_of(u32 cell) { return cell / (SEGMENT * GRID) * SEGMENT + cell % SEGMENT; }

// ---- split --------------------------------------------------------------------------------------

// The elements that a thread has of a chunk.
struct Held { u32 cell[ITEMS], value[CARRIED ? ITEMS : 1]; };

TW_DEVICE void read(u32 chunk, const INDEX* index, const T* source, int* fault, Held& held) {
  INDEX i[ITEMS];
  u32 number[ITEMS];
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 position = q * THREADS + threadIdx.x;
    number[q] = position < CHUNK && chunk * CHUNK + position < POSITIONS ? chunk * CHUNK + position : NOWHERE;
    if (number[q] == NOWHERE) continue;
    i[q] = __ldcs(&index[number[q]]);
    if constexpr (CARRIED) held.value[q] = bits_of(source[source_address(number[q])]);
  }
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    held.cell[q] = NOWHERE;
    if (number[q] == NOWHERE) continue;
    const u32 place = place_of(i[q], PLACES, NONE_SKIPPED, fault), e = number[q];
    if (place < PLACES) held.cell[q] = (e / (INNER * LENGTH) * PLACES + place) * INNER + e % INNER;
  }
}

// Whether cells repeat in the chunk, by a sample of one element a thread, for all threads alike. Lanes
// take turns with their items: neighbours in a sorted index repeat, too, and do no harm.
TW_DEVICE bool repeats(const Held& held) {
  u32 cell = held.cell[0];
  TW_UNROLL for (int q = 1; q < ITEMS; ++q) if (threadIdx.x % ITEMS == q) cell = held.cell[q];
  const u32 alike = __match_any_sync(FULL_WARP, cell);
  return __syncthreads_count(cell != NOWHERE && alike >> threadIdx.x % 32 > 1) >= SAMPLE_REPEATS;
}

// Of the chunk's positions that name one cell, keep the last. Cells are claimed in a table, each entry
// by the first that comes; a position whose entry is another cell's is kept anyway.
TW_DEVICE void thin_out(const Memory& m, Held& held) {
  u32 entry[ITEMS];
  for (u32 s = threadIdx.x; s < SENT; s += THREADS) { m.cell[s] = NOWHERE; m.latest[s] = 0; }
  __syncthreads();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    const u32 cell = held.cell[q];
    if (__match_any_sync(FULL_WARP, cell) >> threadIdx.x % 32 > 1) held.cell[q] = NOWHERE;
    entry[q] = (u32)((u64)(cell * 2654435761u) * SENT >> 32);
    if (held.cell[q] == NOWHERE) continue;
    const u32 was = atomicCAS(&m.cell[entry[q]], NOWHERE, cell);
    if (was == NOWHERE || was == cell) atomicMax(&m.latest[entry[q]], q * THREADS + threadIdx.x);
  }
  __syncthreads();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (held.cell[q] == NOWHERE || m.cell[entry[q]] != held.cell[q]) continue;
    if (m.latest[entry[q]] != q * THREADS + threadIdx.x) held.cell[q] = NOWHERE;
  }
}

// The next place of a run, for each lane one. Lanes that go where the first or the last of their warp
// goes take theirs at once, as most do in sorted indices, where additions would queue up.
TW_DEVICE u32 reserve(u32* next, u32 to) {
  const u32 lane = threadIdx.x % 32, first = __shfl_sync(FULL_WARP, to, 0), last = __shfl_sync(FULL_WARP, to, 31);
  const u32 as_first = __ballot_sync(FULL_WARP, to == first), as_last = __ballot_sync(FULL_WARP, to == last);
  if ((as_first | as_last) != FULL_WARP) return to < GRID ? atomicAdd(&next[to], 1u) : 0;
  const u32 alike = to == first ? as_first : as_last, before = alike & ((1u << lane) - 1);
  u32 begin = 0;
  if (before == 0 && to < GRID) begin = atomicAdd(&next[to], (u32)__popc(alike));
  return __shfl_sync(FULL_WARP, begin, to == first ? 0 : __ffs(as_last) - 1) + __popc(before);
}

// Turn the lengths of the runs into where they begin; the length of all comes last.
TW_DEVICE void begin_runs(const Memory& m, u32 chunk, u32* runs) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, length = threadIdx.x < GRID ? m.next[threadIdx.x] : 0;
  u32 upto = length;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) m.of_warp[warp] = upto;
  __syncthreads();
  for (u32 w = 0; w < min(warp, (u32)(GRID + 31) / 32); ++w) upto += m.of_warp[w];
  if (threadIdx.x < GRID) {
    m.next[threadIdx.x] = upto - length;
    runs[threadIdx.x * CHUNKS + chunk] = upto - length | length << 16;
  }
  if (threadIdx.x == GRID - 1) m.next[GRID] = upto;
  __syncthreads();
}

TW_DEVICE void split(const Memory& m, u32 chunk, const INDEX* index, const T* source, Entry* entries, u32* runs, int* fault) {
  Held held;
  u32 rank[ITEMS];
  read(chunk, index, source, fault, held);
  if (threadIdx.x < GRID) m.next[threadIdx.x] = 0;
  if (SENT > 0 && repeats(held)) thin_out(m, held);
  __syncthreads();
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) rank[q] = reserve(m.next, held.cell[q] == NOWHERE ? NOWHERE : block_of(held.cell[q]));
  __syncthreads();
  begin_runs(m, chunk, runs);
  TW_UNROLL for (int q = 0; q < ITEMS; ++q) {
    if (held.cell[q] == NOWHERE) continue;
    const u32 low = slot_of(held.cell[q]) << 16 | (q * THREADS + threadIdx.x);
    Entry entry = low;
    if constexpr (CARRIED) entry = (u64)held.value[q] << 32 | low;
    m.staged[m.next[block_of(held.cell[q])] + rank[q]] = entry;
  }
  __syncthreads();
  const u32 filled = m.next[GRID];
  for (u32 i = threadIdx.x; i < filled; i += THREADS) entries[(u64)chunk * CHUNK + i] = m.staged[i];
  __syncthreads();
}

// ---- settle -------------------------------------------------------------------------------------

// The runs that a warp gathers as one list: each lane knows where in the list one of them begins, and
// where it does among all entries, less that.
struct List { u32 begin, shifted, total; };

TW_DEVICE List list_runs(const u32* runs) {
  const u32 lane = threadIdx.x % 32, chunk = lane * WARPS + threadIdx.x / 32;
  const u32 run = lane < RUNS && chunk < CHUNKS ? __ldcg(&runs[blockIdx.x * CHUNKS + chunk]) : 0;
  u32 upto = run >> 16;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  List list;
  list.total = __shfl_sync(FULL_WARP, upto, 31);
  list.begin = upto - (run >> 16);
  list.shifted = chunk * CHUNK + (run & 0xffff) - list.begin;
  return list;
}

// Let the entries of all warps' lists compete for the block's slots. In each round of BATCH entries a
// thread the latest position of a slot wins, and then leaves its value.
TW_DEVICE void compete(const Memory& m, const List& list, const Entry* entries) {
  const u32 lane = threadIdx.x % 32;
  for (u32 first = 0, more = 1; more; first += 32 * BATCH) {
    Entry e[BATCH];
    u32 order[BATCH], from[BATCH];
    TW_UNROLL for (u32 r = 0; r < RUNS; ++r) {
      const u32 begin = __shfl_sync(FULL_WARP, list.begin, r), shifted = __shfl_sync(FULL_WARP, list.shifted, r);
      TW_UNROLL for (int q = 0; q < BATCH; ++q) {
        const u32 at = first + q * 32 + lane;
        if (r == 0 || at >= begin) from[q] = shifted + at;
      }
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      order[q] = 0;
      if (first + q * 32 + lane >= list.total) continue;
      e[q] = __ldcg(&entries[from[q]]);
      order[q] = from[q] / CHUNK * CHUNK + 1;
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!order[q]) continue;
      order[q] += (u32)e[q] & 0xffff;
      atomicMax(&m.order[(u32)e[q] >> 16], order[q]);
    }
    more = __syncthreads_or(first + 32 * BATCH < list.total);
    if constexpr (CARRIED) {
      TW_UNROLL for (int q = 0; q < BATCH; ++q) {
        const u32 slot = (u32)e[q] >> 16;
        if (order[q] && m.order[slot] == order[q]) m.value[slot] = (u32)(e[q] >> 32);
      }
    }
    __syncthreads();
  }
}

// Bring near what will stay where nothing is written, a sector for each thread at a time.
TW_DEVICE void fetch_old(const T* old) {
  constexpr u32 SECTOR = 32 / sizeof(T);
  if (IN_PLACE) return;
  for (u32 s = threadIdx.x * SECTOR; s < SLOTS; s += THREADS * SECTOR)
    if (cell_of(s) < CELLS) asm volatile("prefetch.global.L2 [%0];" ::"l"(&old[place_address(cell_of(s))]));
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void exchange(const T* old, const INDEX* index, const T* source, T* out, Entry* entries, u32* runs, u32* counter, double number, int* fault) {
  const Memory m = memory_at(shared);
  fetch_old(old);
  for (u32 chunk = blockIdx.x; chunk < CHUNKS; chunk += GRID) split(m, chunk, index, source, entries, runs, fault);
  arrive_all(counter);
  for (u32 s = threadIdx.x; s < SLOTS; s += THREADS) {
    m.order[s] = 0;
    if (CARRIED && !IN_PLACE && cell_of(s) < CELLS) m.value[s] = bits_of(old[place_address(cell_of(s))]);
  }
  await_all(counter);
  compete(m, list_runs(runs), entries);
  for (u32 s = threadIdx.x; s < SLOTS; s += THREADS) {
    const u32 cell = cell_of(s);
    if (cell >= CELLS || IN_PLACE && !m.order[s]) continue;
    if constexpr (CARRIED) out[place_address(cell)] = of_bits<T>(m.value[s]);
    else out[place_address(cell)] = !m.order[s] ? old[place_address(cell)] : NUMBER ? Narrow<T>::of((A)number) : source[source_address(m.order[s] - 1)];
  }
}
