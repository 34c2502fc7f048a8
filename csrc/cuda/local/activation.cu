// What stands between the two grouped GEMMs of the experts on the GPU: the gated activation, and the scales of rows in
// the order in which a GEMM takes them. Both visit rows of pairs only.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

// Six blocks a multiprocessor write 3.3 TB/s of bf16 outputs on an H200, four 3.1 and two 2.3.
constexpr int kThreads = 256, kWarps = kThreads / 32, kBlocksPerSM = 6;

// gated() of gating.h for outputs of 16 bits or fewer: with the exponential and the reciprocal of the hardware, 2e-6
// in all, it takes half as many instructions.
__device__ __forceinline__ float gated_fast(float gate, float up, const Gating& gating) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(gate) : "f"(gating.limit));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(gating.limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(-gating.limit));
  float power, sigmoid;  // of a large -gate the power is Inf and the sigmoid 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * (gating.alpha * -1.44269504088896341f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return gate * sigmoid * (up + gating.up_offset);
}

// kCount gates and ups of a row, from the first-th on, as they lie in registers. Past the end of the row, where `count`
// ends, they are 0. kWide: rows are aligned to vectors, so a lane has all of them or none.
template <typename T, int kCount, bool kWide>
struct GatesAndUps {
  using Part = Vector<T, kCount>;
  Part first_half = {}, second_half = {};  // gates, ups; or by turns

  __device__ __forceinline__ GatesAndUps(const T* row, const GatedActivationArgs& args, int64_t first, int count) {
    const T* halves[] = {row + (args.interleaved ? 2 * first : first),
                         row + (args.interleaved ? 2 * first + kCount : args.F + first)};
    if constexpr (kWide) {
      if (!count) return;
      first_half = load_past_l1(reinterpret_cast<const Part*>(halves[0]));
      second_half = load_past_l1(reinterpret_cast<const Part*>(halves[1]));
    } else {
      int here[] = {args.interleaved ? 2 * count : count, args.interleaved ? 2 * count - kCount : count};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < here[0]) first_half.at[i] = halves[0][i];
        if (i < here[1]) second_half.at[i] = halves[1][i];
      }
    }
  }

  __device__ __forceinline__ void add_to(float (&gate)[kCount], float (&up)[kCount], bool interleaved) const {
    float values[2][kCount];
    to_floats(first_half, values[0]);
    to_floats(second_half, values[1]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] += interleaved ? values[i >= kCount / 2][2 * i % kCount] : values[0][i];
      up[i] += interleaved ? values[i >= kCount / 2][(2 * i + 1) % kCount] : values[1][i];
    }
  }
};

// A warp has a chunk of a row at a time, and each lane kCount consecutive outputs of it.
template <typename T, bool kQuantize, bool kWide, int kCount = kPerVector<T>>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    gated_rows(const __grid_constant__ GatedActivationArgs args, uint32_t chunks) {
  constexpr int kScaleLanes = static_cast<int>(kScaleBlock) / kCount;  // that share a scale
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  uint32_t items = rows.count() * chunks;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < items; item += gridDim.x * kWarps) {
    uint32_t n = item / chunks;
    auto [expert, t] = rows[n];
    int64_t first = ((item - n * chunks) * 32 + threadIdx.x % 32) * kCount;
    int count = static_cast<int>(min(max(args.F - first, int64_t{0}), int64_t{kCount}));
    using Pairs = GatesAndUps<T, kCount, kWide>;
    Pairs pairs(static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride, args, first, count);
    float gate[kCount] = {}, up[kCount] = {}, value[kCount];
    pairs.add_to(gate, up, args.interleaved);
    if (args.bias_e2F) {
      auto* bias = static_cast<const T*>(args.bias_e2F) + int64_t{expert} * 2 * args.F;
      Pairs(bias, args, first, count).add_to(gate, up, args.interleaved);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i] = sizeof(T) > 2 ? gated(gate[i], up[i], args.gating) : gated_fast(gate[i], up[i], args.gating);
      if (!kWide && i >= count) value[i] = 0.0f;
    }
    using Out = std::conditional_t<kQuantize, uint8_t, T>;
    Vector<Out, kCount> result;
    if constexpr (kQuantize) {
      float scale = block_scale<kCount, kScaleLanes>(value);
      Fp8Registers<kCount> q = to_fp8(value, scale);
      memcpy(&result, &q, sizeof q);
      if (count && threadIdx.x % kScaleLanes == 0) args.scales_BN[first / kScaleBlock * args.scales_stride + t] = scale;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) result.at[i] = from_float<T>(value[i]);
    }
    auto* out = static_cast<Out*>(args.out_NF) + t * args.F + first;
    if constexpr (kWide) {
      if (count) *reinterpret_cast<Vector<Out, kCount>*>(out) = result;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < count) out[i] = result.at[i];
    }
  }
}

constexpr int kBlocksAtOnce = 8;  // scales that a lane moves: a sector of 32 bytes

// A warp moves kBlocksAtOnce scales of 32 rows; rows of one segment lie side by side in the output.
__global__ void __launch_bounds__(kThreads)
    transposed_scales(const __grid_constant__ ScalesByBlockArgs args, uint32_t chunks) {
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  uint32_t items = (rows.count() + 31) / 32 * chunks;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < items; item += gridDim.x * kWarps) {
    uint32_t group = item / chunks, n = group * 32 + threadIdx.x % 32, first = (item - group * chunks) * kBlocksAtOnce;
    if (n >= rows.count()) continue;
    int64_t t = rows[n].t;
    float scale[kBlocksAtOnce];
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i)
      if (first + i < args.B) scale[i] = args.scales_NB[t * args.scales_stride + first + i];
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i)
      if (first + i < args.B) args.out_BN[(first + i) * args.out_stride + t] = scale[i];
  }
}

}  // namespace

cudaError_t gated_activation(const GatedActivationArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    int64_t chunks = ceil_div(args.F, 32 * kPerVector<T>);
    bool wide = args.F % kPerVector<T> == 0 &&
                is_aligned(args.gate_up_N2F, args.gate_up_stride * static_cast<int64_t>(sizeof(T))) &&
                is_aligned(args.bias_e2F, 0);
    auto* kernel = args.scales_BN ? (wide ? gated_rows<T, true, true> : gated_rows<T, true, false>)
                                  : (wide ? gated_rows<T, false, true> : gated_rows<T, false, false>);
    return launch_at_most(kBlocksPerSM, kernel, ceil_div(args.N * chunks, kWarps), kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args,
                          static_cast<uint32_t>(chunks));
  });
}

cudaError_t scales_by_block(const ScalesByBlockArgs& args, cudaStream_t stream) {
  int64_t chunks = ceil_div(args.B, kBlocksAtOnce);
  return launch_at_most(kBlocksPerSM, transposed_scales, ceil_div(ceil_div(args.N, 32) * chunks, kWarps), kThreads,
                        RealRows::shared_bytes(args.segments.num_local_experts), stream, args,
                        static_cast<uint32_t>(chunks));
}

}  // namespace epmoe::cuda
