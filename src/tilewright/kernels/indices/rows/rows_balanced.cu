// Rows reduced into rows by blocks that have equally many of them, however often a place is named: one
// launch, since every block reads the whole index.
//
// A block counts how often each place is named, which tells where its run of positions begins among all
// of them in order, and takes a range of that order. Ranges are alike, but a run of up to `whole` positions is
// left to the block in which it begins. The block puts the positions of its range in order and reduces
// their rows (owned_rows.cuh). Of a longer run, which is cut where a range ends, each block leaves a partial
// row; the last of its blocks to arrive joins them in the blocks' order. Out of place each block fills those
// of its share of the places that no index names.
//
// ITEMS: indices of a thread. BLOCKS: of an SM, for which there are registers. A key is a place above a
// position.

#define WARPS (THREADS / 32)
#define BATCH (ITEMS < 16 ? ITEMS : 16)  // indices of a thread on their way
#define KEY_BITS 16
#define NO_PLACE ((1u << KEY_BITS) - 1)
static_assert(THREADS * ITEMS <= 1 << KEY_BITS, "a position has more bits");

// Where a range of the order begins, and at which place: inside its run or before it.
struct Bound { u32 rank, place; bool inside; };
struct Range { Bound begin, end; u32 share; };

struct Memory {
  Sums* heads;   // of each thread
  u32* begins;   // of each place's run, and the end of all
  u32* of_warp;  // WARPS of each of two
  u32* ends;     // two
  Range* range;  // the block's
  u32* keys;     // those of a run where it begins, in no order
  u32* listed;   // of the run that begins there, how many keys
  u32* sorted;   // keys
};
TW_DEVICE Memory memory_at(u32* start, u32 places, u32 most) {
  Memory m;
  m.heads = (Sums*)start;
  m.begins = (u32*)(m.heads + THREADS);
  m.of_warp = m.begins + places + 1;
  m.ends = m.of_warp + 2 * WARPS;
  m.range = (Range*)(m.ends + 2);
  m.keys = (u32*)(m.range + 1);
  m.listed = m.keys + most;
  m.sorted = m.listed + most;
  return m;
}

// The places that a thread's positions name, two in a register.
struct Named {
  u32 pairs[(ITEMS + 1) / 2];
  TW_DEVICE u32 at(int j) const { return pairs[j / 2] >> j % 2 * KEY_BITS & NO_PLACE; }
  TW_DEVICE void set(int j, u32 place) { pairs[j / 2] = j % 2 ? pairs[j / 2] | place << KEY_BITS : place; }
};
// Which position is the j-th of this thread.
TW_DEVICE u32 held(int j) { return threadIdx.x / 32 * 32 * ITEMS + j * 32 + threadIdx.x % 32; }

// How often each place is named. All positions of a warp that name what its first one does are counted by
// one addition: those of a hot place would queue up.
TW_DEVICE void count_places(const Problem& p, u32* counts, Named& named) {
  for (u32 k = threadIdx.x; k < p.places; k += THREADS) counts[k] = 0;
  TW_UNROLL for (int first = 0; first < ITEMS; first += BATCH) {
    INDEX index[BATCH];
    TW_UNROLL for (int j = 0; j < BATCH; ++j) if (held(first + j) < p.count) index[j] = p.index[held(first + j)];
    if (first == 0) __syncthreads();
    TW_UNROLL for (int j = 0; j < BATCH; ++j) {
      const u32 place = held(first + j) < p.count ? place_of(index[j], p.places, p.skipped, p.fault) : p.places;
      named.set(first + j, place < p.places ? place : NO_PLACE);
      const u32 hot = __shfl_sync(FULL_WARP, place, 0), alike = __ballot_sync(FULL_WARP, place == hot);
      const u32 more = place != hot ? 1 : threadIdx.x % 32 == 0 ? __popc(alike) : 0;
      if (place < p.places && more > 0) atomicAdd(&counts[place], more);
    }
  }
  __syncthreads();
}

// From where a range would be cut to where it is.
TW_DEVICE Bound bound_of(const u32* begins, u32 places, u32 place, u32 rank, u32 whole) {
  if (place == places) return {begins[places], places, false};
  const u32 begin = begins[place], end = begins[place + 1];
  if (rank == begin) return {rank, place, false};
  if (end - begin > whole) return {rank, place, true};
  return {end, place + 1, false};
}

