// Gather with the places of a block of columns in shared memory: x and the index are read, and out is
// written, in the order of memory, once. Tiles are those of tiles.cuh.

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void collect(const T* x, const INDEX* index, T* out, int* fault) {
  T* value = (T*)shared;
  const Tile t = tile_of_block();
  INDEX given[BATCH];
  TW_UNROLL for (int q = 0; q < BATCH; ++q) {
    const int at = threadIdx.x + q * THREADS;
    if (inside(t, at, LENGTH)) given[q] = __ldcs(&index[address(t, at, LENGTH)]);
  }
  for (int first = threadIdx.x; first < SLOTS; first += THREADS * BATCH) {
    T held[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q)
      if (inside(t, first + q * THREADS, PLACES)) held[q] = x[address(t, first + q * THREADS, PLACES)];
    TW_UNROLL for (int q = 0; q < BATCH; ++q)
      if (inside(t, first + q * THREADS, PLACES)) value[first + q * THREADS] = held[q];
  }
  __syncthreads();
  for (int first = threadIdx.x; first < ELEMENTS; first += THREADS * BATCH) {
    T found[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int at = first + q * THREADS;
      if (!inside(t, at, LENGTH)) continue;
      const u32 place = place_of(given[q], PLACES, NONE_SKIPPED, fault);
      found[q] = place < PLACES ? value[slot(at, place)] : T{};
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {  // the next ones are under way while these are written
      const int at = first + (BATCH + q) * THREADS;
      if (inside(t, at, LENGTH)) given[q] = __ldcs(&index[address(t, at, LENGTH)]);
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const int at = first + q * THREADS;
      if (inside(t, at, LENGTH)) out[address(t, at, LENGTH)] = found[q];
    }
  }
}
