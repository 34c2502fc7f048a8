// Where segments start that lie one after the other: sums of their lengths.
#pragma once
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ int32_t aligned(int32_t length, int32_t alignment) {
  return alignment == 1 ? length : (length + alignment - 1) / alignment * alignment;
}

// One warp turns `count` lengths into the starts of their segments, in place, and appends the end
// of the last one. A lane takes neighbouring segments, so that one sum over the warp is enough.
static __device__ __noinline__ void lengths_to_starts(int32_t* segments, int32_t count,
                                                      int32_t alignment) {
  int32_t each = count / 32 + 1;
  int32_t begin = threadIdx.x * each;
  int32_t end = min(begin + each, count + 1);
  int32_t sum = 0;
#pragma unroll 1
  for (int32_t i = begin; i < end; ++i) {
    int32_t length = i < count ? segments[i] : 0;
    segments[i] = sum;
    sum += aligned(length, alignment);
  }
  int32_t start = warp_inclusive_sum(sum) - sum;
#pragma unroll 1
  for (int32_t i = begin; i < end; ++i) segments[i] += start;
}

// The last of `count` segments, at least one, that starts at `place` or before it.
__device__ __forceinline__ int32_t segment_at(const int32_t* starts, int32_t count,
                                              uint32_t place) {
  int32_t low = 0;
  int32_t high = count - 1;
  while (low < high) {
    int32_t middle = (low + high + 1) / 2;
    if (static_cast<uint32_t>(starts[middle]) <= place)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace epmoe::cuda
