// Rows of `source` reduced into rows of `out`, in an order that depends on the indices alone.
//
// 1. A stable counting sort of (place, position) by place, in passes of DIGIT_BITS bits: counts per
//    block of input (histogram), a scan over blocks (scan), and placement by ranks from warp-wide
//    votes, through shared memory so that runs are written together (place). Atomics touch
//    integers in shared memory only.
// 2. accumulate: the sorted positions are cut into units of ROWS, each walked by LANES threads that
//    hold a piece of the row. A run of one place that lies inside a unit is finished there; what
//    reaches over a border is a partial result of the unit, one for either border. Full batches of
//    one place are summed as a tree.
// 3. combine: the unit in which such a run begins adds up the partials of the units that go on with
//    it; a run over many units is shared out among a block and joined as a tree.
// 4. fill (out of place only): rows that no index names.
//
// Configuration: ROWS, LANES, UNROLLED, VEC, BLOCKS, DIGIT_BITS, ITEMS; MEAN divides by the number of terms; INCLUDE
// makes the old row a term; FILL_ZERO gives zeros to rows without an index, else the old row.

#define THREADS 256
#define WARPS (THREADS / 32)
#define BINS (1 << DIGIT_BITS)
#define CHUNK (THREADS * ITEMS)
#define GROUPS (THREADS / LANES)
#define COMBINE_GROUPS (COMBINE_THREADS / LANES)
#define SHORT_RUN 4
#define NOWHERE 0xffffffffu

typedef Pack<T, VEC> Stored;
typedef Pack<A, VEC> Sums;
struct alignas(8) Entry { u32 place, position; };
extern __shared__ __align__(16) u32 shared[];

// ---- sort ---------------------------------------------------------------------------------------

// Entry i of the input of a pass: of the index itself, or of the pass before.
template <bool FIRST> TW_DEVICE Entry entry(const void* in, u32 i, u32 places, i64 skipped, int* fault) {
  if constexpr (FIRST) return {place_of(((const INDEX*)in)[i], places, skipped, fault), i};
  else return ((const Entry*)in)[i];
}
TW_DEVICE u32 digit_of(u32 place, int shift) { return (place >> shift) & (BINS - 1); }

template <bool FIRST> TW_DEVICE void count_digits(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts) {
  for (int d = threadIdx.x; d < BINS; d += THREADS) shared[d] = 0;
  __syncthreads();
  u32 digit[ITEMS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 i = blockIdx.x * CHUNK + j * THREADS + threadIdx.x;
    digit[j] = i < count ? digit_of(entry<FIRST>(in, i, places, skipped, fault).place, shift) : BINS;
  }
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    int same;  // as in sorted or constant input, where 32 additions would queue up
    __match_all_sync(FULL_WARP, digit[j], &same);
    if (digit[j] < BINS && (!same || threadIdx.x % 32 == 0)) atomicAdd(&shared[digit[j]], same ? 32 : 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < BINS; d += THREADS) counts[(u64)blockIdx.x * BINS + d] = shared[d];
}

extern "C" __global__ __launch_bounds__(THREADS) void histogram_first(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts) {
  count_digits<true>(in, count, places, skipped, fault, shift, counts);
}
extern "C" __global__ __launch_bounds__(THREADS) void histogram_next(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts) {
  count_digits<false>(in, count, places, skipped, fault, shift, counts);
}

// For each digit, turn the counts of the blocks into how many came in blocks before; 32 digits to
// a block of 32 x 32 threads.
extern "C" __global__ __launch_bounds__(1024) void scan(u32* counts, u32* totals, int blocks) {
  u32 (*sums)[33] = (u32 (*)[33])shared;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, digit = blockIdx.x * 32 + x;
  const int each = (blocks + 31) / 32, first = min(y * each, blocks), last = min(first + each, blocks);
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
    const u32 here = *at;
    *at = before;
    before += here;
  }
}

