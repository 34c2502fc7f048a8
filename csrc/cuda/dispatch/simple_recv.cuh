// The recv phase of dispatch, Simple protocol: rows whose slot has a flag.
#pragma once
#include "cuda/dispatch/products.cuh"
#include "cuda/exchange/work_queue.cuh"

namespace epmoe::cuda {

constexpr int kMaxChunkVectors = 256;  // about what a warp has in flight at once

// The pairs of a received slot, a lane each.
struct SlotPair {
  int32_t row;  // expert-major; -1: not on this rank
  float weight;
  bool first_is_final;  // of the slot: the sender has already written the first of its rows
};

__device__ __forceinline__ SlotPair read_slot(const DispatchBlock& b, int32_t r, int32_t s) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int64_t pair = (r * plan.M + s) * plan.K + lane;
  bool has_pair = lane < b.args.K;
  int32_t id = has_pair ? in_window<int32_t>(b.ex, plan.rank, plan.recv_ids)[pair] : -1;
  int32_t row_or_ordinal =
      has_pair ? in_window<int32_t>(b.ex, plan.rank, plan.recv_ordinals)[pair] : -1;
  float weight = has_pair ? in_window<float>(b.ex, plan.rank, plan.recv_weights)[pair] : 0.0f;
  bool is_final = row_or_ordinal < -1;
  int32_t row = is_final ? static_cast<int32_t>(row_or_ordinal & ~kFinalRow) : -1;
  if (!is_final)
    row = b.row_of(id, row_or_ordinal, r);
  else if (!b.owns(id) || row >= plan.max_rows)
    row = -1;
  return {row, weight, __any_sync(kAllLanes, is_final) != 0};
}

// One warp moves a chunk of slot s of source r to each of its expert-major rows, as soon as the
// slot's flag is here. kMultiplies: `outputs_ND`.
template <WireFormat kFormat, bool kMultiplies>
__device__ __forceinline__ bool recv_row(const DispatchBlock& b, int32_t r, int32_t s,
                                         int32_t chunk, int32_t chunks) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int64_t slot = r * plan.M + s;
  bool here =
      lane != 0 || b.wait.await(in_window<Flag>(b.ex, plan.rank, plan.recv_flags) + slot, r);
  if (!__all_sync(kAllLanes, here)) return false;
  __syncwarp();  // what one lane has acquired holds for all
  if (!b.args.expert_major) return true;
  SlotPair pair = read_slot(b, r, s);
  if (chunk == 0 && lane < b.args.K) {
    in_scratch<int32_t>(b.ex, plan.row_of_pair)[slot * plan.K + lane] = pair.row;
    in_scratch<float>(b.ex, plan.pair_weights)[slot * plan.K + lane] =
        combine_weight(b, pair.row, pair.weight);
  }
  uint32_t pairs = __ballot_sync(kAllLanes, pair.row >= 0);
  if (!pairs) return true;
  auto vectors = static_cast<int32_t>(b.kernel.row_bytes() / 16);
  auto* rows = in_window<uint4>(b.ex, plan.rank, plan.rows);
  auto* from = reinterpret_cast<const uint4*>(in_window<char>(b.ex, plan.rank, plan.recv_x) +
                                              slot * plan.x_stride_bytes);
  auto* scales_from =
      in_window<float>(b.ex, plan.rank, plan.recv_scales) + slot * plan.scale_blocks;
  int64_t blocks = wire_scales(plan.payload_format, b.args.D);
  auto* row_scales = in_window<float>(b.ex, plan.rank, plan.row_scales);
  if (pair.first_is_final) {
    int64_t first = __shfl_sync(kAllLanes, pair.row, __ffs(pairs) - 1);
    from = rows + first * vectors, scales_from = row_scales + first * blocks;
    pairs &= pairs - 1;
    if (!pairs) return true;
  }
  // The first scales are loaded beside the first vectors.
  float scale = 0.0f;
  if constexpr (wire(kFormat).has_scales())
    if (chunk == 0 && lane < blocks) scale = __ldcg(scales_from + lane);
  bool weigh = b.args.weight_rows && !wire(kFormat).has_scales();
  int32_t begin = vectors * chunk / chunks;
  int32_t end = vectors * (chunk + 1) / chunks;
  constexpr int kDepth = kMultiplies ? 4 : 7;  // loads in flight
  float product = 0.0f;                        // of the row of this lane's pair
  for (int32_t base = begin; base < end; base += kDepth * 32) {
    uint4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (int32_t v = base + i * 32 + lane; v < end) values[i] = __ldcg(from + v);
#pragma unroll 1
    for (uint32_t left = pairs; left; left &= left - 1) {
      int32_t k = __ffs(left) - 1;
      int64_t row = __shfl_sync(kAllLanes, pair.row, k);
      float factor = __shfl_sync(kAllLanes, pair.weight, k);
      if constexpr (kMultiplies) {
        float part = multiply_row<kDepth>(b, row, base + lane, end, factor_of(factor),
                                          [&](int i) { return values[i]; });
        if (lane == k) product += part;
        continue;
      }
      auto* to = rows + row * vectors;
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (int32_t v = base + i * 32 + lane; v < end)
          to[v] = weigh ? weighted(values[i], b.args.dtype, factor) : values[i];
    }
  }
  if (kMultiplies && pairs >> lane & 1u) write_product(b, pair.row, chunk, product);
  if constexpr (wire(kFormat).has_scales()) {
#pragma unroll 1
    for (int64_t base = 0; chunk == 0 && base < blocks; base += 32) {
      int64_t i = base + lane;
      bool inside = i < blocks;
      if (base && inside) scale = __ldcg(scales_from + i);
#pragma unroll 1
      for (uint32_t left = pairs; left; left &= left - 1) {
        int32_t k = __ffs(left) - 1;
        int64_t to = __shfl_sync(kAllLanes, pair.row, k);
        float factor = __shfl_sync(kAllLanes, pair.weight, k);
        if (inside) row_scales[to * blocks + i] = weighted_scale(scale, b.args.weight_rows, factor);
      }
    }
  }
  return true;
}

