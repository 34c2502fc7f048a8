// Weights in MXFP4 as bf16, for a GEMM that takes no other: a thread has eight codes.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;
constexpr int kEightsOfGroup = kMxfp4Group / 8;

__global__ void __launch_bounds__(kThreads)
    dequantize(const __grid_constant__ DequantizeArgs args) {
  wait_for_predecessor();
  let_successor_start();
  auto* codes = static_cast<const uint32_t*>(args.codes);
  auto* out = static_cast<uint4*>(args.out);
  const int64_t eights = kEightsOfGroup * args.num_groups;
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < eights; i += step) {
    const Mxfp4Scale scale{__ldg(args.scales + i / kEightsOfGroup)};
    const uint32_t eight[] = {__ldg(codes + i)};
    uint4 values[1];
    bf16_of_eights<true>(eight, scale, values);
    out[i] = values[0];
  }
}

}  // namespace

cudaError_t dequantize_mxfp4(const DequantizeArgs& args, cudaStream_t stream) {
  int64_t blocks = ceil_div(kEightsOfGroup * args.num_groups, kThreads);
  return launch_at_most(kBlocksPerSM, dequantize, blocks, kThreads, 0, stream, args);
}

}  // namespace epmoe::cuda
