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
  return {weighted(packed.x, dtype, weight), weighted(packed.y, dtype, weight),
          weighted(packed.z, dtype, weight), weighted(packed.w, dtype, weight)};
}
// A vector times `weight`. Its product with `other`, a sum over the elements, is added to `sum`.
template <typename T>
__device__ __forceinline__ uint4 weighted_product(uint4 packed, uint4 other, float weight,
                                                  float& sum) {
  using Elements = Vector<T, kPerVector<T>>;
  float values[kPerVector<T>], others[kPerVector<T>];
  to_floats(from_registers<Elements>(packed), values);
  to_floats(from_registers<Elements>(other), others);
  Elements out;
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i)
    sum += values[i] * others[i], out.at[i] = from_float<T>(values[i] * weight);
  memcpy(&packed, &out, sizeof packed);
  return packed;
}
__device__ __forceinline__ uint4 weighted_product(uint4 packed, uint4 other, DType dtype,
                                                  float weight, float& sum) {
  if (dtype == DType::kFloat32) return weighted_product<float>(packed, other, weight, sum);
  if (dtype == DType::kFloat16) return weighted_product<__half>(packed, other, weight, sum);
  return weighted_product<__nv_bfloat16>(packed, other, weight, sum);
}
// A scale, times `weight` where rows are weighted. A product with 1 would not keep the bits of a
// NaN.
__device__ __forceinline__ float weighted_scale(float scale, bool weigh, float weight) {
  return weigh ? scale * weight : scale;
}

}  // namespace epmoe::cuda
