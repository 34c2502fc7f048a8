// The send phase of dispatch, Simple protocol. Slots and ordinals do not depend on the order of
// atomics: a block counts the tokens before its own.
#pragma once
#include "cuda/dispatch/offsets.cuh"
#include "cuda/dispatch/row_pipeline.cuh"
#include "cuda/exchange/work_queue.cuh"

namespace epmoe::cuda {

// Warp 0 gives token t, row n of the table, a slot on each rank (a lane each) and its pairs their
// ordinals or final rows, and counts it.
__device__ __forceinline__ void assign_slots(DispatchBlock& b, int32_t t, int32_t n,
                                             bool offsets_known) {
  const ExchangePlan& plan = b.plan;
  DispatchShared& shared = b.shared;
  Destinations& destinations = b.shared.destinations;
  int32_t lane = threadIdx.x;
  int32_t id = shared.ids[n][lane];
  int32_t owner = b.owner_of(id);
  uint32_t ranks = shared.ranks[n];
  uint32_t same = __match_any_sync(kAllLanes, id);
  uint32_t before = (1u << lane) - 1;
  int32_t ordinal = id < 0 ? -1 : b.count[id] + __popc(same & before);
  int32_t slot = ranks >> lane & 1u ? shared.rank_count[lane] : -1;
  int32_t row = -1;
  if (id >= 0 && offsets_known) {
    int64_t wanted = int64_t{b.send_offset[b.column(b.location[id])]} + ordinal;
    row = wanted >= 0 && wanted < plan.max_rows ? static_cast<int32_t>(wanted) : -1;
  }
  int32_t first = -1;  // the first row on this lane's rank that takes the token
#pragma unroll 1
  for (int32_t k = 0; offsets_known && k < b.args.K; ++k) {
    int32_t candidate = __shfl_sync(kAllLanes, row, k);
    if (__shfl_sync(kAllLanes, owner, k) == lane && candidate >= 0 && first < 0) first = candidate;
  }
  destinations.row_or_ordinal[lane] = !offsets_known ? ordinal
                                      : row < 0      ? -1
                                                     : static_cast<int32_t>(row | kFinalRow);
  destinations.slot[lane] = slot;
  __syncwarp();
  if (id >= 0 && !(same & before)) b.count[id] += __popc(same);
  if (slot >= 0) ++shared.rank_count[lane];
  __syncwarp();
  char* row_at = nullptr;
  float* scales_at = nullptr;
  if (offsets_known && first >= 0) {
    row_at = in_window<char>(b.ex, lane, plan.rows) + first * b.kernel.row_bytes();
    scales_at = in_window<float>(b.ex, lane, plan.row_scales) +
                first * wire_scales(plan.payload_format, b.args.D);
  } else if (slot >= 0 && !offsets_known) {
    int64_t at = plan.rank * plan.M + slot;
    row_at = in_window<char>(b.ex, lane, plan.recv_x) + at * plan.x_stride_bytes;
    scales_at = in_window<float>(b.ex, lane, plan.recv_scales) + at * plan.scale_blocks;
  }
  destinations.row_at[lane] = row_at;
  destinations.scales_at[lane] = scales_at;
  if (lane < plan.R) in_scratch<int32_t>(b.ex, plan.slots)[int64_t{t} * plan.R + lane] = slot;
}

// Warp 0 sends the pairs of the token, row n of the table.
__device__ __forceinline__ void send_pairs_of_slots(const DispatchBlock& b, int32_t n) {
  const ExchangePlan& plan = b.plan;
  const Destinations& destinations = b.shared.destinations;
  for (int32_t i = threadIdx.x; i < plan.R * b.args.K; i += 32) {
    int32_t rank = i / b.args.K;
    int32_t k = i % b.args.K;
    int32_t slot = destinations.slot[rank];
    int32_t id = b.shared.ids[n][k];
    if (slot < 0) continue;
    int64_t pair = (plan.rank * plan.M + slot) * plan.K + k;
    in_window<int32_t>(b.ex, rank, plan.recv_ids)[pair] = id < 0 ? b.shared.sentinel[rank] : id;
    in_window<int32_t>(b.ex, rank, plan.recv_ordinals)[pair] = destinations.row_or_ordinal[k];
    in_window<float>(b.ex, rank, plan.recv_weights)[pair] = b.shared.weights[n][k];
  }
}

// Warp 0 waits until all stores of the last `count` tokens have arrived and publishes the flags of
// their slots.
__device__ __forceinline__ void publish_flags(const DispatchBlock& b, int32_t count) {
  int32_t lane = threadIdx.x;
  auto* flags =
      in_window<Flag>(b.ex, lane < b.plan.R ? lane : 0, b.plan.recv_flags) + b.plan.rank * b.plan.M;
  tma_wait_written<0>();
  __syncwarp();
  release_all();
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i)
    if (int32_t slot = b.shared.unsignaled_slots[i][lane]; slot >= 0)
      Flag::publish_released(flags + slot, b.wait.epoch);
}

