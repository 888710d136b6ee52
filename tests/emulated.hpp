// CUDA's words for a CPU: the threads of a block are fibers, which run until they must wait for one
// another; blocks run one after another. Every access must be aligned and inside a known tensor.
// Every other launch goes through threads and blocks backwards: where a barrier is missing, its
// results differ.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

using std::fmax;
using std::fmin;

#define __CUDA_ARCH__ 800
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, gridDim;

// ---- fibers --------------------------------------------------------------------------------------

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned block_threads;
static bool backwards;

static void yield() {
  const unsigned me = threadIdx.x;
  swapcontext(&fibers[me].context, &scheduler);
}

struct Meeting {
  unsigned arrived, generation;
  void operator()(unsigned threads) {
    const unsigned mine = generation;
    if (++arrived == threads) arrived = 0, ++generation;
    else while (generation == mine) yield();
  }
};
static Meeting block_meeting, warp_meetings[32], group_meetings[32];
static uint64_t exchanged[1024];

static void __syncthreads() { block_meeting(block_threads); }
static void named_sync(int group, int threads) { group_meetings[group](threads); }
static void warp_sync() {
  const unsigned warp = threadIdx.x / 32;
  warp_meetings[warp](std::min(32u, block_threads - warp * 32));
}
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  T other;
  std::memcpy(&exchanged[threadIdx.x], &x, sizeof(T));
  warp_sync();
  std::memcpy(&other, &exchanged[threadIdx.x ^ mask], sizeof(T));
  warp_sync();
  return other;
}

// ---- memory --------------------------------------------------------------------------------------

static std::vector<std::pair<long, long>> known;
static int faults;

extern "C" void go_backwards(bool now) { backwards = now; }
extern "C" void know_memory(int count, const long* first, const long* end) {
  known.clear();
  for (int i = 0; i < count; ++i) known.push_back({first[i], end[i]});
}
extern "C" int count_faults() { return std::exchange(faults, 0); }
static void touch(const void* p, int bytes) {
  const long at = (long)p;
  for (auto [first, end] : known) {
    if (at % bytes == 0 && at >= first && at + bytes <= end) return;
  }
  ++faults;
}

// ---- functions that CUDA has built in ------------------------------------------------------------

template <class To, class From> To same_bits(From x) {
  To r;
  std::memcpy(&r, &x, sizeof(To));
  return r;
}
static float __int_as_float(int i) { return same_bits<float>(i); }
static float __uint_as_float(unsigned i) { return same_bits<float>(i); }
static unsigned __float_as_uint(float f) { return same_bits<unsigned>(f); }
static unsigned atomicAdd(unsigned* p, unsigned more) { return std::exchange(*p, *p + more); }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static double rsqrt(double x) { return 1 / sqrt(x); }
static unsigned long __cvta_generic_to_shared(const void* p) { return (unsigned long)p; }

// ---- launching -----------------------------------------------------------------------------------

static void (*job)(void*);
static void* job_data;

static void enter() {
  job(job_data);
  Fiber& mine = fibers[threadIdx.x];
  mine.done = true;
  swapcontext(&mine.context, &scheduler);
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(std::decay_t<A>*)args[I]...);
}
static void run_block() {
  block_meeting = {};
  for (Meeting& each : warp_meetings) each = {};
  for (Meeting& each : group_meetings) each = {};
  for (unsigned t = 0; t < block_threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.done = false;
    fiber.stack.resize(64 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned left = block_threads; left;) {
    for (unsigned i = 0; i < block_threads; ++i) {
      const unsigned t = backwards ? block_threads - 1 - i : i;
      if (fibers[t].done) continue;
      threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t].context);
      left -= fibers[t].done;
    }
  }
}
template <class... A> void emulate(void (*kernel)(A...), int grid, int block, void** args) {
  struct Data { void (*kernel)(A...); void** args; } data{kernel, args};
  job = [](void* p) { call(((Data*)p)->kernel, ((Data*)p)->args, std::index_sequence_for<A...>{}); };
  job_data = &data;
  block_threads = block;
  gridDim.x = grid;
  fibers.resize(1024);
  for (int i = 0; i < grid; ++i) {
    blockIdx.x = backwards ? grid - 1 - i : i;
    run_block();
  }
}
