// The expert-major rows that pairs have filled, numbered without the gaps between segments. Only
// the device knows them; the rows of the buffer may be a thousand times as many.
#pragma once
#include "args.h"
#include "cuda/device/scan.cuh"

namespace epmoe::cuda {

// The rows of pairs in a segment.
struct SegmentRows {
  int32_t begin, count;
};

// What the segments say of an expert, clamped to rows below N.
__device__ __forceinline__ SegmentRows rows_of_expert(const Segments& segments, int64_t N,
                                                      int32_t expert) {
  int32_t last = static_cast<int32_t>(N);
  int32_t begin = min(max(segments.expert_offsets[expert], 0), last);
  int32_t count = min(max(segments.expert_offsets[expert + 1], begin), last) - begin;
  if (segments.tokens_per_expert) count = min(max(segments.tokens_per_expert[expert], 0), count);
  return {begin, count};
}

// A table in shared memory, which the whole block builds.
class RealRows {
 public:
  struct Row {
    int32_t expert, t;  // t: its place among all rows
  };

  static int64_t shared_bytes(int32_t experts) {
    return (2 * int64_t{experts} + 1) * sizeof(int32_t);
  }

  // Reads the segments, so call it after wait_for_predecessor().
  __device__ __forceinline__ RealRows(const Segments& segments, int64_t N, int32_t* shared)
      : experts_(segments.num_local_experts), first_(shared), begin_(shared + experts_ + 1) {
    for (int32_t i = threadIdx.x; i < experts_; i += blockDim.x) {
      SegmentRows rows = rows_of_expert(segments, N, i);
      first_[i] = rows.count, begin_[i] = rows.begin;
    }
    __syncthreads();
    if (threadIdx.x < 32) lengths_to_starts(first_, experts_, 1);
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t count() const { return first_[experts_]; }

  // The n-th row.
  __device__ __forceinline__ Row operator[](uint32_t n) const {
    const int32_t expert = segment_at(first_, experts_, n);
    return {expert, begin_[expert] + static_cast<int32_t>(n) - first_[expert]};
  }

 private:
  int32_t experts_;
  int32_t *first_,
      *begin_;  // of each expert: rows of the experts before, and the start of its segment
};

}  // namespace epmoe::cuda
