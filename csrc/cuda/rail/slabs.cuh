// Where the slabs of the nodes lie: that of the own node apart, the others behind one another.
#pragma once
#include "cuda/device/common.cuh"
#include "rail.h"

namespace epmoe::cuda {

// The first slot of node m's slab, counted from the first slab of other nodes; 0 for the own node.
__device__ __forceinline__ int64_t first_slot(int64_t slab_rows, int64_t node, int64_t m) {
  return m == node ? 0 : (m - (m > node)) * slab_rows;
}

// A void slab has no partial rows: its sender has failed. 128 bits say so, at its start, which no
// sums have. NCCL may deliver what a rank sends after it has cut the rail: its kernels look at the
// abort only where they wait.
constexpr int kVoidParts = 8;
__device__ __forceinline__ uint16_t void_part(int i) {
  return static_cast<uint16_t>(0x9e37 * (i + 1));
}
__device__ __forceinline__ void make_void(void* slab) {
  for (int i = 0; i < kVoidParts; ++i) static_cast<uint16_t*>(slab)[i] = void_part(i);
}
__device__ __forceinline__ bool is_void(const void* slab) {
  bool same = true;
#pragma unroll
  for (int i = 0; i < kVoidParts; ++i)
    same &= static_cast<const uint16_t*>(slab)[i] == void_part(i);
  return same;
}

cudaError_t load_rail_pack();
cudaError_t load_rail_sum();

}  // namespace epmoe::cuda
