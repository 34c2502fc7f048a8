// Scores and order-preserving keys of route, one text for CPU and CUDA: explicit fused multiply-adds, so that
// both round alike. Everything else of this project compiles with contraction off.
#pragma once
#include <cmath>

#include "types.h"

namespace epmoe {

EPMOE_HD uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(uint32_t, value);
#endif
}

EPMOE_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

EPMOE_HD bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }
EPMOE_HD bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }

// A key whose unsigned order is the order of the floats: NaN ranks with -Inf, -0 with +0. Never 0, which is
// left to experts that are out of the choice.
EPMOE_HD uint32_t order_key(float value) {
  if (is_nan(value)) return 0x007fffffu;  // the key of -Inf
  if (value == 0.0f) return 0x80000000u;
  uint32_t bits = bits_of(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// exp(x) for x <= 0, within 1 ulp or so: x = n ln2 + r, a degree-7 polynomial in r (coefficients: Taylor, |r|
// <= ln2/2, truncation below 2^-25), scaled by 2^n in two steps so that denormal results are right. NaN stays
// NaN.
EPMOE_HD float exp_nonpositive(float x) {
  if (is_nan(x)) return x;
  if (x < -104.0f) return 0.0f;
  float n = floorf(fmaf(x, 1.44269504088896341f, 0.5f));
  float r = fmaf(n, -0.693145751953125f, x);
  r = fmaf(n, -1.42860682030941723e-6f, r);
  float p = 1.0f / 5040.0f;
  p = fmaf(p, r, 1.0f / 720.0f);
  p = fmaf(p, r, 1.0f / 120.0f);
  p = fmaf(p, r, 1.0f / 24.0f);
  p = fmaf(p, r, 1.0f / 6.0f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  int32_t half = static_cast<int32_t>(n) / 2, rest = static_cast<int32_t>(n) - half;
  p *= float_of(static_cast<uint32_t>(half + 127) << 23);
  return p * float_of(static_cast<uint32_t>(rest + 127) << 23);
}

// 1 / (1 + exp(-x)), by the exponential of a value that is never positive: no overflow at either end.
EPMOE_HD float sigmoid(float x) {
  float t = exp_nonpositive(x < 0.0f ? x : -x);
  return (x < 0.0f ? t : 1.0f) / (1.0f + t);
}

// The guard that the whole project hangs on: a score that is not finite is worth nothing.
EPMOE_HD float sanitise(float score) {
#if defined(EPMOE_MUTATE_ROUTE_CLAMP)
  return score;
#else
  return is_finite(score) ? score : 0.0f;
#endif
}

}  // namespace epmoe
