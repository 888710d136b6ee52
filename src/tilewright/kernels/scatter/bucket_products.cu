// Elementwise products by buckets (buckets.cuh): logarithms are added as integers (logarithms.cuh), in
// any order, and so are those of blocks that share a bucket.
//
// INCLUDE: the old element is a factor.

// Of each slot. Logarithms in two halves, since shared memory adds 32 bits at once.
struct Products { u32 *low, *high, *kinds; };
TW_DEVICE Products products_of(const Settling& m) { return {m.words, m.words + SLOTS, m.words + 2 * SLOTS}; }
TW_DEVICE u64 sum_at(const Products& products, u32 s) { return (u64)products.high[s] << 32 | products.low[s]; }

TW_DEVICE u32 note_of(Carried, u32) { return 0; }

// Whether something has to be known of factors that have no logarithm but a sign.
TW_DEVICE bool tells(u32 kinds) { return kinds > (INCLUDE ? NAMED : 0); }

TW_DEVICE void multiply(const Settling& m, const Products& products, const List& list, const Entry* entries) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const bool valid = from[q] != NOWHERE;
      const u32 slot = valid ? slot_of(e[q]) : NOWHERE;
      u64 logarithm = valid ? logarithm_of(widen(value_of(e[q]))) : 0;
      u32 kinds = valid ? kinds_of(widen(value_of(e[q]))) : 0;
      if (all_of_one(slot)) {
        logarithm = sum_of_warp(logarithm);
        kinds = of_first_lane(__reduce_or_sync(FULL_WARP, kinds));
      }
      if (logarithm) add_shared(&products.low[slot], &products.high[slot], logarithm);
      if (tells(kinds)) atomicOr(&products.kinds[slot], kinds);
    }
  });
}

// Bring the factors of all shares of a bucket together; true for the last block to come.
TW_DEVICE bool join(const Settling& m, const Products& products, Key* common, u32* done, const Share& mine) {
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    if (const u64 sum = sum_at(products, s)) atomicAdd(&common[s], sum);
    if (const u32 kinds = products.kinds[s]) atomicOr(&common[SLOTS + s], (Key)kinds);
  }
  if (!comes_last(m, done, mine)) return false;
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    const u64 sum = __ldcg(&common[s]);
    products.low[s] = (u32)sum;
    products.high[s] = (u32)(sum >> 32);
    products.kinds[s] = (u32)__ldcg(&common[SLOTS + s]);
  }
  __syncthreads();
  return true;
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, SETTLE_BLOCKS) void settle(const T* old, T* out, const Entry* entries, const u32* runs, Key* common, u32* done) {
  const Settling m = settling();
  const Products products = products_of(m);
  const u64 tile = blockIdx.x / (BUCKETS + HEAVY);
  const u32 unit = blockIdx.x % (BUCKETS + HEAVY);
  const Tile t = tile_at(tile);
  for (u32 s = threadIdx.x; s < SLOT_WORDS * SLOTS; s += SETTLE_THREADS) m.words[s] = 0;
  fetch_old(t, unit, old);
  await_previous();
  List list;
  const Share mine = share_and_list(m, unit, runs + tile * CHUNKS * BUCKETS, list);
  if (mine.bucket == NOWHERE) return;
  multiply(m, products, list, entries + tile * CHUNKS * CHUNK);
  if (mine.parts > 1) {
    const u64 heavy = tile * HEAVY + mine.heavy;
    if (!join(m, products, common + heavy * 2 * SLOTS, done + heavy, mine)) return;
  }
  const u32 row = mine.bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  for (u32 first = threadIdx.x; first < size; first += SETTLE_THREADS * BATCH) {
    T now[BATCH];
    bool writes[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 s = first + q * SETTLE_THREADS;
      writes[q] = s < size && inside(t, s) && (!IN_PLACE || sum_at(products, s) || products.kinds[s]);
      if (writes[q]) now[q] = old[address(t, s, row, PLACES)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!writes[q]) continue;
      const u32 s = first + q * SETTLE_THREADS, kinds = products.kinds[s];
      const u64 sum = sum_at(products, s);
      if (sum || kinds) now[q] = Narrow<T>::of(product_of(INCLUDE ? widen(now[q]) : 1, sum, kinds));
      out[address(t, s, row, PLACES)] = now[q];
    }
  }
}
