// The routing of tokens as dispatch reads it: each token's pairs, what is wrong with them, and how
// many go where.
#pragma once
#include "cuda/device/pairs.cuh"
#include "cuda/dispatch/block.cuh"

namespace epmoe::cuda {

// Out of line, so that the usual case stays short: experts with one copy.
static __device__ __noinline__ int32_t copy_of(const Exchange& ex, const Quotas& quotas, int32_t t,
                                               int32_t expert) {
  if (quotas.lines) return copy_by_quota(quotas, t, expert);
  return copy_in_turn(in_scratch<int32_t>(ex, ex.plan.table_copies),
                      in_scratch<int32_t>(ex, ex.plan.table_num_copies), ex.plan.copies,
                      ex.plan.rank, t, expert);
}
__device__ __forceinline__ int32_t only_copy(const Exchange& ex, const Quotas& quotas,
                                             int32_t expert) {
  if (quotas.lines) return only_copy(quotas, expert);
  bool one = in_scratch<int32_t>(ex, ex.plan.table_num_copies)[expert] == 1;
  return one ? in_scratch<int32_t>(ex, ex.plan.table_copies)[expert * ex.plan.copies] : -1;
}
__device__ __forceinline__ int32_t physical(const DispatchBlock& b, int32_t t,
                                            const RoutedPair& pair) {
  auto copy = [&](int32_t expert) {
    int32_t only = b.only_copy[expert];
    return only < 0 ? copy_of(b.ex, b.shared.quotas, t, expert) : only;
  };
  return physical(pair, b.plan.E, b.plan.copies, copy, b.trains && b.args.keeps_zeros);
}

// A lane takes one pair, and a warp takes as many tokens as fit into its lanes.
struct PairLanes {
  int32_t tokens;  // of a warp
  int32_t t, k;    // this lane's token, counted from the warp's first, and its pair

  __device__ __forceinline__ explicit PairLanes(int32_t K) {
    int32_t lane = threadIdx.x % 32;
    int32_t log = 32 - __clz(K - 1);
    tokens = 32 >> log, t = lane >> log, k = lane & ((1 << log) - 1);
  }
  // More tokens, whose lanes no shuffle finds; lanes that are left over have pair K.
  static __device__ __forceinline__ PairLanes dense(int32_t K) {
    PairLanes lanes(K);
    int32_t lane = threadIdx.x % 32;
    lanes.tokens = 32 / K, lanes.t = lane / K, lanes.k = lanes.t < lanes.tokens ? lane % K : K;
    return lanes;
  }
};

// The whole block adds tokens [begin, end) to the counts by expert, and with `by_rank` by rank. A
// warp loads the pairs of kGroupsInFlight groups of tokens before it counts the first group.
template <int kGroupsInFlight>
__device__ __forceinline__ void count_tokens(DispatchBlock& b, int32_t begin, int32_t end,
                                             bool by_rank = true) {
  int32_t K = b.args.K;
  int32_t lane = threadIdx.x % 32;
  int32_t warp = threadIdx.x / 32;
  PairLanes lanes = PairLanes::dense(K);
  int32_t step = block_warps() * lanes.tokens;
#pragma unroll 1
  for (int32_t first = begin + warp * lanes.tokens + lanes.t; first - lanes.t < end;
       first += kGroupsInFlight * step) {
    RoutedPair pairs[kGroupsInFlight];
#pragma unroll
    for (int i = 0; i < kGroupsInFlight; ++i) {
      int32_t t = first + i * step;
      pairs[i] = {b.args, t, lanes.k, lanes.k < K && t < end};
    }
#pragma unroll
    for (int i = 0; i < kGroupsInFlight; ++i) {
      int32_t p = physical(b, first + i * step, pairs[i]);
      int32_t owner = b.owner_of(p);
      if (p >= 0) atomicAdd(&b.count[p], 1);
      if (by_rank) {  // a token counts once for each rank
        uint32_t same = __match_any_sync(kAllLanes, owner < 0 ? -1 : lanes.t << 16 | owner);
        if (owner >= 0 && !(same & ((1u << lane) - 1))) atomicAdd(&b.shared.rank_count[owner], 1);
      }
    }
  }
}

// One warp reads a token's pairs, a lane each, into row `n` of the batch.
__device__ __forceinline__ void read_token(DispatchBlock& b, int32_t t, int32_t n) {
  int32_t lane = threadIdx.x % 32;
  RoutedPair pair(b.args, t, lane, lane < b.args.K);
  int32_t p = physical(b, t, pair);
  b.shared.ids[n][lane] = p;
  b.shared.weights[n][lane] = p < 0 ? 0.0f : pair.weight;
  uint32_t ranks = __reduce_or_sync(kAllLanes, b.rank_mask(p));
  if (lane == 0) b.shared.ranks[n] = ranks;
}

// A warp that has read the n-th token of the batch adds it to the counts.
__device__ __forceinline__ void count_token_of_batch(DispatchBlock& b, int32_t n) {
  int32_t lane = threadIdx.x % 32;
  int32_t p = b.shared.ids[n][lane];
  if (p >= 0) atomicAdd(&b.count[p], 1);
  if (b.shared.ranks[n] >> lane & 1u) atomicAdd(&b.shared.rank_count[lane], 1);
}

// One warp adds what is wrong with a token's pairs to the health counters. Once a token.
__device__ __forceinline__ void count_health(const DispatchBlock& b, int64_t t) {
  int32_t lane = threadIdx.x % 32;
  count_wrong(RoutedPair(b.args, t, lane, lane < b.args.K), b.plan.E,
              in_scratch<int64_t>(b.ex, b.plan.health_counters));
}

}  // namespace epmoe::cuda
