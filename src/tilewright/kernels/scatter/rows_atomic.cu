// Rows added to the places that an index names, by atomic additions in whatever order they come.
//
// 1. prepare, not in place: places hold the old rows, or zeros.
// 2. accumulate: a group of LANES threads takes ROWS positions in accesses of VEC elements. Rows of
//    one place are summed first, those of a group in registers and, where a whole warp has one place,
//    those of its groups by shuffles; what is left are reductions in memory, of VEC elements each
//    where the device has them.

#define THREADS 256
#define GROUPS (THREADS / LANES)

typedef Pack<T, VEC> Stored;

extern "C" __global__ __launch_bounds__(THREADS) void prepare(const T* old, T* out, u32 places, u32 columns, i64 old_outer, i64 old_row, i64 out_outer, i64 out_row) {
  release_next();
  const u32 pieces = columns / VEC;
  const u64 all = (u64)places * pieces;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < all; i += (u64)gridDim.x * THREADS) {
    const u64 place = i / pieces, column = i % pieces * VEC;
    Stored row = {};
    if (KEEPS_OLD) row = load<VEC>(old + blockIdx.z * old_outer + place * old_row + column);
    store(out + blockIdx.z * out_outer + place * out_row + column, row);
  }
}

TW_DEVICE void add_to(i64* at, i64 x) { atomicAdd((u64*)at, (u64)x); }
template <class E> TW_DEVICE void add_to(E* at, E x) { atomicAdd(at, x); }
template <class E, int N> TW_DEVICE void add_to(E* at, const Pack<E, N>& x) {
  TW_UNROLL for (int i = 0; i < N; ++i) add_to(at + i, x.v[i]);
}
#if __CUDA_ARCH__ >= 900
TW_DEVICE void add_to(float* at, const Pack<float, 2>& x) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x.v[0]), "f"(x.v[1]) : "memory");
}
TW_DEVICE void add_to(float* at, const Pack<float, 4>& x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.v[0]), "f"(x.v[1]), "f"(x.v[2]), "f"(x.v[3]) : "memory");
}
#endif

// Bring rows of one place to the first position of a group that has it; the others are done.
TW_DEVICE void merge(u32 (&place)[ROWS], Stored (&row)[ROWS], u32 places) {
  TW_UNROLL for (int q = ROWS - 1; q > 0; --q) {
    TW_UNROLL for (int p = q - 1; p >= 0; --p) {
      if (place[q] == places || place[p] != place[q]) continue;
      row[p] = reduce(row[p], row[q]);
      place[q] = places;
    }
  }
}

extern "C" __global__ __launch_bounds__(THREADS) void accumulate(const INDEX* index, const T* source, T* out, u32 count, u32 places, u32 columns, i64 source_outer, i64 source_row, i64 out_outer, i64 out_row, i64 skipped, double alpha, int* fault) {
  const u32 column = (blockIdx.y * LANES + threadIdx.x % LANES) * VEC;
  const u64 first = ((u64)blockIdx.x * GROUPS + threadIdx.x / LANES) * ROWS;
  source += blockIdx.z * source_outer + column;
  out += blockIdx.z * out_outer + column;
  u32 place[ROWS];
  Stored row[ROWS];
  TW_UNROLL for (int q = 0; q < ROWS; ++q) place[q] = first + q < count ? place_of(index[first + q], places, skipped, fault) : places;
  TW_UNROLL for (int q = 0; q < ROWS; ++q) {
    row[q] = {};
    if (place[q] < places && column < columns) row[q] = load<VEC>(source + (first + q) * source_row);
  }
  if (SCALED) TW_UNROLL for (int q = 0; q < ROWS; ++q) TW_UNROLL for (int i = 0; i < VEC; ++i) row[q].v[i] *= (T)alpha;
  merge(place, row, places);
  await_previous();
  TW_UNROLL for (int q = 0; q < ROWS; ++q) {
    int same;
    __match_all_sync(FULL_WARP, place[q], &same);
    if (same && LANES < 32) {
      TW_UNROLL for (int step = LANES; step < 32; step *= 2)
        TW_UNROLL for (int i = 0; i < VEC; ++i) row[q].v[i] += __shfl_xor_sync(FULL_WARP, row[q].v[i], step);
      if (threadIdx.x % 32 >= LANES) place[q] = places;
    }
    if (place[q] < places && column < columns) add_to(out + place[q] * out_row, row[q]);
  }
}
