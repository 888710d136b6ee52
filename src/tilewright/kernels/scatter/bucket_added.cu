// Elementwise reductions by buckets (buckets.cuh) that are sums of integers modulo 2^64: these are added
// in any order, by blocks that share a bucket, too. What is added of a term, and what is made of the sum
// and of the kinds of all terms, joined by an "or", is in logarithms.cuh and whole_numbers.cuh.
//
// INCLUDE: the old element is a term.

// Of each slot. Integers in two halves, since shared memory adds 32 bits at once.
struct Added { u32 *low, *high, *kinds; };
TW_DEVICE Added added_of(const Settling& m) { return {m.words, m.words + SLOTS, m.words + 2 * SLOTS}; }
TW_DEVICE u64 sum_at(const Added& added, u32 s) { return (u64)added.high[s] << 32 | added.low[s]; }

TW_DEVICE u32 note_of(Carried, u32) { return 0; }

// Whether kinds tell what has to be known: that a place is named, if the old element is no term.
TW_DEVICE bool tells(u32 kinds) { return kinds > (INCLUDE ? NAMED : 0); }

TW_DEVICE void add_up(const Settling& m, const Added& added, const List& list, const Entry* entries) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const bool valid = from[q] != NOWHERE;
      const u32 slot = valid ? slot_of(e[q]) : NOWHERE;
      u64 integer = valid ? integer_of(widen(value_of(e[q]))) : 0;
      u32 kinds = valid ? kinds_of(widen(value_of(e[q]))) : 0;
      if (all_of_one(slot)) {
        integer = sum_of_warp(integer);
        kinds = of_first_lane(__reduce_or_sync(FULL_WARP, kinds));
      }
      if (integer) add_shared(&added.low[slot], &added.high[slot], integer);
      if (tells(kinds)) atomicOr(&added.kinds[slot], kinds);
    }
  });
}

// Bring the terms of all shares of a bucket together; true for the last block to come.
TW_DEVICE bool join(const Settling& m, const Added& added, Key* common, u32* done, const Share& mine) {
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    if (const u64 sum = sum_at(added, s)) atomicAdd(&common[s], sum);
    if (const u32 kinds = added.kinds[s]) atomicOr(&common[SLOTS + s], (Key)kinds);
  }
  if (!comes_last(m, done, mine)) return false;
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    const u64 sum = __ldcg(&common[s]);
    added.low[s] = (u32)sum;
    added.high[s] = (u32)(sum >> 32);
    added.kinds[s] = (u32)__ldcg(&common[SLOTS + s]);
  }
  __syncthreads();
  return true;
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, SETTLE_BLOCKS) void settle(const T* old, T* out, const Entry* entries, const u32* runs, Key* common, u32* done) {
  const Settling m = settling();
  const Added added = added_of(m);
  const u64 tile = blockIdx.x / (BUCKETS + HEAVY);
  const u32 unit = blockIdx.x % (BUCKETS + HEAVY);
  const Tile t = tile_at(tile);
  for (u32 s = threadIdx.x; s < SLOT_WORDS * SLOTS; s += SETTLE_THREADS) m.words[s] = 0;
  fetch_old(t, unit, old);
  await_previous();
  List list;
  const Share mine = share_and_list(m, unit, runs + tile * CHUNKS * BUCKETS, list);
  if (mine.bucket == NOWHERE) return;
  add_up(m, added, list, entries + tile * CHUNKS * CHUNK);
  if (mine.parts > 1) {
    const u64 heavy = tile * HEAVY + mine.heavy;
    if (!join(m, added, common + heavy * 2 * SLOTS, done + heavy, mine)) return;
  }
  const u32 row = mine.bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  for (u32 first = threadIdx.x; first < size; first += SETTLE_THREADS * BATCH) {
    T now[BATCH];
    bool writes[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 s = first + q * SETTLE_THREADS;
      writes[q] = s < size && inside(t, s) && (!IN_PLACE || sum_at(added, s) || added.kinds[s]);
      if (writes[q]) now[q] = old[address(t, s, row, PLACES)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!writes[q]) continue;
      const u32 s = first + q * SETTLE_THREADS, kinds = added.kinds[s];
      const u64 sum = sum_at(added, s);
      if (sum || kinds) now[q] = Narrow<T>::of(result_of(widen(now[q]), sum, kinds));
      out[address(t, s, row, PLACES)] = now[q];
    }
  }
}
