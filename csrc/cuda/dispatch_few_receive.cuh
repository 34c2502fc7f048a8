// The receiving half of dispatch for few tokens: no row waits for more than its own lines, its pairs and the counts.
#pragma once
#include "dispatch_few_send.cuh"
#include "weighted.cuh"

namespace epmoe::cuda {

// A part of a row on its way in, that a warp waits for.
template <int N, bool kFp8>
struct Arriving {
  int32_t unit, index, r, t;
  Part<N, kFp8> part;

  // Units are parts of rows, in order of tokens.
  __device__ __forceinline__ Arriving(const DispatchBlock& b, int32_t unit, int32_t parts, int64_t row_bytes)
      : unit(unit), index(unit % parts), part(index, row_bytes) {
    int32_t slot = unit / parts, R = static_cast<int32_t>(b.plan.R);
    t = slot / R, r = slot - t * R;
  }
};

// By a warp: one part of a received row to each of its expert-major places, as soon as it is here; of a round that is
// void, nowhere.
template <int N, bool kFp8>
__device__ __forceinline__ bool move_part(const DispatchBlock& b, const Arriving<N, kFp8>& arriving,
                                          const FewRows& from) {
  const ExchangePlan& plan = b.plan;
  auto [unit, index, r, t, part] = arriving;
  int32_t lane = threadIdx.x % 32;
  char* at = few_row(b, plan.rank, r, t);
  const uint4* pairs = few_pairs(b, plan.rank, r, t);
  bool has_pair = lane < from.K, here = false;
  Line lines[N];
  uint4 pair;
  bool told = b.wait.until(
      [&] {
        if (has_pair) pair = load_line(pairs + lane);
        if (!here) here = part.load(at, lines);
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
    here = here || b.wait.until([&] { return part.load(at, lines); }, r);
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
      words[part.at(n)] = b.args.weight_rows && !kFp8 ? weighted(lines[n].words, b.args.dtype, factor) : lines[n].words;
      if (part.has_scale(n)) scales[part.at(n) / kScaleLines] = __uint_as_float(lines[n].scale) * factor;
    }
  }
  __syncwarp();
  if (comes) part.unset(at);
  return true;
}

// By the blocks that receive: all rows of sources of few tokens, first `arriving`.
template <int N, bool kFp8>
__device__ __forceinline__ bool move_parts(const DispatchBlock& b, Arriving<N, kFp8> arriving) {
  int32_t parts = parts_of(b.shared.longest_few, N), R = static_cast<int32_t>(b.plan.R);
  int32_t warps = (gridDim.x - b.kernel.senders - b.kernel.tellers) * kWarps,
          prepared = b.shared.differing ? -1 : arriving.unit;
  Units units(R * b.shared.most_few * parts, warps, arriving.unit);
  return units.for_each(&b.wait.round->few_ticket[kDispatch], [&](int32_t unit, int32_t) {
    if (unit != prepared) arriving = {b, unit, parts, b.kernel.row_bytes()};
    const FewRows& from = b.shared.few_rows[arriving.r];
    if (b.shared.differing) arriving.part = {arriving.index, from.row_bytes};
    return arriving.t >= from.tokens || arriving.index >= parts_of(from.row_bytes, N) || move_part(b, arriving, from);
  });
}

// What of that is this warp's first, as long as no source's call differs.
template <int N, bool kFp8>
__device__ __forceinline__ Arriving<N, kFp8> first_arriving(const DispatchBlock& b) {
  int64_t row_bytes = b.kernel.row_bytes();
  return {b, number_from(b.kernel.senders + b.kernel.tellers), parts_of(row_bytes, N), row_bytes};
}

}  // namespace epmoe::cuda
