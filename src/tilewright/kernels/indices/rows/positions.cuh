// For each place the last position of the index that names it, or -1.
// IN_PLACE: places that the index does not name have none, and are left as they are.

#define THREADS 256

#if !BATCHED  // else batches.cuh has them
TW_DEVICE u64 named_at(const INDEX* index, u64 i, u32) { return (u64)(i64)index[i]; }
TW_DEVICE u32 place_at(const INDEX* index, u64 i, u32 places, i64 skipped, int* fault) {
  return place_of(index[i], places, skipped, fault);
}
#endif

// No place has one.
template <class... More> TW_DEVICE void forget(const INDEX* index, int* positions, u32 count, u32 places, i64 skipped, int* fault, More... more) {
  const u32 last = IN_PLACE ? count : places;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < last; i += (u64)gridDim.x * THREADS) {
    const u32 place = IN_PLACE ? place_at(index, i, places, skipped, fault, more...) : (u32)i;
    if (place < places) positions[place] = -1;
  }
}

// For all lanes of a warp at once; of several positions of a place all but one get true.
TW_DEVICE bool claim(int* positions, u32 place, u32 places, int position) {
  int same;  // as in sorted indices: the last lane's position is the largest
  __match_all_sync(FULL_WARP, place, &same);
  if (place >= places) return false;
  if (same && threadIdx.x % 32 != 31) return true;
  return atomicMax(&positions[place], position) >= 0;
}
