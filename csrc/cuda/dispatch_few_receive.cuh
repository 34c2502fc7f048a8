// The receiving half of dispatch for few tokens: no row waits for more than its own lines, its pairs and the counts.
#pragma once
#include "dispatch_few_send.cuh"
#include "weighted.cuh"

namespace epmoe::cuda {

// By a warp: one part of a received row to each of its expert-major places, as soon as it is here; of a round that is
// void, nowhere. kStays: this rank's own rows are where the caller has them.
template <int N, bool kFp8, bool kStays>
__device__ __forceinline__ bool move_part(const DispatchBlock& b, int32_t r, int32_t t, int32_t index,
                                          const FewRows& from) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  Part<N, kFp8> part(index, from.row_bytes);
  char* at = few_row(b, plan.rank, r, t);
  const uint4* pairs = few_pairs(b, plan.rank, r, t);
  bool has_pair = lane < from.K;
  Line lines[1][N];
  bool stayed = kStays && r == plan.rank && t < b.args.T;  // from.tokens has passed through the window
  uint32_t missing = stayed ? 0 : part.mask();
  if (stayed) part.read(b.x_at(t), lines[0]);
  uint4 pair;
  auto load = [&] { return part.load({at}, lines, missing); };
  bool told = b.wait.until(
      [&] {
        if (has_pair) pair = load_line(pairs + lane);
        load();
        return !has_pair || b.wait.reached(pair.w);
      },
      r);
  if (!__all_sync(kAllLanes, told)) return false;
  auto id = static_cast<int32_t>(pair.x), ordinal = static_cast<int32_t>(pair.y);
  bool mine = has_pair && ordinal >= 0 && b.owns(id);
  bool comes = __any_sync(kAllLanes, mine);
  float weight = has_pair ? __uint_as_float(pair.z) : 0.0f;
  int32_t row = mine && !b.shared.differing ? b.row_of(id, ordinal, r) : kNotHere;
  if (comes) {
    bool here = !missing || b.wait.until(load, r);
    if (!__all_sync(kAllLanes, here)) return false;
  }
  if (index == 0 && has_pair && !b.shared.differing) {
    int64_t entry = (r * plan.M + t) * plan.K + lane;
    in_scratch<int32_t>(b.ex, plan.row_of_pair)[entry] = mine && row < 0 ? kDropped : row;
    in_scratch<float>(b.ex, plan.pair_weights)[entry] = b.args.weight_rows ? 1.0f : weight;
  }
#pragma unroll 1
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left; left &= left - 1) {
    int32_t k = __ffs(left) - 1;
    int64_t to = __shfl_sync(kAllLanes, row, k);
    float factor = b.args.weight_rows ? __shfl_sync(kAllLanes, weight, k) : 1.0f;
    auto* words = in_window<uint4>(b.ex, plan.rank, plan.rows) + to * part.row_lines;
    auto* scales = in_window<float>(b.ex, plan.rank, plan.row_scales) + to * (part.row_lines / kScaleLines);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!part.inside(n)) continue;
      words[part.at(n)] =
          b.args.weight_rows && !kFp8 ? weighted(lines[0][n].words, b.args.dtype, factor) : lines[0][n].words;
      if (part.has_scale(n)) scales[part.at(n) / kScaleLines] = __uint_as_float(lines[0][n].scale) * factor;
    }
  }
  __syncwarp();
  if (comes && !stayed) part.unset(at);
  return true;
}

// What a warp moves first, as long as no source's call differs.
template <int N>
__device__ __forceinline__ SlotPart first_arriving(const DispatchBlock& b) {
  return {b.plan, number_from(b.kernel.senders + b.kernel.tellers), parts_of(b.kernel.row_bytes(), N)};
}

// By the blocks that receive: all rows of sources of few tokens, first `arriving`.
template <int N, bool kFp8, bool kStays>
__device__ __forceinline__ bool move_parts(const DispatchBlock& b, SlotPart arriving) {
  int32_t parts = parts_of(b.shared.longest_few, N);
  if (b.shared.differing) arriving = {b.plan, arriving.unit, parts};
  Units units(static_cast<int32_t>(b.plan.R) * b.shared.most_few * parts, b.kernel.senders + b.kernel.tellers);
  return units.for_each(&b.wait.round->few_ticket[kDispatch], [&](int32_t unit, int32_t) {
    if (unit != arriving.unit) arriving = {b.plan, unit, parts};
    auto [r, t] = arriving.slot;
    const FewRows& from = b.shared.few_rows[r];
    bool comes = t < from.tokens && arriving.index < parts_of(from.row_bytes, N);
    return !comes || move_part<N, kFp8, kStays>(b, r, t, arriving.index, from);
  });
}

}  // namespace epmoe::cuda
