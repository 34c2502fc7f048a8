// A work queue hands out items to warps. Warps start with one item each. Where there are more items
// than warps, a warp that is done claims the next one: senders that have finished help to receive,
// and a multiprocessor whose stores the wire takes sooner does more.
#pragma once
#include "cuda/exchange/signal.cuh"

namespace epmoe::cuda {

// Claims the next item of a queue for a warp; lane 0 holds the result. Nothing waits for the result
// before it is used: the compiler would gather a warp's atomicAdds into one and wait for it at
// once. It does not gather atomicInc.
__device__ __forceinline__ int32_t claim(int32_t* head) {
  constexpr uint32_t kMax = 0x7fffffff;
  return threadIdx.x % 32 == 0 ? atomicInc(reinterpret_cast<uint32_t*>(head), kMax) : 0;
}

// An item that is one chunk of a slot. Items are ordered by slot, then by chunk.
struct SlotChunk {
  int32_t item, index;
  Slot slot;

  __device__ __forceinline__ SlotChunk(int32_t item, int32_t index, Slot slot)
      : item(item), index(index), slot(slot) {}
  __device__ __forceinline__ SlotChunk(const ExchangePlan& plan, int32_t item, int32_t chunks)
      : SlotChunk(item, item % chunks, slot_of(plan, item / chunks)) {}
};

// This warp's number among those of `blocks` blocks. Neighbouring numbers belong to different
// blocks.
__device__ __forceinline__ int32_t warp_number(int32_t block, int32_t blocks) {
  return static_cast<int32_t>(threadIdx.x / 32) * blocks + block;
}

// This warp's number among those of the blocks from `first_block` on; -1 in earlier blocks.
__device__ __forceinline__ int32_t warp_number_from(int32_t first_block) {
  int32_t block = blockIdx.x;
  return block < first_block ? -1 : warp_number(block - first_block, gridDim.x - first_block);
}

struct WorkQueue {
  int32_t total, warps, first,
      chunks;  // warps: those that start with an item; first: this warp's first item, or -1

  __device__ WorkQueue(int32_t total, int32_t warps, int32_t first)
      : total(total), warps(warps), first(first), chunks(1) {}
  // The warps of the blocks from `first_block` on start with an item each.
  __device__ WorkQueue(int32_t total, int32_t first_block)
      : WorkQueue(total, (gridDim.x - first_block) * block_warps(), warp_number_from(first_block)) {
  }
  // Items are chunks of rows of up to `longest` vectors of 16 bytes, and shorter ones where warps
  // would idle.
  __device__ WorkQueue(int32_t rows, int32_t vectors, int32_t first_block, int32_t longest)
      : WorkQueue(rows, first_block) {
    while (vectors / chunks > longest ||
           (chunks < 16 && total * 2 <= warps && vectors / (chunks * 2) >= 32))
      chunks *= 2, total *= 2;
  }

  // Calls f(row, chunk) for this warp's items until f returns false. f must return the same in all
  // lanes of a warp. Returns what f returned last.
  template <typename F>
  __device__ bool for_each(int32_t* head, F&& f) const {
    bool more = total > warps;
    if (first < 0 && !more) return true;
    int32_t item = first < 0 ? after(claim(head)) : first;
    while (item < total) {
      int32_t next =
          more ? claim(head) : 0;  // this item's work hides the claim's way to memory and back
      if (!f(item / chunks, item % chunks)) return false;
      if (!more) break;
      item = after(next);
    }
    return true;
  }

  // Calls f(what read(item) returned, prefetch). f calls prefetch() once, where it waits for
  // something else; prefetch reads the next item. `ahead` is read(first); this warp must have a
  // first item.
  template <typename A, typename Read, typename F>
  __device__ void for_each_prefetched(int32_t* head, A ahead, Read&& read, F&& f) const {
    bool more = total > warps;
    for (int32_t item = first, next; item < total; item = next) {
      int32_t claimed = more ? claim(head) : 0;
      A later = ahead;
      f(ahead, [&] {
        next = more ? after(claimed) : total;
        if (next < total) later = read(next);
      });
      ahead = later;
    }
  }

 private:
  __device__ int32_t after(int32_t claimed) const {
    return warps + __shfl_sync(kAllLanes, claimed, 0);
  }
};

}  // namespace epmoe::cuda