// Counts become where runs begin, and the block learns its range.
TW_DEVICE void begin_runs(const Memory& m, u32 places, u32 whole) {
  const u32 each = (places + THREADS - 1) / THREADS | 1;  // odd, so that threads are at different banks
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 first = min(threadIdx.x * each, places), last = min(first + each, places);
  u32 sum = 0;
  for (u32 k = first; k < last; ++k) sum += m.begins[k];
  u32 upto = sum;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) m.of_warp[warp] = upto;
  if (threadIdx.x < 2) m.ends[threadIdx.x] = places;
  __syncthreads();
  u32 begin = upto - sum, total = 0;
  TW_UNROLL for (u32 w = 0; w < WARPS; ++w) {
    if (w < warp) begin += m.of_warp[w];
    total += m.of_warp[w];
  }
  const u32 share = (total + gridDim.x - 1) / gridDim.x, from = blockIdx.x * share, to = from + share;
  for (u32 k = first; k < last; ++k) {
    const u32 here = m.begins[k];
    m.begins[k] = begin;
    if (from - begin < here) m.ends[0] = k;
    if (to - begin < here) m.ends[1] = k;
    begin += here;
  }
  if (threadIdx.x == 0) m.begins[places] = total;
  __syncthreads();
  if (threadIdx.x == 0)
    *m.range = {bound_of(m.begins, places, m.ends[0], from, whole), bound_of(m.begins, places, m.ends[1], to, whole), share};
  __syncthreads();
}

// The keys of a range in order. Those of a run that is cut are told apart by how many of its positions
// come before; others are listed, and each is placed by how many of its run are less.
TW_DEVICE void sort_range(const Memory& m, const Named& named) {
  const Range range = *m.range;
  const u32 first = range.begin.rank, last = range.end.rank, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 cut[2] = {range.begin.inside ? range.begin.place : NOWHERE, range.end.inside ? range.end.place : NOWHERE};
  const u32 named_here = range.end.place + range.end.inside - range.begin.place;
  const bool any_cut = range.begin.inside || range.end.inside;
  u32 before[2] = {0, 0};
  if (any_cut) {
    TW_UNROLL for (int j = 0; j < ITEMS; ++j)
      TW_UNROLL for (int e = 0; e < 2; ++e) before[e] += __popc(__ballot_sync(FULL_WARP, named.at(j) == cut[e]));
    if (lane == 0) TW_UNROLL for (int e = 0; e < 2; ++e) m.of_warp[e * WARPS + warp] = before[e];
    __syncthreads();
    TW_UNROLL for (int e = 0; e < 2; ++e) {
      before[e] = 0;
      for (u32 w = 0; w < warp; ++w) before[e] += m.of_warp[e * WARPS + w];
    }
  }
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 place = named.at(j), key = place << KEY_BITS | held(j);
    if (any_cut) {
      u32 rank = NOWHERE;
      TW_UNROLL for (int e = 0; e < 2; ++e) {
        const u32 alike = __ballot_sync(FULL_WARP, place == cut[e]);
        if (place == cut[e]) rank = m.begins[place] + before[e] + __popc(alike & ((1u << lane) - 1));
        before[e] += __popc(alike);
      }
      if (rank - first < last - first) m.sorted[rank - first] = key;
      if (rank != NOWHERE) continue;
    }
    if (place - range.begin.place >= named_here) continue;
    const u32 run = m.begins[place] - first;
    m.keys[run + atomicAdd(&m.listed[run], 1u)] = key;
  }
  __syncthreads();
  const u32 begin = range.begin.inside ? min(m.begins[range.begin.place + 1], last) : first;
  const u32 end = range.end.inside ? m.begins[range.end.place] : last;
  for (u32 at = begin + threadIdx.x; at < end; at += THREADS) {
    const u32 key = m.keys[at - first], from = m.begins[key >> KEY_BITS], to = m.begins[(key >> KEY_BITS) + 1];
    u32 rank = from - first;
    for (u32 other = from; other < to; ++other) rank += m.keys[other - first] < key;
    m.sorted[rank] = key;
  }
  __syncthreads();
}

// Partial rows of the blocks of a slice, and how many have come of those that share a run, counted where
// it begins: zero again behind the last.
struct Partials {
  Sums* rows;
  u32* counters;
  // Of the run that a block has from inside, or of the one that goes on behind it.
  TW_DEVICE Sums& row(u32 block, bool goes_on) const { return rows[(block * 2 + goes_on) * LANES + threadIdx.x % LANES]; }
};

