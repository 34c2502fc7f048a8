// Weights in MXFP4 as bf16, which holds all their values: codes e2m1, two in a byte, the low four bits first, and a
// scale, a power of two (e8m0), for kMxfp4Group codes of a row. A product beyond bf16's range becomes Inf, and a scale
// of 255 is NaN.
#pragma once
#include <cuda_bf16.h>

#include "types.h"

namespace epmoe::cuda {

// Of pairs of bf16: exact where the product is one of bf16's numbers, also of subnormal ones.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<uint32_t*>(&product);
}

// Codes i and i + 4 of eight as a pair of bf16, times 2^-126. The sign, exponent and mantissa of e2m1 are moved to
// where bf16 has them, and e2m1's only subnormal number, 0.5, becomes a subnormal one.
__device__ __forceinline__ uint32_t tiny_pair(uint32_t eight, int i) {
  uint32_t sign = eight << (12 - 4 * i);
  uint32_t rest = i < 2 ? eight << (6 - 4 * i) : eight >> (4 * i - 6);
  return (sign & 0x80008000) | (rest & 0x01c001c0);
}

// What makes values of tiny pairs. 2^126 times a scale above 2 is beyond bf16, so there is a second factor then.
struct Mxfp4Scale {
  static constexpr uint32_t kBothHalves = 0x10001, kLargest = 128, kNaN = 255;
  uint32_t exponent;

  // Needs `more`.
  __device__ __forceinline__ bool is_large() const { return exponent > kLargest; }
  __device__ __forceinline__ uint32_t factor() const {
    return (exponent == kNaN ? 0x7fc0 : (min(exponent, kLargest) + 126) << 7) * kBothHalves;
  }
  __device__ __forceinline__ uint32_t more() const { return ((max(exponent, kLargest) - 1) << 7) * kBothHalves; }
};

// Eight codes of a group, in their order.
__device__ __forceinline__ uint4 bf16_of_eight(uint32_t eight, const Mxfp4Scale& scale) {
  uint32_t pair[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    pair[c] = multiply_bf16x2(tiny_pair(eight, c), scale.factor());
    if (scale.is_large()) pair[c] = multiply_bf16x2(pair[c], scale.more());
  }
  constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // codes i and i + 4 are a pair
  return make_uint4(__byte_perm(pair[0], pair[1], kLow), __byte_perm(pair[2], pair[3], kLow),
                    __byte_perm(pair[0], pair[1], kHigh), __byte_perm(pair[2], pair[3], kHigh));
}

}  // namespace epmoe::cuda
