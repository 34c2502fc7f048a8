// The gated activation of training on the GPU, times the weight of its row, and its gradients. Like
// those of activation.cu, the kernels visit rows of segments only. A row of a gap is not read, and
// counts as zeros.
#include "cuda/device/launch.cuh"
#include "cuda/local/gates.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSM = 4;

// A warp has a row at a time, and each lane kCount consecutive outputs of it, so that the gradient
// of the row's weight is a sum in an order that does not change.
template <typename T, bool kBackward, bool kInterleaved, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    weighted_gates(const __grid_constant__ WeightedGatesArgs args) {
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  using Pairs = GatesAndUps<T, kCount, true>;
  using Part = Vector<T, kCount>;
  for (uint32_t n = blockIdx.x * kWarps + threadIdx.x / 32; n < rows.count();
       n += gridDim.x * kWarps) {
    auto [expert, place] = rows[n];
    int64_t t = place;
    bool real = !args.tokens_per_expert ||
                place - args.segments.expert_offsets[expert] < args.tokens_per_expert[expert];
    float weight = real && args.row_weights_N ? args.row_weights_N[t] : 1.0f;
    float grad_weight = 0.0f;
    for (int64_t first = threadIdx.x % 32 * kCount; first < args.F; first += 32 * kCount) {
      float gate[kCount] = {};
      float up[kCount] = {};
      if (real)
        Pairs(static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride, kInterleaved,
              args.F, first, kCount)
            .for_each(kInterleaved, [&](int i, float g, float u) { gate[i] = g, up[i] = u; });
      if constexpr (kBackward) {
        float grad[kCount] = {};
        if (real) {
          auto* part = reinterpret_cast<const Part*>(static_cast<const T*>(args.grad_NF) +
                                                     t * args.F + first);
          to_floats(load_past_l1(part), grad);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          GatedWithGradients at = gated_with_gradients(gate[i], up[i], args.gating);
          grad_weight += grad[i] * at.value;
          gate[i] = grad[i] * weight * at.gate;
          up[i] = grad[i] * weight * at.up;
          grad[i] = weight * at.value;
        }
        // The outputs themselves, in the registers of their gradients.
        if (args.out_NF)
          *reinterpret_cast<Part*>(static_cast<T*>(args.out_NF) + t * args.F + first) =
              rounded<T>(grad);
        Pairs(gate, up, kInterleaved)
            .store(static_cast<T*>(args.grad_gate_up_N2F) + t * 2 * args.F, kInterleaved, args.F,
                   first);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) gate[i] = weight * gated(gate[i], up[i], args.gating);
        *reinterpret_cast<Part*>(static_cast<T*>(args.out_NF) + t * args.F + first) =
            rounded<T>(gate);
      }
    }
    if constexpr (kBackward) {
      grad_weight = warp_sum(grad_weight);
      if (threadIdx.x % 32 == 0) args.grad_weights_N[t] = grad_weight;
    }
  }
}

template <typename T, int kCount>
auto* variant_of(bool backward, bool interleaved) {
  if (backward)
    return interleaved ? weighted_gates<T, true, true, kCount>
                       : weighted_gates<T, true, false, kCount>;
  return interleaved ? weighted_gates<T, false, true, kCount>
                     : weighted_gates<T, false, false, kCount>;
}

}  // namespace

cudaError_t weighted_gates(const WeightedGatesArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = args.F % kPerVector<T> == 0 && is_aligned(args.grad_NF, 0) &&
                is_aligned(args.gate_up_N2F, args.gate_up_stride * static_cast<int64_t>(sizeof(T)));
    bool backward = args.grad_NF;
    auto* kernel = wide ? variant_of<T, kPerVector<T>>(backward, args.interleaved)
                        : variant_of<T, 1>(backward, args.interleaved);
    return launch_at_most(kBlocksPerSM, kernel, ceil_div(args.N, kWarps), kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args);
  });
}

}  // namespace epmoe::cuda
