// Shared memory and copies: what of tensor_cores_on_cpu.hpp is the same for all kernels, compiled once.

Dim3 blockDim;
alignas(1024) unsigned char dynamic_shared[SHARED_BYTES];
size_t dynamic_bytes;
extern unsigned char of_block_begins[] __asm__("__start_of_block") __attribute__((weak, visibility("hidden")));
extern unsigned char of_block_ends[] __asm__("__stop_of_block") __attribute__((weak, visibility("hidden")));
static const bool shared_variables_forgotten =
    (at_block_begin.push_back([] { std::memset(of_block_begins, 0xff, of_block_ends - of_block_begins); }), true);

unsigned char* shared_at(unsigned offset, unsigned bytes, unsigned aligned) {
  unsigned char* const variable = dynamic_shared + (int)offset;
  if (variable >= of_block_begins && variable + bytes <= of_block_ends) return variable;
  if ((size_t)offset + bytes > dynamic_bytes) give_up("%u bytes at %d of %zu of shared memory", bytes, (int)offset, dynamic_bytes);
  if (offset % aligned) give_up("%u bytes at %u of shared memory, which is not aligned", bytes, offset);
  return dynamic_shared + offset;
}

struct Copy { unsigned char* to; const void* from; int bytes, read; };
struct Copies { std::vector<std::vector<Copy>> groups; std::vector<Copy> open; };
static std::vector<Copies> copies;  // of each thread
static const bool copies_forgotten = (at_block_begin.push_back([] { copies.assign(block.fibers.size(), {}); }), true);

namespace ptx {
void copy_later(unsigned to, const void* from, int bytes, int read) { copies[threadIdx.x].open.push_back({shared_at(to, bytes), from, bytes, read}); }
void cp_async_commit_group() {
  Copies& own = copies[threadIdx.x];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}
void cp_async_wait_group(int left) {
  auto& groups = copies[threadIdx.x].groups;
  for (; (int)groups.size() > left; groups.erase(groups.begin()))
    for (const Copy& c : groups.front()) {
      std::memset(c.to, 0, c.bytes);
      std::memcpy(c.to, c.from, c.read);
    }
}
}
