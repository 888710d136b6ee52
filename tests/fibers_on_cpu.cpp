// Fibers and launches: what of cuda_on_cpu.hpp is no template, compiled once for all kernels.

PER_BLOCK Dim3 threadIdx, blockIdx, gridDim;
static PER_BLOCK ucontext_t scheduler_context;
static PER_BLOCK jmp_buf scheduler;
PER_BLOCK Block block;
PER_BLOCK Body body;
bool backwards, later_blocks_first;
std::vector<void (*)()> at_block_begin, at_body_end;
unsigned long steps_made;
static int idle_turns;  // since the last step
static uint64_t schedule;  // a random state; 0: nobody is held up
char trouble[200];

void give_up(const char* why, ...) {
  va_list values;
  va_start(values, why);
  const int told = std::snprintf(trouble, sizeof trouble, "thread %u of block %u: ", threadIdx.x, blockIdx.x);
  std::vsnprintf(trouble + told, sizeof trouble - told, why, values);
  va_end(values);
  _longjmp(scheduler, 1);
}
static void leave(Meeting& m) {
  if (--m.members == m.here && m.here) { m.here = 0; ++m.round; }
}
// Its lowest bytes, never to be used, lie about where the stack below begins. A power of two apart, what threads use
// most would have few places in a cache.
static char* stack_of(int thread) { return block.stacks.first + PAGE_BYTES / 2 + (size_t)thread * STACKS_APART; }
void end() {
  ++steps_made;
  for (int i = 0; i < SPARE_WORDS; ++i)
    if (((uint64_t*)stack_of(threadIdx.x))[i]) give_up("needs more than %d bytes of stack", STACK_BYTES - SPARE_WORDS * 8);
  block.fibers[threadIdx.x].done = true;
  leave(block.warps[threadIdx.x / 32]);
  leave(block.all);
  _longjmp(scheduler, 1);
}
static void enter() {
  _setjmp(block.fibers[threadIdx.x].begin);
  body.call(body.kernel, body.args);
  for (auto look : at_body_end) look();
  end();
}
void give_way() {
  const unsigned me = threadIdx.x;
  if (!_setjmp(block.fibers[me].here)) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
void meet(Meeting& m) {
  ++steps_made;
  if (++m.here == m.members) { m.here = 0; ++m.round; return; }
  Fiber& f = block.fibers[threadIdx.x];
  f.awaited = &m, f.round = m.round;
  give_way();  // the scheduler looks whether all have come
  f.awaited = nullptr;
}
void begin_block(int threads) {
  if (!block.stacks.first) {
    block.stacks.bytes = (size_t)threads * STACKS_APART + PAGE_BYTES;
    void* const found = mmap(nullptr, block.stacks.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) std::perror("stacks"), std::abort();
    block.stacks.first = (char*)found;
    block.fibers.assign(threads, Fiber());
  }
  block.warps.assign((threads + 31) / 32, Meeting());
  block.all = Meeting();
  block.all.members = threads;
  block.held = block.turns_left = 0;
  for (Meeting& m : block.groups) m = Meeting();
  for (int i = 0; i < threads; ++i) {
    ++block.warps[i / 32].members;
    block.fibers[i].started = block.fibers[i].done = false;
    block.fibers[i].awaited = nullptr;
  }
  for (auto forget : at_block_begin) forget();
}
static void go_on(Fiber& f, int thread) {
  if (f.started) _longjmp(f.here, 1);
  f.started = true;
  if (std::exchange(f.prepared, true)) _longjmp(f.begin, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(thread);
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  swapcontext(&scheduler_context, &context);
}
static unsigned drawn() {
  schedule = schedule * 6364136223846793005u + 1442695040888963407u;
  return schedule >> 33;
}
// One warp is held up, or about a quarter of them, or none; where the others only wait, it is not for long.
static void hold_some() {
  if (!schedule || (--block.turns_left > 0 && idle_turns < IDLE_TURNS_HELD)) return;
  block.turns_left = 1 + drawn() % MOST_TURNS_HELD;
  const unsigned how = drawn() % 4, any = drawn() & drawn();
  block.held = how > 1 ? uint64_t(1) << drawn() % block.warps.size() : how ? any : 0;
}
bool turn_of_block() {
  hold_some();
  const int threads = block.fibers.size();
  const unsigned long before = steps_made;
  volatile bool alive = false;
  for (volatile int n = 0; n < threads; n = n + 1) {
    const int i = backwards ? threads - 1 - n : n;
    Fiber& f = block.fibers[i];
    if (f.done) continue;
    alive = true;
    if (block.held >> i / 32 & 1 || (f.awaited && f.awaited->round == f.round)) continue;
    threadIdx = {(unsigned)i, 0, 0};
    if (!_setjmp(scheduler)) go_on(f, i);
    if (*trouble) return false;
  }
  idle_turns = steps_made == before ? idle_turns + 1 : 0;
  if (alive && idle_turns > MOST_IDLE_TURNS && !_setjmp(scheduler)) give_up("waits for what never comes");
  return alive && !*trouble;
}

void begin_launch(const Launch& l) {
  gridDim = {(unsigned)l.grid[0], (unsigned)l.grid[1], (unsigned)l.grid[2]};
  *trouble = idle_turns = 0;
  const char* const number = std::getenv("EMULATED_SCHEDULE");
  schedule = number ? std::strtoull(number, nullptr, 10) : 0;
}
const char* launch(Body kernel, const Launch& l) {
  begin_launch(l);
  body = kernel;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned n = 0; n < gridDim.x && !*trouble; ++n) {
        blockIdx = {backwards || later_blocks_first ? gridDim.x - 1 - n : n, y, z};
        std::memset(l.shared, 0xff, l.shared_bytes);
        begin_block(l.threads);
        while (turn_of_block()) {}
      }
  block = Block();  // each library has its own stacks, and a process many libraries
  return trouble;
}

// The same where blocks wait for one another: all of them go on in turn, each with what is its own.
struct Resident {
  Block block;
  std::vector<char> shared;
  Dim3 at;
  bool alive;
  void resume(const Launch& l) {
    std::swap(block, ::block);
    std::memcpy(l.shared, shared.data(), l.shared_bytes);
    blockIdx = at;
  }
  void pause(const Launch& l) {
    std::swap(block, ::block);
    std::memcpy(shared.data(), l.shared, l.shared_bytes);
  }
};
const char* launch_together(Body kernel, const Launch& l) {
  begin_launch(l);
  body = kernel;
  std::vector<Resident> residents(gridDim.x);
  for (unsigned n = 0; n < gridDim.x; ++n) {
    Resident& r = residents[n];
    r.at = {backwards || later_blocks_first ? gridDim.x - 1 - n : n, 0, 0};
    r.shared.assign(l.shared_bytes, (char)0xff);
    r.resume(l);
    begin_block(l.threads);
    r.pause(l);
    r.alive = true;
  }
  for (bool alive = true; alive && !*trouble;) {
    alive = false;
    for (Resident& r : residents) {
      if (!r.alive || *trouble) continue;
      r.resume(l);
      r.alive = turn_of_block();
      r.pause(l);
      alive |= r.alive;
    }
  }
  return trouble;
}
