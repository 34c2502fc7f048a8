// Elements, one or several at a time: conversion from and to floats, loads and stores of up to 16
// bytes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace epmoe::cuda {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(value);
  else
    return value;
}

// The elements of one load or store. The alignment lets the compiler use one instruction.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

// A vector, packed into registers. Separate elements of 16 bits would take twice as many registers.
template <typename V>
using Registers =
    std::conditional_t<sizeof(V) == 16, uint4, std::conditional_t<sizeof(V) == 8, uint2, uint32_t>>;

// A vector as floats. Elements of 16 bits are converted two at a time, as they lie in a register.
template <typename T, int kCount>
__device__ __forceinline__ void to_floats(const Vector<T, kCount>& vector, float (&out)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    using Packed = Registers<Vector<T, kCount>>;
    uint32_t registers[kCount / 2];
    if constexpr (sizeof(Packed) == sizeof vector) {
      // One access: of a vector in memory memcpy would make one for each byte.
      Packed packed = *reinterpret_cast<const Packed*>(&vector);
      memcpy(registers, &packed, sizeof registers);
    } else {
      memcpy(registers, &vector, sizeof registers);  // longer than an access, in registers
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        out[2 * i] = __uint_as_float(registers[i] << 16);
        out[2 * i + 1] = __uint_as_float(registers[i] & 0xffff0000u);
      } else {
        __half2 two;
        memcpy(&two, &registers[i], sizeof two);
        out[2 * i] = __low2float(two);
        out[2 * i + 1] = __high2float(two);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = to_float(vector.at[i]);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> rounded(const float (&values)[kCount]) {
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.at[i] = from_float<T>(values[i]);
  return out;
}

template <typename V>
__device__ __forceinline__ V from_registers(const Registers<V>& registers) {
  V vector;
  memcpy(&vector, &registers, sizeof vector);
  return vector;
}

template <typename T>
constexpr int kPerVector = 16 / sizeof(T);  // elements in the widest access

// Load and store N consecutive elements, in accesses as wide as N allows, up to 16 bytes. Addresses
// must be aligned to the accesses.
template <typename T, int N>
__device__ __forceinline__ void load_vectors(const T* from, T (&to)[N]) {
  constexpr int kWidth = N < kPerVector<T> ? N : kPerVector<T>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(from + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[i + j] = vector.at[j];
  }
}
template <typename T, int N>
__device__ __forceinline__ void store_vectors(const T (&from)[N], T* to) {
  constexpr int kWidth = N < kPerVector<T> ? N : kPerVector<T>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    Vector<T, kWidth> vector;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) vector.at[j] = from[i + j];
    *reinterpret_cast<Vector<T, kWidth>*>(to + i) = vector;
  }
}

// A load past L1, for data that is read once; only accesses of 16 bytes pass L1.
template <typename V>
__device__ __forceinline__ V load_past_l1(const V* from) {
  if constexpr (sizeof(V) != 16) {
    return *from;
  } else {
    uint4 registers = __ldcg(reinterpret_cast<const uint4*>(from));
    V vector;
    memcpy(&vector, &registers, sizeof vector);
    return vector;
  }
}

}  // namespace epmoe::cuda
