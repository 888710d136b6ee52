// A chunk of entries, sorted by one digit of DIGIT_BITS in shared memory: stable, by ranks from
// warp-wide votes. ITEMS: entries of a thread.

#define WARPS (THREADS / 32)
#define BINS (1 << DIGIT_BITS)
#define CHUNK (THREADS * ITEMS)

// Shared memory of the block: its entries in the end, and where each digit begins among them.
struct Chunk {
  Entry* entries;
  u32 *begins, *of_warp;
  u16* seen;  // by warp and digit
};
TW_DEVICE Chunk chunk_at(u32* memory) {
  Chunk c;
  c.entries = (Entry*)memory;
  c.begins = memory + 2 * CHUNK;
  c.of_warp = c.begins + BINS;
  c.seen = (u16*)(c.of_warp + WARPS);
  return c;
}
// Which entry of the chunk is the j-th of this thread.
TW_DEVICE u32 held(int j) { return threadIdx.x / 32 * 32 * ITEMS + j * 32 + threadIdx.x % 32; }

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

// Sort the first `filled` entries of the chunk, which the threads hold, by the digits of their places.
template <class Digit> TW_DEVICE void sort_chunk(const Entry (&entries)[ITEMS], Digit digit_of, u32 filled, const Chunk& c) {
  const int lane = threadIdx.x % 32;
  u16* mine = c.seen + threadIdx.x / 32 * BINS;
  for (int k = threadIdx.x; k < WARPS * BINS / 2; k += THREADS) ((u32*)c.seen)[k] = 0;
  u32 rank[ITEMS];
  __syncthreads();
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    const bool valid = held(j) < filled;
    const u32 digit = valid ? digit_of(entries[j].place) : 0;
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
      const u32 here = c.seen[w * BINS + d];
      c.seen[w * BINS + d] = (u16)next;
      next += here;
    }
    c.begins[d] = next;
  }
  scan_bins(c.begins, c.of_warp);
  TW_UNROLL for (int j = 0; j < ITEMS; ++j) {
    if (held(j) >= filled) continue;
    const u32 digit = digit_of(entries[j].place);
    c.entries[c.begins[digit] + mine[digit] + rank[j]] = entries[j];
  }
  __syncthreads();
}
