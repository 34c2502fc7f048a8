// Where the slabs of the nodes lie: that of the own node apart, the others behind one another.
#pragma once
#include "cuda/device/common.cuh"
#include "rail.h"

namespace epmoe::cuda {

// The first slot of node m's slab, counted from the first slab of other nodes; 0 for the own node. Without counts all
// slabs have `slab_rows` slots.
__device__ __forceinline__ int64_t first_slot(const int32_t* rows_by_node, int64_t slab_rows, int64_t node, int64_t m) {
  if (m == node) return 0;
  if (!rows_by_node) return (m - (m > node)) * slab_rows;
  int64_t first = 0;
  for (int64_t before = 0; before < m; ++before) first += before == node ? 0 : rows_by_node[before];
  return first;
}

cudaError_t load_rail_pack();
cudaError_t load_rail_sum();

}  // namespace epmoe::cuda
