// What all kernels share: programmatic dependent launch, elements of any dtype, warp reductions,
// real slots.
#pragma once
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/vector.cuh"
#include "types.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "epmoe needs compute capability 8.0 or later"
#endif

namespace epmoe::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Programmatic dependent launch: a kernel may start while its predecessor in the stream ends.
// Before a thread touches memory that a kernel may write, it waits here until the predecessor has
// completed and its writes are visible. So the order of the stream holds.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start. Call it after wait_for_predecessor(): then all kernels
// before the predecessor have completed for the next kernel, too.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Whether rows that start at `base` and lie `stride_bytes` apart allow accesses of 16 bytes.
inline bool is_aligned(const void* base, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride_bytes % 16 == 0;
}

// Calls f with a value of the C++ type of a dtype other than fp8, which quantize makes and permute
// only copies.
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
  // No branches: a branch would hold back later loads.
  bool wide = dtype == DType::kFloat32;
  uint32_t bits =
      wide ? static_cast<const uint32_t*>(base)[index] : static_cast<const uint16_t*>(base)[index];
  float fp16 = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  float bf16 = __uint_as_float(bits << 16);
  return wide ? __uint_as_float(bits) : dtype == DType::kFloat16 ? fp16 : bf16;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// The sum over this lane and all lower lanes.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    T before = __shfl_up_sync(kAllLanes, value, offset);
    if (threadIdx.x % 32 >= offset) value += before;
  }
  return value;
}

// The largest value of the warp. No value may be NaN.
__device__ __forceinline__ float warp_max(float value) {
  auto signed_order = [](int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(
      signed_order(__reduce_max_sync(kAllLanes, signed_order(__float_as_int(value)))));
}

// R slabs of `slab` slots each. The first counts_R[r] slots of slab r are real; without counts all
// are.
struct Slots {
  const int32_t* counts_R;
  int32_t slab, R;

  __device__ __forceinline__ int32_t count(int32_t r) const {
    return counts_R ? min(max(counts_R[r], 0), slab) : slab;
  }
  __device__ __forceinline__ bool is_real(uint32_t slot) const {
    if (!counts_R) return true;
    uint32_t r = slot / static_cast<uint32_t>(slab);
    return static_cast<int32_t>(slot - r * slab) < count(r);
  }
  // The index-th real slot, or -1 past the last.
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
