// Rows added straight to their places, each of which the index names at most once. Whether that is so
// is looked at first; where a place is named again, rows.cu does the work, and else its kernels return.
//
// 1. prepare: no place has a position. In place, only places that the index names are looked at.
// 2. look: each place gets its position; `repeats` becomes 1 where one had another already.
// 3. add: a row is moved by ADD_LANES threads, ADD_UNROLLED rows at a time. In place, each position adds
//    its row; else each place is written, in the order of memory.

extern "C" __global__ __launch_bounds__(THREADS) void prepare(const INDEX* index, int* positions, u32 count, u32 places, i64 skipped, int* fault, u32* repeats) {
  release_next();
  if (blockIdx.x == 0 && threadIdx.x == 0) *repeats = 0;
  forget(index, positions, count, places, skipped, fault);
}

extern "C" __global__ __launch_bounds__(THREADS) void look(const INDEX* index, int* positions, u32 count, u32 places, i64 skipped, int* fault, u32* repeats) {
  release_next();
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  const u32 place = i < count ? place_of(index[i], places, skipped, fault) : places;
  await_previous();
  if (claim(positions, place, places, (int)i)) *repeats = 1;
}

extern "C" __global__ __launch_bounds__(ADD_THREADS) void add(ARGUMENTS, const INDEX* index, const int* positions, i64 skipped, int* fault) {
  follow_previous();
  const bool repeats = *wanted;
  const Problem p = PROBLEM;
  // Neighbouring blocks have the pieces of the same rows, so that memory is read in long stretches.
  const u32 pieces = (columns + ADD_LANES * VEC - 1) / (ADD_LANES * VEC);
  const u32 column = (blockIdx.x % pieces * ADD_LANES + threadIdx.x % ADD_LANES) * VEC;
  const u64 first = ((u64)(blockIdx.x / pieces) * ADD_THREADS + threadIdx.x) / ADD_LANES * ADD_UNROLLED;
  if (repeats || column >= columns || SLICE >= outer) return;
  const T* rows = source + SLICE * source_outer + column;
  u32 place[ADD_UNROLLED];
  bool named[ADD_UNROLLED];
  Stored row[ADD_UNROLLED], kept[ADD_UNROLLED];
  TW_UNROLL for (int q = 0; q < ADD_UNROLLED; ++q) {
    const u64 at = first + q;
    i64 position = -1;
    place[q] = places;
    if (IN_PLACE && at < count) place[q] = place_of(index[at], places, skipped, fault), position = at;
    if (!IN_PLACE && at < places) place[q] = (u32)at, position = positions[at];
    named[q] = position >= 0;
    kept[q] = {};
    if (place[q] >= places) continue;
    if (named[q]) row[q] = load<VEC>(rows + position * source_row);
    if (INCLUDE || !(FILL_ZERO || named[q])) kept[q] = load<VEC>(p.old_at(place[q], column));
  }
  TW_UNROLL for (int q = 0; q < ADD_UNROLLED; ++q) {
    if (place[q] >= places) continue;
    if (named[q]) kept[q] = result_of<ALL>(p, tree<0, 1>(row + q), kept[q], A(1 + INCLUDE));
    store(p.out_at(place[q], column), kept[q]);
  }
}
