// The sending half of dispatch. Slots and ordinals need no atomics' order: a block counts the tokens before its own.
#pragma once
#include "dispatch_counts.cuh"
#include "fp8.cuh"
#include "team.cuh"

namespace epmoe::cuda {

// By warp 0, token after token: the ordinals of the n-th's pairs, and where it goes on each rank. Counts it, too.
__device__ __forceinline__ void place_token(DispatchBlock& b, int32_t t, int32_t n, bool bases_known) {
  const ExchangePlan& plan = b.plan;
  DispatchShared& shared = b.shared;
  Sending& sending = b.shared.sending[n];
  int32_t lane = threadIdx.x, id = shared.ids[n][lane], owner = id < 0 ? -1 : b.place[id] >> 16;
  uint32_t ranks = shared.ranks[n], same = __match_any_sync(kAllLanes, id), before = (1u << lane) - 1;
  int32_t ordinal = id < 0 ? -1 : b.count[id] + __popc(same & before);
  int32_t slot = ranks >> lane & 1u ? shared.rank_count[lane] : -1, row = -1;
  bool direct = bases_known && slot >= kStagedSlots;
  if (id >= 0 && bases_known) {
    int64_t wanted = int64_t{b.base[b.column(b.place[id])]} + ordinal;
    row = wanted >= 0 && wanted < plan.max_rows ? static_cast<int32_t>(wanted) : -1;
  }
  int32_t first = -1;  // of this lane's rank, the first row that takes the token
#pragma unroll 1
  for (int32_t k = 0; bases_known && k < b.args.K; ++k) {
    int32_t candidate = __shfl_sync(kAllLanes, row, k);
    if (__shfl_sync(kAllLanes, owner, k) == lane && candidate >= 0 && first < 0) first = candidate;
  }
  sending.ordinals[lane] = ordinal;
  sending.rows[lane] = row;
  sending.slot[lane] = slot;
  uint32_t in_place = __ballot_sync(kAllLanes, direct);
  if (lane == 0) sending.in_place = in_place;
  if (id >= 0 && !(same & before)) b.count[id] += __popc(same);
  if (slot >= 0) ++shared.rank_count[lane];
  __syncwarp();
  if (lane >= plan.R) return;
  in_scratch<int32_t>(b.ex, plan.slots)[int64_t{t} * plan.R + lane] = slot;
  char* row_at = nullptr;
  float* scales_at = nullptr;
  if (direct && first >= 0) {
    row_at = in_window<char>(b.ex, lane, plan.rows) + first * b.kernel.row_bytes();
    scales_at = in_window<float>(b.ex, lane, plan.row_scales) + first * ceil_div(b.args.D, kScaleBlock);
  } else if (slot >= 0 && !direct) {
    int64_t place = plan.rank * plan.M + slot;
    row_at = in_window<char>(b.ex, lane, plan.recv_x) + place * plan.x_stride_bytes;
    scales_at = in_window<float>(b.ex, lane, plan.recv_scales) + place * plan.scale_blocks;
  }
  sending.row_at[lane] = row_at;
  sending.scales_at[lane] = scales_at;
}

// The n-th token's row as fp8: kLanes threads share a block of 128 elements.
template <typename Source>
__device__ __forceinline__ void send_row_fp8(const DispatchBlock& b, const Team& team, int32_t t, int32_t n) {
  constexpr int kCount = kPerVector<Source>, kLanes = kScaleBlock / kCount;
  const Sending& sending = b.shared.sending[n];
  const char* x = static_cast<const char*>(b.args.x_TD) + t * b.args.x_stride_bytes;
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
#pragma unroll 1
  for (int32_t base = 0; base < vectors; base += team.threads()) {
    int32_t v = base + team.thread;
    float values[kCount] = {};
    if (v < vectors) {
      auto row = load_past_l1(reinterpret_cast<const Vector<Source, kCount>*>(x) + v);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = to_float(row.at[i]);
    }
    float scale = block_scale<kCount, kLanes>(values);
    Vector<uint8_t, kCount> packed = to_fp8(values, scale);
#pragma unroll 1
    for (uint32_t left = b.shared.ranks[n]; left && v < vectors; left &= left - 1) {
      int32_t rank = __ffs(left) - 1;
      if (!sending.row_at[rank]) continue;
      reinterpret_cast<Vector<uint8_t, kCount>*>(sending.row_at[rank])[v] = packed;
      if (v % kLanes == 0) sending.scales_at[rank][v / kLanes] = scale;
    }
  }
}

__device__ __forceinline__ void send_row(const DispatchBlock& b, const Team& team, int32_t t, int32_t n) {
  constexpr int kDepth = 2;  // loads in flight
  const Sending& sending = b.shared.sending[n];
  auto* x = reinterpret_cast<const uint4*>(static_cast<const char*>(b.args.x_TD) + t * b.args.x_stride_bytes);
  auto vectors = static_cast<int32_t>(b.kernel.row_bytes() / 16);
  for (int32_t base = team.thread; base < vectors; base += kDepth * team.threads()) {
    uint4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (int32_t v = base + i * team.threads(); v < vectors) values[i] = __ldcg(x + v);
#pragma unroll 1
    for (uint32_t left = b.shared.ranks[n]; left; left &= left - 1) {
      auto* out = reinterpret_cast<uint4*>(sending.row_at[__ffs(left) - 1]);
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (int32_t v = base + i * team.threads(); out && v < vectors) out[v] = values[i];
    }
  }
}

// By a team: the n-th token of the batch to all ranks that need it, what is said about it, and its flags.
template <typename Source>
__device__ __forceinline__ void send_token(const DispatchBlock& b, const Team& team, int32_t t, int32_t n) {
  const ExchangePlan& plan = b.plan;
  const Sending& sending = b.shared.sending[n];
  if constexpr (std::is_void_v<Source>)
    send_row(b, team, t, n);
  else
    send_row_fp8<Source>(b, team, t, n);
  // The last warps have the least of the row to send.
  for (int32_t i = team.threads() - 1 - team.thread; i < plan.R * b.args.K; i += team.threads()) {
    int32_t rank = i / b.args.K, k = i % b.args.K, slot = sending.slot[rank], id = b.shared.ids[n][k];
    if (slot < 0) continue;
    int64_t pair = (plan.rank * plan.M + slot) * plan.K + k;
    bool in_place = sending.in_place >> rank & 1u;
    in_window<int32_t>(b.ex, rank, plan.recv_ids)[pair] = id < 0 ? b.shared.sentinel[rank] : id;
    in_window<int32_t>(b.ex, rank, plan.recv_ordinals)[pair] = in_place ? sending.rows[k] : sending.ordinals[k];
    in_window<float>(b.ex, rank, plan.recv_weights)[pair] = b.shared.weights[n][k];
  }
  team.sync();
  if (int32_t slot = team.thread < plan.R ? sending.slot[team.thread] : -1; slot >= 0)
    raise_flag(in_window<uint32_t>(b.ex, team.thread, plan.recv_flags) + plan.rank * plan.M + slot, b.wait.epoch);
  if (team.thread < 32) count_health(b, t);
}

// By the whole block, a batch at a time. False if the round may not be opened, or the
// counts that rows in place need did not come.
template <typename Source>
__device__ __forceinline__ bool send_rows(DispatchBlock& b, int32_t tokens) {
  Team team(b.kernel.team);
  int32_t batch = b.kernel.batch, warp = threadIdx.x / 32, counted = 0;
  bool bases_known = false;
  for (int32_t begin = blockIdx.x * batch; begin < tokens; begin += b.kernel.senders * batch) {
    int32_t end = min(begin + batch, tokens);
    if (begin + warp < end) read_token(b, begin + warp, warp);
    count_tokens(b, counted, begin);
    counted = end;
    __syncthreads();
    if (!b.may_open()) return false;
    if (b.kernel.way() & kDirect && end > kStagedSlots && !bases_known) {
      if (!receive_bases(b)) return false;
      bases_known = true;
    }
    if (warp == 0)
      for (int32_t t = begin; t < end; ++t) place_token(b, t, t - begin, bases_known);
    __syncthreads();
    for (int32_t t = begin + team.index; t < end; t += team.teams()) send_token<Source>(b, team, t, t - begin);
    if (batch > 1) __syncthreads();  // the table of the batch
  }
  return true;
}

}  // namespace epmoe::cuda
