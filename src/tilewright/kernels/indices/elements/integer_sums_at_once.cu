// The phases of integer_sums.cuh in one launch, whose blocks all run at once and wait for one another in
// between (meet.cuh): AT_ONCE threads of an SM.

extern "C" __global__ __launch_bounds__(THREADS, AT_ONCE / THREADS) void add(const T* old, const INDEX* index, T* out, u32* marks, Integer* integers, u32* counter, u32 count, u32 places, u32 unit_bits, double alpha, i64 skipped, int* fault MORE_PARAMETERS) {
  const bool again = turns(count) > 1;  // else what was read first is still at hand
  Given g;
  read<true>(g, first_of(0), count, index, skipped, fault MORE);
  clear_all(index, marks, integers, count, places, skipped, fault MORE);
  arrive_all(counter);
  bound_all([=] { await_all(counter, 1, 3); }, g, index, marks, count, places, skipped, fault MORE);
  arrive_all(counter);
  if (again) read<true>(g, first_of(0), count, index, skipped, fault MORE);
  add_all([=] { await_all(counter, 2, 3); }, g, index, marks, integers, count, places, unit_bits, skipped, fault MORE);
  arrive_all(counter);
  if (again && BY_NAME) read<false>(g, first_of(0), count, index, skipped, fault MORE);
  finish_all([=] { await_all(counter, 3, 3); }, g, old, index, out, marks, integers, count, places, unit_bits, alpha, skipped, fault MORE);
}
