// Rows of `source` reduced into rows of `out`, in an order that depends on the indices alone.
//
// 1. A stable counting sort of (place, position) by place, in passes of DIGIT_BITS bits: counts per
//    block of input (histogram), a scan over blocks (scan), and placement by ranks from warp-wide
//    matches (place). Atomics touch integers in shared memory only.
// 2. accumulate: the sorted positions are cut into units of ROWS, each walked by LANES threads that
//    hold a piece of the row. A run of one place that lies inside a unit is finished there; what
//    reaches over a border is a partial result of the unit, one for either border.
// 3. combine: the unit in which such a run begins adds up the partials of the units that go on with
//    it; a run over many units is shared out among a block and joined as a tree.
// 4. fill (out of place only): rows that no index names.
//
// Configuration: ROWS, LANES, UNROLLED, VEC, DIGIT_BITS, ITEMS; MEAN divides by the number of terms; INCLUDE
// makes the old row a term; FILL_ZERO gives zeros to rows without an index, else the old row.

#define THREADS 256
#define WARPS (THREADS / 32)
#define BINS (1 << DIGIT_BITS)
#define CHUNK (THREADS * ITEMS)
#define GROUPS (THREADS / LANES)
#define COMBINE_GROUPS (COMBINE_THREADS / LANES)
#define SHORT_RUN 8
#define NOWHERE 0xffffffffu

typedef Pack<T, VEC> Stored;
typedef Pack<A, VEC> Sums;
extern __shared__ __align__(16) u32 shared[];

// ---- sort ---------------------------------------------------------------------------------------

struct Entry { u32 place, position; };

// Entry i of the input of a pass: of the index itself, or of the pass before.
template <bool FIRST> TW_DEVICE Entry entry(const void* in, u32 i, u32 count, u32 places, i64 skipped, int* fault) {
  if constexpr (FIRST) return {place_of(((const INDEX*)in)[i], places, skipped, fault), i};
  else return {((const u32*)in)[i], ((const u32*)in + count)[i]};
}

template <bool FIRST> TW_DEVICE void count_digits(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts, u8* touched) {
  for (int d = threadIdx.x; d < BINS; d += THREADS) shared[d] = 0;
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    u32 i = blockIdx.x * CHUNK + j * THREADS + threadIdx.x;
    u32 digit = BINS;
    if (i < count) {
      u32 place = entry<FIRST>(in, i, count, places, skipped, fault).place;
      if (FIRST && touched && place < places) touched[place] = 1;
      digit = (place >> shift) & (BINS - 1);
    }
    u32 alike = __match_any_sync(FULL_WARP, digit);
    if (digit < BINS && (alike & ((1u << (threadIdx.x % 32)) - 1)) == 0) atomicAdd(&shared[digit], __popc(alike));
  }
  __syncthreads();
  for (int d = threadIdx.x; d < BINS; d += THREADS) counts[(u64)blockIdx.x * BINS + d] = shared[d];
}

extern "C" __global__ __launch_bounds__(THREADS) void histogram_first(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts, u8* touched) {
  count_digits<true>(in, count, places, skipped, fault, shift, counts, touched);
}
extern "C" __global__ __launch_bounds__(THREADS) void histogram_next(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts, u8* touched) {
  count_digits<false>(in, count, places, skipped, fault, shift, counts, touched);
}

// For each digit, turn the counts of the blocks into how many came in blocks before; 32 digits to
// a block of 32 x 32 threads.
extern "C" __global__ __launch_bounds__(1024) void scan(u32* counts, u32* totals, int blocks) {
  u32 (*sums)[33] = (u32 (*)[33])shared;
  int x = threadIdx.x % 32, y = threadIdx.x / 32, digit = blockIdx.x * 32 + x;
  int each = (blocks + 31) / 32, first = min(y * each, blocks), last = min(first + each, blocks);
  u32 sum = 0;
  if (digit < BINS) {
#pragma unroll 8
    for (int b = first; b < last; ++b) sum += counts[(u64)b * BINS + digit];
  }
  sums[y][x] = sum;
  __syncthreads();
  u32 before = 0;
  for (int k = 0; k < y; ++k) before += sums[k][x];
  if (digit >= BINS) return;
  if (y == 31) totals[digit] = before + sum;
#pragma unroll 8
  for (int b = first; b < last; ++b) {
    u32* at = &counts[(u64)b * BINS + digit];
    u32 here = *at;
    *at = before;
    before += here;
  }
}

