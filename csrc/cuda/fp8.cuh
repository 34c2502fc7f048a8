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

// kCount elements as they lie in registers: put together byte by byte, they take twice as many instructions.
template <int kCount>
using Fp8Words = Words<Vector<uint8_t, kCount>>;

template <int kCount, typename F>
__device__ __forceinline__ Fp8Words<kCount> packed_fp8(const float (&values)[kCount], F&& scaled_down) {
  static_assert(sizeof(Fp8Words<kCount>) == kCount);
  uint32_t words[kCount / 4];
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    auto two = [&](int j) -> uint32_t {
      float2 both = make_float2(scaled_down(values[j]), scaled_down(values[j + 1]));
      return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
    };
    words[i / 4] = two(i) | two(i + 2) << 16;
  }
  Fp8Words<kCount> packed;
  memcpy(&packed, words, sizeof packed);
  return packed;
}

template <int kCount>
__device__ __forceinline__ bool has_nan(const Fp8Words<kCount>& packed) {
  uint32_t words[kCount / 4], found = 0;
  memcpy(words, &packed, sizeof words);
#pragma unroll
  for (uint32_t word : words) found |= (word & 0x7f7f7f7fu) + 0x01010101u;
  return found & 0x80808080u;
}

// The quotient of which `first` is the product with the rounded reciprocal, corrected once; the sign of 0 is kept.
__device__ __forceinline__ float corrected(float first, float value, float scale, float inverse) {
  return fmaf(-fmaf(first, scale, -value), inverse, first);
}

// Divides by a scale of scale_for. The compiler's division takes a branch, and so many elements one after the other;
// the product with the rounded reciprocal, corrected once, is the same wherever fp8 can tell (Markstein 1990), as long
// as nothing is infinite or denormal. Where an infinity has made a NaN, or a small scale must be kept away from
// denormals by a power of two, all is done again.
template <int kCount>
__device__ __forceinline__ Fp8Words<kCount> to_fp8(const float (&values)[kCount], float scale) {
  constexpr float kSmall = 0x1p-64f;
  float inverse = 1.0f / scale;
  auto packed = packed_fp8(values, [&](float value) { return corrected(value * inverse, value, scale, inverse); });
  if (scale < kSmall || has_nan<kCount>(packed)) {
    float up = scale < kSmall ? 1.0f / kSmall : 1.0f, upscaled = scale * up;
    inverse = 1.0f / upscaled;
    packed = packed_fp8(values, [&](float value) {
      float first = value * up * inverse, second = corrected(first, value * up, upscaled, inverse);
      return is_nan(second) ? first : second;  // Inf - Inf
    });
  }
  return packed;
}

// From fp8, without the scale.
template <int kCount>
__device__ __forceinline__ void to_floats(const Vector<uint8_t, kCount>& packed, float (&out)[kCount]) {
  static_assert(kCount % 4 == 0);
  uint32_t words[kCount / 4];
  memcpy(words, &packed, sizeof words);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 4] >> i % 4 * 8);
    float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    out[i] = both.x, out[i + 1] = both.y;
  }
}

}  // namespace epmoe::cuda
