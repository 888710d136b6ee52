// Clusters: the blocks of each run side by side, every one as a thread of the machine with shared memory
// of its own, and take turns, so that only one of them goes on at a time.

#include <condition_variable>
#include <mutex>
#include <thread>

static PER_BLOCK char origin;
static PER_BLOCK unsigned rank_now;
static std::vector<char*> origins;  // blocks have memory laid out alike, each from an origin of its own
static Meeting together;
u32 cluster_rank() { return rank_now; }
void barriers_ready() { meet(together); }
long way_to_block(u32 rank) { return origins[rank] - &origin; }

static std::mutex one_at_a_time;
static std::condition_variable next_turn;
static std::vector<bool> running;
static unsigned turn;

static void wait_for_turn(std::unique_lock<std::mutex>& lock) {
  next_turn.wait(lock, [] { return turn == rank_now; });
}
static void pass_turn() {
  for (size_t n = 0; n < running.size(); ++n) {
    turn = (turn + 1) % running.size();
    if (running[turn]) break;
  }
  next_turn.notify_all();
}
// Run the block of this rank, when it is its turn.
static void run_in_turn(unsigned rank, const Launch& l, void* (*memory)()) {
  std::unique_lock<std::mutex> lock(one_at_a_time);
  rank_now = rank;
  wait_for_turn(lock);
  origins[rank] = &origin;
  pass_turn();  // everybody's memory is known before anybody begins
  wait_for_turn(lock);
  std::memset(memory(), 0xff, l.shared_bytes);
  begin_block(l.threads);
  for (int turns = 1; turn_of_block(); ++turns) {
    if (backwards && turns % 64) continue;  // as far as it gets before the others begin
    pass_turn();
    wait_for_turn(lock);
  }
  running[rank] = false;
  pass_turn();
}
const char* launch_clusters(Body kernel, const Launch& l, int blocks, void* (*memory)()) {
  begin_launch(l);
  const unsigned grid = l.grid[0], every = grid * l.grid[1];
  for (unsigned done = 0; done < every && !*trouble; done += blocks) {
    const unsigned n = done % grid, y = done / grid;
    const unsigned first = backwards ? grid - blocks - n : n;
    origins.assign(blocks, nullptr);
    running.assign(blocks, true);
    turn = backwards ? blocks - 1 : 0;
    together = Meeting();
    together.members = blocks * l.threads;
    std::vector<std::thread> machine;
    for (int rank = 0; rank < blocks; ++rank)
      machine.emplace_back([=] {
        gridDim = {grid, (unsigned)l.grid[1], 1};
        blockIdx = {first + rank, y, 0};
        body = kernel;
        run_in_turn(rank, l, memory);
      });
    for (std::thread& t : machine) t.join();
  }
  return trouble;
}
