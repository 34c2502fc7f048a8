// Where the slabs of the nodes lie: that of the own node apart, the others behind one another.
#pragma once
#include "cuda/device/common.cuh"
#include "rail.h"

namespace epmoe::cuda {

// The first slot of node m's slab, counted from the first slab of other nodes; 0 for the own node.
__device__ __forceinline__ int64_t first_slot(int64_t slab_rows, int64_t node, int64_t m) {
  return m == node ? 0 : (m - (m > node)) * slab_rows;
}

cudaError_t load_rail_pack();
cudaError_t load_rail_sum();

}  // namespace epmoe::cuda
