// What the libraries of CUTLASS's weight gradients share, 2.x's and 3.x's.

#include <cuda_bf16.h>

#include <atomic>

struct Problem {  // as Python packs it
  int n, h, w, c, k, p, q, r, s;
  int padding_h, padding_w, stride_h, stride_w, dilation_h, dilation_w;
  int slices;
  int serial;  // slices are added one after the other by the blocks of a tile, guarded by a semaphore
};

// The tensors' device is made current while this lives.
struct OnDevice {
  int before = 0, device;
  explicit OnDevice(int device) : device(device) {
    if (cudaGetDevice(&before) == cudaSuccess && before != device) cudaSetDevice(device);
  }
  ~OnDevice() {
    if (before != device) cudaSetDevice(before);
  }
};

// Lets a kernel have so many bytes of shared memory; `prepared` knows for which devices that is done.
inline cudaError_t prepare(const void* entry, int shared_bytes, std::atomic<unsigned long long>& prepared, int device) {
  const unsigned long long here = 1ull << (device & 63);
  if (shared_bytes <= 48 << 10 || prepared.load() & here) return cudaSuccess;
  if (auto error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) return error;
  prepared |= here;
  return cudaSuccess;
}

