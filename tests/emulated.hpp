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

// What follows is defined in emulated.cpp.
#pragma GCC visibility push(hidden)
extern unsigned comes_to;  // the meeting that blocks end with; 0: they go on
void look_up(long at, int bytes);  // give up where no tensor is
#pragma GCC visibility pop

static void touch(const void* p, int bytes) {
  if ((long)p % bytes) give_up("accesses %d bytes at %p, which is not aligned", bytes, p);
  look_up((long)p, bytes);
}
