// The block-quantised fp8 wire format: e4m3 with one fp32 scale for each 128 elements.
#pragma once
#include "common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// The scale of a block, of which each of kLanes neighbouring lanes holds kCount elements: amax / 448.
template <int kCount, int kLanes>
__device__ __forceinline__ float block_scale(const float (&values)[kCount]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (is_finite(values[i])) amax = fmaxf(amax, fabsf(values[i]));
#pragma unroll
  for (int offset = kLanes / 2; offset; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  return scale_for(amax);
}

template <int kCount>
__device__ __forceinline__ Vector<uint8_t, kCount> to_fp8(const float (&values)[kCount], float scale) {
  Vector<uint8_t, kCount> packed;
#pragma unroll
  for (int i = 0; i < kCount; ++i) packed.at[i] = __nv_cvt_float_to_fp8(values[i] / scale, __NV_SATFINITE, __NV_E4M3);
  return packed;
}

__device__ __forceinline__ float from_fp8(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

}  // namespace epmoe::cuda
