// Rows reduced into rows by blocks to which the places are dealt out in turn: one launch and no
// workspace, since every block reads the whole index.
//
// A block has every gridDim.x-th place and a piece of the row. It counts for each warp how often its
// places are named, which tells where each position of one comes among them (stable: ranks by votes of a
// warp), and reduces their rows (owned_rows.cuh). Out of place it fills those of its rows that no index
// names.
//
// ITEMS: indices of a thread. BLOCKS: of an SM, for which there are registers. An entry is the number of a place among the block's, above its position.

#define WARPS (THREADS / 32)
#define CHUNK (THREADS * ITEMS)
#define BATCH (ITEMS < 16 ? ITEMS : 16)  // indices of a thread on their way
#define POSITION_BITS 16
#define RANK_BITS 10
static_assert(32 * ITEMS <= 1 << RANK_BITS && CHUNK <= 1 << POSITION_BITS, "a position has more bits");

struct Memory {
  Sums* heads;   // of each thread
  u32* entries;  // CHUNK
  u32* begins;   // of each place, and their end
  u32* of_warp;  // WARPS
  u16* seen;     // by warp and place
};
TW_DEVICE Memory memory_at(u32* start, u32 owned) {
  Memory m;
  m.heads = (Sums*)start;
  m.entries = (u32*)(m.heads + THREADS);
  m.begins = m.entries + CHUNK;
  m.of_warp = m.begins + owned + 1;
  m.seen = (u16*)(m.of_warp + WARPS);
  return m;
}

// Which position is the j-th of this thread.
TW_DEVICE u32 held(int j) { return threadIdx.x / 32 * 32 * ITEMS + j * 32 + threadIdx.x % 32; }

// What warps have seen becomes what those before them have; where the entries of each place begin.
TW_DEVICE void begin_runs(const Memory& m, u32 owned) {
  const u32 each = (owned + THREADS - 1) / THREADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 first = min(threadIdx.x * each, owned), last = min(first + each, owned);
  u32 sum = 0;
  for (u32 k = first; k < last; ++k) {
    u32 next = 0;
    TW_UNROLL for (int w = 0; w < WARPS; ++w) {
      const u32 here = m.seen[w * owned + k];
      m.seen[w * owned + k] = (u16)next;
      next += here;
    }
    m.begins[k] = sum;
    sum += next;
  }
  u32 upto = sum;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) m.of_warp[warp] = upto;
  __syncthreads();
  u32 before = upto - sum;
  for (u32 w = 0; w < warp; ++w) before += m.of_warp[w];
  for (u32 k = first; k < last; ++k) m.begins[k] += before;
  if (threadIdx.x == THREADS - 1) m.begins[owned] = before + sum;
  __syncthreads();
}

// Sort all positions of the block's places. A place times `magic`, shifted, is its quotient by gridDim.x,
// which numbers it among the block's.
TW_DEVICE void sort_dealt(const Problem& p, const Memory& m, u32 owned, u64 magic, u32 shift) {
  u32 place[ITEMS], ranked[ITEMS];  // the number of a place, above the rank of the position in its warp
  for (u32 i = threadIdx.x; i < WARPS * owned; i += THREADS) m.seen[i] = 0;
  TW_UNROLL for (int first = 0; first < ITEMS; first += BATCH) {
    INDEX index[BATCH];
    TW_UNROLL for (int j = 0; j < BATCH; ++j) if (held(first + j) < p.count) index[j] = p.index[held(first + j)];
    TW_UNROLL for (int j = 0; j < BATCH; ++j)
      place[first + j] = held(first + j) < p.count ? place_of(index[j], p.places, p.skipped, p.fault) : p.places;
  }
  __syncthreads();
  u16* mine = m.seen + threadIdx.x / 32 * owned;
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 number = (u32)(place[j] * magic >> shift);
    const bool ours = place[j] < p.places && place[j] - number * gridDim.x == blockIdx.x;
    ranked[j] = NOWHERE;
    if (!__any_sync(FULL_WARP, ours)) continue;
    const u32 alike = __match_any_sync(FULL_WARP, ours ? number : NOWHERE), before = alike & ((1u << threadIdx.x % 32) - 1);
    const u32 earlier = ours ? mine[number] : 0;
    if (ours) ranked[j] = number << RANK_BITS | (earlier + __popc(before));
    __syncwarp();
    if (ours && before == 0) mine[number] = (u16)(earlier + __popc(alike));
    __syncwarp();
  }
  __syncthreads();
  begin_runs(m, owned);
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    if (ranked[j] == NOWHERE) continue;
    const u32 number = ranked[j] >> RANK_BITS, rank = ranked[j] & ((1u << RANK_BITS) - 1);
    m.entries[m.begins[number] + mine[number] + rank] = number << POSITION_BITS | held(j);
  }
  __syncthreads();
}

// `most` places are a block's at most.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void reduce_rows(const INDEX* index, const T* source, const T* old, T* out, u32 count, u32 places, u32 columns, u32 most, i64 magic, u32 shift, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, i64 skipped, double alpha, int* fault) {
  const Problem p = {index, source + blockIdx.z * source_outer, old + blockIdx.z * old_outer, out + blockIdx.z * out_outer,
                     count, places, columns, source_row, old_row, out_row, skipped, (A)alpha, fault};
  const Memory m = memory_at(shared, most);
  sort_dealt(p, m, most, (u64)magic, shift);
  const u32 *begins = m.begins, *entries = m.entries, piece = blockIdx.y * LANES * VEC;
  const auto place_at = [](u32 k) { return k * gridDim.x + blockIdx.x; };
  if (FILLED) fill(p, most, piece, min(piece + LANES * VEC, columns), [=](u32 k) {
    return begins[k] == begins[k + 1] && place_at(k) < p.places ? place_at(k) : NOWHERE;
  });
  reduce_runs(p, piece + threadIdx.x % LANES * VEC, begins, 0, begins[most], m.heads,
              [=](u32 at) { return Entry{entries[at] >> POSITION_BITS, entries[at] & ((1u << POSITION_BITS) - 1)}; }, place_at, [](const Sums&) {});
}