// The send blocks send a token at a time. Warp 0 sends it and publishes its flags, while the other
// warps count the tokens up to the next one. Returns false if the round may not be opened.
template <WireFormat kFormat, typename Source, int kGroupsInFlight>
__device__ __forceinline__ bool send_rows(DispatchBlock& b, int32_t tokens, int32_t* head) {
  int32_t warp = threadIdx.x / 32;
  int32_t lane = threadIdx.x % 32;
  int32_t counted = 0;
  int32_t unsignaled = 0;
  int32_t send_blocks = b.kernel.send_blocks;
  bool sends = warp == 0;
  bool more = tokens > send_blocks;
  bool offsets_known = false;
  RowPipeline pipeline(b);
  if (sends && b.number < tokens) pipeline.load_chunk(b.number, 0);
  for (int32_t t = b.number, n = 0, next; t < tokens; t = next, n ^= 1) {
    int32_t claimed = warp == 1 && more ? claim(head) : 0;
    if (warp == kWarps - 1) read_token(b, t, n);  // the last warps have the fewest tokens to count
    count_tokens<kGroupsInFlight>(b, counted, t, 1);
    counted = t + 1;
    if (warp == 1 && lane == 0) b.shared.next_token = more ? send_blocks + claimed : tokens;
    __syncthreads();
    next = b.shared.next_token;
    if (!b.may_open()) {
      if (sends) pipeline.take();
      return false;
    }
    bool first = t < send_blocks;  // the counts of other ranks cannot have arrived yet
    offsets_known =
        offsets_known || (!first && b.kernel.sends_to_final_rows() && compute_send_offsets(b));
    if (sends) assign_slots(b, t, n, offsets_known);
    __syncthreads();
    for (int32_t chunk = 0; chunk < b.kernel.row_chunks; ++chunk) {
      if (sends && chunk + 1 < b.kernel.row_chunks) pipeline.load_chunk(t, chunk + 1);
      if (!kQuantizes<Source> && !sends) break;
      char* buffer = pipeline.take();
      if constexpr (kQuantizes<Source>)
        quantize_chunk<kFormat, Source>(b, buffer, pipeline.bytes(chunk));
      if (sends) send_chunk<kFormat, Source>(b, t, chunk, buffer, pipeline.bytes(chunk));
    }
    if (warp == kWarps - 2) count_health(b, t);
    if (!sends) continue;
    send_pairs_of_slots(b, n);
    if (next < tokens) pipeline.load_chunk(next, 0);
    b.shared.unsignaled_slots[unsignaled++][lane] = b.shared.destinations.slot[lane];
    if (unsignaled < b.kernel.tokens_per_release && next < tokens) continue;
    publish_flags(b, unsignaled);
    unsignaled = 0;
  }
  return true;
}

}  // namespace epmoe::cuda