// Exclusive prefix sum over all digits, in place; `of_warp` is scratch.
TW_DEVICE void scan_bins(u32* bins, u32* of_warp) {
  constexpr int EACH = (BINS + THREADS - 1) / THREADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 value[EACH], sum = 0;
  __syncthreads();
  TW_UNROLL for (int j = 0; j < EACH; ++j) {
    const int d = threadIdx.x * EACH + j;
    value[j] = d < BINS ? bins[d] : 0;
    sum += value[j];
  }
  u32 upto = sum;
  TW_UNROLL for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) of_warp[warp] = upto;
  __syncthreads();
  u32 before = upto - sum;
  for (int w = 0; w < warp; ++w) before += of_warp[w];
  TW_UNROLL for (int j = 0; j < EACH; ++j) {
    const int d = threadIdx.x * EACH + j;
    if (d < BINS) bins[d] = before;
    before += value[j];
  }
  __syncthreads();
}

// The valid lanes whose digit is this one's: a vote on each bit.
TW_DEVICE u32 lanes_alike(u32 digit, bool valid) {
  u32 alike = __ballot_sync(FULL_WARP, valid);
  TW_UNROLL for (int b = 0; b < DIGIT_BITS; ++b) {
    const bool set = digit >> b & 1;
    const u32 votes = __ballot_sync(FULL_WARP, set);
    alike &= set ? votes : ~votes;
  }
  return alike;
}

template <bool FIRST> TW_DEVICE void place_entries(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
  Entry* chunk = (Entry*)shared;                 // sorted here first
  u32 *to = (u32*)(chunk + CHUNK), *local = to + BINS, *of_warp = local + BINS;
  u16* seen = (u16*)(of_warp + WARPS);           // by warp and digit
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u16* mine = seen + warp * BINS;
  for (int k = threadIdx.x; k < WARPS * BINS / 2; k += THREADS) ((u32*)seen)[k] = 0;
  Entry entries[ITEMS];
  u32 rank[ITEMS];
  const u32 base = blockIdx.x * CHUNK + warp * 32 * ITEMS + lane;
  TW_UNROLL for (int j = 0; j < ITEMS; ++j)
    if (base + j * 32 < count) entries[j] = entry<FIRST>(in, base + j * 32, places, skipped, fault);
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const bool valid = base + j * 32 < count;
    const u32 digit = valid ? digit_of(entries[j].place, shift) : 0;
    const u32 alike = lanes_alike(digit, valid), before = alike & ((1u << lane) - 1);
    const u32 earlier = valid ? mine[digit] : 0;
    rank[j] = earlier + __popc(before);
    __syncwarp();
    if (valid && before == 0) mine[digit] = (u16)(earlier + __popc(alike));
    __syncwarp();
  }
  __syncthreads();
  for (int d = threadIdx.x; d < BINS; d += THREADS) {
    u32 next = 0;
    TW_UNROLL for (int w = 0; w < WARPS; ++w) {
      const u32 here = seen[w * BINS + d];
      seen[w * BINS + d] = (u16)next;
      next += here;
    }
    local[d] = next;
    to[d] = totals[d];
  }
  scan_bins(local, of_warp);
  scan_bins(to, of_warp);
  for (int d = threadIdx.x; d < BINS; d += THREADS) to[d] += counts[(u64)blockIdx.x * BINS + d] - local[d];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    if (base + j * 32 >= count) continue;
    const u32 digit = digit_of(entries[j].place, shift);
    chunk[local[digit] + mine[digit] + rank[j]] = entries[j];
  }
  __syncthreads();
  const u32 filled = min((u64)CHUNK, (u64)count - (u64)blockIdx.x * CHUNK);
  for (u32 i = threadIdx.x; i < filled; i += THREADS) out[to[digit_of(chunk[i].place, shift)] + i] = chunk[i];
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void place_first(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
  place_entries<true>(in, count, places, skipped, fault, shift, counts, totals, out);
}
extern "C" __global__ __launch_bounds__(THREADS, 2) void place_next(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
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
  const T *source, const T *old, T *out, const Entry *sorted, A *partials, u8 *touched,           \
      u32 count, u32 places, u32 columns, u32 units, i64 source_outer, i64 source_row,            \
      i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, double alpha
#define PROBLEM                                                                                   \
  {source, old, out, sorted, partials, touched, count, places, columns, units,                    \
   {source_outer, source_row}, {old_outer, old_row}, {out_outer, out_row}, alpha}

struct Problem {
  const T* source;
  const T* old;
  T* out;
  const Entry* sorted;
  A* partials;  // (outer, unit, border, columns)
  u8* touched;  // places with an index; null where nobody asks
  u32 count, places, columns, units;
  Rows in_source, in_old, in_out;
  double alpha;

  TW_DEVICE u32 place(u64 i) const { return sorted[i].place; }
  TW_DEVICE const T* old_at(u32 place, u32 column) const {
    return old + blockIdx.z * in_old.outer + place * in_old.row + column;
  }
  TW_DEVICE T* out_at(u32 place, u32 column) const {
    return out + blockIdx.z * in_out.outer + place * in_out.row + column;
  }
  TW_DEVICE A* partial(u32 unit, int border, u32 column) const {
    return partials + (((u64)blockIdx.z * units + unit) * 2 + border) * columns + column;
  }
};

TW_DEVICE u32 first_not_below(const Problem& p, u64 place) {
  u32 low = 0, high = p.count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (p.place(middle) < place) low = middle + 1; else high = middle;
  }
  return low;
}

