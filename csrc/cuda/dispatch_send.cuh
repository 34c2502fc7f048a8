// The sending half of dispatch. Slots and ordinals need no atomics' order: a block counts the tokens before its own.
#pragma once
#include "dispatch_pieces.cuh"
#include "dispatch_places.cuh"
#include "units.cuh"

namespace epmoe::cuda {

// By warp 0: the ordinals of token t's pairs, in row n of the table, and where it goes on each rank, a lane each.
// Counts it, too.
__device__ __forceinline__ void place_token(DispatchBlock& b, int32_t t, int32_t n, bool bases_known) {
  const ExchangePlan& plan = b.plan;
  DispatchShared& shared = b.shared;
  Sending& sending = b.shared.sending;
  int32_t lane = threadIdx.x, id = shared.ids[n][lane], owner = b.owner_of(id);
  uint32_t ranks = shared.ranks[n], same = __match_any_sync(kAllLanes, id), before = (1u << lane) - 1;
  int32_t ordinal = id < 0 ? -1 : b.count[id] + __popc(same & before);
  int32_t slot = ranks >> lane & 1u ? shared.rank_count[lane] : -1, row = -1;
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
  sending.places[lane] = !bases_known ? ordinal : row < 0 ? -1 : static_cast<int32_t>(row | kInPlace);
  sending.slot[lane] = slot;
  __syncwarp();
  if (id >= 0 && !(same & before)) b.count[id] += __popc(same);
  if (slot >= 0) ++shared.rank_count[lane];
  __syncwarp();
  char* row_at = nullptr;
  float* scales_at = nullptr;
  if (bases_known && first >= 0) {
    row_at = in_window<char>(b.ex, lane, plan.rows) + first * b.kernel.row_bytes();
    scales_at = in_window<float>(b.ex, lane, plan.row_scales) + first * ceil_div(b.args.D, kScaleBlock);
  } else if (slot >= 0 && !bases_known) {
    int64_t place = plan.rank * plan.M + slot;
    row_at = in_window<char>(b.ex, lane, plan.recv_x) + place * plan.x_stride_bytes;
    scales_at = in_window<float>(b.ex, lane, plan.recv_scales) + place * plan.scale_blocks;
  }
  sending.row_at[lane] = row_at;
  sending.scales_at[lane] = scales_at;
  if (lane < plan.R) in_scratch<int32_t>(b.ex, plan.slots)[int64_t{t} * plan.R + lane] = slot;
}

// By warp 0: what is said of the token's pairs.
__device__ __forceinline__ void send_pairs_of_slots(const DispatchBlock& b, int32_t n) {
  const ExchangePlan& plan = b.plan;
  const Sending& sending = b.shared.sending;
  for (int32_t i = threadIdx.x; i < plan.R * b.args.K; i += 32) {
    int32_t rank = i / b.args.K, k = i % b.args.K, slot = sending.slot[rank], id = b.shared.ids[n][k];
    if (slot < 0) continue;
    int64_t pair = (plan.rank * plan.M + slot) * plan.K + k;
    in_window<int32_t>(b.ex, rank, plan.recv_ids)[pair] = id < 0 ? b.shared.sentinel[rank] : id;
    in_window<int32_t>(b.ex, rank, plan.recv_ordinals)[pair] = sending.places[k];
    in_window<float>(b.ex, rank, plan.recv_weights)[pair] = b.shared.weights[n][k];
  }
}

// By warp 0: what has been stored of `count` tokens arrives, and then their flags say so.
__device__ __forceinline__ void raise_flags(const DispatchBlock& b, int32_t count) {
  int32_t lane = threadIdx.x;
  auto* flags = in_window<uint32_t>(b.ex, lane < b.plan.R ? lane : 0, b.plan.recv_flags) + b.plan.rank * b.plan.M;
  wait_stored<0>();
  __syncwarp();
  release_all();
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i)
    if (int32_t slot = b.shared.unflagged_slots[i][lane]; slot >= 0) raise_released(flags + slot, b.wait.epoch);
}

// By the blocks that send, a token at a time: warp 0 sends it, and raises its flags when it has arrived, while the
// others count those up to the next. False if the round may not be opened.
template <typename Source, int kGroups>
__device__ __forceinline__ bool send_rows(DispatchBlock& b, int32_t tokens, int32_t* ticket) {
  int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, counted = 0, unflagged = 0, senders = b.kernel.senders;
  bool sends = warp == 0, more = tokens > senders, bases_known = false;
  Pieces pieces(b);
  if (sends && blockIdx.x < tokens) pieces.fetch_piece(blockIdx.x, 0);
  for (int32_t t = blockIdx.x, n = 0, next; t < tokens; t = next, n ^= 1) {
    int32_t drawn = warp == 1 && more ? draw(ticket) : 0;
    if (warp == kWarps - 1) read_token(b, t, n);  // the last warps have the fewest tokens to count
    count_tokens<kGroups>(b, counted, t, 1);
    counted = t + 1;
    if (warp == 1 && lane == 0) b.shared.next = more ? senders + drawn : tokens;
    __syncthreads();
    next = b.shared.next;
    if (!b.may_open()) {
      if (sends) pieces.take();
      return false;
    }
    bool first = t < senders;  // too early to know more
    bases_known = bases_known || (!first && b.kernel.sends_in_place() && learn_bases(b));
    if (sends) place_token(b, t, n, bases_known);
    __syncthreads();
    for (int32_t piece = 0; piece < b.kernel.row_pieces; ++piece) {
      if (sends && piece + 1 < b.kernel.row_pieces) pieces.fetch_piece(t, piece + 1);
      if (std::is_void_v<Source> && !sends) break;
      char* buffer = pieces.take();
      if constexpr (!std::is_void_v<Source>) quantize_piece<Source>(b, buffer, pieces.bytes(piece));
      if (sends) send_piece<Source>(b, piece, buffer, pieces.bytes(piece));
    }
    if (warp == kWarps - 2) count_health(b, t);
    if (!sends) continue;
    send_pairs_of_slots(b, n);
    if (next < tokens) pieces.fetch_piece(next, 0);
    b.shared.unflagged_slots[unflagged++][lane] = b.shared.sending.slot[lane];
    if (unflagged < b.kernel.tokens_a_release && next < tokens) continue;
    raise_flags(b, unflagged);
    unflagged = 0;
  }
  return true;
}

}  // namespace epmoe::cuda
