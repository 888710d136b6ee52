// A stable counting sort of indices by DIGIT_BITS of their places: counts per block of input
// (histogram), a scan over blocks (scan), and placement of chunks that are sorted first (chunk.cuh),
// so that runs are written together (place). Atomics touch integers in shared memory only, so the
// order depends on the indices alone.

#if BATCHED
template <class... More> TW_DEVICE Entry entry_of(const INDEX* index, u32 i, u32 places, i64 skipped, int* fault, More... more) {
  return {place_at(index, i, places, skipped, fault, more...), i};
}
#elif !defined(MORE_PARAMETERS)  // else elements.cuh has them, and its own entry_of
#define MORE_PARAMETERS
#define MORE
TW_DEVICE Entry entry_of(const INDEX* index, u32 i, u32 places, i64 skipped, int* fault) {
  return {place_of(index[i], places, skipped, fault), i};
}
#endif

// Entry i of the input of a pass: of the index itself, or of the pass before.
template <bool FIRST, class... More> TW_DEVICE Entry entry(const void* in, u32 i, u32 places, i64 skipped, int* fault, More... more) {
  if constexpr (FIRST) return entry_of((const INDEX*)in, i, places, skipped, fault, more...);
  else return ((const Entry*)in)[i];
}
TW_DEVICE u32 digit_of(u32 place, int shift) { return (place >> shift) & (BINS - 1); }

template <bool FIRST, class... More> TW_DEVICE void count_digits(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts, More... more) {
  for (int d = threadIdx.x; d < BINS; d += THREADS) shared[d] = 0;
  __syncthreads();
  u32 digit[ITEMS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const u32 i = blockIdx.x * CHUNK + j * THREADS + threadIdx.x;
    digit[j] = i < count ? digit_of(entry<FIRST>(in, i, places, skipped, fault, more...).place, shift) : BINS;
  }
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    int same;  // as in sorted or constant input, where 32 additions would queue up
    __match_all_sync(FULL_WARP, digit[j], &same);
    if (digit[j] < BINS && (!same || threadIdx.x % 32 == 0)) atomicAdd(&shared[digit[j]], same ? 32 : 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < BINS; d += THREADS) counts[(u64)blockIdx.x * BINS + d] = shared[d];
}

// The first kernel also makes the `words` at `cleared` zero, for those that come after the sort.
extern "C" __global__ __launch_bounds__(THREADS) void histogram_first(const u32* wanted, const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts, u32* cleared, u32 words MORE_PARAMETERS) {
  if (!follow_wanted(wanted)) return;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < words; i += gridDim.x * THREADS) cleared[i] = 0;
  count_digits<true>(in, count, places, skipped, fault, shift, counts MORE);
}
extern "C" __global__ __launch_bounds__(THREADS) void histogram_next(const u32* wanted, const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, u32* counts) {
  if (!follow_wanted(wanted)) return;
  count_digits<false>(in, count, places, skipped, fault, shift, counts);
}

// For each digit, turn the counts of the blocks into how many came in blocks before; 32 digits to
// a block of 32 x 32 threads.
extern "C" __global__ __launch_bounds__(1024) void scan(const u32* wanted, u32* counts, u32* totals, int blocks) {
  if (!follow_wanted(wanted)) return;
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

template <bool FIRST, class... More> TW_DEVICE void place_entries(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out, More... more) {
  const Chunk c = chunk_at(shared);
  u32* to = (u32*)(c.seen + WARPS * BINS);
  const u32 base = blockIdx.x * CHUNK, filled = min((u64)CHUNK, (u64)count - base);
  Entry entries[ITEMS];
  TW_UNROLL for (int j = 0; j < ITEMS; ++j)
    if (held(j) < filled) entries[j] = entry<FIRST>(in, base + held(j), places, skipped, fault, more...);
  for (int d = threadIdx.x; d < BINS; d += THREADS) to[d] = totals[d];
  sort_chunk(entries, [=](u32 place) { return digit_of(place, shift); }, filled, c);
  scan_bins(to, c.of_warp);
  for (int d = threadIdx.x; d < BINS; d += THREADS) to[d] += counts[(u64)blockIdx.x * BINS + d] - c.begins[d];
  __syncthreads();
  for (u32 i = threadIdx.x; i < filled; i += THREADS) out[to[digit_of(c.entries[i].place, shift)] + i] = c.entries[i];
}

extern "C" __global__ __launch_bounds__(THREADS, ITEMS < 16 ? 4 : 2) void place_first(const u32* wanted, const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out MORE_PARAMETERS) {
  if (!follow_wanted(wanted)) return;
  place_entries<true>(in, count, places, skipped, fault, shift, counts, totals, out MORE);
}
extern "C" __global__ __launch_bounds__(THREADS, ITEMS < 16 ? 4 : 2) void place_next(const u32* wanted, const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
  if (!follow_wanted(wanted)) return;
  place_entries<false>(in, count, places, skipped, fault, shift, counts, totals, out);
}

