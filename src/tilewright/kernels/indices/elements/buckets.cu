// Elementwise scatter by buckets (buckets.cuh): the last element of each slot wins, by a maximum.
//
// Of each slot: the winner's position in the tile plus one, then its value if it is CARRIED, else winners
// fetch them.

TW_DEVICE u32 note_of(Carried, u32 position) { return position; }

struct Winners { u32 *order, *value; };
TW_DEVICE Winners winners(const Settling& m) { return {m.words, m.words + SLOTS}; }

// Let the listed entries compete for the bucket's slots. In each round of BATCH entries a thread the
// latest position of a slot wins, and then leaves its value.
TW_DEVICE void compete(const Settling& m, const Winners& w, const List& list, const Entry* entries) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    u32 order[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      order[q] = from[q] == NOWHERE ? 0 : from[q] * CHUNK + 1 + note_of(e[q]);
      const u32 slot = order[q] ? slot_of(e[q]) : NOWHERE;
      int same;  // as where an index repeats, when maxima would queue up
      __match_all_sync(FULL_WARP, slot, &same);
      if (same && order[q] != __reduce_max_sync(FULL_WARP, order[q])) order[q] = 0;
      if (order[q]) atomicMax(&w.order[slot], order[q]);
    }
    if (!CARRIED) return;
    __syncthreads();
    TW_UNROLL for (int q = 0; q < BATCH; ++q)
      if (order[q] && w.order[slot_of(e[q])] == order[q]) w.value[slot_of(e[q])] = (u32)((u64)e[q] >> 32);
    __syncthreads();
  });
}

// Bring the winners of all shares of a bucket together; true for the last block to come.
TW_DEVICE bool join(const Settling& m, const Winners& w, Key* common, u32* done, const Share& mine) {
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    Key key = w.order[s];
    if constexpr (CARRIED) key = key << 32 | w.value[s];
    if (w.order[s]) atomicMax(&common[s], key);
  }
  if (!comes_last(m, done, mine)) return false;
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) {
    const Key key = __ldcg(&common[s]);
    if constexpr (CARRIED) w.value[s] = (u32)key;
    w.order[s] = (u32)(CARRIED ? (u64)key >> 32 : key);
  }
  __syncthreads();
  return true;
}

TW_DEVICE T value_at(const Winners& w, u32 slot, const Tile& t, const T* source, double number) {
  if constexpr (NUMBER) return Narrow<T>::of((A)number);
  else if constexpr (CARRIED) return of_bits<T>(w.value[slot]);
  else return source[source_address(t, w.order[slot] - 1)];
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, SETTLE_BLOCKS) void settle(const T* old, const T* source, T* out, const Entry* entries, const u32* runs, Key* common, u32* done, double number, const u32* state) {
  const Settling m = settling();
  const Winners w = winners(m);
  const u64 tile = blockIdx.x / (BUCKETS + HEAVY);
  const u32 unit = blockIdx.x % (BUCKETS + HEAVY);
  const Tile t = tile_at(tile);
  for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) w.order[s] = 0;
  fetch_old(t, unit, old);
  await_previous();
  if (rising(state)) return;
  runs += tile * CHUNKS * BUCKETS;
  List list;
  const Share mine = share_and_list(m, unit, runs, list);
  if (mine.bucket == NOWHERE) return;
  compete(m, w, list, entries + tile * CHUNKS * CHUNK);
  if (mine.splits > 1) {
    const u64 heavy = tile * HEAVY + mine.heavy;
    if (!join(m, w, common + heavy * SLOTS, done + heavy, mine)) return;
  }
  const u32 row = mine.bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  for (u32 first = threadIdx.x; first < size; first += SETTLE_THREADS * BATCH) {
    T now[BATCH];
    bool writes[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 s = first + q * SETTLE_THREADS;
      writes[q] = s < size && inside(t, s);
      if (!writes[q]) continue;
      if (w.order[s]) now[q] = value_at(w, s, t, source, number);
      else if (IN_PLACE) writes[q] = false;
      else now[q] = old[place_address(t, s, row)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q)
      if (writes[q]) out[place_address(t, first + q * SETTLE_THREADS, row)] = now[q];
  }
}
