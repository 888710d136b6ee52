// One-dimensional scatter by buckets: one pass of the sort by the upper bits of a place brings the
// positions of 2^SHIFT neighbouring places together, in their order; a block per bucket finds the
// last position of each place in shared memory and writes the bucket's places.
//
// CARRIED: entries hold values rather than positions, so that src is read in order.

#define SETTLE_THREADS 1024
#define BATCH 8

TW_DEVICE T value_of(const Entry& e, const T* source) {
  if constexpr (CARRIED) return of_bits<T>(e.position);
  else return source[e.position];
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, 1) void settle(const Entry* sorted, const u32* totals, const T* old, const T* source, T* out, u32 places, double number) {
  int* winner = (int*)shared;
  u32* of_warp = shared + (1 << SHIFT);
  const u32 base = blockIdx.x << SHIFT, size = min(1u << SHIFT, places - base);
  for (u32 s = threadIdx.x; s < size; s += SETTLE_THREADS) winner[s] = -1;
  u32 before = 0;
  for (u32 b = threadIdx.x; b < blockIdx.x; b += SETTLE_THREADS) before += totals[b];
  TW_UNROLL for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(FULL_WARP, before, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = before;
  __syncthreads();
  u32 start = 0;
  TW_UNROLL for (int w = 0; w < SETTLE_THREADS / 32; ++w) start += of_warp[w];
  const Entry* entries = sorted + start;
  const u32 count = totals[blockIdx.x];
  for (u32 first = threadIdx.x; first < count; first += SETTLE_THREADS * BATCH) {
    u32 place[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 j = first + q * SETTLE_THREADS;
      place[q] = j < count ? entries[j].place : places;
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q)
      if (place[q] < places) atomicMax(&winner[place[q] - base], (int)(first + q * SETTLE_THREADS));
  }
  __syncthreads();
  for (u32 first = threadIdx.x; first < count; first += SETTLE_THREADS * BATCH) {
    Entry e[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 j = first + q * SETTLE_THREADS;
      e[q] = j < count ? entries[j] : Entry{places, 0};
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const bool won = e[q].place < places && winner[e[q].place - base] == (int)(first + q * SETTLE_THREADS);
      if (won) out[e[q].place] = NUMBER ? Narrow<T>::of((A)number) : value_of(e[q], source);
    }
  }
  if (IN_PLACE) return;
  for (u32 s = threadIdx.x; s < size; s += SETTLE_THREADS) if (winner[s] < 0) out[base + s] = old[base + s];
}
