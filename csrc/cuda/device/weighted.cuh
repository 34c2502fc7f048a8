// Elements times a weight, packed as in memory. The product is computed in fp32 and rounded once.
#pragma once
#include "cuda/device/vector.cuh"
#include "types.h"

namespace epmoe::cuda {

template <typename T>
__device__ __forceinline__ uint32_t weighted_elements(uint32_t bits, float weight) {
  Vector<T, 4 / sizeof(T)> elements;
  memcpy(&elements, &bits, sizeof bits);
#pragma unroll
  for (T& element : elements.at) element = from_float<T>(to_float(element) * weight);
  memcpy(&bits, &elements, sizeof bits);
  return bits;
}

// Not inlined: few calls use weight_rows, but every kernel would carry the instructions.
static __device__ __noinline__ uint32_t weighted(uint32_t bits, DType dtype, float weight) {
  if (dtype == DType::kFloat32) return weighted_elements<float>(bits, weight);
  if (dtype == DType::kFloat16) return weighted_elements<__half>(bits, weight);
  return weighted_elements<__nv_bfloat16>(bits, weight);
}
__device__ __forceinline__ uint4 weighted(uint4 packed, DType dtype, float weight) {
  return {weighted(packed.x, dtype, weight), weighted(packed.y, dtype, weight), weighted(packed.z, dtype, weight),
          weighted(packed.w, dtype, weight)};
}
// A scale, times `weight` where rows are weighted. A product with 1 would not keep the bits of a NaN.
__device__ __forceinline__ float weighted_scale(float scale, bool weigh, float weight) {
  return weigh ? scale * weight : scale;
}

}  // namespace epmoe::cuda
