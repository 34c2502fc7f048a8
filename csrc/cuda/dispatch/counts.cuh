// The count matrix: every rank learns how many pairs each source brings for each expert, before any
// row has its expert-major offset (offsets.cuh).
#pragma once
#include "cuda/dispatch/parts.cuh"

namespace epmoe::cuda {

constexpr int kSourcesInFlight = 4;  // sources whose words are loaded at once

// The first notify block counts all tokens, with the Simple protocol by what the send blocks have
// counted, and sends the counts to every rank. Its words open the round, unless the round may not
// be opened.
template <bool kLL, int kGroupsInFlight>
__device__ __forceinline__ void send_counts(DispatchBlock& b, int32_t tokens) {
  const ExchangePlan& plan = b.plan;
  auto R = static_cast<int32_t>(plan.R);
  auto P = static_cast<int32_t>(plan.P);
  if constexpr (kLL) {
    count_tokens<kGroupsInFlight>(b, 0, tokens);
    __syncthreads();
    if (!b.may_open()) return;
  } else {
    __syncthreads();
    if (!b.may_open()) return;
    PartCounter<kGroupsInFlight>(b, tokens).count_up_to(tokens);
    __syncthreads();
  }
  // The rank of each expert gets its count. With the Simple protocol all other ranks get it too:
  // they may need it for the final rows of their own tokens.
  bool all = !b.kernel.uses_ll();
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < (all ? P * R : P); i += block_threads()) {
    int32_t p = all ? i % P : i;
    int32_t rank = all ? i / P : b.location[p] >> 16;
    Word* words = b.kernel.counts(rank, plan.rank) + kCountColumns;
    Word::publish(words + b.column(b.location[p]), b.wait.epoch, b.count[p]);
  }
  // The last warps have the fewest experts to publish.
  if (int32_t rank = block_threads() - 1 - threadIdx.x; rank < R) {
    Word* words = b.kernel.counts(rank, plan.rank);
    int32_t rows = b.shared.rank_count[rank];
    Word::publish(words, b.wait.epoch, static_cast<int32_t>(b.kernel.size(rows)));
    uint32_t more = b.kernel.asked & 1 ? kMoreRounds : 0;
    Word::publish(words + 1, b.wait.epoch, static_cast<int32_t>(b.kernel.call.shape | more));
    Word::publish(words + 2, b.wait.epoch, kLL ? tokens : 0);
    in_scratch<int64_t>(b.ex, plan.health_rows_sent)[rank] += rows;
  }
}

// One lane reads what sources `first`, `first` + `step` and so on bring for local expert `local` of
// `owner`, and calls f(source, pairs) in this order. Returns false if a count is missing: at once,
// or with kWaits after the deadline.
template <bool kWaits, typename F>
__device__ __forceinline__ bool each_source(const DispatchBlock& b, int32_t owner, int32_t local,
                                            int32_t first, int32_t step, F&& f) {
  auto R = static_cast<int32_t>(b.plan.R);
  int64_t columns = b.kernel.count_columns();
  const Word* words =
      b.kernel.counts(b.plan.rank, 0) + kCountColumns + owner * b.plan.most_local_experts + local;
#pragma unroll 1
  for (int32_t r = first; r < R; r += kSourcesInFlight * step) {
    int32_t pairs[kSourcesInFlight], missing, count = 0;
#pragma unroll
    for (int i = 0; i < kSourcesInFlight; ++i) count += r + i * step < R;
    if (!(kWaits ? b.wait.await(words + r * columns, step * columns, r, step, count, pairs)
                 : b.wait.have_arrived(words + r * columns, step * columns, count, pairs, missing)))
      return false;
#pragma unroll
    for (int i = 0; i < kSourcesInFlight; ++i)
      if (i < count) f(r + i * step, b.kernel.valid_count(pairs[i]));
  }
  return true;
}

}  // namespace epmoe::cuda
