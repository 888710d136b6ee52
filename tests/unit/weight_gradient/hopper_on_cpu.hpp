// What the kernel for sm_90 needs beyond tensor_cores_on_cpu.hpp: barriers that count bytes, the copy
// engine, and products of a warpgroup.
//
// Boxes arrive as soon as they are asked for, and products are done as late as they may be, so that a stage that
// is given back too early gives wrong results, and one that is not waited for NaN. Boxes lie unswizzled.

#define __CUDA_ARCH__ 900
static const bool last_block_first = (later_blocks_first = true);  // those that others wait for

struct Box {  // a tensor map
  const uint16_t* base;
  int columns, walks, width, height, images, pixels, lower[2], upper[2], stride[2];
};
struct Tiled {  // a tensor map whose boxes keep the copy engine's swizzle, if any; innermost dim first
  const uint16_t* base;
  long long strides[4];
  int sizes[4], box[4], steps[4], swizzled;
};
struct Barrier { uint64_t members : 12, phase : 1; int64_t missing : 12, bytes : 39; };
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (unsigned)(both >> (selector >> i * 4 & 7) * 8 & 255) << i * 8;
  return found;
}

namespace ptx {
static Barrier& barrier_at(unsigned offset) { return *(Barrier*)shared_at(offset, sizeof(Barrier)); }
inline void turn_if_complete(Barrier& b) {
  if (b.missing == 0 && b.bytes == 0) b.phase ^= 1, b.missing = b.members;
}
inline void mbarrier_init_shared_cta_b64(unsigned at, unsigned members = 1) { barrier_at(at) = {members, 0, (int)members, 0}; }
inline void mbarrier_arrive_shared_cta_b64(unsigned at) {
  Barrier& b = barrier_at(at);
  --b.missing, turn_if_complete(b);
}
inline void mbarrier_arrive_expect_tx_shared_cta_b64(unsigned at, unsigned bytes) {
  barrier_at(at).bytes += bytes;
  mbarrier_arrive_shared_cta_b64(at);
}
inline void unpack(unsigned& open, unsigned at, unsigned parity) {  // try_wait
  open = barrier_at(at).phase != parity;
  if (open) ++steps_made;
  else give_way();
}
inline void unpack(unsigned at, int rank) {  // arrive at a neighbour's
  Barrier& b = *(Barrier*)shared_of(rank, at, sizeof(Barrier));
  --b.missing, turn_if_complete(b);
}
inline void unpack(unsigned at) {  // try_wait for the first phase, until it ends
  while (barrier_at(at).phase == 0) give_way();
  ++steps_made;
}
inline void unpack(float& x, float& y, float& z, float& w, unsigned from, int rank) {  // ld.shared::cluster
  float all[4];
  std::memcpy(all, shared_of(rank, from, 16), 16);
  x = all[0], y = all[1], z = all[2], w = all[3];
}
inline void unpack(unsigned to, unsigned at, int rank, float x, float y, float z, float w) {  // st.async
  const float all[4] = {x, y, z, w};
  std::memcpy(shared_of(rank, to, 16), all, 16);
  Barrier& b = *(Barrier*)shared_of(rank, at, sizeof(Barrier));
  b.bytes -= 16, turn_if_complete(b);
}
inline void bar_consumers(int threads) { sync_group(1, threads); }
inline void bar_group(int group, int threads) { sync_group(group, threads); }
inline void bar_everyone(int threads) { sync_group(2, threads); }
inline void bar_arrive(int threads) {
  Meeting& m = block.groups[2];
  ++steps_made;
  m.members = threads;
  if (++m.here == threads) m.here = 0, ++m.round;
}

inline void copied(unsigned char* to, const uint16_t* from, int columns) {
  for (int c = 0; c < 64; ++c) ((uint16_t*)to)[c] = c < columns ? from[c] : 0;
}
inline void copied(unsigned to, int row, const uint16_t* from, int columns) { copied(shared_at(to + row * 128, 128), from, columns); }
inline void arrived(unsigned at, const Box& box) {
  Barrier& b = barrier_at(at);
  b.bytes -= box.pixels * 128, turn_if_complete(b);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* map, unsigned at, int column, int pixel) {
  const Box& box = *(const Box*)map;
  if (box.walks) give_up("copies a box that walks as one that does not");
  for (int i = 0; i < box.pixels; ++i, ++pixel)
    copied(to, i, box.base + (long long)pixel * box.columns + column, pixel < box.width ? box.columns - column : 0);
  arrived(at, box);
}
inline void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* map, unsigned at, int column, int pixel, int line) {
  const Box& box = *(const Box*)map;
  for (int i = 0; i < box.pixels; ++i, ++pixel)
    copied(to, i, box.base + ((long long)line * box.width + pixel) * box.columns + column, pixel < box.width ? box.columns - column : 0);
  arrived(at, box);
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* map, unsigned barrier, int i, int j, int k, int l) {
  const Tiled& t = *(const Tiled*)map;
  const int first[4] = {i, j, k, l}, row = t.box[0] * 2;
  int bytes = 0, count[4];
  for (int d = 0; d < 4; ++d) count[d] = (t.box[d] + t.steps[d] - 1) / t.steps[d];
  unsigned char* const box = shared_at(to, count[0] * count[1] * count[2] * count[3] * 2, t.swizzled ? row * 8 : 128);
  for (int n = 0; n < count[0] * count[1] * count[2] * count[3]; ++n, bytes += 2) {
    const int index[4] = {n % count[0], n / count[0] % count[1], n / count[0] / count[1] % count[2], n / count[0] / count[1] / count[2]};
    bool inside = true;
    const uint16_t* from = t.base;
    for (int d = 0; d < 4; ++d) {
      const int place = first[d] + index[d] * t.steps[d];
      inside &= place >= 0 && place < t.sizes[d], from += place * t.strides[d];
    }
    const unsigned at = t.swizzled ? bytes ^ (bytes >> 7) % (row / 16) * 16 : bytes;
    *(uint16_t*)(box + at) = inside ? *from : 0;
  }
  barrier_at(barrier).bytes -= bytes, turn_if_complete(barrier_at(barrier));
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* from, unsigned bytes, unsigned at) {
  if ((uintptr_t)from % 16 || bytes % 16) give_up("copies %u bytes from %p, which is not aligned", bytes, from);
  std::memcpy(shared_at(to, bytes, 16), from, bytes);
  barrier_at(at).bytes -= bytes, turn_if_complete(barrier_at(at));
}
inline void cp_async_bulk_tensor_4d_shared_cluster_global_im2col_mbarrier_complete_tx_bytes(
    unsigned to, const void* map, unsigned at, int c, int w, int h, int n, int tap_w, int tap_h) {
  const Box& box = *(const Box*)map;
  if (!box.walks) give_up("copies a box that does not walk as one that does");
  for (int i = 0; i < box.pixels; ++i) {
    const int x = w + tap_w, y = h + tap_h;
    const bool inside = x >= 0 && x < box.width && y >= 0 && y < box.height && n < box.images;
    copied(to, i, box.base + (((long long)n * box.height + y) * box.width + x) * box.columns + c, inside ? box.columns - c : 0);
    if ((w += box.stride[0]) < box.width + box.upper[0]) continue;
    w = box.lower[0];
    if ((h += box.stride[1]) < box.height + box.upper[1]) continue;
    h = box.lower[1], ++n;
  }
  arrived(at, box);
}
inline void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(unsigned to, const void* map, unsigned at, int column, int pixel, unsigned ranks) {
  const Box& box = *(const Box*)map;
  for (int rank = 0; ranks >> rank; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    for (int i = 0; i < box.pixels; ++i)
      copied(shared_of(rank, to + i * 128, 128), box.base + (long long)(pixel + i) * box.columns + column, pixel + i < box.width ? box.columns - column : 0);
    Barrier& b = *(Barrier*)shared_of(rank, at, sizeof(Barrier));
    b.bytes -= box.pixels * 128, turn_if_complete(b);
  }
}
inline void ld_shared_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned from) {
  unsigned words[4];
  std::memcpy(words, shared_at(from, 16), 16);
  a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void ld_shared_v2_u32(unsigned& a, unsigned& b, unsigned from) {
  unsigned words[2];
  std::memcpy(words, shared_at(from, 8), 8);
  a = words[0], b = words[1];
}
inline void ld_shared_u32(unsigned& a, unsigned from) { std::memcpy(&a, shared_at(from, 4), 4); }
inline void prefetch_tensormap(const void*) {}
inline void prefetch_global_L2(const void*) {}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() {}
inline void barrier_cluster_arrive_release_aligned() { arrive_at_cluster(); }
inline void barrier_cluster_arrive_relaxed_aligned() { arrive_at_cluster(); }
inline void barrier_cluster_wait_acquire_aligned() { wait_for_cluster(); }
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

struct Product { float* sums; int count; uint64_t a, b; std::vector<unsigned> rows; bool begins; };
using Groups = std::vector<std::vector<Product>>;  // the last one is open
static std::vector<Groups> under_way;  // of each thread
static const bool products_forgotten =
    (at_block_begin.push_back([] { under_way.assign(block.fibers.size(), Groups(1)); }), at_change.push_back(change_places<under_way>), true);
inline Groups& products() { return under_way[threadIdx.x]; }
inline float operand(uint64_t descriptor, int column, int k) {
  if (descriptor >> 62 == 0) return 1;  // no box: ones, of which the bias is summed
  const unsigned first = (descriptor & 0x3fff) * 16, apart = (descriptor >> 16 & 0x3fff) * 16;
  uint16_t bits;
  std::memcpy(&bits, shared_at(first + column / 64 * apart + k * 128 + column % 64 * 2, 2), 2);
  return half_value(bits, BRAIN);
}
inline void multiplied(const Product& p) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
  const bool held = !p.rows.empty();
  if (p.begins) std::memset(p.sums, 0, p.count * sizeof(float));
  const auto in_registers = [&](int below, int k) {  // of lanes with the same row
    return half_value(p.rows[(below + k / 8 * 2) * 4 + k % 8 / 2] >> k % 2 * 16, BRAIN);
  };
  for (int k = 0; k < 16; ++k) {
    const float a[2] = {held ? in_registers(0, k) : operand(p.a, row, k), held ? in_registers(1, k) : operand(p.a, row + 8, k)};
    for (int j = 0; j < p.count / 4; ++j) {
      const float b[2] = {operand(p.b, j * 8 + pair, k), operand(p.b, j * 8 + pair + 1, k)};
      for (int i = 0; i < 4; ++i) p.sums[j * 4 + i] += a[i / 2] * b[i % 2];
    }
  }
}
inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { products().emplace_back(); }
inline void wgmma_wait_group_sync_aligned(int later) {
  for (auto& own = products(); (int)own.size() - 1 > later; own.erase(own.begin()))
    for (const Product& p : own.front()) multiplied(p);
  __syncwarp();  // the lane that frees the stage frees it for all
}
}  // namespace ptx
template <int COUNT> static void multiply(float (&sums)[COUNT], uint64_t a, uint64_t b) {
  ptx::products().back().push_back({sums, COUNT, a, b});
}
template <int COUNT> static void begin(float (&sums)[COUNT], uint64_t a, uint64_t b) {
  ptx::products().back().push_back({sums, COUNT, a, b, {}, true});
}
// Rows in registers, laid out as mma.sync has them.
template <int COUNT> static void multiply(float (&sums)[COUNT], const unsigned (&a)[4], uint64_t b) {
  ptx::Product p = {sums, COUNT, 0, b};
  for (int i = 0; i < 4; ++i) {
    const Warp w = gather(a[i]);
    for (int j = 0; j < 4; ++j) p.rows.push_back(of_lane<unsigned>(w, threadIdx.x % 32 / 4 * 4 + j));
  }
  ptx::products().back().push_back(p);
}
