// Separate elements reduced into places, where few positions share a column: one thread for each
// element of the index looks at all of its column. The first that names a place goes through the
// others in their order, so it needs no workspace, no sort, and nothing of the number of places.
//
// Terms are added in ACCUMULATORS sums in turn, which rounds less than one sum does. Configuration: AHEAD
// positions are read at once.

#define ACCUMULATORS (REDUCE == PROD ? 1 : 4)

struct Column {
  const INDEX* index;
  const T* src;
  u32 index_step, src_step;
};

// Whether one of the positions from `first` on, AHEAD at most and all before `end`, names `index`.
TW_DEVICE bool named(const Column& column, u32 first, u32 end, INDEX index) {
  bool found = false;
  TW_UNROLL for (int q = 0; q < AHEAD; ++q)
    if (first + q < end) found |= column.index[(first + q) * column.index_step] == index;
  return found;
}

extern "C" __global__ __launch_bounds__(THREADS, 512 / THREADS) void reduce_elements(const T* old, const INDEX* index, T* out, u32 count, u32 length, u32 index_step, u32 src_step, double alpha, int* fault MORE_PARAMETERS) {
  follow_previous();
  const u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  const At at = at_of(i AXES);
  const Column column = {index + at.index - at.position * index_step, moved + at.src - at.position * src_step, index_step, src_step};
  const INDEX mine = index[at.index];
  const u32 place = place_of(mine, along, NONE_SKIPPED, fault);
  if (place == along) return;
  for (u32 k = 0; k < at.position; k += AHEAD)
    if (named(column, k, at.position, mine)) return;
  const u64 to = at.x + (u64)place * stride;
  Pack<A, ACCUMULATORS> sums = nothing<A, ACCUMULATORS>();
  if (INCLUDE && REDUCE == PROD) sums.v[0] = (A)widen(old[to]);  // in order, so that no part overflows
  sums.v[0] = reduce(sums.v[0], (A)widen(moved[at.src]));
  u32 terms = 1;
  for (u32 k = at.position + 1; k < length; k += AHEAD) {
    if (!named(column, k, length, mine)) continue;
    TW_UNROLL for (int q = 0; q < AHEAD; ++q) {
      if (k + q >= length || column.index[(k + q) * index_step] != mine) continue;
      sums.v[q % ACCUMULATORS] = reduce(sums.v[q % ACCUMULATORS], (A)widen(column.src[(k + q) * src_step]));
      ++terms;
    }
  }
  A sum = sums.v[0];
  TW_UNROLL for (int q = 1; q < ACCUMULATORS; ++q) sum = reduce(sum, sums.v[q]);
  if (SCALED) sum = sum * (A)alpha;
  if (INCLUDE && REDUCE != PROD) sum = reduce((A)widen(old[to]), sum);
  else if (REDUCE == SUM) sum += A(0);
  if (MEAN) sum = divided(sum, A(terms + INCLUDE));
  out[to] = Narrow<T>::of(sum);
}
