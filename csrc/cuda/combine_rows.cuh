// combine of many tokens: a partial row a slot, with a flag.
#pragma once
#include "bulk.cuh"
#include "combine.cuh"
#include "fp8.cuh"
#include "team.cuh"

namespace epmoe::cuda {

constexpr int kStretches = 2;  // vectors of a row that a thread sums at a time: a step
constexpr int kSteps = 4;      // of a team, on their way through shared memory
constexpr int kStepsBytes = kSteps * kStretches * kThreads * 16;  // of a block; fp8 leaves half of it to rows' scales

// By a team: one slot's weighted sum, or its partial row as it is, into the window of its source: summed into shared
// memory a step at a time, and bulk copies from there, the row's scales last. `stored` counts the team's steps.
template <typename T, bool kFp8>
__device__ __forceinline__ void send_slot(const CombineBlock& b, const Team& team, int32_t source, int32_t s, Pair pair,
                                          char* shared, int32_t& stored) {
  constexpr int kCount = kPerVector<T>, kLanes = kScaleBlock / kCount;
  using Out = std::conditional_t<kFp8, Fp8Words<kCount>, Vector<T, kCount>>;
  static_assert(!kFp8 || kSteps * kStretches * kThreads * sizeof(Out) <= kStepsBytes / 2);
  const ExchangePlan& plan = b.plan;
  int64_t place = plan.rank * plan.M + s;
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
  auto* out =
      reinterpret_cast<Out*>(in_window<char>(b.ex, source, plan.combine_rows) + place * plan.combine_stride_bytes);
  uint32_t kept = pair.kept();
  int32_t length = kStretches * team.threads();
  bool first_warp = team.thread < 32;
  auto* scales = reinterpret_cast<float*>(shared + kStepsBytes / 2 + team.index * scale_bytes(b.args.D));
  for (int32_t base = 0; base < vectors; base += length, ++stored) {
    int32_t v[kStretches];
    bool inside[kStretches];
    float sum[kStretches][kCount];
#pragma unroll
    for (int i = 0; i < kStretches; ++i) v[i] = base + i * team.threads() + team.thread, inside[i] = v[i] < vectors;
    sum_pairs<T, 2>(b, pair, kept, v, inside, sum, [] {});
    Out* step = reinterpret_cast<Out*>(shared) + (team.index * kSteps + stored % kSteps) * length;
#pragma unroll
    for (int i = 0; i < kStretches; ++i) {
      if constexpr (kFp8) {
        float scale = block_scale<kCount, kLanes>(sum[i]);
        if (!inside[i]) continue;
        step[v[i] - base] = to_fp8(sum[i], scale);
        if (v[i] % kLanes == 0) scales[v[i] / kLanes] = scale;
      } else if (inside[i]) {
        step[v[i] - base] = rounded<T>(sum[i]);
      }
    }
    publish_shared();
    if (first_warp && stored + 1 >= kSteps) wait_read<kSteps - 2>();  // what is written after this barrier has left
    team.sync();
    auto bytes = static_cast<int32_t>(min(length, vectors - base) * sizeof(Out));
    if (first_warp) store(team.leads() ? out + base : nullptr, step, bytes);
  }
  if (!first_warp) return;
  if constexpr (kFp8) {
    float* to = in_window<float>(b.ex, source, plan.combine_scales) + place * plan.combine_scale_blocks;
    store(team.leads() ? to : nullptr, scales, scale_bytes(b.args.D));
  }
  wait_stored<0>();
  __syncwarp();
  if (team.leads()) raise_flag(in_window<uint32_t>(b.ex, source, plan.combine_flags) + place, b.wait.epoch);
}

// By the team's index in the grid.
__device__ __forceinline__ int32_t first_slot(const CombineBlock& b) {
  return Team(b.kernel.team).index * b.kernel.senders + static_cast<int32_t>(blockIdx.x);
}
// By the blocks that send: a team takes a slot, first `owed`, and then, by tickets, others.
template <typename T, bool kFp8>
__device__ __forceinline__ void send_slots(const CombineBlock& b, Owed owed, char* shared, int32_t* ticket) {
  __shared__ int32_t next[2][kWarps];
  Team team(b.kernel.team);
  int32_t teams = b.kernel.senders * team.teams(), slots = b.slots(false), stored = 0;
  for (int32_t turn = 0; owed.unit < slots; ++turn) {
    int32_t drawn = 0;
    bool more = slots > teams;
    if (more && team.leads()) drawn = draw(ticket);  // its way to memory and back is hidden by this slot
    if (turn) owed.read(b);
    auto [source, s] = owed.slot;
    if (s < b.count_R[source] && !b.is_few(source))
      send_slot<T, kFp8>(b, team, source, s, checked(b, owed.pair), shared, stored);
    if (!more) break;
    if (team.leads()) next[turn % 2][team.index] = teams + drawn;
    team.sync();
    owed = {b, next[turn % 2][team.index], 1};
  }
}

// One piece of a token's row: waits for the ranks that owe it, then adds theirs in rank order.
template <typename T, bool kFp8>
__device__ __forceinline__ bool sum_token(const CombineBlock& b, int32_t t, int32_t piece, int32_t pieces,
                                          uint32_t senders) {
  constexpr int kCount = kPerVector<T>;
  using Wire = std::conditional_t<kFp8, uint8_t, T>;
  using Loaded = Words<Vector<Wire, kCount>>;
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int32_t slot = owed_slot(b, t, senders);
  auto* flags = in_window<uint32_t>(b.ex, plan.rank, plan.combine_flags) + lane * plan.M;
  bool here = slot < 0 || b.wait.for_flag(flags + slot, lane);
  if (!__all_sync(kAllLanes, here)) return false;
  __syncwarp();  // what each lane has acquired is there for all
  uint32_t ranks = __ballot_sync(kAllLanes, slot >= 0);
  auto* window = in_window<char>(b.ex, plan.rank, plan.combine_rows);
  auto* scales = in_window<float>(b.ex, plan.rank, plan.combine_scales);
  auto* y = reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(b.args.y_TD) + int64_t{t} * b.args.D);
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
  int32_t begin = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
  constexpr int kDepth = 2;  // ranks whose loads are in flight
  for (int32_t base = begin; base < end; base += 32 * kStretches) {
    float sum[kStretches][kCount] = {};
    for (uint32_t left = ranks; left;) {
      Loaded values[kDepth][kStretches];
      float scale[kDepth][kStretches];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (!left) break;
        int rank = __ffs(left) - 1;
        left &= left - 1;
        ++count;
        int64_t place = rank * plan.M + __shfl_sync(kAllLanes, slot, rank);
        auto* row = reinterpret_cast<const Loaded*>(window + place * plan.combine_stride_bytes);
#pragma unroll
        for (int j = 0; j < kStretches; ++j) {
          int32_t v = base + j * 32 + lane;
          if (v < end) values[i][j] = __ldcg(row + v);
          if (kFp8 && v < end)
            scale[i][j] = __ldcg(scales + place * plan.combine_scale_blocks + v * kCount / kScaleBlock);
        }
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < kStretches; ++j) {
          if (base + j * 32 + lane >= end) continue;
          add_words<Wire>(sum[j], values[i][j], kFp8 ? scale[i][j] : 1.0f);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kStretches; ++j)
      if (int32_t v = base + j * 32 + lane; v < end) y[v] = rounded<T>(sum[j]);
  }
  return true;
}

}  // namespace epmoe::cuda
