// What the parts of combine share.
#pragma once
#include "units.cuh"
#include "wait.cuh"

namespace epmoe::cuda {

struct CombineKernel {
  Exchange ex;
  CombineArgs args;
  int32_t senders;  // blocks that send first
  int32_t team;     // warps that send a row
  bool forwards;    // rows, which need no sums
};

// One block at work on the round that dispatch left.
struct CombineBlock {
  const CombineKernel& kernel;
  const Exchange& ex;
  const ExchangePlan& plan;
  const CombineArgs& args;
  Wait wait;
  const RoundState& now;
  const int32_t* count_R;    // slots to look at, of each source
  const int32_t (&most)[2];  // the most of those, of one source of many tokens and of one of few

  __device__ __forceinline__ bool is_few(int32_t source) const { return now.few >> source & 1u; }
  // Numbers of slots to look at, where sources of few tokens, or those of many, are meant.
  __device__ __forceinline__ int32_t slots(bool of_few) const { return most[of_few] * static_cast<int32_t>(plan.R); }
};

// One lane's pair of a received slot: the row that it contributes, negative for none, and its weight.
struct Pair {
  int32_t row;
  float weight;

  // What a warp adds up, from the first pair that counts on; the same in all lanes.
  __device__ uint32_t kept() const { return __ballot_sync(kAllLanes, row >= 0); }
  __device__ Pair of(int32_t k) const { return {__shfl_sync(kAllLanes, row, k), __shfl_sync(kAllLanes, weight, k)}; }
};

// A part of what this rank owes a slot's token.
struct Owed : SlotPart {
  int64_t pair_at = -1;  // the lane's pair, if there can be one
  Pair pair{kNotHere, 0.0f};

  __device__ __forceinline__ Owed(const CombineBlock& b, int32_t unit, int32_t parts) : SlotPart(b.plan, unit, parts) {
    int32_t lane = threadIdx.x % 32;
    if (lane < b.plan.K && slot.s < b.plan.M) pair_at = (slot.source * b.plan.M + slot.s) * b.plan.K + lane;
  }
  __device__ __forceinline__ void read(const CombineBlock& b) {
    const ExchangePlan& plan = b.plan;
    if (!b.args.expert_major)
      pair = {threadIdx.x % 32 == 0 ? static_cast<int32_t>(slot.source * plan.M + slot.s) : kNotHere, 1.0f};
    else if (pair_at >= 0)
      pair = {in_scratch<int32_t>(b.ex, plan.row_of_pair)[pair_at],
              in_scratch<float>(b.ex, plan.pair_weights)[pair_at]};
  }
};

// The slot in which the lane's rank owes token t its sum, -1 where it owes none: a rank that gave the round up has sent
// no rows.
__device__ __forceinline__ int32_t owed_slot(const CombineBlock& b, int32_t t, uint32_t senders) {
  int32_t lane = threadIdx.x % 32;
  bool owed = t < b.now.T && lane < b.plan.R && senders >> lane & 1u;
  return owed ? in_scratch<int32_t>(b.ex, b.plan.slots)[int64_t{t} * b.plan.R + lane] : -1;
}

// Whether the lane has a pair in this round.
__device__ __forceinline__ bool has_pair(const CombineBlock& b) {
  return static_cast<int32_t>(threadIdx.x % 32) < b.now.K || !b.args.expert_major;
}

// Whether dispatch has received the slot whose pair this is: of few tokens, not every slot has a row.
__device__ __forceinline__ bool was_received(const CombineBlock& b, Pair pair) {
  return __any_sync(kAllLanes, pair.row != kNotHere && has_pair(b));
}

// A pair that does not belong to the round, has no row or weighs nothing counts for nothing.
__device__ __forceinline__ Pair checked(const CombineBlock& b, Pair pair) {
  bool counts = has_pair(b) && pair.row < b.args.num_rows && pair.weight != 0.0f;
  return {counts ? pair.row : kNotHere, pair.weight};
}

// kCount elements at once in fp32.
template <typename T, int kCount>
__device__ __forceinline__ void add_words(float (&sum)[kCount], const Words<Vector<T, kCount>>& words, float weight) {
  float values[kCount];
  to_floats(from_words<Vector<T, kCount>>(words), values);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += weight * values[i];
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> rounded(const float (&sum)[kCount]) {
  Vector<T, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.at[i] = from_float<T>(sum[i]);
  return out;
}

// The sums of a slot's pairs over several stretches of kCount elements: stretch v[i], where the lane has such a one.
// Calls meanwhile() when the first of them are on their way.
template <typename T, int kDepth, int kCount, int kStretches, typename F>
__device__ __forceinline__ void sum_pairs(const CombineBlock& b, Pair pair, uint32_t kept,
                                          const int32_t (&v)[kStretches], const bool (&inside)[kStretches],
                                          float (&sum)[kStretches][kCount], F&& meanwhile) {
  auto* rows = static_cast<const char*>(b.args.rows);
  bool first = true;
#pragma unroll
  for (int i = 0; i < kStretches * kCount; ++i) sum[i / kCount][i % kCount] = 0.0f;
  do {
    using Loaded = Words<Vector<T, kCount>>;
    Loaded values[kDepth][kStretches];  // in flight
    float weights[kDepth];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (!kept) break;
      Pair next = pair.of(__ffs(kept) - 1);
      kept &= kept - 1;
      auto* row = reinterpret_cast<const Loaded*>(rows + next.row * b.args.rows_stride_bytes);
#pragma unroll
      for (int j = 0; j < kStretches; ++j)
        if (inside[j]) values[i][j] = row[v[j]];
      weights[i] = next.weight;
      ++count;
    }
    if (first) meanwhile(), first = false;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int j = 0; j < kStretches; ++j)
        if (inside[j]) add_words<T>(sum[j], values[i][j], weights[i]);
    }
  } while (kept);
}

}  // namespace epmoe::cuda
