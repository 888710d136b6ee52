// What generated kernels need besides cuda_on_cpu.hpp. Every access to memory must be aligned and
// inside a tensor.

#define __CUDA_ARCH__ 800
#undef __shared__
#define __shared__ static PER_BLOCK

using std::fmax;
using std::fmin;

static float rsqrtf(float x) { return 1 / sqrtf(x); }
static double rsqrt(double x) { return 1 / sqrt(x); }
static unsigned long __umul64hi(unsigned long a, unsigned long b) { return (unsigned long)((unsigned __int128)a * b >> 64); }
static unsigned long __cvta_generic_to_shared(const void* p) { return (unsigned long)p; }

static std::vector<std::pair<long, long>> known;

static bool comes_only;
extern "C" void come_only(bool now) { comes_only = now; }
extern "C" void go_backwards(bool now) { backwards = now; }
extern "C" void know_memory(int count, const long* first, const long* end) {
  known.clear();
  for (int i = 0; i < count; ++i) known.push_back({first[i], end[i]});
}
static void touch(const void* p, int bytes) {
  const long at = (long)p;
  if (at % bytes) give_up("accesses %d bytes at %p, which is not aligned", bytes, p);
  for (auto [first, end] : known)
    if (at >= first && at + bytes <= end) return;
  give_up("accesses %d bytes at %p, outside of all tensors", bytes, p);
}
