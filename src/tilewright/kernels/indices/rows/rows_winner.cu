// Rows copied to the places that an index names; where it repeats, the last position wins.
//
// 1. prepare: no place has a winner yet. In place, only places that the index names are looked at.
// 2. elect: for each place the last position that names it, by an integer maximum.
// 3. write: a row is moved by LANES threads in accesses of VEC elements, UNROLLED rows at a time.
//    In place, each position that won writes its row; else each place is written. NUMBER: rows of one
//    number are written, and there is no source.

#define GROUPS (THREADS / LANES)

#if !BATCHED
#define MORE_PARAMETERS
#define MORE
#endif

typedef Pack<T, VEC> Stored;

extern "C" __global__ __launch_bounds__(THREADS) void prepare(const INDEX* index, int* winner, u32 count, u32 places, int* fault MORE_PARAMETERS) {
  release_next();
  forget(index, winner, count, places, NONE_SKIPPED, fault MORE);
}

extern "C" __global__ __launch_bounds__(THREADS) void elect(const INDEX* index, int* winner, u32 count, u32 places, int* fault MORE_PARAMETERS) {
  release_next();
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  const u32 place = i < count ? place_at(index, i, places, NONE_SKIPPED, fault MORE) : places;
  await_previous();
  claim(winner, place, places, (int)i);
}

extern "C" __global__ __launch_bounds__(THREADS) void write(const INDEX* index, const T* source, const T* old, T* out, const int* winner, u32 count, u32 places, u32 columns, i64 source_outer, i64 source_row, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row, double number MORE_PARAMETERS) {
  const u32 column = (blockIdx.y * LANES + threadIdx.x % LANES) * VEC;
  const u64 first = ((u64)blockIdx.x * GROUPS + threadIdx.x / LANES) * UNROLLED;
  await_previous();
  if (column >= columns) return;
  if (!NUMBER) source += blockIdx.z * source_outer + column;
  old += blockIdx.z * old_outer + column;
  out += blockIdx.z * out_outer + column;
  const T* from[UNROLLED];
  T* to[UNROLLED];
  Stored row[UNROLLED];
  TW_UNROLL for (int q = 0; q < UNROLLED; ++q) {
    from[q] = nullptr;
    to[q] = nullptr;
    const u64 i = first + q;
    if (i >= (IN_PLACE ? count : places)) continue;
    const u64 place = IN_PLACE ? named_at(index, i, places MORE) : i;
    if (place >= places) continue;
    const int won = winner[place];
    if (IN_PLACE && won != (int)i) continue;
    if (won < 0) from[q] = old + place * old_row;
    else if (!NUMBER) from[q] = source + won * source_row;
    to[q] = out + place * out_row;
    TW_UNROLL for (int v = 0; NUMBER && v < VEC; ++v) row[q].v[v] = Narrow<T>::of((A)number);
  }
  TW_UNROLL for (int q = 0; q < UNROLLED; ++q) if (from[q]) row[q] = load<VEC>(from[q]);
  TW_UNROLL for (int q = 0; q < UNROLLED; ++q) if (to[q]) store(to[q], row[q]);
}
