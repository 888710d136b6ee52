// What surrounds a sort by PyTorch: keys before it, as narrow as the places allow, and entries after.
// KEY is a key's type, and LEAST its least value, which stands for place 0.

// The kernel also makes the `words` at `cleared` zero, for those that come after the sort.
extern "C" __global__ __launch_bounds__(THREADS) void write_keys(const INDEX* index, u32 count, u32 places, i64 skipped, int* fault, KEY* keys, u32* cleared, u32 words) {
  follow_previous();
  const u32 i = blockIdx.x * THREADS + threadIdx.x;
  for (u32 k = i; k < words; k += gridDim.x * THREADS) cleared[k] = 0;
  if (i < count) keys[i] = (KEY)((i64)place_of(index[i], places, skipped, fault) + LEAST);
}

extern "C" __global__ __launch_bounds__(THREADS) void write_entries(const KEY* keys, const i64* positions, u32 count, Entry* entries) {
  follow_previous();
  const u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < count) entries[i] = {(u32)((i64)keys[i] - LEAST), (u32)positions[i]};
}

