// From the pairs of each expert to the segments of the expert-major rows, by one block.
#pragma once
#include "args.h"
#include "common.cuh"

namespace epmoe::cuda {

constexpr int kMaxWarps = 16;  // of a block that does this

__device__ __forceinline__ int64_t block_inclusive_sum(int64_t value) {
  __shared__ int64_t totals[kMaxWarps];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  value = warp_inclusive_sum(value);
  if (lane == 31) totals[warp] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) value += w < warps && w < warp ? totals[w] : 0;
  __syncthreads();
  return value;
}

struct Segment {
  int32_t begin, kept, end;  // an expert's rows are [begin, begin + kept), then there is a gap
};

// Lays out the segments in turn, a thread an expert: `total(expert)` tells how many pairs it has, and `emit(expert,
// segment)` takes the result. Where `publish` holds, offsets, counts and what was dropped are written too.
template <typename Total, typename Emit>
__device__ __forceinline__ void place_segments(const PermuteArgs& args, bool publish, Total&& total, Emit&& emit) {
  __shared__ int64_t carry;
  int32_t experts = args.num_local_experts;
  int64_t begin_of_tile = 0;
  for (int32_t tile = 0; tile < experts || tile == 0; tile += blockDim.x) {
    int32_t i = tile + threadIdx.x;
    uint32_t here = i < experts ? total(i) : 0, alignment = args.alignment;
    uint32_t padded = alignment == 1 ? here : (here + alignment - 1) / alignment * alignment;
    int64_t end = begin_of_tile + block_inclusive_sum(padded), begin = end - padded;
    Segment segment = {static_cast<int32_t>(min(begin, args.max_rows)), 0,
                       static_cast<int32_t>(min(end, args.max_rows))};
    segment.kept = static_cast<int32_t>(min(int64_t{here}, args.max_rows - segment.begin));
    if (i < experts) {
      emit(i, segment);
      if (publish) {
        args.expert_offsets[i] = segment.begin;
        args.tokens_per_expert[i] = segment.kept;
        uint32_t dropped = here - segment.kept;
        if (dropped && args.counters)
          atomicAdd(reinterpret_cast<unsigned long long*>(args.counters) + kDroppedPairs, dropped);
      }
    }
    if (threadIdx.x == blockDim.x - 1) carry = end;
    __syncthreads();
    begin_of_tile = carry;
  }
  if (publish && threadIdx.x == 0) {
    args.expert_offsets[experts] = static_cast<int32_t>(min(begin_of_tile, args.max_rows));
    if (args.needed) *args.needed = begin_of_tile;
  }
}

}  // namespace epmoe::cuda
