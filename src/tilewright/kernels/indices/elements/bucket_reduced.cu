// Elementwise reductions by buckets (buckets.cuh) of an integer for each term, in any order, by blocks that
// share a bucket, too. What the integer of a term is, and what is made of the whole and of the kinds of all
// terms, joined by an "or", is in logarithms.cuh, whole_numbers.cuh and extremes.cuh; how integers are put
// together in summed_slots.cuh and extremes.cuh.
//
// INCLUDE: the old element is a term.

TW_DEVICE u32* kinds_in(const Settling& m) { return m.words + 2 * SLOTS; }

TW_DEVICE u32 note_of(Carried, u32) { return 0; }

// Whether kinds tell what has to be known: that a place is named, if the old element is no term.
TW_DEVICE bool tells(u32 kinds) { return kinds > (INCLUDE ? NAMED : 0); }

TW_DEVICE void take_terms(const Settling& m, const List& list, const Entry* entries) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const bool valid = from[q] != NOWHERE;
      const u32 slot = valid ? slot_of(e[q]) : NOWHERE;
      u64 integer = valid ? integer_of(widen(value_of(e[q]))) : 0;
      u32 kinds = valid ? kinds_of(widen(value_of(e[q]))) : 0;
      if (all_of_one(slot)) {
        integer = of_warp(integer);
        kinds = of_first_lane(__reduce_or_sync(FULL_WARP, kinds));
      }
      if (integer) put_to(m.words, slot, integer);
      if (tells(kinds)) atomicOr(&kinds_in(m)[slot], kinds);
    }
  });
}

// Bring the terms of all shares of a bucket together; true for the last block to come.
TW_DEVICE bool join(const Settling& m, Key* common, u32* done, const Share& mine) {
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    if (const u64 whole = whole_at(m.words, s)) put_to(&common[s], whole);
    if (const u32 kinds = kinds_in(m)[s]) atomicOr(&common[SLOTS + s], (Key)kinds);
  }
  if (!comes_last(m, done, mine)) return false;
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    set_whole(m.words, s, __ldcg(&common[s]));
    kinds_in(m)[s] = (u32)__ldcg(&common[SLOTS + s]);
  }
  __syncthreads();
  return true;
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, SETTLE_BLOCKS) void settle(const T* old, T* out, const Entry* entries, const u32* runs, Key* common, u32* done) {
  const Settling m = settling();
  const u64 tile = blockIdx.x / (BUCKETS + HEAVY);
  const u32 unit = blockIdx.x % (BUCKETS + HEAVY);
  const Tile t = tile_at(tile);
  for (u32 s = threadIdx.x; s < SLOT_WORDS * SLOTS; s += SETTLE_THREADS) m.words[s] = 0;
  fetch_old(t, unit, old);
  await_previous();
  List list;
  const Share mine = share_and_list(m, unit, runs + tile * CHUNKS * BUCKETS, list);
  if (mine.bucket == NOWHERE) return;
  take_terms(m, list, entries + tile * CHUNKS * CHUNK);
  if (mine.splits > 1) {
    const u64 heavy = tile * HEAVY + mine.heavy;
    if (!join(m, common + heavy * 2 * SLOTS, done + heavy, mine)) return;
  }
  const u32 row = mine.bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  for (u32 first = threadIdx.x; first < size; first += SETTLE_THREADS * BATCH) {
    T now[BATCH];
    bool writes[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 s = first + q * SETTLE_THREADS;
      writes[q] = s < size && inside(t, s) && (!IN_PLACE || whole_at(m.words, s) || kinds_in(m)[s]);
      if (writes[q]) now[q] = old[place_address(t, s, row)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!writes[q]) continue;
      const u32 s = first + q * SETTLE_THREADS, kinds = kinds_in(m)[s];
      const u64 whole = whole_at(m.words, s);
      if (whole || kinds) now[q] = Narrow<T>::of(result_of(widen(now[q]), whole, kinds));
      out[place_address(t, s, row)] = now[q];
    }
  }
}
