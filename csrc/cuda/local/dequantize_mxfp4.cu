// Weights in MXFP4 or NVFP4 as bf16, for a GEMM that takes no other: a thread has eight codes.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    dequantize(const __grid_constant__ DequantizeArgs args) {
  constexpr int kEightsOfGroup = group_of(kFormat) / 8;
  wait_for_predecessor();
  let_successor_start();
  auto* codes = static_cast<const uint32_t*>(args.codes);
  auto* out = static_cast<uint4*>(args.out);
  const int64_t eights = kEightsOfGroup * args.num_groups;
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < eights; i += step) {
    const uint32_t scale = __ldg(args.scales + i / kEightsOfGroup);
    const uint32_t eight[] = {__ldg(codes + i)};
    uint4 values[1];
    if constexpr (kFormat == WeightFormat::kNvfp4) {
      bf16_of_eights<false>(eight, Nvfp4Scales{scale}, values);
      constexpr uint32_t kLeftOut = 0x43004300;  // Nvfp4Scales::kLeftOut twice
      values[0] = make_uint4(
          multiply_bf16x2(values[0].x, kLeftOut), multiply_bf16x2(values[0].y, kLeftOut),
          multiply_bf16x2(values[0].z, kLeftOut), multiply_bf16x2(values[0].w, kLeftOut));
    } else {
      bf16_of_eights<true>(eight, Mxfp4Scale{scale}, values);
    }
    out[i] = values[0];
  }
}

}  // namespace

cudaError_t dequantize_mxfp4(const DequantizeArgs& args, cudaStream_t stream) {
  int64_t blocks = ceil_div(group_of(args.format) / 8 * args.num_groups, kThreads);
  auto* kernel = args.format == WeightFormat::kNvfp4 ? dequantize<WeightFormat::kNvfp4>
                                                     : dequantize<WeightFormat::kMxfp4>;
  return launch_at_most(kBlocksPerSM, kernel, blocks, kThreads, 0, stream, args);
}

}  // namespace epmoe::cuda
