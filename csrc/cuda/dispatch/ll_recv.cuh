// The recv phase of dispatch, LL protocol: a row waits only for its own lines, its pairs and the
// counts.
#pragma once
#include "cuda/dispatch/ll_send.cuh"
#include "cuda/dispatch/products.cuh"

namespace epmoe::cuda {

// Where LL rows go: the expert-major rows, or with layout="rank" the slots of the slabs.
template <WireFormat kFormat>
struct RowsOut {
  char* rows;
  float* scales;
  int64_t row_bytes, row_scales;  // from row to row

  __device__ __forceinline__ RowsOut(const DispatchBlock& b, int32_t row_lines) {
    const ExchangePlan& plan = b.plan;
    bool expert_major = b.args.expert_major;
    rows = in_window<char>(b.ex, plan.rank, expert_major ? plan.rows : plan.recv_x);
    scales = in_window<float>(b.ex, plan.rank, expert_major ? plan.row_scales : plan.recv_scales);
    row_bytes = expert_major ? int64_t{row_lines} * 16 : plan.x_stride_bytes;
    row_scales = expert_major ? row_lines / kScaleLines<kFormat> : plan.scale_blocks;
  }
};

// One warp moves a chunk of token t of source r to each of its rows, as soon as it is here.
// kSkipSelf: this rank's own rows are read where the caller has them. kMultiplies: `outputs_ND`.
// Ids and places come from a peer and may be any number.
template <int N, WireFormat kFormat, bool kSkipSelf, bool kMultiplies>
__device__ __forceinline__ bool recv_chunk(const DispatchBlock& b, int32_t r, int32_t t,
                                           int32_t index) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  RowChunk<N, kFormat> chunk(index, b.kernel.row_bytes());
  char* at = ll_row_at(b, plan.rank, r, t);
  const Line* pairs = ll_pairs_at(b, plan.rank, r, t);
  bool has_pair = lane < b.args.K;
  LineData lines[1][N];
  bool is_local =
      kSkipSelf && r == plan.rank && t < b.args.T;  // t came through the window: check it before x
  uint32_t missing = is_local ? 0 : chunk.mask();
  if (is_local) chunk.read(b.x_at(t), lines[0]);
  uint4 pair;
  auto poll = [&] { return chunk.poll({at}, lines, missing); };
  bool notified = b.wait.until(
      [&] {
        if (has_pair) pair = Line::peek(pairs + lane);
        poll();
        return !has_pair || b.wait.reached(pair.w);
      },
      r);
  if (!__all_sync(kAllLanes, notified)) return false;
  auto id = static_cast<int32_t>(pair.x);
  auto place = static_cast<int32_t>(pair.y);
  float weight = has_pair ? __uint_as_float(pair.z) : 0.0f;
  bool mine = has_pair && place >= 0 && b.owns(id);
  bool comes = __any_sync(kAllLanes, mine);
  int32_t row = kForeign;
  if (b.args.expert_major) {
    row = mine ? b.row_of(id, place, r) : kForeign;
  } else {
    place = __shfl_sync(kAllLanes, place, 0);
    comes = comes && place >= 0 && place < plan.M;
    if (lane == 0 && comes) row = static_cast<int32_t>(r * plan.M) + place;
  }
  if (comes) {
    bool here = !missing || b.wait.until(poll, r);
    if (!__all_sync(kAllLanes, here)) return false;
  }
  if (index == 0 && has_pair && b.args.expert_major) {
    int64_t entry = (r * plan.M + t) * plan.K + lane;
    in_scratch<int32_t>(b.ex, plan.row_of_pair)[entry] = mine && row < 0 ? kDropped : row;
    in_scratch<float>(b.ex, plan.pair_weights)[entry] = combine_weight(b, row, weight);
  } else if (index == 0 && has_pair && comes) {
    int64_t entry = (r * plan.M + place) * plan.K + lane;
    bool valid = id >= 0 && id < plan.P;
    in_window<int32_t>(b.ex, plan.rank, plan.recv_ids)[entry] =
        valid ? id : b.shared.sentinel[plan.rank];
    in_window<float>(b.ex, plan.rank, plan.recv_weights)[entry] = valid ? weight : 0.0f;
  }
  RowsOut<kFormat> out(b, chunk.row_lines);
#pragma unroll 1
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left; left &= left - 1) {
    int32_t k = __ffs(left) - 1;
    int64_t to = __shfl_sync(kAllLanes, row, k);
    if constexpr (kMultiplies) {
      float product = multiply_row<N>(b, to, chunk.at(0), chunk.row_lines,
                                      factor_of(__shfl_sync(kAllLanes, weight, k)),
                                      [&](int n) { return lines[0][n].words; });
      if (lane == 0) write_product(b, to, index, product);
      continue;
    }
    float factor = b.args.weight_rows ? __shfl_sync(kAllLanes, weight, k) : 1.0f;
    auto* words = reinterpret_cast<uint4*>(out.rows + to * out.row_bytes);
    auto* scales = out.scales + to * out.row_scales;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!chunk.inside(n)) continue;
      words[chunk.at(n)] = b.args.weight_rows && !chunk.kScaled
                               ? weighted(lines[0][n].words, b.args.dtype, factor)
                               : lines[0][n].words;
      if (chunk.has_scale(n))
        scales[chunk.at(n) / kScaleLines<kFormat>] =
            weighted_scale(__uint_as_float(lines[0][n].scale), b.args.weight_rows, factor);
    }
  }
  __syncwarp();
  if (comes && !is_local) chunk.rearm(at);
  return true;
}

// The item that a warp receives first.
template <int N>
__device__ __forceinline__ SlotChunk first_incoming(const DispatchBlock& b) {
  return {b.plan, warp_number_from(b.kernel.sending_blocks()), num_chunks(b.kernel.row_bytes(), N)};
}

// The blocks that receive move all rows of the LL sources, first `incoming`.
template <int N, WireFormat kFormat, bool kSkipSelf, bool kMultiplies = false>
__device__ __forceinline__ bool recv_chunks(const DispatchBlock& b, SlotChunk incoming) {
  int32_t chunks = num_chunks(b.kernel.row_bytes(), N);
  WorkQueue queue(static_cast<int32_t>(b.plan.R) * b.shared.ll_most_tokens * chunks,
                  b.kernel.sending_blocks());
  return queue.for_each(&b.wait.round->ll_queue[kDispatch], [&](int32_t item, int32_t) {
    if (item != incoming.item) incoming = {b.plan, item, chunks};
    auto [r, t] = incoming.slot;
    return t >= b.shared.ll_tokens[r] ||
           recv_chunk<N, kFormat, kSkipSelf, kMultiplies>(b, r, t, incoming.index);
  });
}

}  // namespace epmoe::cuda
