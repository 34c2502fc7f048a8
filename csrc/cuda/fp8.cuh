// The block-quantised fp8 wire format: e4m3 with one fp32 scale for each 128 elements.
#pragma once
#include "common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// Of a row's scales, in whole bulk copies.
EPMOE_HD int32_t scale_bytes(int64_t D) { return static_cast<int32_t>(ceil_div(D, kScaleBlock * 4) * 16); }

// The largest finite magnitude.
template <int kCount>
__device__ __forceinline__ float finite_amax(const float (&values)[kCount]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(values[i]));  // passes over NaN
  if (amax == INFINITY) {
    amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, is_finite(values[i]) ? fabsf(values[i]) : 0.0f);
  }
  return amax;
}

// The scale of a block, of which each of kLanes neighbouring lanes holds kCount elements: amax / 448.
template <int kCount, int kLanes>
__device__ __forceinline__ float block_scale(const float (&values)[kCount]) {
  float amax = finite_amax(values);
#pragma unroll
  for (int offset = kLanes / 2; offset; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  return scale_for(amax);
}

// Divides by a scale of scale_for. The compiler's division takes a branch, and so many elements one after the other;
// the product with the rounded reciprocal, corrected once, is the same wherever fp8 can tell (Markstein 1990), as long
// as nothing is denormal, from which a small scale is kept away by a power of two.
class ScaledDown {
 public:
  __device__ __forceinline__ explicit ScaledDown(float scale)
      : up_(scale < 0x1p-64f ? 0x1p64f : 1.0f), scale_(scale * up_), inverse_(1.0f / scale_) {}

  __device__ __forceinline__ float operator()(float value) const {
    float scaled = value * up_, first = scaled * inverse_;
    float corrected = fmaf(fmaf(-first, scale_, scaled), inverse_, first);
    return copysignf(is_nan(corrected) ? first : corrected, value);  // Inf - Inf; 0 - 0
  }

 private:
  float up_, scale_, inverse_;
};

template <int kCount>
__device__ __forceinline__ Vector<uint8_t, kCount> to_fp8(const float (&values)[kCount], float scale) {
  static_assert(kCount % 2 == 0);
  ScaledDown down(scale);
  Vector<uint8_t, kCount> packed;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    __nv_fp8x2_storage_t two =
        __nv_cvt_float2_to_fp8x2(make_float2(down(values[i]), down(values[i + 1])), __NV_SATFINITE, __NV_E4M3);
    memcpy(&packed.at[i], &two, sizeof two);
  }
  return packed;
}

// From fp8, without the scale.
template <int kCount>
__device__ __forceinline__ void to_floats(const Vector<uint8_t, kCount>& packed, float (&out)[kCount]) {
  static_assert(kCount % 2 == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    __nv_fp8x2_storage_t two;
    memcpy(&two, &packed.at[i], sizeof two);
    float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    out[i] = both.x, out[i + 1] = both.y;
  }
}

}  // namespace epmoe::cuda
