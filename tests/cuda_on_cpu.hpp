// Enough of CUDA C++ to run our kernels on a CPU, one block after the other: each thread is a fiber,
// and warp-wide functions and barriers switch to the next one. Slow, and single-threaded. Threads and
// blocks take their turns forwards, or backwards: where a barrier is missing, results differ. By a number in
// EMULATED_SCHEDULE some warps are held up for a while, others then: where a warp may not come so late, it shows.
//
// A launch does the same whenever it is made, whatever is wrong with its kernel: memory begins alike,
// nobody waits for what another block left, and what a GPU might not survive ends it with a reason.
// Headers are few, and what is no template is declared here and defined elsewhere: the time that each kernel
// takes to compile would be mostly theirs.

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // which would be instantiated for each kernel
#include <cmath>

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
#pragma GCC visibility push(hidden)
extern PER_BLOCK Dim3 threadIdx, blockIdx, gridDim;
#pragma GCC visibility pop

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

enum { PAGE_BYTES = 1 << 12, STACK_BYTES = 1 << 16, STACKS_APART = STACK_BYTES + 17 * 64, SPARE_WORDS = 32, MOST_IDLE_TURNS = 10000, IDLE_TURNS_HELD = 20, MOST_TURNS_HELD = 1000 };
struct Meeting {  // of `members` fibers, again and again
  int members = 0, here = 0, round = 0, votes[2];
  uint64_t given[2][32];
};
struct Fiber {
  jmp_buf begin, here;
  bool prepared, started, done;  // `prepared` for all blocks, `started` in this one
  const Meeting* awaited;  // which goes on when its round is another
  int round;
};
struct Stacks {  // zeros at first: a kernel that reads what it never wrote does the same every time
  char* first = nullptr;
  size_t bytes = 0;
  Stacks() = default;
  Stacks(Stacks&& other) : first(std::exchange(other.first, nullptr)), bytes(other.bytes) {}
  Stacks& operator=(Stacks&& other) { std::swap(first, other.first), std::swap(bytes, other.bytes); return *this; }
  ~Stacks() { if (first) munmap(first, bytes); }
};
struct Block {
  std::vector<Fiber> fibers;
  Stacks stacks;
  std::vector<Meeting> warps;
  Meeting all, groups[16];
  uint64_t held = 0;  // warps that get no turns
  int turns_left = 0;  // until others are
};
struct Body {  // a kernel and its arguments
  void (*call)(void (*)(), void**);
  void (*kernel)();
  void** args;
};
// What follows is defined in fibers_on_cpu.cpp, which each library has for itself.
#pragma GCC visibility push(hidden)
extern PER_BLOCK Block block;
extern PER_BLOCK Body body;
extern bool backwards, later_blocks_first;
extern std::vector<void (*)()> at_block_begin, at_body_end;
extern unsigned long steps_made;  // by threads, each until it waits for something else
extern char trouble[200];  // why the launch cannot go on, if it cannot

[[noreturn]] void give_up(const char* why, ...);  // end the launch
[[noreturn]] void end();  // end the thread
void give_way();  // let the other threads go on until it is this one's turn again
void meet(Meeting& m);  // wait until all members of the meeting have come
void begin_block(int threads);
bool turn_of_block();  // every thread goes on until it has to wait; whether one of them is not done
#pragma GCC visibility pop

// What all lanes of the warp give, and which is this one.
struct Warp { const uint64_t* given; int lane; };
template <class V> static Warp gather(V value) {
  Meeting& m = block.warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, round = m.round % 2;
  m.given[round][lane] = 0;
  std::memcpy(&m.given[round][lane], &value, sizeof value);
  meet(m);
  return {m.given[round], lane};
}
template <class V> static V of_lane(const Warp& w, int lane) { V v; std::memcpy(&v, &w.given[lane], sizeof v); return v; }

// ---- CUDA's functions ---------------------------------------------------------------------------

static inline void __syncthreads() { meet(block.all); }
static inline int __syncthreads_count(int v) {
  Meeting& all = block.all;
  const int round = all.round % 2;
  all.votes[round] = (all.here > 0 ? all.votes[round] : 0) + !!v;
  meet(all);
  return all.votes[round];
}
static inline int __syncthreads_or(int v) { return __syncthreads_count(v) > 0; }
static inline void sync_group(int group, int threads) {
  block.groups[group].members = threads;
  meet(block.groups[group]);
}
static inline void __syncwarp() { meet(block.warps[threadIdx.x / 32]); }
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
template <class V> static V __reduce_or_sync(unsigned, V v) {
  const Warp w = gather(v);
  for (int i = 0; i < 32; ++i) v |= of_lane<V>(w, i);
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

// ---- launches -----------------------------------------------------------------------------------

// Shared memory starts as 0xff in each block, and arguments are as the driver takes them.
struct Launch { int grid[3], threads; void* shared; size_t shared_bytes; };
template <class... P, size_t... I> static Body body_of(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  return {[](void (*k)(), void** args) { ((void (*)(P...))k)(*(P*)args[I]...); }, (void (*)())kernel, args};
}
template <class... P> static Body body_of(void (*kernel)(P...), void** args) {
  return body_of(kernel, args, std::index_sequence_for<P...>());
}
#pragma GCC visibility push(hidden)
void begin_launch(const Launch& l);
// Each returns why it ended before its end, or nothing.
const char* launch(Body kernel, const Launch& l);
const char* launch_together(Body kernel, const Launch& l);  // where blocks wait for one another
#pragma GCC visibility pop
