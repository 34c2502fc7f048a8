// Elements times a weight, as they lie in memory: the fp32 product, rounded once.
#pragma once
#include "types.h"
#include "vector.cuh"

namespace epmoe::cuda {

template <typename T>
__device__ __forceinline__ uint32_t weighted_word(uint32_t word, float weight) {
  Vector<T, 4 / sizeof(T)> elements;
  memcpy(&elements, &word, sizeof word);
#pragma unroll
  for (T& element : elements.at) element = from_float<T>(to_float(element) * weight);
  memcpy(&word, &elements, sizeof word);
  return word;
}

// Out of line: few ask for it, and all would carry its instructions.
static __device__ __noinline__ uint32_t weighted(uint32_t word, DType dtype, float weight) {
  if (dtype == DType::kFloat32) return weighted_word<float>(word, weight);
  if (dtype == DType::kFloat16) return weighted_word<__half>(word, weight);
  return weighted_word<__nv_bfloat16>(word, weight);
}
__device__ __forceinline__ uint4 weighted(uint4 words, DType dtype, float weight) {
  return {weighted(words.x, dtype, weight), weighted(words.y, dtype, weight), weighted(words.z, dtype, weight),
          weighted(words.w, dtype, weight)};
}

}  // namespace epmoe::cuda
