// The gated activation on the GPU, between the two grouped GEMMs of the experts. It stops at the last segment, which
// the device knows and the host does not: the rows past it may be a thousand times as many.
#include "args.h"
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kPerLane = kScaleBlock / 32;

// The expert whose segment holds row t.
__device__ __forceinline__ int32_t expert_of(const GatedActivationArgs& args, int32_t t) {
  int32_t first = 0, last = args.num_local_experts - 1;
  while (first < last) {
    int32_t middle = (first + last) / 2;
    if (t < args.expert_offsets[middle + 1])
      last = middle;
    else
      first = middle + 1;
  }
  return first;
}

// kPerLane gates and ups of a row, from the first-th on. Past the end of the row, where `count` ends, they are 0.
template <typename T>
struct GatesAndUps {
  float gate[kPerLane], up[kPerLane];

  __device__ __forceinline__ GatesAndUps(const T* row, const GatedActivationArgs& args, int64_t first, int count,
                                         bool wide) {
    if (!wide || count < kPerLane) {
      int64_t step = args.interleaved ? 2 : 1, to_up = args.interleaved ? 1 : args.F;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const T* at = row + step * (first + i);
        gate[i] = i < count ? to_float(at[0]) : 0.0f;
        up[i] = i < count ? to_float(at[to_up]) : 0.0f;
      }
    } else if (args.interleaved) {
      T both[2 * kPerLane];
      load_vectors(row + 2 * first, both);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) gate[i] = to_float(both[2 * i]), up[i] = to_float(both[2 * i + 1]);
    } else {
      to_floats(*reinterpret_cast<const Vector<T, kPerLane>*>(row + first), gate);
      to_floats(*reinterpret_cast<const Vector<T, kPerLane>*>(row + args.F + first), up);
    }
  }
};

// Each warp has kScaleBlock outputs of a row at a time; each lane has kPerLane consecutive ones.
template <typename T, bool kQuantize>
__global__ void __launch_bounds__(kThreads)
    gated_rows(const __grid_constant__ GatedActivationArgs args, uint32_t blocks, bool wide) {
  wait_for_predecessor();
  let_successor_start();
  uint32_t real =
      static_cast<uint32_t>(min(max(int64_t{args.expert_offsets[args.num_local_experts]}, int64_t{0}), args.N));
  for (uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32; index < real * blocks; index += gridDim.x * kWarps) {
    int64_t t = index / blocks, first = index % blocks * kScaleBlock + threadIdx.x % 32 * kPerLane;
    int count = static_cast<int>(min(max(args.F - first, int64_t{0}), int64_t{kPerLane}));
    bool full = wide && count == kPerLane;
    GatesAndUps<T> of(static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride, args, first, count, wide);
    if (args.bias_e2F) {
      int64_t expert = expert_of(args, static_cast<int32_t>(t));
      GatesAndUps<T> bias(static_cast<const T*>(args.bias_e2F) + expert * 2 * args.F, args, first, count, wide);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) of.gate[i] += bias.gate[i], of.up[i] += bias.up[i];
    }
    float value[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = i < count ? gated(of.gate[i], of.up[i], args.gating) : 0.0f;
    if constexpr (kQuantize) {
      float scale = scale_for(warp_max(finite_amax(value)));
      auto* out = static_cast<uint8_t*>(args.out_NF) + t * args.F + first;
      Fp8Registers<kPerLane> q = to_fp8(value, scale);
      if (full) *reinterpret_cast<Fp8Registers<kPerLane>*>(out) = q;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (!full && i < count) out[i] = static_cast<uint8_t>(q >> 8 * i);
      if (threadIdx.x % 32 == 0) args.scales_NB[index] = scale;
    } else {
      T rounded[kPerLane], *out = static_cast<T*>(args.out_NF) + t * args.F + first;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) rounded[i] = from_float<T>(value[i]);
      if (full) store_vectors(rounded, out);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (!full && i < count) out[i] = rounded[i];
    }
  }
}

}  // namespace

cudaError_t gated_activation(const GatedActivationArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t blocks = ceil_div(args.F, kScaleBlock);
  int64_t grid = std::min<int64_t>(ceil_div(args.N * blocks, kWarps), 8 * device.multiprocessors);
  if (grid == 0) return cudaSuccess;
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = args.F % kPerLane == 0 &&
                is_aligned(args.gate_up_N2F, args.gate_up_stride * static_cast<int64_t>(sizeof(T))) &&
                is_aligned(args.bias_e2F, 0);
    auto* kernel = args.scales_NB ? gated_rows<T, true> : gated_rows<T, false>;
    return launch(kernel, grid, kThreads, 0, stream, args, static_cast<uint32_t>(blocks), wide);
  });
}

}  // namespace epmoe::cuda
