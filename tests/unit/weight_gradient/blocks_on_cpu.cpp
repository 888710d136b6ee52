// What blocks_on_cpu.hpp declares.

enum { MOST_TURNS = 64 };
struct Neighbour {
  Block block;
  std::vector<unsigned char> dynamic, variables;  // of its shared memory, while others are at work
  std::vector<int> arrived;  // threads at the cluster's barrier: its round, or -1 where they have not
  Dim3 at;
  bool alive;
};
static std::vector<Neighbour> residents;
static std::vector<Meeting> clusters;
static unsigned at_work, cluster_size = 1;
std::vector<void (*)(unsigned)> at_change;
static const bool copies_are_a_blocks_own = (at_change.push_back(change_places<copies>), true);

static void begin_turn(const Launch& l, unsigned n) {
  Neighbour& r = residents[at_work = n];
  std::swap(r.block, block);
  std::memcpy(l.shared, r.dynamic.data(), l.shared_bytes);
  std::memcpy(of_block_begins, r.variables.data(), r.variables.size());
  for (auto change : at_change) change(n);
  blockIdx = r.at;
}
static void end_turn(const Launch& l) {
  Neighbour& r = residents[at_work];
  std::swap(r.block, block);
  std::memcpy(r.dynamic.data(), l.shared, l.shared_bytes);
  std::memcpy(r.variables.data(), of_block_begins, r.variables.size());
  for (auto change : at_change) change(at_work);
}
const char* launch_in_turn(Body kernel, const Launch& l, int size) {
  begin_launch(l);
  body = kernel;
  cluster_size = size;
  const unsigned count = gridDim.x * gridDim.y * gridDim.z;
  clusters.assign(count / size, Meeting());
  for (Meeting& m : clusters) m.members = size * l.threads;
  residents.clear();
  residents.resize(count);
  for (unsigned n = 0; n < count; ++n) {
    Neighbour& r = residents[n];
    r.at = {n % gridDim.x, n / gridDim.x % gridDim.y, n / gridDim.x / gridDim.y};
    r.dynamic.assign(l.shared_bytes, 0xff);
    r.variables.assign(of_block_ends - of_block_begins, 0xff);
    r.arrived.assign(l.threads, -1);
    r.alive = true;
    begin_turn(l, n);
    begin_block(l.threads);
    end_turn(l);
  }
  for (bool alive = true; alive && !*trouble;) {
    alive = false;
    for (unsigned i = 0; i < count && !*trouble; ++i) {
      const unsigned n = backwards ? count - 1 - i : i;
      if (!residents[n].alive) continue;
      begin_turn(l, n);
      int turns = backwards ? MOST_TURNS : 1;
      while ((residents[n].alive = turn_of_block()) && --turns) {}
      end_turn(l);
      alive |= residents[n].alive;
    }
  }
  residents.clear();
  return trouble;
}

// ---- clusters -----------------------------------------------------------------------------------

unsigned char* shared_of(unsigned rank, unsigned offset, unsigned bytes) {
  unsigned char* const own = shared_at(offset, bytes);
  const unsigned n = at_work / cluster_size * cluster_size + rank;
  if (rank >= cluster_size) give_up("block %u of a cluster of %u", rank, cluster_size);
  if (n == at_work) return own;
  Neighbour& r = residents[n];
  if (!r.alive) give_up("shared memory of block %u, which has ended", r.at.x);
  const bool variable = own >= of_block_begins && own < of_block_ends;
  return variable ? r.variables.data() + (own - of_block_begins) : r.dynamic.data() + offset;
}
void arrive_at_cluster() {
  Meeting& m = clusters[at_work / cluster_size];
  int& arrived = residents[at_work].arrived[threadIdx.x];
  if (arrived >= 0) give_up("arrives twice at the cluster's barrier");
  arrived = m.round;
  ++steps_made;
  if (++m.here == m.members) m.here = 0, ++m.round;
}
void wait_for_cluster() {
  const Meeting& m = clusters[at_work / cluster_size];
  const int arrived = residents[at_work].arrived[threadIdx.x];
  if (arrived < 0) give_up("waits at the cluster's barrier, where it has not arrived");
  while (m.round == arrived) give_way();
  residents[at_work].arrived[threadIdx.x] = -1;
  ++steps_made;
}
