// Elements, one and several at a time: conversion from and to floats, loads and stores of up to 16 bytes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

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

// What one load or store moves; aligned, so that the compiler makes one instruction of it.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

// Two 16-bit elements a step, as they lie in registers.
template <typename T, int kCount>
__device__ __forceinline__ void to_floats(const Vector<T, kCount>& vector, float (&out)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
    memcpy(words, &vector, sizeof words);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        __half2 pair;
        memcpy(&pair, &words[i], sizeof pair);
        out[2 * i] = __low2float(pair);
        out[2 * i + 1] = __high2float(pair);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = to_float(vector.at[i]);
  }
}

// A vector as it lies in registers: what waits there in parts of 16 bits takes twice as many.
template <typename V>
using Words = std::conditional_t<sizeof(V) == 16, uint4, std::conditional_t<sizeof(V) == 8, uint2, uint32_t>>;

template <typename V>
__device__ __forceinline__ V from_words(const Words<V>& words) {
  V vector;
  memcpy(&vector, &words, sizeof vector);
  return vector;
}

template <typename T>
constexpr int kPerVector = 16 / sizeof(T);  // elements in the widest access

// N consecutive elements, in accesses as wide as N and their size allow; aligned to those.
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

// For what is read once.
template <typename V>
__device__ __forceinline__ V load_past_l1(const V* from) {
  if constexpr (sizeof(V) != 16) {
    return *from;
  } else {
    uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
    V vector;
    memcpy(&vector, &words, sizeof vector);
    return vector;
  }
}

}  // namespace epmoe::cuda
