// The phases of winner.cuh in one launch, whose blocks all run at once and wait for one another in between
// (meet.cuh): AT_ONCE threads of an SM.

extern "C" __global__ __launch_bounds__(THREADS, AT_ONCE / THREADS) void elect(const T* old, const INDEX* index, const T* source, T* out, Key* keys, double number, u32* counter, int* fault) {
  const u64 of_turn = (u64)gridDim.x * THREADS * ITEMS;
  clear_all((Pack<u64, 2>*)keys);
  arrive_all(counter);
  elect_turn([=] { await_all(counter, 1, 2); }, first_of(0), index, source, keys, fault);
  for (u64 turn = 1; turn * of_turn < POSITIONS; ++turn) elect_turn([] {}, first_of(turn), index, source, keys, fault);
  arrive_all(counter);
  write_turn([=] { await_all(counter, 2, 2); }, first_of(0), old, source, out, keys, number);
  for (u64 turn = 1; turn * of_turn < CELLS; ++turn) write_turn([] {}, first_of(turn), old, source, out, keys, number);
}
