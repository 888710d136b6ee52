// Rows reduced into a few places, which fit in shared memory once for each group of threads.
//
// 1. accumulate: each group of LANES threads takes `range` positions in their order, UNROLLED in flight,
//    and adds them to bins of its own: a thread has VEC columns of every place, so nothing is shared.
//    The bins of a block's groups are joined in their order and written as one partial table.
// 2. combine: a block for each place and piece of the row brings the partial tables together, in an
//    order that depends on their number alone, and writes the row.

#define GROUPS (THREADS / LANES)

extern __shared__ __align__(16) u32 shared[];

typedef Pack<T, VEC> Stored;
typedef Pack<A, VEC> Sums;

TW_DEVICE Sums widened(const Stored& row, A alpha) {
  Sums s;
  TW_UNROLL for (int i = 0; i < VEC; ++i) s.v[i] = SCALED ? (A)widen(row.v[i]) * alpha : (A)widen(row.v[i]);
  return s;
}

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT / THREADS) void accumulate(const INDEX* index, const T* source, A* partials, u32 count, u32 places, u32 columns, u32 range, i64 source_outer, i64 source_row, i64 skipped, double alpha, int* fault) {
  release_next();
  Sums* bins = (Sums*)shared;  // (place, thread)
  Sums* mine = bins + threadIdx.x;
  for (u32 k = 0; k < places; ++k) mine[k * THREADS] = nothing<A, VEC>();
  const int lane = threadIdx.x % LANES;
  const u32 column = (blockIdx.y * LANES + lane) * VEC;
  const bool inside = column < columns;
  const T* rows = source + blockIdx.z * source_outer + column;
  const u64 begin = min((u64)(blockIdx.x * GROUPS + threadIdx.x / LANES) * range, (u64)count);
  const u64 end = min(begin + range, (u64)count);
  for (u64 at = begin; __any_sync(FULL_WARP, at < end); at += LANES) {
    const u32 named = at + lane < end ? place_of(index[at + lane], places, skipped, fault) : places;
    TW_UNROLL for (int u = 0; u < LANES; u += UNROLLED) {
      u32 place[UNROLLED];
      Stored row[UNROLLED];
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        place[q] = __shfl_sync(FULL_WARP, named, u + q, LANES);
        if (inside && place[q] < places) row[q] = load<VEC>(rows + (at + u + q) * source_row);
      }
      TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
        if (!inside || place[q] >= places) continue;
        Sums& bin = mine[place[q] * THREADS];
        bin = reduce(bin, widened(row[q], (A)alpha));
      }
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < places * LANES; i += THREADS) {
    const u32 place = i / LANES, to = (blockIdx.y * LANES + i % LANES) * VEC;
    if (to >= columns) continue;
    Sums sums = bins[place * THREADS + i % LANES];
    for (u32 g = 1; g < GROUPS; ++g) sums = reduce(sums, bins[place * THREADS + g * LANES + i % LANES]);
    store(partials + (((u64)blockIdx.z * gridDim.x + blockIdx.x) * places + place) * columns + to, sums);
  }
}

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT / THREADS) void combine(const A* partials, const T* old, T* out, u32 tables, u32 columns, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row) {
  follow_previous();
  Sums* joined = (Sums*)shared;
  const u32 places = gridDim.x, place = blockIdx.x, group = threadIdx.x / LANES;
  const u32 column = (blockIdx.y * LANES + threadIdx.x % LANES) * VEC;
  const bool inside = column < columns;
  Sums sums = nothing<A, VEC>();
  for (u32 t = group; t < tables; t += GROUPS)
    if (inside) sums = reduce(sums, load<VEC>(partials + (((u64)blockIdx.z * tables + t) * places + place) * columns + column));
  joined[threadIdx.x] = sums;
  __syncthreads();
  for (int half = GROUPS / 2; half > 0; half /= 2) {
    if (group < half) joined[threadIdx.x] = reduce(joined[threadIdx.x], joined[threadIdx.x + half * LANES]);
    __syncthreads();
  }
  if (group || !inside) return;
  sums = joined[threadIdx.x];
  Stored kept, result;
  if (INCLUDE) kept = load<VEC>(old + blockIdx.z * old_outer + place * old_row + column);
  TW_UNROLL for (int i = 0; i < VEC; ++i) {
    const A value = INCLUDE ? reduce((A)widen(kept.v[i]), sums.v[i]) : sums.v[i] + A(0);
    result.v[i] = Narrow<T>::of(value);
  }
  store(out + blockIdx.z * out_outer + place * out_row + column, result);
}
