// Hands out units of work to warps. Where the blocks that send nothing have warps enough, they take one each; otherwise
// all blocks draw tickets, so that those that were busy sending join when they are done. A unit is one of `pieces`
// parts of a row's columns.
#pragma once
#include "mail.cuh"

namespace epmoe::cuda {

struct Units {
  int32_t total, first_block, warps, pieces;

  __device__ Units(int32_t total, int32_t senders)
      : total(total), first_block(senders), warps((gridDim.x - senders) * kWarps), pieces(1) {}
  // Rows are cut into pieces of up to `longest` vectors, and of fewer where warps would idle.
  __device__ Units(int32_t rows, int64_t vectors, int32_t senders, int64_t longest) : Units(rows, senders) {
    while (vectors / pieces > longest || (pieces < 16 && total * 2 <= warps && vectors / (pieces * 2) >= 32))
      pieces *= 2, total *= 2;
  }

  // Calls f(row, piece) until it is false; the same in all lanes of a warp. Returns what f returned last. What is there
  // for each at the start needs no ticket.
  template <typename F>
  __device__ bool for_each(int32_t* ticket, F&& f) const {
    int32_t block = blockIdx.x - first_block, blocks = gridDim.x - first_block;
    bool more = total > warps;
    if (block < 0 && !more) return true;
    int32_t unit = block < 0 ? after(draw(ticket)) : static_cast<int32_t>(threadIdx.x / 32) * blocks + block;
    while (unit < total) {
      int32_t next = more ? draw(ticket) : 0;  // its way to memory and back is hidden by this unit
      if (!f(unit / pieces, unit % pieces)) return false;
      if (!more) break;
      unit = after(next);
    }
    return true;
  }

 private:
  static __device__ int32_t draw(int32_t* ticket) { return threadIdx.x % 32 == 0 ? atomicAdd(ticket, 1) : 0; }
  __device__ int32_t after(int32_t drawn) const { return warps + __shfl_sync(kAllLanes, drawn, 0); }
};

}  // namespace epmoe::cuda
