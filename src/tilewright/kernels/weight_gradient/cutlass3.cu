// CUTLASS 3.x's implicit-GEMM weight gradients for sm_90, of one tile shape: a kernel for each cluster.
//
// grad_output comes by TMA, x by TMA in im2col mode; one warp copies, one warpgroup multiplies. A tile of columns
// is TILE_N channels of one filter tap. There is no split-K and no persistent schedule for
// convolutions. CUTLASS's device-level wrapper is left out: it prepares the kernel on each call.
//
// Defined before this text, besides weight_grad_cutlass_common.cuh: ELEMENT of x and grad_output,
// RESULT, TILE_M, TILE_N, TILE_K, STAGES, SHARED_BYTES, at least what a block needs. After it: WEIGHT_GRAD(cluster_m, cluster_n) for each kernel.

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/gemm.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/conv/kernel/sm90_implicit_gemm_tma_warpspecialized.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"

constexpr auto WGRAD = cutlass::conv::Operator::kWgrad;
using Rows = cutlass::layout::TensorNHWC;
using Filters = cutlass::layout::TensorKCSR;
using TileShape = cute::Shape<cute::Int<TILE_M>, cute::Shape<cute::Int<TILE_N>>, cute::Shape<cute::Int<TILE_K>>>;
using Size = cutlass::conv::ConvProblemShape<WGRAD, 2>;

template <int M, int N> struct Product {
  using Cluster = cute::Shape<cute::Int<M>, cute::Int<N>, cute::_1>;
  static constexpr int IN = 16 / sizeof(ELEMENT), OUT = 16 / sizeof(RESULT);
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, RESULT, Filters, OUT, RESULT, Filters, OUT,
      cutlass::epilogue::NoSmemWarpSpecialized>::CollectiveOp;
  using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, WGRAD, ELEMENT, Rows, IN, ELEMENT, Rows, IN, float, TileShape,
      Cluster, cutlass::conv::collective::StageCount<STAGES>,
      cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
  using Kernel = cutlass::conv::kernel::ConvUniversal<Size, Mainloop, Epilogue>;
  static_assert(Kernel::SharedStorageSize <= SHARED_BYTES, "shared memory");
};

template <int M, int N>
int launch(const void* entry, std::atomic<unsigned long long>& prepared, const Problem& p, const void* x,
           const void* grad, void* out, int device, cudaStream_t stream) {
  using Kernel = typename Product<M, N>::Kernel;
  const OnDevice current(device);
  const Size size(cutlass::conv::Mode::kCrossCorrelation, {p.n, p.h, p.w, p.c}, {p.k, p.r, p.s, p.c},
                  {p.padding_h, p.padding_w}, {p.padding_h, p.padding_w}, {p.stride_h, p.stride_w},
                  {p.dilation_h, p.dilation_w}, 1);
  typename Product<M, N>::Epilogue::StrideD pitch{};  // of a filter, and of its columns and rows
  cute::get<0>(pitch) = size.stride_C[0];
  cute::get<1, 1>(pitch) = size.stride_C[2], cute::get<1, 2>(pitch) = size.stride_C[1];
  const typename Kernel::Arguments arguments{
      size, {(const ELEMENT*)grad, (const ELEMENT*)x}, {{1.0f, 0.0f}, (RESULT*)out, pitch, (RESULT*)out, pitch}};
  if (!Kernel::can_implement(arguments)) return cudaErrorInvalidValue;
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  if (auto error = prepare(entry, Kernel::SharedStorageSize, prepared, device)) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {M, N, 1};
  cudaLaunchConfig_t how{};
  how.gridDim = Kernel::get_grid_shape(params), how.blockDim = Kernel::get_block_shape();
  how.dynamicSmemBytes = Kernel::SharedStorageSize, how.stream = stream;
  how.attrs = &cluster, how.numAttrs = 1;
  void* packed[] = {&params};
  return cudaLaunchKernelExC(&how, entry, packed);
}

#define WEIGHT_GRAD(M, N)                                                                                 \
  extern "C" __global__ void __launch_bounds__(Product<M, N>::Kernel::MaxThreadsPerBlock, 1)              \
      weight_grad_kernel_##M##x##N(const __grid_constant__ Product<M, N>::Kernel::Params params) {        \
    extern __shared__ __align__(128) char memory[];                                                       \
    Product<M, N>::Kernel()(params, memory);                                                              \
  }                                                                                                       \
  extern "C" int weight_grad_##M##x##N(const Problem* p, const void* x, const void* grad, void* out,      \
                                       int device, cudaStream_t stream) {                                 \
    static std::atomic<unsigned long long> prepared{0};                                                   \
    return launch<M, N>((const void*)weight_grad_kernel_##M##x##N, prepared, *p, x, grad, out, device, stream); \
  }
