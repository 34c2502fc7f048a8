// Matrices that TMA moves in boxes between memory and shared memory. A box lies there in lines of
// 128 bytes, in bf16 64 of 64 elements, with their 16 bytes swizzled, as wgmma reads them. What
// lies outside the matrix is loaded as zeros.
#pragma once
#include <cuda.h>

#include "cuda/device/tma.cuh"

namespace epmoe::cuda {

constexpr int kLineBytes = 64 * 2, kBoxBytes = 64 * kLineBytes;

// Where the 16 bytes `part` of a line lie in its box.
__device__ __forceinline__ int32_t in_box(int32_t line, int32_t part) {
  return line * kLineBytes + (part ^ line % 8) * 16;
}
// The first box of a matrix then waits for no description of it.
__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void load_box(const CUtensorMap& map, uint32_t to, uint64_t* mbarrier,
                                         int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int32_t x,
                                          int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Elements from one line to the next, and from one matrix to the next.
struct Strides {
  int64_t y, z;
};

// A matrix or several of them, [z, y, x], in elements of so many bytes. TMA moves boxes of so many
// of its lines, of 128 bytes each, or 64. L2 fetches 256 bytes where a line is missing, or as many
// as `fetched` says.
inline cudaError_t describe(CUtensorMap& map, const void* at, int64_t x, int64_t y, int64_t z,
                            Strides elements, int lines, int bytes, int line_bytes = kLineBytes,
                            CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes[] = {static_cast<cuuint64_t>(x), static_cast<cuuint64_t>(y),
                        static_cast<cuuint64_t>(z)};
  cuuint64_t strides[] = {static_cast<cuuint64_t>(bytes * elements.y),
                          static_cast<cuuint64_t>(bytes * elements.z)};
  cuuint32_t box[] = {static_cast<cuuint32_t>(line_bytes / bytes), static_cast<cuuint32_t>(lines),
                      1};
  cuuint32_t steps[] = {1, 1, 1};
  CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void*>(at), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      line_bytes == kLineBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, fetched,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
// The same where lines and matrices follow one another.
inline cudaError_t describe(CUtensorMap& map, const void* at, int64_t x, int64_t y, int64_t z,
                            int lines = 64, int bytes = 2, int line_bytes = kLineBytes,
                            CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return describe(map, at, x, y, z, Strides{x, x * y}, lines, bytes, line_bytes, fetched);
}

}  // namespace epmoe::cuda