TW_DEVICE void finish(const Problem& p, u32 place, u32 column, const Sums& sums, const Stored& kept) {
  Stored result;
  A terms = 1;
  if (MEAN) terms = A(first_not_below(p, (u64)place + 1) - first_not_below(p, place) + INCLUDE);
  TW_UNROLL for (int i = 0; i < VEC; ++i) {
    A value = SCALED ? sums.v[i] * (A)p.alpha : sums.v[i];
    if (INCLUDE) value = reduce((A)widen(kept.v[i]), value);
    if (MEAN) value = divided(value, terms);
    result.v[i] = Narrow<T>::of(value);
  }
  store(p.out_at(place, column), result);
  if (p.touched && column == 0 && blockIdx.z == 0) p.touched[place] = 1;
}

template <int FIRST, int N> TW_DEVICE Sums tree(const Stored* rows) {
  if constexpr (N == 1) {
    Sums s;
    TW_UNROLL for (int i = 0; i < VEC; ++i) s.v[i] = (A)widen(rows[FIRST].v[i]);
    return s;
  } else return reduce(tree<FIRST, N / 2>(rows), tree<FIRST + N / 2, N / 2>(rows));
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void accumulate(ARGUMENTS) {
  const Problem p = PROBLEM;
  const int lane = threadIdx.x % LANES;
  const u32 unit = blockIdx.x * GROUPS + threadIdx.x / LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u32 begin = min((u64)unit * ROWS, (u64)p.count), end = min((u64)begin + ROWS, (u64)p.count);
  const T* rows = p.source + blockIdx.z * p.in_source.outer + column;
  u32 current = NOWHERE, before = NOWHERE, after = NOWHERE;
  if (begin < end) {
    if (begin > 0) before = p.place(begin - 1);
    if (end < p.count) after = p.place(end);
  }
  Sums sums = nothing<A, VEC>();
  Stored kept;
  for (u32 at = begin; __any_sync(FULL_WARP, at < end); at += LANES) {
    const bool mine = at < end && at + lane < end;
    const Entry my = mine ? p.sorted[at + lane] : Entry{NOWHERE, 0};
    TW_UNROLL for (int u = 0; u < LANES; u += UNROLLED) {
      u32 place[UNROLLED];
      Stored row[UNROLLED];
      bool one_run = true;
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        place[q] = __shfl_sync(FULL_WARP, my.place, u + q, LANES);
        const u32 position = __shfl_sync(FULL_WARP, my.position, u + q, LANES);
        const bool begins = place[q] != (q ? place[q - 1] : current);
        one_run = one_run && !begins;
        if (!inside || place[q] >= p.places) continue;
        row[q] = load<VEC>(rows + position * p.in_source.row);
        // Its old row is read when the run begins, and needed soon.
        if (INCLUDE && begins) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.old_at(place[q], column)));
      }
      if (one_run) {
        if (inside && current < p.places) sums = reduce(sums, tree<0, UNROLLED>(row));
        continue;
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        if (place[q] == NOWHERE) continue;
        if (place[q] != current) {
          if (inside && current < p.places) {
            if (current == before) store(p.partial(unit, 0, column), sums);
            else finish(p, current, column, sums, kept);
          }
          current = place[q];
          sums = nothing<A, VEC>();
          if (INCLUDE && inside && current < p.places && current != before) kept = load<VEC>(p.old_at(current, column));
        }
        if (inside && place[q] < p.places) sums = reduce(sums, tree<0, 1>(row + q));
      }
    }
  }
  if (!inside || current >= p.places) return;
  if (current == before) store(p.partial(unit, 0, column), sums);
  else if (current == after) store(p.partial(unit, 1, column), sums);
  else finish(p, current, column, sums, kept);
}

