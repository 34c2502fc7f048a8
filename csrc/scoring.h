// Scores and order-preserving keys of route, one text for CPU and CUDA: explicit fused
// multiply-adds, so that both round alike. Everything else of this project compiles with
// contraction off.
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
EPMOE_HD bool is_nan(float value) { return value != value; }

// A key whose unsigned order is the order of the floats: NaN ranks with -Inf, -0 with +0. Never 0,
// which is left to experts that are out of the choice. No branch: the GPU makes two instructions of
// the last line.
EPMOE_HD uint32_t order_key(float value) {
  uint32_t bits = bits_of(fmaxf(value + 0.0f, -INFINITY));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// exp(x) for x <= 0, not NaN, within 1 ulp or so. x = n ln2 + r; n by adding a number whose last
// bit is worth 1, which leaves n + 64 in the low bits; exp(r), |r| <= ln2/2, by a polynomial of
// degree 6 (minimax, 3e-9); 2^(n + 64) goes into its exponent, and the last product brings denormal
// results to their place with one rounding.
EPMOE_HD float exp_of_number(float x) {
  constexpr float kShift = 12582912.0f + 64.0f;  // 1.5 * 2^23
  float clamped = fmaxf(x, -104.0f);
  float shifted = fmaf(clamped, 1.44269504088896341f, kShift);
  float n = shifted - kShift;
  float r = fmaf(n, -0.693145751953125f, clamped);
  r = fmaf(n, -1.42860682030941723e-6f, r);
  float p = 0.001381454f;
  p = fmaf(p, r, 0.008368745f);
  p = fmaf(p, r, 0.04166839f);
  p = fmaf(p, r, 0.16666521f);
  p = fmaf(p, r, 0.49999994f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  return float_of(bits_of(p) + (bits_of(shifted) << 23)) * 0x1p-64f;
}

EPMOE_HD float exp_nonpositive(float x) { return is_nan(x) ? x : exp_of_number(x); }

// 1 / d, correctly rounded, for d and 1 / d within 2^±126.
EPMOE_HD float reciprocal(float d) {
#if defined(__CUDA_ARCH__)
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(d));
  return fmaf(fmaf(-d, guess, 1.0f), guess, guess);
#else
  return 1.0f / d;
#endif
}

// 2^64 / (1 + exp(-x)) for x within the bounds below, outside of which a sigmoid is 0 or 1. Scaled,
// so that neither the exponential, 2^-64 exp(-x), nor the result leaves the normal numbers. As
// above, but with degree 5 (minimax, 1.1e-7) and one step for n ln2 (2e-9 n): within 5e-7 in all. A
// row has many of them, and a weight needs no more.
constexpr float kLeastSigmoid = -104.0f;
constexpr float kFullSigmoid = 32.0f;
constexpr float kSigmoidScale = 0x1p-64f;
EPMOE_HD float scaled_sigmoid(float x) {
  constexpr float kShift = 12582912.0f - 64.0f;  // 1.5 * 2^23
  float shifted = fmaf(x, -1.44269504088896341f, kShift);
  float r = fmaf(shifted - kShift, -0.693147182464599609f, -x);
  float p = 0.008312502f;
  p = fmaf(p, r, 0.041890334f);
  p = fmaf(p, r, 0.16667116f);
  p = fmaf(p, r, 0.4999923f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  float d = float_of(bits_of(p) + (bits_of(shifted) << 23)) + kSigmoidScale;
  return reciprocal(d);
}

// 1 / (1 + exp(-x)), not NaN: 0 for that.
EPMOE_HD float sigmoid_of_number(float x) {
  return scaled_sigmoid(fminf(fmaxf(x, kLeastSigmoid), kFullSigmoid)) * kSigmoidScale;
}

EPMOE_HD float sigmoid(float x) { return is_nan(x) ? x : sigmoid_of_number(x); }

}  // namespace epmoe
