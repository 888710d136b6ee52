// The phases of winner.cuh as launches, each of which reads its inputs while the one before ends.

#define AWAIT_PREVIOUS [] { await_previous(); }

extern "C" __global__ __launch_bounds__(THREADS) void clear(Pack<u64, 2>* keys) {
  release_next();
  clear_all(keys);
}

extern "C" __global__ __launch_bounds__(THREADS) void elect(const INDEX* index, const T* source, Key* keys, int* fault) {
  release_next();
  elect_turn(AWAIT_PREVIOUS, first_of(0), index, source, keys, fault);
}

extern "C" __global__ __launch_bounds__(THREADS) void write(const T* old, const T* source, T* out, const Key* keys, double number) {
  write_turn(AWAIT_PREVIOUS, first_of(0), old, source, out, keys, number);
}
