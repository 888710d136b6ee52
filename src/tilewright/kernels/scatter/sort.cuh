// A stable counting sort of indices by DIGIT_BITS of their places: counts per block of input
// (histogram), a scan over blocks (scan), and placement by ranks from warp-wide votes, through
// shared memory so that runs are written together (place). Atomics touch integers in shared memory
// only, so the order depends on the indices alone. ITEMS: indices of a thread.

#define THREADS 256
#define WARPS (THREADS / 32)
#define BINS (1 << DIGIT_BITS)
#define CHUNK (THREADS * ITEMS)

extern __shared__ __align__(16) u32 shared[];

// An index and its position.
struct alignas(8) Entry { u32 place, position; };

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

extern "C" __global__ __launch_bounds__(THREADS, ITEMS < 16 ? 4 : 2) void place_first(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
  place_entries<true>(in, count, places, skipped, fault, shift, counts, totals, out);
}
extern "C" __global__ __launch_bounds__(THREADS, ITEMS < 16 ? 4 : 2) void place_next(const void* in, u32 count, u32 places, i64 skipped, int* fault, int shift, const u32* counts, const u32* totals, Entry* out) {
  place_entries<false>(in, count, places, skipped, fault, shift, counts, totals, out);
}

