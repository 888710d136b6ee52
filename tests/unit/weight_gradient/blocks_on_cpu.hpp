// Blocks that wait for one another, or read each other's shared memory: all blocks of a launch are there at once
// and take turns, each with what is its own. `size` blocks in a row are a cluster.
//
// Backwards, a block goes on as far as it gets before the others do.

#pragma GCC visibility push(hidden)
extern std::vector<void (*)(unsigned)> at_change;  // what else is a block's own changes places with what is kept of that one
const char* launch_in_turn(Body kernel, const Launch& l, int size);
// Shared memory of a block of this cluster, where this block has `offset`.
unsigned char* shared_of(unsigned rank, unsigned offset, unsigned bytes);
void arrive_at_cluster();
void wait_for_cluster();
#pragma GCC visibility pop
template <auto& own> static void change_places(unsigned n) {
  static std::vector<std::remove_reference_t<decltype(own)>> kept;
  if (kept.size() <= n) kept.resize(n + 1);
  std::swap(kept[n], own);
}
