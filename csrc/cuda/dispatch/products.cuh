// Training: a round whose rows are gradients of weighted outputs multiplies each row by its weight
// as it arrives. The product of the row and the output, a sum over their elements, is the gradient
// of the weight.
#pragma once
#include "cuda/device/weighted.cuh"
#include "cuda/dispatch/block.cuh"

namespace epmoe::cuda {

// One warp writes up to N vectors a lane of an expert-major row, times `factor`: vector(n) as the
// row's vector `first` + n * 32, if it lies before `end`. Returns, in all lanes, their product with
// the row's outputs.
template <int N, typename F>
__device__ __forceinline__ float multiply_row(const DispatchBlock& b, int64_t row, int32_t first,
                                              int32_t end, float factor, F&& vector) {
  auto* to = in_window<uint4>(b.ex, b.plan.rank, b.plan.rows) + row * (b.kernel.row_bytes() / 16);
  auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(b.args.outputs_ND) +
                                              row * b.args.outputs_stride_bytes);
  uint4 outputs[N];
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * 32 < end) outputs[n] = __ldcg(from + first + n * 32);
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * 32 < end)
      to[first + n * 32] = weighted_product(vector(n), outputs[n], b.args.dtype, factor, sum);
  return warp_sum(sum);
}

// The product of a chunk. A row has up to kProductParts chunks, with either protocol.
__device__ __forceinline__ void write_product(const DispatchBlock& b, int64_t row, int32_t chunk,
                                              float product) {
  b.args.products_NC[row * kProductParts + chunk] = product;
}

}  // namespace epmoe::cuda
