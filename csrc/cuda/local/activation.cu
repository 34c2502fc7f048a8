// What stands between the two grouped GEMMs of the experts on the GPU: the gated activation, and
// the scales of rows in the order in which a GEMM takes them. Both visit rows of pairs only.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/gates.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

// Six blocks a multiprocessor write 3.3 TB/s of bf16 outputs on an H200, four 3.1 and two 2.3.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSM = 6;

// A warp has a chunk of a row at a time, and each lane kCount consecutive outputs of it.
// kScaled: gates and ups, and outputs, get those of NVFP4.
template <typename T, bool kQuantize, bool kWide, bool kScaled = false, int kCount = kPerVector<T>>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    gated_rows(const __grid_constant__ GatedActivationArgs args, uint32_t chunks) {
  constexpr int kScaleLanes = static_cast<int>(kScaleBlock) / kCount;  // that share a scale
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  uint32_t items = rows.count() * chunks;
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < items;
       item += gridDim.x * kWarps) {
    uint32_t n = item / chunks;
    auto [expert, t] = rows[n];
    int64_t first = ((item - n * chunks) * 32 + threadIdx.x % 32) * kCount;
    int count = static_cast<int>(min(max(args.F - first, int64_t{0}), int64_t{kCount}));
    using Pairs = GatesAndUps<T, kCount, kWide>;
    auto* row = static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride;
    Pairs pairs(row, args.interleaved, args.F, first, count);
    float gate[kCount] = {};
    float up[kCount] = {};
    float value[kCount];
    pairs.add_to(gate, up, args.interleaved);
    [[maybe_unused]] const float* scales = args.tensor_scales + int64_t{expert} * kTensorScales;
    if constexpr (kScaled) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gate[i] *= scales[0], up[i] *= scales[1];
    }
    if (args.bias_e2F) {
      auto* bias = static_cast<const T*>(args.bias_e2F) + int64_t{expert} * 2 * args.F;
      Pairs(bias, args.interleaved, args.F, first, count).add_to(gate, up, args.interleaved);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      value[i] = sizeof(T) > 2 ? gated(gate[i], up[i], args.gating)
                               : gated_fast(gate[i], up[i], args.gating);
      if constexpr (kScaled) value[i] *= scales[2];
      if (!kWide && i >= count) value[i] = 0.0f;
    }
    using Out = std::conditional_t<kQuantize, uint8_t, T>;
    Vector<Out, kCount> result;
    if constexpr (kQuantize) {
      float scale = block_scale<kCount, kScaleLanes>(value);
      Fp8Registers<kCount> q = to_fp8(value, scale);
      memcpy(&result, &q, sizeof q);
      if (count && threadIdx.x % kScaleLanes == 0)
        args.scales_BN[first / kScaleBlock * args.scales_stride + t] = scale;
    } else {
      result = rounded<T>(value);
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
  for (uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32; item < items;
       item += gridDim.x * kWarps) {
    uint32_t group = item / chunks;
    uint32_t n = group * 32 + threadIdx.x % 32;
    uint32_t first = (item - group * chunks) * kBlocksAtOnce;
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
    bool wide =
        args.F % kPerVector<T> == 0 &&
        is_aligned(args.gate_up_N2F, args.gate_up_stride * static_cast<int64_t>(sizeof(T))) &&
        is_aligned(args.bias_e2F, 0);
    auto* kernel = wide ? gated_rows<T, false, true> : gated_rows<T, false, false>;
    if (args.scales_BN) kernel = wide ? gated_rows<T, true, true> : gated_rows<T, true, false>;
    if (args.tensor_scales) {
      if (args.scales_BN || !std::is_same_v<T, __nv_bfloat16>) return cudaErrorInvalidValue;
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        kernel = wide ? gated_rows<T, false, true, true> : gated_rows<T, false, false, true>;
    }
    return launch_at_most(kBlocksPerSM, kernel, ceil_div(args.N * chunks, kWarps), kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args,
                          static_cast<uint32_t>(chunks));
  });
}

cudaError_t scales_by_block(const ScalesByBlockArgs& args, cudaStream_t stream) {
  int64_t chunks = ceil_div(args.B, kBlocksAtOnce);
  return launch_at_most(kBlocksPerSM, transposed_scales,
                        ceil_div(ceil_div(args.N, 32) * chunks, kWarps), kThreads,
                        RealRows::shared_bytes(args.segments.num_local_experts), stream, args,
                        static_cast<uint32_t>(chunks));
}

}  // namespace epmoe::cuda
