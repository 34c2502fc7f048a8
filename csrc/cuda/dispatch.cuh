// What the two halves of dispatch share: the arguments, and a block's view of experts and counts.
#pragma once
#include "mail.cuh"
#include "scoring.h"

namespace epmoe::cuda {

constexpr int kMaxExperts = 4096;
constexpr int kMaxCachedCounts = 2048;
constexpr int kCountColumns =
    2;  // of a source's row of counts, before its counts by expert: rows sent, shape of the call

struct DispatchKernel {
  Exchange ex;
  DispatchArgs args;
  int32_t senders;  // blocks that send; the next one counts

  __device__ __forceinline__ int64_t tokens() const {
    int64_t wanted = args.num_tokens ? *args.num_tokens : args.num_rows;
    return min(max(wanted, int64_t{0}), args.T);
  }
  __device__ __forceinline__ int64_t row_bytes() const {
    return ex.plan.payload_fp8 ? args.D : args.D * itemsize(args.dtype);
  }
  // What must be equal on all ranks, in one word.
  __device__ __forceinline__ int32_t shape() const {
    return static_cast<int32_t>(args.D | int64_t{args.K} << 17 | static_cast<int64_t>(args.dtype) << 24);
  }
  __device__ __forceinline__ uint64_t* counts(int64_t rank, int64_t source) const {
    return in_window<uint64_t>(ex, rank, ex.plan.recv_counts) + source * (ex.plan.most_local_experts + kCountColumns);
  }
};

struct DispatchShared {
  int32_t place[kMaxExperts];      // of each physical expert: owner << 16 | local index
  int32_t count[kMaxExperts + 1];  // sending: pairs of each expert before this token; receiving: start of its segment
  int32_t by_source[kMaxCachedCounts];  // [R, e] pairs, where they fit
  int32_t rank_count[kMaxExchangeRanks];
  int32_t slot[kMaxExchangeRanks];
  int32_t ids[kMaxExchangeTopK], ordinals[kMaxExchangeTopK];
  float weights[kMaxExchangeTopK];
  int32_t most;
  uint32_t ranks;
};

}  // namespace epmoe::cuda
