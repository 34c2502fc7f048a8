// The fp8 format of rows: e4m3 with one fp32 scale for each block of 128 elements.
#pragma once
#include "cuda/device/common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// The largest finite magnitude of the values; 0 if none is finite.
template <int kCount>
__device__ __forceinline__ float finite_amax(const float (&values)[kCount]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(values[i]));  // fmaxf ignores NaN
  if (amax == INFINITY) {
    amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      amax = fmaxf(amax, is_finite(values[i]) ? fabsf(values[i]) : 0.0f);
  }
  return amax;
}

// The scale of a block, which is its largest finite magnitude / 448. Each of kLanes neighbouring
// lanes holds kCount elements of the block.
template <int kCount, int kLanes>
__device__ __forceinline__ float block_scale(const float (&values)[kCount]) {
  float amax = finite_amax(values);
#pragma unroll
  for (int offset = kLanes / 2; offset; offset /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  return scale_for(amax);
}

// kCount fp8 elements, packed into registers. To assemble them byte by byte takes twice as many
// instructions.
template <int kCount>
using Fp8Registers = Registers<Vector<uint8_t, kCount>>;

// scaled_down(value) as fp8, for each value.
template <int kCount, typename F>
__device__ __forceinline__ Fp8Registers<kCount> packed_fp8(const float (&values)[kCount],
                                                           F&& scaled_down) {
  static_assert(sizeof(Fp8Registers<kCount>) == kCount);
  uint32_t registers[kCount / 4];
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    auto two = [&](int j) -> uint32_t {
      float2 both = make_float2(scaled_down(values[j]), scaled_down(values[j + 1]));
      return __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
    };
    registers[i / 4] = two(i) | two(i + 2) << 16;
  }
  Fp8Registers<kCount> packed;
  memcpy(&packed, registers, sizeof packed);
  return packed;
}

template <int kCount>
__device__ __forceinline__ bool has_nan(const Fp8Registers<kCount>& packed) {
  uint32_t registers[kCount / 4], found = 0;
  memcpy(registers, &packed, sizeof registers);
#pragma unroll
  for (uint32_t bits : registers) found |= (bits & 0x7f7f7f7fu) + 0x01010101u;
  return found & 0x80808080u;
}

// value / scale. `first` is value * inverse, where `inverse` is the rounded reciprocal of the
// scale; one step corrects it. The sign of 0 is kept.
__device__ __forceinline__ float corrected(float first, float value, float scale, float inverse) {
  return fmaf(-fmaf(first, scale, -value), inverse, first);
}

// Divides values by a scale of scale_for() and rounds them to fp8. The compiler's division takes a
// branch for each element, so that elements follow one another. Instead, the product with the
// rounded reciprocal is corrected once (Markstein 1990): it rounds to the same fp8 value, as long
// as nothing is infinite or denormal. All values are computed again where an infinity has made a
// NaN, or where the scale is below 2^-64: then a power of two keeps the computation away from
// denormals.
template <int kCount>
__device__ __forceinline__ Fp8Registers<kCount> to_fp8(const float (&values)[kCount], float scale) {
  constexpr float kSmall = 0x1p-64f;
  float inverse = 1.0f / scale;
  auto packed = packed_fp8(
      values, [&](float value) { return corrected(value * inverse, value, scale, inverse); });
  if (scale < kSmall || has_nan<kCount>(packed)) {
    float up = scale < kSmall ? 1.0f / kSmall : 1.0f;
    float upscaled = scale * up;
    inverse = 1.0f / upscaled;
    packed = packed_fp8(values, [&](float value) {
      float first = value * up * inverse;
      float second = corrected(first, value * up, upscaled, inverse);
      return is_nan(second) ? first : second;  // Inf - Inf
    });
  }
  return packed;
}

// fp8 elements as floats; the caller multiplies by the scale.
template <int kCount>
__device__ __forceinline__ void to_floats(const Vector<uint8_t, kCount>& packed,
                                          float (&out)[kCount]) {
  static_assert(kCount % 4 == 0);
  uint32_t registers[kCount / 4];
  memcpy(registers, &packed, sizeof registers);
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    auto two = static_cast<__nv_fp8x2_storage_t>(registers[i / 4] >> i % 4 * 8);
    float2 both = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    out[i] = both.x, out[i + 1] = both.y;
  }
}

}  // namespace epmoe::cuda
