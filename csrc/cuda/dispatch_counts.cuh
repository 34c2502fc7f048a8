// What every rank learns before rows have their places (dispatch_places.cuh): how many pairs each source brings for
// each expert.
#pragma once
#include "dispatch_tokens.cuh"

namespace epmoe::cuda {

constexpr int kSources = 4;  // whose words are asked for at once

// By one block: counts everything and tells every rank, which opens the round, if it may be opened.
template <int kGroups>
__device__ __forceinline__ void send_counts(DispatchBlock& b, int32_t tokens) {
  const ExchangePlan& plan = b.plan;
  auto R = static_cast<int32_t>(plan.R), P = static_cast<int32_t>(plan.P);
  count_tokens<kGroups>(b, 0, tokens);
  __syncthreads();
  if (!b.may_open()) return;
  // To the rank of each expert, and to all others too where they may be looking for the place of a row of theirs.
  bool all = !b.kernel.few();
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < (all ? P * R : P); i += block_threads()) {
    int32_t p = all ? i % P : i, rank = all ? i / P : b.place[p] >> 16;
    uint64_t* words = b.kernel.counts(rank, plan.rank) + kCountColumns;
    store_word(words + b.column(b.place[p]), b.wait.epoch, b.count[p]);
  }
  // The last warps have the fewest experts to tell of.
  if (int32_t rank = block_threads() - 1 - threadIdx.x; rank < R) {
    uint64_t* words = b.kernel.counts(rank, plan.rank);
    int32_t rows = b.shared.rank_count[rank];
    store_word(words, b.wait.epoch, b.kernel.size(rows, tokens));
    store_word(words + 1, b.wait.epoch, b.kernel.shape());
    in_scratch<int64_t>(b.ex, plan.rows_sent)[rank] += rows;
  }
}

// By one lane: what sources `first`, `first` + `step` and so on bring for local expert `local` of `owner`. Calls
// f(source, pairs) in this order. False if it is not here: at once, or with kWaits after the deadline.
template <bool kWaits, typename F>
__device__ __forceinline__ bool each_source(const DispatchBlock& b, int32_t owner, int32_t local, int32_t first,
                                            int32_t step, F&& f) {
  auto R = static_cast<int32_t>(b.plan.R);
  int64_t columns = b.kernel.count_columns();
  const uint64_t* words = b.kernel.counts(b.plan.rank, 0) + kCountColumns + owner * b.plan.most_local_experts + local;
#pragma unroll 1
  for (int32_t r = first; r < R; r += kSources * step) {
    int32_t pairs[kSources], missing, count = 0;
#pragma unroll
    for (int i = 0; i < kSources; ++i) count += r + i * step < R;
    if (!(kWaits ? b.wait.for_words(words + r * columns, step * columns, r, step, count, pairs)
                 : b.wait.has_words(words + r * columns, step * columns, count, pairs, missing)))
      return false;
#pragma unroll
    for (int i = 0; i < kSources; ++i)
      if (i < count) f(r + i * step, pairs[i]);
  }
  return true;
}

}  // namespace epmoe::cuda
