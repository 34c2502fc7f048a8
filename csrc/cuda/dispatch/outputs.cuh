// What dispatch returns besides the rows of pairs: offsets, counts, zeros in gaps, sentinels in
// unused slots.
#pragma once
#include "cuda/dispatch/block.cuh"

namespace epmoe::cuda {

// One block writes offsets and counts, and adds to the totals.
__device__ __forceinline__ void write_offsets(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
  if (int32_t r = threadIdx.x; r < plan.R) {
    in_scratch<int32_t>(b.ex, plan.counts)[r] = b.shared.rank_count[r];
    int32_t ll_tokens = b.shared.ll_tokens[r];
    in_scratch<int32_t>(b.ex, plan.slots_used)[r] =
        ll_tokens && b.args.expert_major ? ll_tokens : b.shared.rank_count[r];
  }
  auto experts = static_cast<int32_t>(plan.num_local_experts);
  int32_t needed = b.count[experts];
  if (threadIdx.x == 0 && needed > plan.max_rows)
    b.ex.status->needed_rows = max(b.ex.status->needed_rows, int64_t{needed});
#pragma unroll 1
  for (int32_t i = threadIdx.x; i <= experts; i += block_threads()) {
    int64_t start = min(int64_t{b.count[i]}, plan.max_rows);
    in_scratch<int32_t>(b.ex, plan.expert_offsets)[i] = static_cast<int32_t>(start);
    if (i == experts) break;
    int64_t total = b.pairs_of(i);
    int64_t kept = min(plan.max_rows - start, total);
    in_scratch<int32_t>(b.ex, plan.tokens_per_expert)[i] = static_cast<int32_t>(kept);
    in_scratch<int64_t>(b.ex, plan.health_tokens_per_expert)[i] += kept;
    auto* dropped = reinterpret_cast<unsigned long long*>(
        in_scratch<int64_t>(b.ex, plan.health_counters) + kDroppedPairs);
    if (kept < total) atomicAdd(dropped, static_cast<unsigned long long>(total - kept));
  }
}

// One thread answers the host, which has asked whether any rank needs another round. One store
// moves the answer and the number of its round.
__device__ __forceinline__ void answer(const DispatchBlock& b) {
  auto* progress = reinterpret_cast<Progress*>(b.ex.status + 1);
  *static_cast<volatile int64_t*>(&progress->has_more_rounds) =
      (b.kernel.asked & ~int64_t{1}) | b.shared.more_rounds;
}

// Zeros the gap rows that alignment leaves between segments; each block takes some experts.
__device__ __forceinline__ void zero_gaps(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
  int64_t vectors = b.kernel.row_bytes() / 16;
  int64_t blocks = wire_scales(plan.payload_format, b.args.D);
  auto* rows = in_window<uint4>(b.ex, plan.rank, plan.rows);
  auto* scales = in_window<float>(b.ex, plan.rank, plan.row_scales);
#pragma unroll 1
  for (int32_t i = blockIdx.x; i < plan.num_local_experts; i += gridDim.x) {
    int64_t begin = b.count[i] + b.pairs_of(i);
    int64_t end = min(int64_t{b.count[i + 1]}, plan.max_rows);
#pragma unroll 1
    for (int64_t v = begin * vectors + threadIdx.x; v < end * vectors; v += block_threads())
      rows[v] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int64_t n = begin * blocks + threadIdx.x;
         plan.payload_format != WireFormat::kAuto && n < end * blocks; n += block_threads())
      scales[n] = 1.0f;
    for (int64_t n = begin + threadIdx.x; b.trains && b.args.row_weights_N && n < end;
         n += block_threads())
      b.args.row_weights_N[n] = 0.0f;
  }
}

// Training: rows past the last segment, and their weights, become zeros. The blocks of the grid
// share them.
__device__ __forceinline__ void zero_tail(const DispatchBlock& b) {
  int64_t vectors = b.kernel.row_bytes() / 16;
  int64_t end = b.plan.max_rows;
  auto* rows = in_window<uint4>(b.ex, b.plan.rank, b.plan.rows);
#pragma unroll 1
  for (int64_t n = b.count[b.plan.num_local_experts] + int64_t{blockIdx.x}; n < end;
       n += gridDim.x) {
#pragma unroll 1
    for (int64_t v = threadIdx.x; v < vectors; v += block_threads())
      rows[n * vectors + v] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0 && b.args.row_weights_N) b.args.row_weights_N[n] = 0.0f;
  }
}

// The grid writes `value` to words [begin, end), 16 bytes at a time where it can. `words` is
// aligned to 16 bytes.
__device__ __forceinline__ void fill_words(int32_t* words, int64_t begin, int64_t end,
                                           int32_t value) {
  int64_t first = (begin + 3) / 4;
  int64_t last = end / 4;
  int64_t ahead = min(first * 4, end);
  int64_t thread = int64_t{blockIdx.x} * block_threads() + threadIdx.x;
  int64_t threads = int64_t{gridDim.x} * block_threads();
#pragma unroll 1
  for (int64_t i = first + thread; i < last; i += threads)
    reinterpret_cast<int4*>(words)[i] = make_int4(value, value, value, value);
  if (begin + thread < ahead) words[begin + thread] = value;
  if (int64_t i = max(last * 4, ahead) + thread; i < end) words[i] = value;
}

// layout="rank": unused slots carry the sentinel and weight 0 throughout. Called before the block
// waits for rows, so that these stores arrive meanwhile.
__device__ __forceinline__ void fill_unused_slots(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
#pragma unroll 1
  for (int64_t r = 0; r < plan.R; ++r) {
    int64_t begin = (r * plan.M + b.shared.rank_count[r]) * plan.K;
    int64_t end = (r + 1) * plan.M * plan.K;
    fill_words(in_window<int32_t>(b.ex, plan.rank, plan.recv_ids), begin, end,
               b.shared.sentinel[plan.rank]);
    fill_words(in_window<int32_t>(b.ex, plan.rank, plan.recv_weights), begin, end, 0);
  }
}

// A round that has failed returns no rows.
static __device__ void zero_outputs(const Exchange& ex) {
  for (int64_t i = threadIdx.x; i <= ex.plan.num_local_experts; i += block_threads()) {
    in_scratch<int32_t>(ex, ex.plan.expert_offsets)[i] = 0;
    if (i < ex.plan.num_local_experts) in_scratch<int32_t>(ex, ex.plan.tokens_per_expert)[i] = 0;
  }
  if (threadIdx.x < ex.plan.R)
    in_scratch<int32_t>(ex, ex.plan.counts)[threadIdx.x] =
        in_scratch<int32_t>(ex, ex.plan.slots_used)[threadIdx.x] = 0;
}

}  // namespace epmoe::cuda
