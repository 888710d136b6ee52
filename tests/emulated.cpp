// Memory, barriers and copies of generated kernels: what of emulated.hpp and emulated.py is no template,
// compiled once for all kernels.

unsigned comes_to;
static std::vector<std::pair<long, long>> known;

extern "C" void come_to(unsigned meeting) { comes_to = meeting; }
extern "C" void go_backwards(bool now) { backwards = now; }
extern "C" void know_memory(int count, const long* first, const long* end) {
  known.clear();
  for (int i = 0; i < count; ++i) known.push_back({first[i], end[i]});
}
static const bool all_meet = (at_body_end.push_back([] { if (comes_to) give_up("ends without meeting %u", comes_to); }), true);
void look_up(long at, int bytes) {
  for (auto [first, end] : known)
    if (at >= first && at + bytes <= end) return;
  give_up("accesses %d bytes at %p, outside of all tensors", bytes, (void*)at);
}

// A copy is done at once, as one that overtakes a reader would be; or, threads going backwards,
// when somebody waits for it, as one that nobody waits for never would be.
struct Copy { void* to; const void* from; u32 bytes; u64* arrived; };
static PER_BLOCK std::vector<Copy> copies;
static const bool copies_forgotten = (at_block_begin.push_back([] { copies.clear(); }), true);
static void deliver(const Copy& c) {
  for (u32 i = 0; i < c.bytes; i += 16) touch((const char*)c.from + i, 16);
  if ((long)c.to % 16 || c.bytes % 16) give_up("copies %u bytes to %p", c.bytes, c.to);
  std::memcpy(c.to, c.from, c.bytes);
  barrier_at(c.arrived).bytes -= c.bytes;
  settle(barrier_at(c.arrived));
}
void copy_bulk(void* to, const void* from, u32 bytes, u64* arrived) {
  if (!backwards) return deliver({to, from, bytes, arrived});
  copies.push_back({to, from, bytes, arrived});
}
void barrier_wait(u64* b, u32 parity) {
  while (barrier_at(b).round % 2 == (int)parity) {
    for (size_t i = 0; i < copies.size();)
      if (copies[i].arrived == b) deliver(copies[i]), copies.erase(copies.begin() + i);
      else ++i;
    if (barrier_at(b).round % 2 == (int)parity) give_way();
  }
  ++steps_made;
}