// Slots of the own rank that a warp looks at together: their senders have usually received them.
constexpr int32_t kOwnSlots = 4;

// Of kOwnSlots slots of this rank from slot `first` on: those that their senders have not received,
// as a mask. Returns false if a flag has not come.
__device__ __forceinline__ bool left_by_senders(const DispatchBlock& b, int32_t first,
                                                uint32_t& left) {
  const ExchangePlan& plan = b.plan;
  auto rank = static_cast<int32_t>(plan.rank);
  int32_t lane = threadIdx.x % 32;
  int64_t slot = plan.rank * plan.M + first + lane;
  bool inside = lane < kOwnSlots && first + lane < b.shared.rank_count[rank];
  bool here =
      !inside || b.wait.await(in_window<Flag>(b.ex, plan.rank, plan.recv_flags) + slot, rank);
  if (!__all_sync(kAllLanes, here)) return false;
  bool received = !inside || in_window<int32_t>(b.ex, plan.rank,
                                                plan.recv_ordinals)[slot * plan.K] == kReceived;
  left = __ballot_sync(kAllLanes, !received);
  return true;
}

// The blocks that receive move all rows of the Simple sources. Slots of this rank, which kOwn says
// to be one of them, come last: there is least to do.
template <WireFormat kFormat, bool kMultiplies, bool kOwn>
__device__ __forceinline__ bool recv_rows(DispatchBlock& b) {
  auto rank = static_cast<int32_t>(b.plan.rank);
  int32_t own_items = kOwn ? divided_up(b.shared.rank_count[rank], kOwnSlots) : 0;
  int32_t others = static_cast<int32_t>(b.plan.R - 1) * b.shared.simple_most_rows;
  WorkQueue queue(others + own_items, static_cast<int32_t>(b.kernel.row_bytes() / 16),
                  b.kernel.sending_blocks(), kMaxChunkVectors);
  return queue.for_each(&b.wait.round->recv_queue[kDispatch], [&](int32_t n, int32_t chunk) {
    if constexpr (kOwn) {
      Slot slot = slot_of<true>(b.plan, n);
      uint32_t left = 1;  // slots from `slot` on, as a mask
      if (n >= others) {
        slot = {rank, (n - others) * kOwnSlots};
        if (!left_by_senders(b, slot.s, left)) return false;
      } else {
        bool is_simple = !b.shared.ll_tokens[slot.source];
        if (!is_simple || slot.s >= b.shared.rank_count[slot.source]) return true;
      }
#pragma unroll 1
      for (; left; left &= left - 1) {
        int32_t s = slot.s + __ffs(left) - 1;
        if (!recv_row<kFormat, kMultiplies>(b, slot.source, s, chunk, queue.chunks)) return false;
      }
      return true;
    } else {
      auto [r, s] = slot_of<true>(b.plan, n);
      bool is_simple = !b.shared.ll_tokens[r];
      return !is_simple || s >= b.shared.rank_count[r] ||
             recv_row<kFormat, kMultiplies>(b, r, s, chunk, queue.chunks);
    }
  });
}

}  // namespace epmoe::cuda