// The partial rows of the runs that are cut at the ends of a range; what is the block's own is there.
TW_DEVICE void join(const Problem& p, const Memory& m, u32 column, const Partials& partials) {
  const Range range = *m.range;
  const bool one_run = range.begin.inside && range.end.inside && range.begin.place == range.end.place;
  const bool inside[2] = {range.begin.inside, range.end.inside && !one_run};
  const u32 place[2] = {range.begin.place, range.end.place};
  const u32 group = threadIdx.x / LANES;
  u32 from[2], upto[2];  // blocks that share the run
  TW_UNROLL for (int e = 0; e < 2; ++e) {
    if (!inside[e]) continue;
    from[e] = m.begins[place[e]] / range.share;
    upto[e] = (m.begins[place[e] + 1] - 1) / range.share;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    TW_UNROLL for (int e = 0; e < 2; ++e) {
      if (!inside[e]) continue;
      m.ends[e] = atomicAdd(&partials.counters[from[e]], 1u) == upto[e] - from[e];
      if (m.ends[e]) partials.counters[from[e]] = 0;
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
  __syncthreads();
  TW_UNROLL for (int e = 0; e < 2; ++e) {
    if (!inside[e] || !m.ends[e]) continue;
    Sums sums = nothing<A, VEC>();
    if (column < p.columns) {
#pragma unroll 4
      for (u32 block = from[e] + group; block <= upto[e]; block += GROUPS) sums = reduce(sums, partials.row(block, block == from[e]));
    }
    m.heads[threadIdx.x] = sums;
    __syncthreads();
    if (group == 0 && column < p.columns) {
      sums = with_heads(sums, m.heads, min(upto[e] - from[e], GROUPS - 1));
      p.write(place[e], column, result_of(sums, A(m.begins[place[e] + 1] - m.begins[place[e]] + INCLUDE)));
    }
    __syncthreads();
  }
}

// `most` positions are a range's at most.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void reduce_rows(const INDEX* index, const T* source, const T* old, T* out, Sums* partial_rows, u32* counters, u32 count, u32 places, u32 columns, u32 whole, u32 most, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, i64 skipped, double alpha, int* fault) {
  const Problem p = {index, source + blockIdx.z * source_outer, old + blockIdx.z * old_outer, out + blockIdx.z * out_outer,
                     count, places, columns, source_row, old_row, out_row, skipped, (A)alpha, fault};
  const Memory m = memory_at(shared, places, most);
  const u32 piece = blockIdx.y * LANES * VEC, column = piece + threadIdx.x % LANES * VEC;
  const u32 blocks_before = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x;
  const Partials partials = {partial_rows + (u64)blocks_before * 2 * LANES, counters + blocks_before};
  Named named;
  for (u32 i = threadIdx.x; i < most; i += THREADS) m.listed[i] = 0;
  count_places(p, m.begins, named);
  begin_runs(m, places, whole);
  sort_range(m, named);
  const u32 *begins = m.begins, *sorted = m.sorted, first = m.range->begin.rank, last = m.range->end.rank;
  const u32 filled = (places + gridDim.x - 1) / gridDim.x, fill_from = blockIdx.x * filled;
  if (FILLED) fill(p, filled, piece, min(piece + LANES * VEC, columns), [=](u32 k) {
    return fill_from + k < places && begins[fill_from + k] == begins[fill_from + k + 1] ? fill_from + k : NOWHERE;
  });
  reduce_runs(p, column, begins, first, last, m.heads,
              [=](u32 at) { return Entry{sorted[at - first] >> KEY_BITS, sorted[at - first] & NO_PLACE}; },
              [](u32 place) { return place; }, [=](const Sums& sums) { partials.row(blockIdx.x, true) = sums; });
  const bool cut_at_begin = m.range->begin.inside;
  if (!cut_at_begin && !m.range->end.inside) return;
  if (cut_at_begin && threadIdx.x < LANES && column < columns)
    partials.row(blockIdx.x, false) = with_heads(m.heads[threadIdx.x], m.heads, (min(begins[m.range->begin.place + 1], last) - 1 - first) / range_of(last - first));
  join(p, m, column, partials);
}
