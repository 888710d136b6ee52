// Integers of 64 bits, added where many threads may add to one place.

// Where a warp's terms are all of one place, to which they would queue up: of all its lanes, in the first.
TW_DEVICE bool all_of_one(u32 place) {
  int same;
  __match_all_sync(FULL_WARP, place, &same);
  return same;
}
TW_DEVICE u32 of_first_lane(u32 word) { return threadIdx.x % 32 == 0 ? word : 0; }
TW_DEVICE u64 sum_of_warp(u64 integer) {
  TW_UNROLL for (int step = 16; step > 0; step /= 2) integer += __shfl_xor_sync(FULL_WARP, integer, step);
  return threadIdx.x % 32 == 0 ? integer : 0;
}

// In shared memory, which adds 32 bits at once: each half is added modulo 2^32, and whoever wraps the
// lower one carries. Together a sum modulo 2^64.
TW_DEVICE void add_shared(u32* low, u32* high, u64 integer) {
  const u32 mine = (u32)integer, was = atomicAdd(low, mine);
  const u32 rest = (u32)(integer >> 32) + (was + mine < was);
  if (rest) atomicAdd(high, rest);
}