// Exclusive prefix sum of `totals` over all digits, into shared memory.
TW_DEVICE void scan_totals(const u32* totals, u32* starts, u32* of_warp) {
  constexpr int EACH = (BINS + THREADS - 1) / THREADS;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 value[EACH], sum = 0;
  TW_UNROLL for (int j = 0; j < EACH; ++j) {
    int d = threadIdx.x * EACH + j;
    value[j] = d < BINS ? totals[d] : 0;
    sum += value[j];
  }
  u32 upto = sum;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  u32 before = upto - sum;
  for (int w = 0; w < warp; ++w) before += of_warp[w];
  TW_UNROLL for (int j = 0; j < EACH; ++j) {
    int d = threadIdx.x * EACH + j;
    if (d < BINS) starts[d] = before;
    before += value[j];
  }
  __syncthreads();
}

template <bool FIRST> TW_DEVICE void place_entries(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, u32* out) {
  u32 *seen = shared, *starts = shared + WARPS * BINS, *of_warp = starts + BINS;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int k = threadIdx.x; k < WARPS * BINS; k += THREADS) seen[k] = 0;
  scan_totals(totals, starts, of_warp);
  u32* mine = seen + warp * BINS;
  Entry entries[ITEMS];
  u32 rank[ITEMS];
  u32 base = blockIdx.x * CHUNK + warp * 32 * ITEMS + lane;
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    u32 i = base + j * 32;
    entries[j] = i < count ? entry<FIRST>(in, i, count, places, skipped, fault) : Entry{NOWHERE, 0};
  }
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    bool valid = base + j * 32 < count;
    u32 digit = valid ? (entries[j].place >> shift) & (BINS - 1) : BINS;
    u32 alike = __match_any_sync(FULL_WARP, digit), before = alike & ((1u << lane) - 1);
    u32 earlier = valid ? mine[digit] : 0;
    rank[j] = earlier + __popc(before);
    __syncwarp();
    if (valid && before == 0) mine[digit] = earlier + __popc(alike);
    __syncwarp();
  }
  __syncthreads();
  for (int d = threadIdx.x; d < BINS; d += THREADS) {
    u32 next = starts[d] + counts[(u64)blockIdx.x * BINS + d];
    TW_UNROLL for (int w = 0; w < WARPS; ++w) {
      u32 here = seen[w * BINS + d];
      seen[w * BINS + d] = next;
      next += here;
    }
  }
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    if (base + j * 32 >= count) continue;
    u32 to = mine[(entries[j].place >> shift) & (BINS - 1)] + rank[j];
    out[to] = entries[j].place;
    out[(u64)count + to] = entries[j].position;
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void place_first(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, u32* out) {
  place_entries<true>(in, count, places, skipped, fault, shift, counts, totals, out);
}
extern "C" __global__ __launch_bounds__(THREADS, 2) void place_next(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, u32* out) {
  place_entries<false>(in, count, places, skipped, fault, shift, counts, totals, out);
}

extern "C" __global__ __launch_bounds__(THREADS) void clear(u32* words, u32 count) {
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) words[i] = 0;
}

// ---- reduce -------------------------------------------------------------------------------------

// Rows of a tensor (outer, rows, columns) with unit stride along columns.
struct Rows { i64 outer, row; };