// Reduce into `sums` the partials of COUNT units from `first` on, `step` apart, that belong to
// `place`; false once one does not. All are fetched at once, needed or not.
template <int COUNT> TW_DEVICE bool take(const Problem& p, u64 first, u32 step, u32 place, u32 column, bool inside, Sums& sums) {
  bool part[COUNT];
  Sums more[COUNT];
  TW_UNROLL for (int q = 0; q < COUNT; ++q) {
    const u64 unit = first + (u64)q * step;
    part[q] = false;
    if (unit >= p.units) continue;
    part[q] = p.place(unit * ROWS) == place;
    if (inside) more[q] = load<VEC>(p.partial((u32)unit, 0, column));
  }
  TW_UNROLL for (int q = 0; q < COUNT; ++q) if (part[q] && inside) sums = reduce(sums, more[q]);
  return part[COUNT - 1];
}

extern "C" __global__ __launch_bounds__(COMBINE_THREADS, 1) void combine(ARGUMENTS) {
  const Problem p = PROBLEM;
  Sums* joined = (Sums*)shared;
  u32* longer = (u32*)(joined + COMBINE_THREADS);
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  const bool inside = column < p.columns;
  const u64 unit = (u64)blockIdx.x * COMBINE_GROUPS + group, begin = unit * ROWS, end = begin + ROWS;
  u32 place = NOWHERE;
  if (end < p.count) {
    place = p.place(end - 1);
    const bool goes_on = place < p.places && p.place(end) == place;
    const bool began_before = begin > 0 && p.place(begin - 1) == place;
    if (!goes_on || began_before) place = NOWHERE;
  }
  bool is_long = false;
  if (place != NOWHERE) {
    Sums sums;
    Stored kept;
    if (inside) sums = load<VEC>(p.partial((u32)unit, 1, column));
    if (INCLUDE && inside) kept = load<VEC>(p.old_at(place, column));
    is_long = take<SHORT_RUN>(p, unit + 1, 1, place, column, inside, sums) &&
              take<SHORT_RUN>(p, unit + 1 + SHORT_RUN, 1, place, column, inside, sums);
    if (inside && !is_long) finish(p, place, column, sums, kept);
  }
  if (lane == 0) longer[group] = is_long ? place : NOWHERE;
  __syncthreads();
  for (int g = 0; g < COMBINE_GROUPS; ++g) {
    const u32 common = longer[g];
    if (common == NOWHERE) continue;
    const u64 first = (u64)blockIdx.x * COMBINE_GROUPS + g;
    Sums sums = nothing<A, VEC>();
    u64 next = first + 1 + group;
    while (take<4>(p, next, COMBINE_GROUPS, common, column, inside, sums)) next += 4 * COMBINE_GROUPS;
    joined[threadIdx.x] = sums;
    __syncthreads();
    for (int half = COMBINE_GROUPS / 2; half > 0; half /= 2) {
      if (group < half) joined[threadIdx.x] = reduce(joined[threadIdx.x], joined[threadIdx.x + half * LANES]);
      __syncthreads();
    }
    if (group == 0 && inside) {
      Stored kept;
      if (INCLUDE) kept = load<VEC>(p.old_at(common, column));
      finish(p, common, column, reduce(load<VEC>(p.partial((u32)first, 1, column)), joined[lane]), kept);
    }
    __syncthreads();
  }
}

// Rows that no index names.
extern "C" __global__ __launch_bounds__(THREADS) void fill(ARGUMENTS) {
  const Problem p = PROBLEM;
  const u32 column = (blockIdx.y * LANES + threadIdx.x % LANES) * VEC;
  if (column >= p.columns) return;
  for (u64 place = (u64)blockIdx.x * GROUPS + threadIdx.x / LANES; place < p.places; place += (u64)gridDim.x * GROUPS) {
    if (p.touched[place]) continue;
    Stored row;
    if (!FILL_ZERO) row = load<VEC>(p.old_at((u32)place, column));
    else TW_UNROLL for (int i = 0; i < VEC; ++i) row.v[i] = Narrow<T>::of(A(0));
    store(p.out_at((u32)place, column), row);
  }
}
