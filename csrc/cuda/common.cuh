// What the kernels share: their place behind the kernel before, elements of any dtype, warp reductions, real slots.
#pragma once
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "types.h"
#include "vector.cuh"

namespace epmoe::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Programmatic dependent launch: a kernel may be put on the machine while its predecessor ends. Every thread waits for
// that one's writes before it touches memory that a kernel may write, so the order of the stream holds.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// To be called after wait_for_predecessor(): what ran before the predecessor is then finished for a successor too.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether rows from `base` on, this far apart, may be accessed 16 bytes at a time.
inline bool is_aligned(const void* base, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride_bytes % 16 == 0;
}

// Calls f with a value of the C++ type behind a floating dtype (not fp8, which only quantize makes and permute copies).
template <typename F>
auto visit(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

__device__ __forceinline__ float load_float(const void* base, DType dtype, int64_t index) {
  // Without branches, so that other loads are not kept waiting.
  bool wide = dtype == DType::kFloat32;
  uint32_t bits = wide ? static_cast<const uint32_t*>(base)[index] : static_cast<const uint16_t*>(base)[index];
  auto half_bits = static_cast<uint16_t>(bits);
  float of_half = __half2float(__ushort_as_half(half_bits)), of_bfloat16 = __uint_as_float(bits << 16);
  return wide ? __uint_as_float(bits) : dtype == DType::kFloat16 ? of_half : of_bfloat16;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Of this lane and those before it.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    T before = __shfl_up_sync(kAllLanes, value, offset);
    if (threadIdx.x % 32 >= offset) value += before;
  }
  return value;
}

// NaN must have been left out before.
__device__ __forceinline__ float warp_max(float value) {
  auto signed_order = [](int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(signed_order(__reduce_max_sync(kAllLanes, signed_order(__float_as_int(value)))));
}

constexpr EPMOE_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// R slabs of S / R slots each, of which the first counts[r] are real.
struct Slots {
  const int32_t* counts_R;
  int32_t slab, R;

  __device__ __forceinline__ int32_t count(int32_t r) const { return counts_R ? min(max(counts_R[r], 0), slab) : slab; }
  __device__ __forceinline__ bool is_real(uint32_t slot) const {
    if (!counts_R) return true;
    uint32_t r = slot / static_cast<uint32_t>(slab);
    return static_cast<int32_t>(slot - r * slab) < count(r);
  }
  // The slot of the index-th real one, or -1 past the last.
  __device__ __forceinline__ int64_t real_slot(uint32_t index) const {
    if (!counts_R) return index < static_cast<uint32_t>(slab) * R ? int64_t{index} : -1;
    for (int32_t r = 0; r < R; ++r) {
      uint32_t here = count(r);
      if (index < here) return int64_t{r} * slab + index;
      index -= here;
    }
    return -1;
  }
};

template <typename Args>
Slots slots_of(const Args& args) {
  return {args.counts_R, static_cast<int32_t>(args.R > 0 ? args.S / args.R : 0), args.R};
}

}  // namespace epmoe::cuda