// The arguments of the kernels below, and how they become a Problem.
#define ARGUMENTS                                                                                 \
  const T *source, const T *old, T *out, const u32 *sorted, A *partials, u32 count, u32 places,   \
      u32 columns, u32 units, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row,       \
      i64 out_outer, i64 out_row, double alpha
#define PROBLEM                                                                                   \
  {source, old, out, sorted, partials, count, places, columns, units, {source_outer, source_row}, \
   {old_outer, old_row}, {out_outer, out_row}, alpha}

struct Problem {
  const T* source;
  const T* old;
  T* out;
  const u32* sorted;  // places, then positions
  A* partials;        // (outer, unit, border, columns)
  u32 count, places, columns, units;
  Rows in_source, in_old, in_out;
  double alpha;
};

TW_DEVICE u32 first_not_below(const u32* sorted, u32 count, u64 place) {
  u32 low = 0, high = count;
  while (low < high) {
    u32 middle = low + (high - low) / 2;
    if (sorted[middle] < place) low = middle + 1; else high = middle;
  }
  return low;
}

TW_DEVICE void finish(const Problem& p, u32 place, u32 column, Sums sums) {
  i64 z = blockIdx.z;
  Stored old, result;
  if (INCLUDE) old = load<VEC>(p.old + z * p.in_old.outer + place * p.in_old.row + column);
  A terms = 1;
  if (MEAN) terms = A(first_not_below(p.sorted, p.count, (u64)place + 1) - first_not_below(p.sorted, p.count, place) + INCLUDE);
  TW_UNROLL for (int i = 0; i < VEC; ++i) {
    A value = SCALED ? sums.v[i] * (A)p.alpha : sums.v[i];
    if (INCLUDE) value = reduce(widen(old.v[i]), value);
    if (MEAN) value = divided(value, terms);
    result.v[i] = Narrow<T>::of(value);
  }
  store(p.out + z * p.in_out.outer + place * p.in_out.row + column, result);
}

TW_DEVICE A* partial(const Problem& p, u32 unit, int border, u32 column) {
  return p.partials + (((u64)blockIdx.z * p.units + unit) * 2 + border) * p.columns + column;
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void accumulate(ARGUMENTS) {
  const Problem p = PROBLEM;
  const int lane = threadIdx.x % LANES;
  const u32 unit = blockIdx.x * GROUPS + threadIdx.x / LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u32 begin = min((u64)unit * ROWS, (u64)p.count), end = min((u64)begin + ROWS, (u64)p.count);
  const u32* positions = p.sorted + p.count;
  const T* rows = p.source + blockIdx.z * p.in_source.outer + column;
  u32 current = NOWHERE, before = NOWHERE, after = NOWHERE;
  if (begin < end) {
    if (begin > 0) before = p.sorted[begin - 1];
    if (end < p.count) after = p.sorted[end];
  }
  Sums sums = nothing<A, VEC>();
  for (u32 at = begin; __any_sync(FULL_WARP, at < end); at += LANES) {
    const bool mine = at + lane < end && at < end;
    const u32 my_place = mine ? p.sorted[at + lane] : NOWHERE;
    const u32 my_position = mine ? positions[at + lane] : 0;
    TW_UNROLL for (int u = 0; u < LANES; u += UNROLLED) {
      u32 place[UNROLLED];
      Stored row[UNROLLED];
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        place[q] = __shfl_sync(FULL_WARP, my_place, u + q, LANES);
        const u32 position = __shfl_sync(FULL_WARP, my_position, u + q, LANES);
        if (inside && place[q] < p.places) row[q] = load<VEC>(rows + position * p.in_source.row);
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        if (place[q] == NOWHERE) continue;
        if (place[q] != current) {
          if (inside && current < p.places) {
            if (current == before) store(partial(p, unit, 0, column), sums);
            else finish(p, current, column, sums);
          }
          current = place[q];
          sums = nothing<A, VEC>();
        }
        if (inside && place[q] < p.places) {
          TW_UNROLL for (int i = 0; i < VEC; ++i) sums.v[i] = reduce(sums.v[i], (A)widen(row[q].v[i]));
        }
      }
    }
  }
  if (!inside || current >= p.places) return;
  if (current == before) store(partial(p, unit, 0, column), sums);
  else if (current == after) store(partial(p, unit, 1, column), sums);
  else finish(p, current, column, sums);
}

