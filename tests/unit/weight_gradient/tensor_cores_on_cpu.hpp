// What kernels for tensor cores need beyond cuda_on_cpu.hpp: each asm statement has become a call of the
// function in `ptx` that is named after its instruction.
//
// Asynchronous copies arrive when their thread waits for them and not before, and shared memory begins
// as NaN, so that a missing wait or barrier gives wrong results.

#undef __shared__
#define __shared__ static __attribute__((section("of_block")))
#define __grid_constant__

struct float2 { float x, y; };
struct double2 { double x, y; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> static T __ldg(const T* p) { return *p; }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) { return (((uint64_t)high << 32) | low) >> by; }

// What follows is defined in tensor_cores_on_cpu.cpp.
#pragma GCC visibility push(hidden)
extern Dim3 blockDim;
extern unsigned char dynamic_shared[SHARED_BYTES];
extern size_t dynamic_bytes;
unsigned char* shared_at(unsigned offset, unsigned bytes, unsigned aligned);
#pragma GCC visibility pop
static inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - dynamic_shared; }
static inline unsigned char* shared_at(unsigned offset, unsigned bytes) { return shared_at(offset, bytes, bytes); }

namespace ptx {
template <class T> void cvt_rn_f16_f32(T& to, float from) { to = half_bits(from, false); }
template <class T> void cvt_rn_bf16_f32(T& to, float from) { to = half_bits(from, true); }
template <class T> void cvt_f32_f16(float& to, T from) { to = half_value(from, false); }
inline void unpack(float& low, float& high, unsigned pair) { low = half_value(pair, false), high = half_value(pair >> 16, false); }
inline void cvt_rn_f16x2_f32(unsigned& to, float high, float low) { to = half_bits(low, false) | half_bits(high, false) << 16; }
inline void cvt_rn_bf16x2_f32(unsigned& to, float high, float low) { to = half_bits(low, true) | half_bits(high, true) << 16; }
inline void fence_acq_rel_gpu() {}
inline void st_relaxed_gpu_global_v4_f32(void* to, float x, float y, float z, float w) {
  const float4 all = {x, y, z, w};
  std::memcpy(to, &all, 16);
}
inline void ld_relaxed_gpu_global_v4_f32(float& x, float& y, float& z, float& w, const void* from) {
  float4 all;
  std::memcpy(&all, from, 16);
  x = all.x, y = all.y, z = all.z, w = all.w;
}
inline void bar_sync(int threads) {
  if (threads != (int)blockDim.x) give_up("a barrier of %d of %u threads", threads, blockDim.x);
  __syncthreads();
}

#pragma GCC visibility push(hidden)
void copy_later(unsigned to, const void* from, int bytes, int read);
void cp_async_commit_group();
void cp_async_wait_group(int left = 0);
#pragma GCC visibility pop
inline void cp_async_cg_shared_global(unsigned to, const void* from, int read) { copy_later(to, from, 16, read); }
inline void cp_async_ca_shared_global(unsigned to, const void* from, int bytes, int read) { copy_later(to, from, bytes, read); }
inline void st_shared_v4_b32(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  const unsigned words[4] = {a, b, c, d};
  std::memcpy(shared_at(to, 16), words, 16);
}

// Lane i gets column i / 4 and rows i % 4 * 2 and the next of four 8 x 8 matrices, whose rows begin
// where lanes say: 0 to 7 those of the first, and so on.
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  const Warp w = gather(from);
  unsigned* to[4] = {&a, &b, &c, &d};
  unsigned found[4];
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i)
      std::memcpy(pair + i, shared_at(of_lane<unsigned>(w, m * 8 + w.lane % 4 * 2 + i), 16) + w.lane / 4 * 2, 2);
    found[m] = pair[0] | pair[1] << 16;
  }
  __syncwarp();  // all have read before anyone goes on
  for (int m = 0; m < 4; ++m) *to[m] = found[m];
}

inline void mma_sync_aligned_m16n8k16_row_col_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1,
                                                  unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned given[6] = {a0, a1, a2, a3, b0, b1};
  unsigned all[6][32];
  for (int i = 0; i < 6; ++i) {
    const Warp w = gather(given[i]);
    for (int lane = 0; lane < 32; ++lane) all[i][lane] = of_lane<unsigned>(w, lane);
  }
  const int lane = threadIdx.x % 32;
  float* sums[4] = {&d0, &d1, &d2, &d3};
  const auto half = [](unsigned pair, int k) { return half_value(pair >> k % 2 * 16, BRAIN); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const unsigned a = all[i / 2 + k / 8 * 2][row * 4 + k % 8 / 2], b = all[4 + k / 8][column * 4 + k % 8 / 2];
      sum += (double)half(a, k) * half(b, k);
    }
    *sums[i] += (float)sum;
  }
}

// Operands are rounded to 10 bits, and the rest must be zeros: hardware ignores it.
inline void cvt_rna_tf32_f32(unsigned& to, float from) {
  to = cast_bits<uint32_t>(from);
  if (std::isfinite(from)) to += 0x1000;
  to &= ~0x1fffu;
}
inline void ld_shared_f32(float& to, unsigned from) { std::memcpy(&to, shared_at(from, 4), 4); }
inline void ld_shared_v2_f32(float& x, float& y, unsigned from) {
  float both[2];
  std::memcpy(both, shared_at(from, 8), 8);
  x = both[0], y = both[1];
}
inline void ld_shared_f64(double& to, unsigned from) { std::memcpy(&to, shared_at(from, 8), 8); }
inline void ld_shared_v2_f64(double& x, double& y, unsigned from) {
  double both[2];
  std::memcpy(both, shared_at(from, 16), 16);
  x = both[0], y = both[1];
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1,
                                                               unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned given[6] = {a0, a1, a2, a3, b0, b1};
  float all[6][32];
  for (int i = 0; i < 6; ++i) {
    const Warp w = gather(given[i]);
    for (int lane = 0; lane < 32; ++lane) {
      all[i][lane] = of_lane<float>(w, lane);
      if (of_lane<unsigned>(w, lane) & 0x1fff) give_up("multiplies fp32 that is no tf32");
    }
  }
  const int lane = threadIdx.x % 32;
  float* sums[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 8; ++k) sum += (double)all[i / 2 + k / 4 * 2][row * 4 + k % 4] * all[4 + k / 4][column * 4 + k % 4];
    *sums[i] += (float)sum;
  }
}
}  // namespace ptx
