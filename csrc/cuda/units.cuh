// Hands out units of work to warps. Where the blocks that send nothing have warps enough, they take one each; otherwise
// all blocks draw tickets, so that those that were busy sending join when they are done. A unit is one of `pieces`
// parts of a row's columns.
#pragma once
#include "mail.cuh"

namespace epmoe::cuda {

struct Units {
  int64_t total, first_block, warps;
  int32_t pieces;

  __device__ Units(int64_t rows, int64_t vectors, int64_t senders)
      : total(rows), first_block(senders), warps((gridDim.x - senders) * kWarps), pieces(1) {
    // A warp takes seven turns or so for its piece: what arrives last is not kept waiting. Fewer where warps idle.
    while (vectors / (pieces * 2) >= 192) pieces *= 2, total *= 2;
    while (pieces < 16 && total * 2 <= warps && vectors / (pieces * 2) >= 32) pieces *= 2, total *= 2;
  }

  // Calls f(row, piece) until it is false; the same in all lanes of a warp. Returns what f returned last.
  template <typename F>
  __device__ bool for_each(int32_t* ticket, F&& f) const {
    if (total <= warps) {
      int64_t block = blockIdx.x - first_block, unit = int64_t{threadIdx.x / 32} * (gridDim.x - first_block) + block;
      return block < 0 || unit >= total || f(unit / pieces, static_cast<int32_t>(unit % pieces));
    }
    for (int32_t next = take(ticket);;) {
      int32_t unit = __shfl_sync(kAllLanes, next, 0);
      if (unit >= total) return true;
      next = take(ticket);  // its way to memory and back is hidden by this unit
      if (!f(unit / pieces, static_cast<int32_t>(unit % pieces))) return false;
    }
  }

  static __device__ int32_t take(int32_t* ticket) { return threadIdx.x % 32 == 0 ? atomicAdd(ticket, 1) : 0; }
};

}  // namespace epmoe::cuda
