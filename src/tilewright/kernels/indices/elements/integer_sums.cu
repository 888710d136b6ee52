// The phases of integer_sums.cuh as launches, each of which reads its inputs while the one before ends.

#define AWAIT_PREVIOUS [] { await_previous(); }

extern "C" __global__ __launch_bounds__(THREADS) void clear(const INDEX* index, u32* marks, Integer* integers, u32 count, u32 places, i64 skipped, int* fault MORE_PARAMETERS) {
  release_next();
  clear_all(index, marks, integers, count, places, skipped, fault MORE);
}

extern "C" __global__ __launch_bounds__(THREADS) void bound(const INDEX* index, u32* marks, u32 count, u32 places, i64 skipped, int* fault MORE_PARAMETERS) {
  release_next();
  Given g;
  read<true>(g, first_of(0), count, index, skipped, fault MORE);
  bound_all(AWAIT_PREVIOUS, g, index, marks, count, places, skipped, fault MORE);
}

extern "C" __global__ __launch_bounds__(THREADS) void add(const INDEX* index, const u32* marks, Integer* integers, u32 count, u32 places, u32 unit_bits, i64 skipped, int* fault MORE_PARAMETERS) {
  release_next();
  Given g;
  read<true>(g, first_of(0), count, index, skipped, fault MORE);
  add_all(AWAIT_PREVIOUS, g, index, marks, integers, count, places, unit_bits, skipped, fault MORE);
}

extern "C" __global__ __launch_bounds__(THREADS) void finish(const T* old, const INDEX* index, T* out, u32* marks, const Integer* integers, u32 count, u32 places, u32 unit_bits, double alpha, i64 skipped, int* fault MORE_PARAMETERS) {
  release_next();
  Given g;
  if (BY_NAME) read<false>(g, first_of(0), count, index, skipped, fault MORE);
  finish_all(AWAIT_PREVIOUS, g, old, index, out, marks, integers, count, places, unit_bits, alpha, skipped, fault MORE);
}
