// The receiving half of dispatch, for rows that come with a flag a slot.
#pragma once
#include "dispatch.cuh"
#include "weighted.cuh"

namespace epmoe::cuda {

// Where the pairs of a received slot go, a lane each.
struct Arrived {
  int32_t row;  // -1: not here
  float weight;
  bool in_place;  // the first of those rows is where the sender has put it
};

__device__ __forceinline__ Arrived read_slot(const DispatchBlock& b, int32_t r, int32_t s) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int64_t pair = (r * plan.M + s) * plan.K + lane;
  bool has_pair = lane < b.args.K;
  int32_t id = has_pair ? in_window<int32_t>(b.ex, plan.rank, plan.recv_ids)[pair] : -1;
  int32_t said = has_pair ? in_window<int32_t>(b.ex, plan.rank, plan.recv_ordinals)[pair] : -1;
  float weight = has_pair ? in_window<float>(b.ex, plan.rank, plan.recv_weights)[pair] : 0.0f;
  bool in_place = said < -1;
  int32_t row = in_place ? static_cast<int32_t>(said & ~kInPlace) : -1;
  if (!in_place)
    row = b.row_of(id, said, r);
  else if (!b.owns(id) || row >= plan.max_rows)
    row = -1;
  return {row, weight, __any_sync(kAllLanes, in_place) != 0};
}

// One piece of a received row to each of its expert-major places, as soon as it is here.
template <bool kFp8>
__device__ __forceinline__ bool move_row(const DispatchBlock& b, int32_t r, int32_t s, int32_t piece, int32_t pieces) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int64_t slot = r * plan.M + s;
  bool here = lane != 0 || b.wait.for_flag(in_window<uint32_t>(b.ex, plan.rank, plan.recv_flags) + slot, r);
  if (!__all_sync(kAllLanes, here)) return false;
  __syncwarp();  // what one lane has acquired is there for all
  if (!b.args.expert_major) return true;
  Arrived arrived = read_slot(b, r, s);
  if (piece == 0 && lane < b.args.K) {
    in_scratch<int32_t>(b.ex, plan.row_of_pair)[slot * plan.K + lane] = arrived.row;
    in_scratch<float>(b.ex, plan.pair_weights)[slot * plan.K + lane] = b.args.weight_rows ? 1.0f : arrived.weight;
  }
  uint32_t places = __ballot_sync(kAllLanes, arrived.row >= 0);
  if (!places) return true;
  auto vectors = static_cast<int32_t>(b.kernel.row_bytes() / 16);
  auto* rows = in_window<uint4>(b.ex, plan.rank, plan.rows);
  auto* from =
      reinterpret_cast<const uint4*>(in_window<char>(b.ex, plan.rank, plan.recv_x) + slot * plan.x_stride_bytes);
  auto* scales_from = in_window<float>(b.ex, plan.rank, plan.recv_scales) + slot * plan.scale_blocks;
  int64_t blocks = ceil_div(b.args.D, kScaleBlock);
  auto* row_scales = in_window<float>(b.ex, plan.rank, plan.row_scales);
  if (arrived.in_place) {
    int64_t first = __shfl_sync(kAllLanes, arrived.row, __ffs(places) - 1);
    from = rows + first * vectors, scales_from = row_scales + first * blocks;
    places &= places - 1;
    if (!places) return true;
  }
  bool weigh = b.args.weight_rows && !kFp8;
  int32_t begin = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
  constexpr int kDepth = 7;  // loads in flight
  for (int32_t base = begin; base < end; base += kDepth * 32) {
    uint4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (int32_t v = base + i * 32 + lane; v < end) values[i] = __ldcg(from + v);
#pragma unroll 1
    for (uint32_t left = places; left; left &= left - 1) {
      int32_t k = __ffs(left) - 1;
      auto* to = rows + int64_t{__shfl_sync(kAllLanes, arrived.row, k)} * vectors;
      float factor = __shfl_sync(kAllLanes, arrived.weight, k);
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (int32_t v = base + i * 32 + lane; v < end)
          to[v] = weigh ? weighted(values[i], b.args.dtype, factor) : values[i];
    }
  }
  if constexpr (kFp8) {
#pragma unroll 1
    for (uint32_t left = piece ? 0 : places; left; left &= left - 1) {
      int32_t k = __ffs(left) - 1;
      int64_t to = __shfl_sync(kAllLanes, arrived.row, k);
      float factor = b.args.weight_rows ? __shfl_sync(kAllLanes, arrived.weight, k) : 1.0f;
#pragma unroll 1
      for (int64_t i = lane; i < blocks; i += 32) row_scales[to * blocks + i] = __ldcg(scales_from + i) * factor;
    }
  }
  return true;
}

// What dispatch returns beside the rows, and the totals. By one block.
__device__ __forceinline__ void write_offsets(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
  if (int32_t r = threadIdx.x; r < plan.R) {
    in_scratch<int32_t>(b.ex, plan.counts)[r] = b.shared.rank_count[r];
    int32_t few = b.shared.few_rows[r].tokens;
    in_scratch<int32_t>(b.ex, plan.slots_used)[r] = few ? few : b.shared.rank_count[r];
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
    int64_t total = b.pairs_of(i), kept = min(plan.max_rows - start, total);
    in_scratch<int32_t>(b.ex, plan.tokens_per_expert)[i] = static_cast<int32_t>(kept);
    in_scratch<int64_t>(b.ex, plan.total_tokens_per_expert)[i] += kept;
    auto* dropped = reinterpret_cast<unsigned long long*>(in_scratch<int64_t>(b.ex, plan.counters) + kDroppedPairs);
    if (kept < total) atomicAdd(dropped, static_cast<unsigned long long>(total - kept));
  }
}

// Rows of the gaps that alignment leaves between segments become zeros; an expert a block.
__device__ __forceinline__ void zero_gaps(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
  int64_t vectors = b.kernel.row_bytes() / 16, blocks = ceil_div(b.args.D, kScaleBlock);
  auto* rows = in_window<uint4>(b.ex, plan.rank, plan.rows);
  auto* scales = in_window<float>(b.ex, plan.rank, plan.row_scales);
#pragma unroll 1
  for (int32_t i = blockIdx.x; i < plan.num_local_experts; i += gridDim.x) {
    int64_t begin = b.count[i] + b.pairs_of(i), end = min(int64_t{b.count[i + 1]}, plan.max_rows);
#pragma unroll 1
    for (int64_t v = begin * vectors + threadIdx.x; v < end * vectors; v += block_threads())
      rows[v] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int64_t n = begin * blocks + threadIdx.x; plan.payload_fp8 && n < end * blocks; n += block_threads())
      scales[n] = 1.0f;
  }
}

// layout="rank": unused slots carry the sentinel and 0 throughout.
__device__ __forceinline__ void fill_unused_slots(const DispatchBlock& b) {
  const ExchangePlan& plan = b.plan;
  int32_t sentinel = b.shared.sentinel[plan.rank];
#pragma unroll 1
  for (int64_t r = 0; r < plan.R; ++r) {
    int64_t begin = (r * plan.M + b.shared.rank_count[r]) * plan.K, end = (r + 1) * plan.M * plan.K;
#pragma unroll 1
    for (int64_t i = begin + int64_t{blockIdx.x} * block_threads() + threadIdx.x; i < end;
         i += int64_t{gridDim.x} * block_threads()) {
      in_window<int32_t>(b.ex, plan.rank, plan.recv_ids)[i] = sentinel;
      in_window<float>(b.ex, plan.rank, plan.recv_weights)[i] = 0.0f;
    }
  }
}

}  // namespace epmoe::cuda
