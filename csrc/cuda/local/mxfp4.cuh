// Weights in MXFP4 and NVFP4 as bf16, which holds all their values: codes e2m1, two in a byte, the
// low four bits first, and scales. Kernels read 32 codes at a time, with their scales.
//
// MXFP4 has a power of two (e8m0) for kMxfp4Group codes of a row. A product beyond bf16's range
// becomes Inf, and a scale of 255 is NaN. NVFP4 has an e4m3 for kNvfp4Group codes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "types.h"

namespace epmoe::cuda {

// Of pairs of bf16: exact where the product is one of bf16's numbers, also of subnormal ones.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                   *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<uint32_t*>(&product);
}

// Codes i and i + 4 of eight as a pair of bf16, times 2^-126. The sign, exponent and mantissa of
// e2m1 are moved to where bf16 has them, and e2m1's only subnormal number, 0.5, becomes a subnormal
// one.
__device__ __forceinline__ uint32_t tiny_pair(uint32_t eight, int i) {
  uint32_t sign = eight << (12 - 4 * i);
  uint32_t rest = i < 2 ? eight << (6 - 4 * i) : eight >> (4 * i - 6);
  return (sign & 0x80008000) | (rest & 0x01c001c0);
}

// What makes values of tiny pairs. 2^126 times a scale above 2 is beyond bf16, so there is a second
// factor then.
struct Mxfp4Scale {
  using Bytes = uint8_t;  // of 32 codes
  static constexpr bool kMayBeLarge = true;
  static constexpr float kLeftOut = 1.0f;  // of values
  static constexpr uint32_t kBothHalves = 0x10001;
  static constexpr uint32_t kLargest = 128;
  static constexpr uint32_t kNaN = 255;
  uint32_t exponent;

  // Needs `more`.
  __device__ __forceinline__ bool is_large() const { return exponent > kLargest; }
  // Of the codes 8 eight to 8 eight + 7.
  __device__ __forceinline__ uint32_t factor(int /*eight*/) const {
    return (exponent == kNaN ? 0x7fc0 : (min(exponent, kLargest) + 126) << 7) * kBothHalves;
  }
  __device__ __forceinline__ uint32_t more() const {
    return ((max(exponent, kLargest) - 1) << 7) * kBothHalves;
  }
};

// The two scales of 32 codes. 2^126 times a scale above 2 is beyond bf16, so values are 2^-7 of
// what they should be: 448 · 2^119 is one of bf16's numbers.
struct Nvfp4Scales {
  using Bytes = uint16_t;
  static constexpr bool kMayBeLarge = false;
  static constexpr float kLeftOut = 128.0f;
  uint32_t both;

  __device__ __forceinline__ bool is_large() const { return false; }
  __device__ __forceinline__ uint32_t factor(int eight) const {
    __half2_raw scales =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(both), __NV_E4M3);
    const float2 wide = __half22float2(scales);
    const float scale = (eight < 2 ? wide.x : wide.y) * 0x1p119f;
    __nv_bfloat162 pair = __floats2bfloat162_rn(scale, scale);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
  __device__ __forceinline__ uint32_t more() const { return 0; }
};

// Codes that share scales, eight at a time, in their order. Not kAlsoLarge: the scale is not large.
template <bool kAlsoLarge, typename Scales, int kCount>
__device__ __forceinline__ void bf16_of_eights(const uint32_t (&eights)[kCount],
                                               const Scales& scale, uint4 (&values)[kCount]) {
  uint32_t pairs[4][kCount];  // those of all eights at a time: a lane waits for none of them
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      pairs[c][i] = multiply_bf16x2(tiny_pair(eights[i], c), scale.factor(i));
      if (kAlsoLarge && scale.is_large()) pairs[c][i] = multiply_bf16x2(pairs[c][i], scale.more());
    }
  // Codes i and i + 4 are a pair.
  constexpr uint32_t kLow = 0x5410;
  constexpr uint32_t kHigh = 0x7632;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = make_uint4(
        __byte_perm(pairs[0][i], pairs[1][i], kLow), __byte_perm(pairs[2][i], pairs[3][i], kLow),
        __byte_perm(pairs[0][i], pairs[1][i], kHigh), __byte_perm(pairs[2][i], pairs[3][i], kHigh));
}

}  // namespace epmoe::cuda