extern "C" __global__ __launch_bounds__(COMBINE_THREADS, 1) void combine(ARGUMENTS) {
  const Problem p = PROBLEM;
  Sums* joined = (Sums*)shared;
  u32* longer = (u32*)(joined + COMBINE_THREADS);
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u32 unit = blockIdx.x * COMBINE_GROUPS + group;
  const u64 begin = (u64)unit * ROWS, end = begin + ROWS;
  u32 place = NOWHERE;
  if (end < p.count) {
    place = p.sorted[end - 1];
    const bool goes_on = place < p.places && p.sorted[end] == place;
    const bool began_before = begin > 0 && p.sorted[begin - 1] == place;
    if (!goes_on || began_before) place = NOWHERE;
  }
  bool is_long = false;
  if (place != NOWHERE) {
    Sums sums = nothing<A, VEC>();
    if (inside) sums = load<VEC>(partial(p, unit, 1, column));
    u32 next = unit + 1;
    for (; next < p.units && next <= unit + SHORT_RUN && p.sorted[(u64)next * ROWS] == place; ++next)
      if (inside) sums = reduce(sums, load<VEC>(partial(p, next, 0, column)));
    is_long = next < p.units && p.sorted[(u64)next * ROWS] == place;
    if (inside && !is_long) finish(p, place, column, sums);
  }
  if (lane == 0) longer[group] = is_long ? place : NOWHERE;
  __syncthreads();
  for (int g = 0; g < COMBINE_GROUPS; ++g) {
    const u32 shared_place = longer[g];
    if (shared_place == NOWHERE) continue;
    const u32 first = blockIdx.x * COMBINE_GROUPS + g;
    Sums sums = nothing<A, VEC>();
    for (u32 next = first + 1 + group; next < p.units; next += 4 * COMBINE_GROUPS) {
      bool part[4];
      Sums more[4];
      TW_UNROLL for (int q = 0; q < 4; ++q) {
        const u32 at = next + q * COMBINE_GROUPS;
        part[q] = at < p.units && p.sorted[(u64)at * ROWS] == shared_place;
        if (part[q] && inside) more[q] = load<VEC>(partial(p, at, 0, column));
      }
      TW_UNROLL for (int q = 0; q < 4; ++q) if (part[q] && inside) sums = reduce(sums, more[q]);
      if (!part[3]) break;
    }
    joined[threadIdx.x] = sums;
    __syncthreads();
    for (int half = COMBINE_GROUPS / 2; half > 0; half /= 2) {
      if (group < half) joined[threadIdx.x] = reduce(joined[threadIdx.x], joined[threadIdx.x + half * LANES]);
      __syncthreads();
    }
    if (group == 0 && inside) finish(p, shared_place, column, reduce(load<VEC>(partial(p, first, 1, column)), joined[lane]));
    __syncthreads();
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void fill(ARGUMENTS, const u8* touched) {
  const Problem p = PROBLEM;
  const int lane = threadIdx.x % LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  if (column >= p.columns) return;
  for (u64 place = (u64)blockIdx.x * GROUPS + threadIdx.x / LANES; place < p.places; place += (u64)gridDim.x * GROUPS) {
    if (touched[place]) continue;
    Stored row;
    if (!FILL_ZERO) row = load<VEC>(p.old + blockIdx.z * p.in_old.outer + place * p.in_old.row + column);
    else TW_UNROLL for (int i = 0; i < VEC; ++i) row.v[i] = Narrow<T>::of(A(0));
    store(p.out + blockIdx.z * p.in_out.outer + place * p.in_out.row + column, row);
  }
}
