// CUTLASS 2.x implicit-GEMM weight gradients of one tile shape: a kernel for each number of stages,
// and the kernel that adds the slices of a split reduction.
//
// CUTLASS's device-level wrappers are left out: they clear the workspace on each call even where every
// element is then written, and forget the stream. Semaphores come zeroed and are left zeroed.
//
// Defined before this text: ELEMENT of x and grad_output, WRITTEN by the product (float where slices
// are to be added), RESULT; TILE_M, TILE_N, TILE_K and WARPS_M, WARPS_N, WARPS_K that share a tile;
// INSTRUCTION_K and ARCH; ALIGN_X, ALIGN_GRAD, WRITTEN_VECTOR and RESULT_VECTOR in elements. After it:
// WEIGHT_GRAD(stages) for each kernel.

#include "cutlass/cutlass.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/reduction/kernel/reduce_split_k.h"
#include "cutlass/reduction/thread/reduction_operators.h"

using cutlass::gemm::GemmShape;
using cutlass::layout::TensorNHWC;

template <class Out, int Vector>
using Rounded = cutlass::epilogue::thread::LinearCombination<Out, Vector, float, float>;

template <int Stages>
using Product = typename cutlass::conv::kernel::DefaultConv2dWgrad<
    ELEMENT, TensorNHWC, ELEMENT, TensorNHWC, WRITTEN, TensorNHWC, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::ARCH, GemmShape<TILE_M, TILE_N, TILE_K>,
    GemmShape<TILE_M / WARPS_M, TILE_N / WARPS_N, TILE_K / WARPS_K>, GemmShape<16, 8, INSTRUCTION_K>,
    Rounded<WRITTEN, WRITTEN_VECTOR>, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<4>, Stages,
    cutlass::arch::OpMultiplyAdd, cutlass::conv::IteratorAlgorithm::kOptimized,
    cutlass::conv::StrideSupport::kStrided, ALIGN_GRAD, ALIGN_X>::Kernel;

using Sum = cutlass::reduction::kernel::ReduceSplitK<
    cutlass::MatrixShape<4, 32 * RESULT_VECTOR>, Rounded<RESULT, RESULT_VECTOR>,
    cutlass::reduction::thread::ReduceAdd<float, float, RESULT_VECTOR>>;

extern "C" __global__ void __launch_bounds__(128) add_slices(const __grid_constant__ Sum::Params params) {
  Sum::SharedStorage unused;
  Sum()(params, unused);
}

inline cudaError_t add(const Problem& p, int partitions, void* workspace, void* out, cudaStream_t stream) {
  const int columns = p.r * p.s * p.c;
  const cutlass::MatrixCoord size(p.k, columns);
  const cutlass::layout::RowMajor rows(columns);
  Sum::Params params(size, partitions, (size_t)p.k * columns, {(float*)workspace, rows}, {(RESULT*)out, rows},
                     {(RESULT*)out, rows}, {1.0f, 0.0f});
  void* arguments[] = {&params};
  return cudaLaunchKernel((const void*)add_slices, Sum::grid_shape(size), Sum::block_shape(), arguments, 0, stream);
}

// Sums are fp32 throughout: those of slices go to the workspace, one after the other (parallel) or into
// one place (serial), and are rounded to the result's type once.
template <class Kernel>
int launch(const void* entry, std::atomic<unsigned long long>& prepared, const Problem& p, const void* x,
           const void* grad, void* out, void* workspace, void* semaphores, int device, cudaStream_t stream) {
  const OnDevice current(device);
  using cutlass::conv::SplitKMode;
  const cutlass::conv::Conv2dProblemSize size(p.n, p.h, p.w, p.c, p.k, p.r, p.s, p.p, p.q, p.padding_h, p.padding_w,
                                              p.stride_h, p.stride_w, p.dilation_h, p.dilation_w,
                                              cutlass::conv::Mode::kCrossCorrelation, p.slices, 1);
  void* sums = workspace ? workspace : out;
  const TensorNHWC x_rows = TensorNHWC::packed({p.n, p.h, p.w, p.c}), grad_rows = TensorNHWC::packed({p.n, p.p, p.q, p.k});
  const TensorNHWC out_rows = TensorNHWC::packed({p.k, p.r, p.s, p.c});
  const bool parallel = p.slices > 1 && !p.serial;
  typename Kernel::Arguments arguments(
      size, {(ELEMENT*)grad, grad_rows}, {(ELEMENT*)x, x_rows}, {(WRITTEN*)sums, out_rows}, {(WRITTEN*)sums, out_rows},
      {1.0f, 0.0f}, parallel ? SplitKMode::kParallel : SplitKMode::kSerial);
  typename Kernel::Params params(arguments, (int*)semaphores);
  const int shared_bytes = sizeof(typename Kernel::SharedStorage);
  if (auto error = prepare(entry, shared_bytes, prepared, device)) return error;
  const dim3 grid = typename Kernel::ThreadblockSwizzle().get_grid_shape(params.grid_tiled_shape);
  void* packed[] = {&params};
  if (auto error = cudaLaunchKernel(entry, grid, dim3(Kernel::kThreadCount), packed, shared_bytes, stream)) return error;
  return workspace ? add(p, parallel ? p.slices : 1, workspace, out, stream) : cudaSuccess;
}

#define WEIGHT_GRAD(STAGES)                                                                               \
  extern "C" __global__ void __launch_bounds__(Product<STAGES>::kThreadCount)                             \
      weight_grad_kernel_##STAGES(const __grid_constant__ Product<STAGES>::Params params) {               \
    extern __shared__ __align__(16) unsigned char memory[];                                               \
    Product<STAGES>()(params, *reinterpret_cast<Product<STAGES>::SharedStorage*>(memory));                \
  }                                                                                                       \
  extern "C" int weight_grad_##STAGES(const Problem* p, const void* x, const void* grad, void* out,       \
                                      void* workspace, void* semaphores, int device, cudaStream_t stream) { \
    static std::atomic<unsigned long long> prepared{0};                                                   \
    return launch<Product<STAGES>>((const void*)weight_grad_kernel_##STAGES, prepared, *p, x, grad, out,  \
                                   workspace, semaphores, device, stream);                                \
  }
