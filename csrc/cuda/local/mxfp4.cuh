// Weights in MXFP4 as bf16, which holds all their values: codes e2m1, two in a byte, the low four
// bits first, and a scale, a power of two (e8m0), for kMxfp4Group codes of a row. A product beyond
// bf16's range becomes Inf, and a scale of 255 is NaN.
#pragma once
#include <cuda_bf16.h>

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
  static constexpr uint32_t kBothHalves = 0x10001;
  static constexpr uint32_t kLargest = 128;
  static constexpr uint32_t kNaN = 255;
  uint32_t exponent;

  // Needs `more`.
  __device__ __forceinline__ bool is_large() const { return exponent > kLargest; }
  __device__ __forceinline__ uint32_t factor() const {
    return (exponent == kNaN ? 0x7fc0 : (min(exponent, kLargest) + 126) << 7) * kBothHalves;
  }
  __device__ __forceinline__ uint32_t more() const {
    return ((max(exponent, kLargest) - 1) << 7) * kBothHalves;
  }
};

// Codes of a group, eight at a time, in their order. Not kAlsoLarge: the scale is not large.
template <bool kAlsoLarge, int kCount>
__device__ __forceinline__ void bf16_of_eights(const uint32_t (&eights)[kCount],
                                               const Mxfp4Scale& scale, uint4 (&values)[kCount]) {
  uint32_t pairs[4][kCount];  // those of all eights at a time: a lane waits for none of them
#pragma unroll
  for (int c = 0; c < 4; ++c)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      pairs[c][i] = multiply_bf16x2(tiny_pair(eights[i], c), scale.factor());
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
