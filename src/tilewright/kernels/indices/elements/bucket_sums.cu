// Elementwise sums by buckets (buckets.cuh): terms are added as integers (integers.cuh), in any order.
//
// A block goes over its list twice, for the marks of its slots and for their integers. Blocks that share
// a bucket have units of their own: each leaves its sums, and the last adds these in the blocks' order.
// SCALED: alpha times the sum is added.

// Of each slot. Integers in two halves, since shared memory adds 32 bits at once.
struct Sums {
  u32 *mark, *halves;
  TW_DEVICE u32* low(int limb) const { return halves + 2 * limb * SLOTS; }
  TW_DEVICE u32* high(int limb) const { return low(limb) + SLOTS; }
  TW_DEVICE Integer at(u32 s) const {
    Integer r;
    EACH_LIMB(p) r.limb[p] = (u64)high(p)[s] << 32 | low(p)[s];
    return r;
  }
};
TW_DEVICE Sums sums_of(const Settling& m) { return {m.words, m.words + SLOTS}; }

// The mark of a value that is apart from its entry's word; else it is made where it is needed.
TW_DEVICE u32 note_of(Carried value, u32) { return LIMBS > 1 ? mark_of((Term)value) : 0; }
TW_DEVICE u32 mark_at(const Entry& e) { return LIMBS > 1 ? note_of(e) : mark_of(widen(value_of(e))); }

TW_DEVICE void look(const Settling& m, const Sums& sums, const List& list, const Entry* entries) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 slot = from[q] == NOWHERE ? NOWHERE : slot_of(e[q]);
      u32 mark = slot == NOWHERE ? UNNAMED : mark_at(e[q]);
      if (all_of_one(slot)) mark = of_first_lane(__reduce_max_sync(FULL_WARP, mark));
      if (mark != UNNAMED) atomicMax(&sums.mark[slot], mark);
    }
  });
}

TW_DEVICE void add_up(const Settling& m, const Sums& sums, const List& list, const Entry* entries, u32 unit_bits) {
  take_all(m, list, entries, [&](const Entry (&e)[BATCH], const u32 (&from)[BATCH]) {
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 slot = from[q] == NOWHERE ? NOWHERE : slot_of(e[q]), mark = slot == NOWHERE ? UNNAMED : sums.mark[slot];
      if (mark == NOT_FINITE) {
        if (const u32 kind = kind_of(widen(value_of(e[q])))) atomicOr(&sums.low(0)[slot], kind);
      }
      const Integer integer = adds(mark) ? integer_of(widen(value_of(e[q])), mark, unit_bits) : Integer{};
      const bool alike = all_of_one(slot);
      EACH_LIMB(p) {
        const u64 limb = alike ? sum_of_warp(integer.limb[p]) : integer.limb[p];
        if (limb) add_shared(&sums.low(p)[slot], &sums.high(p)[slot], limb);
      }
    }
  });
}

// What all blocks of a bucket have left of a slot, in their order: those of first blocks of all buckets lie
// before those of blocks beside.
TW_DEVICE double sum_of_partials(const double* partials, const Share& mine) {
  double sum = __ldcg(&partials[(u64)mine.heavy * SLOTS]);
  for (u32 p = 1; p < mine.splits; ++p) sum += __ldcg(&partials[(u64)(HEAVY + mine.beside + p - 1) * SLOTS]);
  return sum;
}

extern "C" __global__ __launch_bounds__(SETTLE_THREADS, SETTLE_BLOCKS) void settle(const T* old, T* out, const Entry* entries, const u32* runs, double* common, u32* done, double alpha) {
  const Settling m = settling();
  const Sums sums = sums_of(m);
  const u64 tile = blockIdx.x / (BUCKETS + HEAVY);
  const u32 unit = blockIdx.x % (BUCKETS + HEAVY);
  const Tile t = tile_at(tile);
  for (u32 s = threadIdx.x; s < SLOT_WORDS * SLOTS; s += SETTLE_THREADS) m.words[s] = 0;
  fetch_old(t, unit, old);
  await_previous();
  List list;
  const Share mine = share_and_list(m, unit, runs + tile * CHUNKS * BUCKETS, list);
  if (mine.bucket == NOWHERE) return;
  double* partials = common + tile * 2 * HEAVY * SLOTS;
  double* here = partials + (u64)(mine.split ? HEAVY + mine.beside + mine.split - 1 : mine.heavy) * SLOTS;
  const u32 unit_bits = 30 + __clz(min(list.total, (u32)LENGTH));  // so many are of one slot at most
  look(m, sums, list, entries + tile * CHUNKS * CHUNK);
  add_up(m, sums, list, entries + tile * CHUNKS * CHUNK, unit_bits);
  const auto sum_at = [&](u32 s) { return sum_of(sums.at(s), sums.mark[s], unit_bits); };
  if (mine.splits > 1) {
    for (u32 s = threadIdx.x; s < SLOTS; s += SETTLE_THREADS) here[s] = sum_at(s);
    if (!comes_last(m, done + tile * HEAVY + mine.heavy, mine)) return;
  }
  const u32 row = mine.bucket << SHIFT, size = min(1u << SHIFT, PLACES - row) * WIDTH;
  for (u32 first = threadIdx.x; first < size; first += SETTLE_THREADS * BATCH) {
    T now[BATCH];
    bool writes[BATCH];
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      const u32 s = first + q * SETTLE_THREADS;
      writes[q] = s < size && inside(t, s) && !(IN_PLACE && mine.splits == 1 && sums.mark[s] == UNNAMED);
      if (writes[q]) now[q] = old[place_address(t, s, row)];
    }
    TW_UNROLL for (int q = 0; q < BATCH; ++q) {
      if (!writes[q]) continue;
      const u32 s = first + q * SETTLE_THREADS;
      double sum = mine.splits > 1 ? sum_of_partials(partials + s, mine) : sum_at(s);
      if (SCALED) sum *= alpha;
      out[place_address(t, s, row)] = Narrow<T>::of((Term)((double)widen(now[q]) + sum));
    }
  }
}
