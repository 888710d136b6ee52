// Enough of CUDA C++ to run our kernels on a CPU, one block after the other: each thread is a fiber,
// and warp-wide functions and barriers switch to the next one. Slow, and single-threaded. Threads and
// blocks take their turns forwards, or backwards: where a barrier is missing, results differ.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <csetjmp>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __ldcs(p) (*(p))
#define __ldcg(p) (*(p))
#define __threadfence()
#define __popc(x) __builtin_popcount(x)
#define __ffs(x) __builtin_ffs(x)
#define __clz(x) ((x) ? __builtin_clz(x) : 32)

#ifndef PER_BLOCK
#define PER_BLOCK  // what each of several blocks that run at once has for itself
#endif

struct Dim3 { unsigned x, y, z; };
static PER_BLOCK Dim3 threadIdx, blockIdx, gridDim;

template <class A, class B> static auto min(A a, B b) -> decltype(a + b) { return a < b ? a : b; }
template <class A, class B> static auto max(A a, B b) -> decltype(a + b) { return a > b ? a : b; }
template <class To, class From> static To cast_bits(From x) { To to; static_assert(sizeof to == sizeof x); std::memcpy(&to, &x, sizeof x); return to; }
static inline float __uint_as_float(unsigned x) { return cast_bits<float>(x); }
static inline float __int_as_float(int x) { return cast_bits<float>(x); }
static inline float __fmul_rn(float a, float b) { volatile float product = a * b; return product; }
static inline int __float_as_int(float x) { return cast_bits<int>(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline double __dmul_rn(double a, double b) { volatile double product = a * b; return product; }
static inline unsigned __float_as_uint(float x) { return cast_bits<unsigned>(x); }
static inline long long __double2ll_rn(double x) { return std::llrint(x); }
static inline long long __double_as_longlong(double x) { return cast_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return cast_bits<double>(x); }

static float half_value(uint16_t bits, bool brain) {
  return brain ? cast_bits<float>((uint32_t)bits << 16) : (float)cast_bits<_Float16>(bits);
}
static uint16_t half_bits(float value, bool brain) {
  if (!brain) return cast_bits<uint16_t>((_Float16)value);
  const uint32_t bits = cast_bits<uint32_t>(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// ---- fibers -------------------------------------------------------------------------------------

enum { STACK_BYTES = 1 << 16 };
struct Meeting {  // of `members` fibers, again and again
  int members = 0, here = 0, round = 0, votes[2];
  uint64_t given[2][32];
};
struct Fiber {
  ucontext_t context;  // to start from; later switches need no system call
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool started, done;
};
static PER_BLOCK ucontext_t scheduler_context;
static PER_BLOCK jmp_buf scheduler;
static PER_BLOCK std::vector<Fiber> fibers;
static PER_BLOCK std::vector<Meeting> warps;
static PER_BLOCK Meeting block, groups[16];
static bool backwards, later_blocks_first;
static PER_BLOCK std::function<void()> body;
static std::vector<void (*)()> at_thread_begin;

static void leave(Meeting& m) {
  if (--m.members == m.here && m.here) { m.here = 0; ++m.round; }
}
static void end() {
  fibers[threadIdx.x].done = true;
  leave(warps[threadIdx.x / 32]);
  leave(block);
  _longjmp(scheduler, 1);
}
static void enter() {
  for (auto forget : at_thread_begin) forget();  // what the last block's thread left undone; its stack is gone
  body();
  end();
}
// Let the other threads go on until it is this one's turn again.
static void give_way() {
  const unsigned me = threadIdx.x;
  if (!_setjmp(fibers[me].here)) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
// Wait until all members of the meeting have come.
static void meet(Meeting& m) {
  const int round = m.round;
  if (++m.here == m.members) { m.here = 0; ++m.round; return; }
  while (m.round == round) give_way();
}
static void begin_block(int threads) {
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Meeting());
  block = Meeting();
  block.members = threads;
  for (int i = 0; i < threads; ++i) {
    ++warps[i / 32].members;
    Fiber& f = fibers[i];
    f.started = f.done = false;
    f.stack.reset(new char[STACK_BYTES]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK_BYTES;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
}
// Every thread of the block goes on until it has to wait; whether one of them is not done.
static bool turn_of_block() {
  const int threads = fibers.size();
  bool alive = false;
  for (int n = 0; n < threads; ++n) {
    const int i = backwards ? threads - 1 - n : n;
    if (fibers[i].done) continue;
    alive = true;
    threadIdx = {(unsigned)i, 0, 0};
    if (_setjmp(scheduler)) continue;
    if (fibers[i].started) _longjmp(fibers[i].here, 1);
    fibers[i].started = true;
    swapcontext(&scheduler_context, &fibers[i].context);
  }
  return alive;
}
static void run_block(int threads) {
  begin_block(threads);
  while (turn_of_block()) {}
  for (Fiber& f : fibers) f.stack.reset();  // each library has its own fibers, and a process many libraries
}

// What all lanes of the warp give, and which is this one.
struct Warp { const uint64_t* given; int lane; };
template <class V> static Warp gather(V value) {
  Meeting& m = warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, round = m.round % 2;
  m.given[round][lane] = 0;
  std::memcpy(&m.given[round][lane], &value, sizeof value);
  meet(m);
  return {m.given[round], lane};
}
template <class V> static V of_lane(const Warp& w, int lane) { V v; std::memcpy(&v, &w.given[lane], sizeof v); return v; }

// ---- CUDA's functions ---------------------------------------------------------------------------

static inline void __syncthreads() { meet(block); }
static inline int __syncthreads_count(int v) {
  const int round = block.round % 2;
  block.votes[round] = (block.here > 0 ? block.votes[round] : 0) + !!v;
  meet(block);
  return block.votes[round];
}
static inline int __syncthreads_or(int v) { return __syncthreads_count(v) > 0; }
static inline void sync_group(int group, int threads) { groups[group].members = threads; meet(groups[group]); }
static inline void __syncwarp() { meet(warps[threadIdx.x / 32]); }
template <class V> static V __shfl_sync(unsigned, V v, int from, int width = 32) {
  const Warp w = gather(v);
  return of_lane<V>(w, w.lane / width * width + from % width);
}
template <class V> static V __shfl_up_sync(unsigned, V v, int by) {
  const Warp w = gather(v);
  return of_lane<V>(w, w.lane < by ? w.lane : w.lane - by);
}
template <class V> static V __shfl_down_sync(unsigned, V v, int by) {
  const Warp w = gather(v);
  return of_lane<V>(w, w.lane + by > 31 ? w.lane : w.lane + by);
}
template <class V> static V __shfl_xor_sync(unsigned, V v, int with) {
  const Warp w = gather(v);
  return of_lane<V>(w, w.lane ^ with);
}
static inline unsigned __ballot_sync(unsigned, bool v) {
  const Warp w = gather(v);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= (unsigned)of_lane<bool>(w, i) << i;
  return votes;
}
static inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
template <class V> static unsigned __match_any_sync(unsigned, V v) {
  const Warp w = gather(v);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= (unsigned)(of_lane<V>(w, i) == v) << i;
  return same;
}
template <class V> static unsigned __match_all_sync(unsigned mask, V v, int* same) {
  *same = __match_any_sync(mask, v) == mask;
  return *same ? mask : 0;
}
template <class V> static V __reduce_max_sync(unsigned, V v) {
  const Warp w = gather(v);
  for (int i = 0; i < 32; ++i) v = max(v, of_lane<V>(w, i));
  return v;
}
template <class V> static V __reduce_min_sync(unsigned, V v) {
  const Warp w = gather(v);
  for (int i = 0; i < 32; ++i) v = min(v, of_lane<V>(w, i));
  return v;
}
template <class P, class V> static P atomicMax(P* at, V v) { const P was = *at; if ((P)v > was) *at = (P)v; return was; }
template <class P, class V> static P atomicMin(P* at, V v) { const P was = *at; if ((P)v < was) *at = (P)v; return was; }
static inline unsigned atomicInc(unsigned* at, unsigned last) { const unsigned was = *at; *at = was >= last ? 0 : was + 1; return was; }
template <class P, class V> static P atomicAdd(P* at, V v) { const P was = *at; *at += (P)v; return was; }
template <class P> static P atomicCAS(P* at, P old, P now) { const P was = *at; if (was == old) *at = now; return was; }
template <class P, class V> static P atomicExch(P* at, V v) { const P was = *at; *at = (P)v; return was; }
template <class P, class V> static P atomicOr(P* at, V v) { const P was = *at; *at |= (P)v; return was; }

// Arguments of a launch, as the driver takes them. Shared memory starts as 0xff in each block.
struct Launch { int grid[3], threads; void** args; void* shared; size_t shared_bytes; };
template <class... P, size_t... I> static void launch(void (*kernel)(P...), const Launch& l, std::index_sequence<I...>) {
  gridDim = {(unsigned)l.grid[0], (unsigned)l.grid[1], (unsigned)l.grid[2]};
  body = [=] { kernel(*(P*)l.args[I]...); };
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned n = 0; n < gridDim.x; ++n) {
        blockIdx = {backwards || later_blocks_first ? gridDim.x - 1 - n : n, y, z};
        std::memset(l.shared, 0xff, l.shared_bytes);
        run_block(l.threads);
      }
}
template <class... P> static void launch(void (*kernel)(P...), const Launch& l) {
  launch(kernel, l, std::index_sequence_for<P...>());
}

// The same where blocks wait for one another: all of them go on in turn, each with what is its own.
struct Resident {
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  Meeting block;
  std::vector<char> shared;
  Dim3 at;
  bool alive;
  void trade(const Launch& l) {
    std::swap(fibers, ::fibers), std::swap(warps, ::warps), std::swap(block, ::block);
    std::swap_ranges(shared.begin(), shared.end(), (char*)l.shared);
    blockIdx = at;
  }
};
template <class... P, size_t... I> static void launch_together(void (*kernel)(P...), const Launch& l, std::index_sequence<I...>) {
  gridDim = {(unsigned)l.grid[0], 1, 1};
  body = [=] { kernel(*(P*)l.args[I]...); };
  std::vector<Resident> residents(gridDim.x);
  for (unsigned n = 0; n < gridDim.x; ++n) {
    Resident& r = residents[n];
    r.at = {backwards || later_blocks_first ? gridDim.x - 1 - n : n, 0, 0};
    r.shared.assign(l.shared_bytes, (char)0xff);
    r.trade(l);
    begin_block(l.threads);
    r.trade(l);
    r.alive = true;
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (Resident& r : residents) {
      if (!r.alive) continue;
      r.trade(l);
      r.alive = turn_of_block();
      r.trade(l);
      alive |= r.alive;
    }
  }
}
template <class... P> static void launch_together(void (*kernel)(P...), const Launch& l) {
  launch_together(kernel, l, std::index_sequence_for<P...>());
}
