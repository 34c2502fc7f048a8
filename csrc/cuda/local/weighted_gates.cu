// The gated activation of training on the GPU, times the weight of its row, and its gradients. Like those of
// activation.cu, the kernels visit rows of segments only. A row of a gap is not read, and counts as zeros.
#include "cuda/device/launch.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocksPerSM = 4;

// kCount gates and as many ups of a row as they lie in memory: gates, then ups; or by turns. Vectors of one element are
// in order either way.
template <typename T, int kCount>
struct GatesAndUps {
  using Part = Vector<T, kCount>;

  static __device__ __forceinline__ int64_t second(bool interleaved, int64_t first, int64_t F) {
    return interleaved ? 2 * first + kCount : F + first;
  }
  static __device__ __forceinline__ void load(const T* row, bool interleaved, int64_t first, int64_t F,
                                              float (&gate)[kCount], float (&up)[kCount]) {
    float halves[2][kCount];
    to_floats(load_past_l1(reinterpret_cast<const Part*>(row + (interleaved ? 2 * first : first))), halves[0]);
    to_floats(load_past_l1(reinterpret_cast<const Part*>(row + second(interleaved, first, F))), halves[1]);
    bool turns = kCount > 1 && interleaved;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] = turns ? halves[2 * i / kCount][2 * i % kCount] : halves[0][i];
      up[i] = turns ? halves[(2 * i + 1) / kCount][(2 * i + 1) % kCount] : halves[1][i];
    }
  }
  static __device__ __forceinline__ void store(T* row, bool interleaved, int64_t first, int64_t F,
                                               const float (&gate)[kCount], const float (&up)[kCount]) {
    Part halves[2];
    bool turns = kCount > 1 && interleaved;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      halves[turns ? 2 * i / kCount : 0].at[turns ? 2 * i % kCount : i] = from_float<T>(gate[i]);
      halves[turns ? (2 * i + 1) / kCount : 1].at[turns ? (2 * i + 1) % kCount : i] = from_float<T>(up[i]);
    }
    *reinterpret_cast<Part*>(row + (interleaved ? 2 * first : first)) = halves[0];
    *reinterpret_cast<Part*>(row + second(interleaved, first, F)) = halves[1];
  }
};

// A warp has a row at a time, and each lane kCount consecutive outputs of it, so that the gradient of the row's weight
// is a sum in an order that does not change.
template <typename T, bool kBackward, bool kInterleaved, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    weighted_gates(const __grid_constant__ WeightedGatesArgs args) {
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  using Row = GatesAndUps<T, kCount>;
  using Part = Vector<T, kCount>;
  for (uint32_t n = blockIdx.x * kWarps + threadIdx.x / 32; n < rows.count(); n += gridDim.x * kWarps) {
    auto [expert, place] = rows[n];
    int64_t t = place;
    bool real =
        !args.tokens_per_expert || place - args.segments.expert_offsets[expert] < args.tokens_per_expert[expert];
    float weight = real && args.row_weights_N ? args.row_weights_N[t] : 1.0f, grad_weight = 0.0f;
    for (int64_t first = threadIdx.x % 32 * kCount; first < args.F; first += 32 * kCount) {
      float gate[kCount] = {}, up[kCount] = {};
      if (real)
        Row::load(static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride, kInterleaved, first, args.F, gate,
                  up);
      if constexpr (kBackward) {
        float grad[kCount] = {};
        if (real) {
          auto* part = reinterpret_cast<const Part*>(static_cast<const T*>(args.grad_NF) + t * args.F + first);
          to_floats(load_past_l1(part), grad);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          GatedWithGradients at = gated_with_gradients(gate[i], up[i], args.gating);
          grad_weight += grad[i] * at.value;
          gate[i] = grad[i] * weight * at.gate, up[i] = grad[i] * weight * at.up;
        }
        Row::store(static_cast<T*>(args.grad_gate_up_N2F) + t * 2 * args.F, kInterleaved, first, args.F, gate, up);
      } else {
        Part out;
#pragma unroll
        for (int i = 0; i < kCount; ++i) out.at[i] = from_float<T>(weight * gated(gate[i], up[i], args.gating));
        *reinterpret_cast<Part*>(static_cast<T*>(args.out_NF) + t * args.F + first) = out;
      }
    }
    if constexpr (kBackward) {
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) grad_weight += __shfl_xor_sync(kAllLanes, grad_weight, lanes);
      if (threadIdx.x % 32 == 0) args.grad_weights_N[t] = grad_weight;
    }
  }
}

template <typename T, int kCount>
auto* variant_of(bool backward, bool interleaved) {
  return backward ? (interleaved ? weighted_gates<T, true, true, kCount> : weighted_gates<T, true, false, kCount>)
                  : (interleaved ? weighted_gates<T, false, true, kCount> : weighted_gates<T, false, false, kCount>);
}

}  // namespace

cudaError_t weighted_gates(const WeightedGatesArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = args.F % kPerVector<T> == 0 && is_aligned(args.grad_NF, 0) &&
                is_aligned(args.gate_up_N2F, args.gate_up_stride * static_cast<int64_t>(sizeof(T)));
    bool backward = args.grad_NF;
    auto* kernel =
        wide ? variant_of<T, kPerVector<T>>(backward, args.interleaved) : variant_of<T, 1>(backward, args.interleaved);
    return launch_at_most(kBlocksPerSM, kernel, ceil_div(args.N, kWarps), kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args);
  });
}

}  // namespace epmoe::cuda
