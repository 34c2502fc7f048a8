// Weights in MXFP4 as bf16, for a GEMM that takes no other: a thread has a group of them.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256, kBlocksPerSM = 8;

__global__ void __launch_bounds__(kThreads) dequantize(const __grid_constant__ DequantizeArgs args) {
  wait_for_predecessor();
  let_successor_start();
  auto* groups = static_cast<const uint4*>(args.codes);
  auto* out = static_cast<uint4*>(args.out);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.num_groups;
       i += int64_t{gridDim.x} * kThreads) {
    const uint4 group = groups[i];
    const Mxfp4Scale scale{args.scales[i]};
    const uint32_t eights[] = {group.x, group.y, group.z, group.w}, factor = scale.factor(), more = scale.more();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pair[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        pair[c] = times_bf16(tiny_pair(eights[j], c), factor);
        if (scale.is_large()) pair[c] = times_bf16(pair[c], more);
      }
      constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // halves of two pairs
      out[4 * i + j] = make_uint4(__byte_perm(pair[0], pair[1], kLow), __byte_perm(pair[2], pair[3], kLow),
                                  __byte_perm(pair[0], pair[1], kHigh), __byte_perm(pair[2], pair[3], kHigh));
    }
  }
}

}  // namespace

cudaError_t dequantize_mxfp4(const DequantizeArgs& args, cudaStream_t stream) {
  if (args.num_groups == 0) return cudaSuccess;
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t blocks = std::min<int64_t>(ceil_div(args.num_groups, kThreads), kBlocksPerSM * device.multiprocessors);
  return launch(dequantize, blocks, kThreads, 0, stream, args);
}

}  // namespace epmoe::cuda
