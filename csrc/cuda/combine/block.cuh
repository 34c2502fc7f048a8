// What the parts of combine share.
#pragma once
#include "cuda/exchange/wait.cuh"
#include "cuda/exchange/work_queue.cuh"

namespace epmoe::cuda {

struct CombineKernel {
  Exchange ex;
  CombineArgs args;
  int32_t send_blocks;  // as in CombineLaunch, like the next fields
  int32_t team;
  int32_t rows_per_release;
};

// One block at work on the round that dispatch left.
struct CombineBlock {
  const CombineKernel& kernel;
  const Exchange& ex;
  const ExchangePlan& plan;
  const CombineArgs& args;
  Wait wait;
  const RoundState& now;
  const int32_t* count_R;         // slots in use, of each source
  const int32_t (&max_slots)[2];  // the largest count of a Simple source, and of an LL source

  __device__ __forceinline__ bool is_ll(int32_t source) const { return now.ll_mask >> source & 1u; }
  // The slots to look at: of so many sources, up to the largest count of one protocol.
  __device__ __forceinline__ int32_t num_slots(bool ll, int64_t sources) const {
    return max_slots[ll] * static_cast<int32_t>(sources);
  }
};

// A lane's pair of a received slot: the expert-major row that it contributes, negative for none,
// and its weight.
struct ReceivedPair {
  int32_t row;
  float weight;

  // The pairs that have a row, as a mask that is the same in all lanes.
  __device__ uint32_t kept() const { return __ballot_sync(kAllLanes, row >= 0); }
  __device__ ReceivedPair of(int32_t k) const {
    return {__shfl_sync(kAllLanes, row, k), __shfl_sync(kAllLanes, weight, k)};
  }
};

// A chunk of the sum that this rank returns for a slot's token.
struct OutgoingSum : SlotChunk {
  int64_t pair_at = -1;  // the index of the lane's pair, -1 if the slot cannot have it
  ReceivedPair pair{kForeign, 0.0f};

  __device__ __forceinline__ OutgoingSum(const CombineBlock& b, SlotChunk chunk)
      : SlotChunk(chunk) {
    int32_t lane = threadIdx.x % 32;
    if (lane < b.plan.K && slot.s < b.plan.M)
      pair_at = (slot.source * b.plan.M + slot.s) * b.plan.K + lane;
  }
  __device__ __forceinline__ void read(const CombineBlock& b) {
    const ExchangePlan& plan = b.plan;
    if (!b.args.expert_major)
      pair = {
          threadIdx.x % 32 == 0 ? static_cast<int32_t>(slot.source * plan.M + slot.s) : kForeign,
          1.0f};
    else if (pair_at >= 0)
      pair = {in_scratch<int32_t>(b.ex, plan.row_of_pair)[pair_at],
              in_scratch<float>(b.ex, plan.pair_weights)[pair_at]};
  }
};

// The slot in which the lane's rank returns its sum for token t; -1 if it returns none. A rank that
// aborted the round returns none.
__device__ __forceinline__ int32_t slot_of_sum(const CombineBlock& b, int32_t t,
                                               uint32_t sending_ranks) {
  int32_t lane = threadIdx.x % 32;
  bool returns = t < b.now.T && lane < b.plan.R && sending_ranks >> lane & 1u;
  return returns ? in_scratch<int32_t>(b.ex, b.plan.slots)[int64_t{t} * b.plan.R + lane] : -1;
}

// Whether the lane has a pair in this round.
__device__ __forceinline__ bool has_pair(const CombineBlock& b) {
  return static_cast<int32_t>(threadIdx.x % 32) < b.now.K || !b.args.expert_major;
}

// Whether dispatch received a row in the slot of this pair. With the LL protocol not every slot has
// one.
__device__ __forceinline__ bool was_received(const CombineBlock& b, ReceivedPair pair) {
  return __any_sync(kAllLanes, pair.row != kForeign && has_pair(b));
}

// Drops a pair that is not of this round, has no row or has weight 0.
__device__ __forceinline__ ReceivedPair checked(const CombineBlock& b, ReceivedPair pair) {
  bool counts = has_pair(b) && pair.row < b.args.num_rows && pair.weight != 0.0f;
  return {counts ? pair.row : kForeign, pair.weight};
}

// Adds kCount weighted elements in fp32.
template <typename T, int kCount>
__device__ __forceinline__ void add_weighted(float (&sum)[kCount],
                                             const Registers<Vector<T, kCount>>& packed,
                                             float weight) {
  float values[kCount];
  to_floats(from_registers<Vector<T, kCount>>(packed), values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += weight * values[i];
}

// Sums a slot's pairs over several vectors of kCount elements: vector v[i], where the lane has one.
// kDepth pairs are in flight. Calls prefetch() once the first loads are issued.
template <typename T, int kDepth, int kCount, int kVectors, typename F>
__device__ __forceinline__ void sum_pairs(const CombineBlock& b, ReceivedPair pair, uint32_t kept,
                                          const int32_t (&v)[kVectors],
                                          const bool (&inside)[kVectors],
                                          float (&sum)[kVectors][kCount], F&& prefetch) {
  auto* rows = static_cast<const char*>(b.args.rows);
  bool first = true;
#pragma unroll
  for (int i = 0; i < kVectors * kCount; ++i) sum[i / kCount][i % kCount] = 0.0f;
  do {
    using Loaded = Registers<Vector<T, kCount>>;
    Loaded values[kDepth][kVectors];
    float weights[kDepth];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (!kept) break;
      ReceivedPair next = pair.of(__ffs(kept) - 1);
      kept &= kept - 1;
      auto* row = reinterpret_cast<const Loaded*>(rows + next.row * b.args.rows_stride_bytes);
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (inside[j]) values[i][j] = row[v[j]];
      weights[i] = next.weight;
      ++count;
    }
    if (first) prefetch(), first = false;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (inside[j]) add_weighted<T>(sum[j], values[i][j], weights[i]);
    }
  } while (kept);
}

// Sums the pairs that this rank has for a token of its own, rounded as if the sum travelled. Calls
// meanwhile() once the first loads are issued.
template <typename T, int kDepth, int kCount, int kVectors, typename F>
__device__ __forceinline__ void sum_own(const CombineBlock& b, ReceivedPair pair,
                                        const int32_t (&v)[kVectors],
                                        const bool (&inside)[kVectors],
                                        float (&sum)[kVectors][kCount], F&& meanwhile) {
  pair = checked(b, pair);
  sum_pairs<T, kDepth>(b, pair, pair.kept(), v, inside, sum, meanwhile);
#pragma unroll
  for (int i = 0; i < kVectors * kCount; ++i) {
    float& value = sum[i / kCount][i % kCount];
    value = 0.0f + to_float(from_float<T>(value));
  }
}

}  // namespace epmoe::cuda
