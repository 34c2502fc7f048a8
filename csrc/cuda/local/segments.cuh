// One block computes the segments of the expert-major rows from the number of pairs of each expert.
#pragma once
#include "args.h"
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

constexpr int kMaxWarps = 16;  // of that block

// The sum over this thread and all lower threads of the block.
__device__ __forceinline__ int64_t block_inclusive_sum(int64_t value) {
  __shared__ int64_t totals[kMaxWarps];
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  int warps = blockDim.x / 32;
  value = warp_inclusive_sum(value);
  if (lane == 31) totals[warp] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) value += w < warps && w < warp ? totals[w] : 0;
  __syncthreads();
  return value;
}

struct Segment {
  int32_t begin, kept,
      end;  // rows [begin, begin + kept) belong to the expert, rows [begin + kept, end) are a gap
};

// Lays out the segments one after the other, with one thread an expert. `total(expert)` returns the
// number of its pairs; `emit(expert, segment)` takes the result. If `writes_outputs`, it also
// writes expert_offsets, tokens_per_expert, `needed` and the counter of dropped pairs.
template <typename Total, typename Emit>
__device__ __forceinline__ void lay_out_segments(const PermuteArgs& args, bool writes_outputs,
                                                 Total&& total, Emit&& emit) {
  __shared__ int64_t carry;
  int32_t experts = args.num_local_experts;
  int64_t begin_of_tile = 0;
  for (int32_t tile = 0; tile < experts || tile == 0; tile += blockDim.x) {
    int32_t i = tile + threadIdx.x;
    uint32_t pairs = i < experts ? total(i) : 0;
    uint32_t alignment = args.alignment;
    uint32_t padded = alignment == 1 ? pairs : (pairs + alignment - 1) / alignment * alignment;
    int64_t end = begin_of_tile + block_inclusive_sum(padded);
    int64_t begin = end - padded;
    Segment segment = {static_cast<int32_t>(min(begin, args.max_rows)), 0,
                       static_cast<int32_t>(min(end, args.max_rows))};
    segment.kept = static_cast<int32_t>(min(int64_t{pairs}, args.max_rows - segment.begin));
    if (i < experts) {
      emit(i, segment);
      if (writes_outputs) {
        args.expert_offsets[i] = segment.begin;
        args.tokens_per_expert[i] = segment.kept;
        uint32_t dropped = pairs - segment.kept;
        if (dropped && args.counters)
          atomicAdd(reinterpret_cast<unsigned long long*>(args.counters) + kDroppedPairs, dropped);
      }
    }
    if (threadIdx.x == blockDim.x - 1) carry = end;
    __syncthreads();
    begin_of_tile = carry;
  }
  if (writes_outputs && threadIdx.x == 0) {
    args.expert_offsets[experts] = static_cast<int32_t>(min(begin_of_tile, args.max_rows));
    if (args.needed) *args.needed = begin_of_tile;
  }
}

}  // namespace epmoe::cuda
