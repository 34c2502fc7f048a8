// Hands out units of work to warps. Some begin with one each; if there are more, whoever has time draws tickets:
// senders that are done sending, and multiprocessors whose stores the wire takes sooner than others'. A unit is a part
// of a received slot, or one of `pieces` parts of a row's columns.
#pragma once
#include "mail.cuh"

namespace epmoe::cuda {

// A ticket for a warp, in its lane 0, which need not be waited for before it is looked at. The compiler gathers a
// warp's atomicAdds of one, and then waits for the result at once, to share it out; not so with atomicInc.
__device__ __forceinline__ int32_t draw(int32_t* ticket) {
  constexpr uint32_t kMost = 0x7fffffff;
  return threadIdx.x % 32 == 0 ? atomicInc(reinterpret_cast<uint32_t*>(ticket), kMost) : 0;
}

// A received slot.
struct Slot {
  int32_t source, s;
};

// Slots are taken in the order of their numbers, those of all sources by turns, each rank beginning with itself.
__device__ __forceinline__ Slot slot_of(const ExchangePlan& plan, int32_t n) {
  auto R = static_cast<int32_t>(plan.R), s = n / R, source = n - s * R + static_cast<int32_t>(plan.rank);
  return {source < R ? source : source - R, s};
}

// A part of a slot, cut into `parts`. Units of work are those, in order of slots.
struct SlotPart {
  int32_t unit, index;
  Slot slot;

  __device__ __forceinline__ SlotPart(const ExchangePlan& plan, int32_t unit, int32_t parts)
      : unit(unit), index(unit % parts), slot(slot_of(plan, unit / parts)) {}
};

// Neighbouring numbers are of different blocks.
__device__ __forceinline__ int32_t number_of_warp(int32_t block, int32_t blocks) {
  return static_cast<int32_t>(threadIdx.x / 32) * blocks + block;
}

// This warp's, among those of the blocks from `first_block` on; before those -1.
__device__ __forceinline__ int32_t number_from(int32_t first_block) {
  int32_t block = blockIdx.x;
  return block < first_block ? -1 : number_of_warp(block - first_block, gridDim.x - first_block);
}

struct Units {
  int32_t total, warps, first, pieces;  // warps: that begin with a unit; first: this one's, or -1

  __device__ Units(int32_t total, int32_t warps, int32_t first) : total(total), warps(warps), first(first), pieces(1) {}
  // To the blocks from `first_block` on, at first.
  __device__ Units(int32_t total, int32_t first_block)
      : Units(total, (gridDim.x - first_block) * block_warps(), number_from(first_block)) {}
  // Rows are cut into pieces of up to `longest` vectors, and of fewer where warps would idle.
  __device__ Units(int32_t rows, int32_t vectors, int32_t first_block, int32_t longest) : Units(rows, first_block) {
    while (vectors / pieces > longest || (pieces < 16 && total * 2 <= warps && vectors / (pieces * 2) >= 32))
      pieces *= 2, total *= 2;
  }

  // Calls f(row, piece) until it is false; the same in all lanes of a warp. Returns what f returned last.
  template <typename F>
  __device__ bool for_each(int32_t* ticket, F&& f) const {
    bool more = total > warps;
    if (first < 0 && !more) return true;
    int32_t unit = first < 0 ? after(draw(ticket)) : first;
    while (unit < total) {
      int32_t next = more ? draw(ticket) : 0;  // its way to memory and back is hidden by this unit
      if (!f(unit / pieces, unit % pieces)) return false;
      if (!more) break;
      unit = after(next);
    }
    return true;
  }

  // Calls f(what read(unit) has returned, meanwhile), and f calls meanwhile(), once, where it waits for something else:
  // that reads the next unit. `ahead` is read(first); this warp must have a first one.
  template <typename A, typename Read, typename F>
  __device__ void for_each_ahead(int32_t* ticket, A ahead, Read&& read, F&& f) const {
    bool more = total > warps;
    for (int32_t unit = first, next; unit < total; unit = next) {
      int32_t drawn = more ? draw(ticket) : 0;
      A later = ahead;
      f(ahead, [&] {
        next = more ? after(drawn) : total;
        if (next < total) later = read(next);
      });
      ahead = later;
    }
  }

 private:
  __device__ int32_t after(int32_t drawn) const { return warps + __shfl_sync(kAllLanes, drawn, 0); }
};

}  // namespace epmoe::cuda
