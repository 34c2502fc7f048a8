// Element types on the CPU: conversion from and to fp32, the fp8 format with one scale a block,
// loads of ids and weights.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "wire_format.h"

namespace epmoe::cpu {

using Float16 = _Float16;
struct BFloat16 {
  uint16_t bits;
};
struct Float8 {  // e4m3, finite: no Inf, NaN is 0x7f
  uint8_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(Float16 value) { return static_cast<float>(value); }
inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline float to_float(Float8 value) {
  uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24;
  uint32_t magnitude = value.bits & 0x7f;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  // Read as the top bits of an fp32 number, the bits are 2^-120 times the value, denormals
  // included.
  return std::bit_cast<float>(sign | magnitude << 20) * 0x1p120f;
}

inline BFloat16 to_bfloat16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
  return {static_cast<uint16_t>(value != value ? (bits >> 16 | 0x40u) : rounded)};
}
inline Float8 to_float8(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  float magnitude = std::fabs(value);
  if (magnitude != magnitude) return {static_cast<uint8_t>(sign | 0x7f)};
  if (magnitude >= 448.0f) return {static_cast<uint8_t>(sign | 0x7e)};  // saturates
  // Below the normal range the step is 2^-9; above, three bits of mantissa are kept.
  if (magnitude < 0x1p-6f)
    return {static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyintf(magnitude * 512)))};
  uint32_t m = std::bit_cast<uint32_t>(magnitude);
  uint32_t rounded = (m + 0x7ffffu + (m >> 20 & 1u)) >> 20;
  return {static_cast<uint8_t>(sign | std::min<uint32_t>(rounded - (120u << 3), 0x7e))};
}
template <typename T>
inline T from_float(float value) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return to_bfloat16(value);
  else if constexpr (std::is_same_v<T, Float8>)
    return to_float8(value);
  else
    return static_cast<T>(value);
}

// Calls f with a value of the C++ type of `dtype`.
template <typename F>
auto visit(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat8E4M3:
      return f(Float8{});
    default:
      return f(float{});
  }
}

inline float load_float(const void* base, DType dtype, int64_t index) {
  return visit(
      dtype, [&](auto type) { return to_float(static_cast<const decltype(type)*>(base)[index]); });
}

inline int64_t load_id(const void* base, bool wide, int64_t index) {
  return wide ? static_cast<const int64_t*>(base)[index] : static_cast<const int32_t*>(base)[index];
}

// The largest finite magnitude of n values. Inf and NaN do not count, so that they do not set a
// scale.
template <typename T>
float finite_amax(const T* values, int64_t n) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    float magnitude = std::fabs(to_float(values[i]));
    if (magnitude < INFINITY) largest = std::max(largest, magnitude);
  }
  return largest;
}

// Quantizes a row of n values to e4m3, with a scale for each `block` of them. Inf saturates and NaN
// stays NaN; other values of the block are not affected.
template <typename T>
void quantize_row(const T* row, int64_t n, void* out, float* scales, int64_t block) {
  for (int64_t begin = 0; begin < n; begin += block) {
    int64_t end = std::min(begin + block, n);
    float scale = scale_for(finite_amax(row + begin, end - begin));
    scales[begin / block] = scale;
    for (int64_t i = begin; i < end; ++i)
      static_cast<Float8*>(out)[i] = from_float<Float8>(to_float(row[i]) / scale);
  }
}

}  // namespace epmoe::cpu
