// The gradients of rows times their weights, on the GPU. Each element is read once. Rows of gaps
// are not read.
#include "cuda/device/launch.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSM = 4;
constexpr int kInFlight = 4;  // vectors of each matrix that a thread loads at once

// A team, the whole block or a warp, has a row at a time, and each of its threads every kTeam-th
// vector. So the gradient of the row's weight is a sum in an order that does not change.
template <typename T, int kCount, int kTeam>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    weighted_rows_backward(const __grid_constant__ WeightedRowsArgs args) {
  extern __shared__ int32_t table[];
  __shared__ float warp_sums[2][kWarps];  // by turns, so that the block waits once a row
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  using Part = Vector<T, kCount>;
  constexpr int kTeams = kThreads / kTeam;
  constexpr int kStep = kTeam * kCount;
  int turn = 0;
  for (uint32_t n = blockIdx.x * kTeams + threadIdx.x / kTeam; n < rows.count();
       n += gridDim.x * kTeams, turn ^= 1) {
    auto [expert, place] = rows[n];
    int64_t t = place;
    float sum = 0.0f;
    if (!args.tokens_per_expert ||
        place - args.segments.expert_offsets[expert] < args.tokens_per_expert[expert]) {
      T* grad = static_cast<T*>(args.grad_ND) + t * args.D;
      auto* factors = static_cast<const T*>(args.rows_ND) + t * args.rows_stride;
      float weight = args.row_weights_N ? args.row_weights_N[t] : 1.0f;
      for (int64_t first = threadIdx.x % kTeam * kCount; first < args.D;
           first += kInFlight * kStep) {
        Part grads[kInFlight], others[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          int64_t at = first + i * kStep;
          if (at >= args.D) continue;
          grads[i] = load_past_l1(reinterpret_cast<const Part*>(grad + at));
          others[i] = load_past_l1(reinterpret_cast<const Part*>(factors + at));
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          int64_t at = first + i * kStep;
          if (at >= args.D) continue;
          float by[kCount], factor[kCount];
          to_floats(grads[i], by);
          to_floats(others[i], factor);
          Part out;
#pragma unroll
          for (int j = 0; j < kCount; ++j)
            sum += by[j] * factor[j], out.at[j] = from_float<T>(by[j] * weight);
          if (args.row_weights_N) *reinterpret_cast<Part*>(grad + at) = out;
        }
      }
    }
    sum = warp_sum(sum);
    if constexpr (kTeam > 32) {
      if (threadIdx.x % 32 == 0) warp_sums[turn][threadIdx.x / 32] = sum;
      __syncthreads();
      sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[turn][warp];
    }
    if (threadIdx.x % kTeam == 0) args.grad_weights_N[t] = sum;
  }
}

}  // namespace

cudaError_t weighted_rows_backward(const WeightedRowsArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = kPerVector<T>;
    bool wide = args.D % kWide == 0 && is_aligned(args.grad_ND, 0) &&
                is_aligned(args.rows_ND, args.rows_stride * static_cast<int64_t>(sizeof(T)));
    // Then every thread of a block has a vector of the row.
    bool whole = wide && args.D >= kThreads * kWide;
    auto* kernel = weighted_rows_backward<T, 1, 32>;
    if (wide) kernel = weighted_rows_backward<T, kWide, 32>;
    if (whole) kernel = weighted_rows_backward<T, kWide, kThreads>;
    return launch_at_most(kBlocksPerSM, kernel, ceil_div(args.N, whole ? 1 : kWarps), kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args);
  });
}

}  // namespace epmoe::cuda
