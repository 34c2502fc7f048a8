// The send phase of dispatch, Simple protocol: a send block takes a batch of neighbouring tokens.
// Slots and ordinals do not depend on the order of atomics: a block knows the counts of the tokens
// before its own.
#pragma once
#include "cuda/dispatch/offsets.cuh"
#include "cuda/dispatch/warp_chunk.cuh"
#include "cuda/exchange/work_queue.cuh"

namespace epmoe::cuda {

// A token of a batch, as each warp that moves a part of it finds it.
struct BatchToken {
  int32_t t;
  int32_t n;  // in the batch
  // A pair a lane: its final row with kFinalRow, or its ordinal; -1 for none.
  int32_t row_or_ordinal;
  int32_t own_row;  // a pair a lane: its final row on this rank, if it is known; else -1
  bool received;    // on this rank: own rows are known
  Destinations to;
};

// The pairs of an expert among the batch's tokens before the n-th.
__device__ __forceinline__ int32_t pairs_in_batch(const DispatchBlock& b, int32_t n, int32_t id) {
  int32_t quads = (b.args.K + 3) / 4;
  int32_t pairs = 0;
#pragma unroll 1
  for (int32_t i = 0; i < n; ++i)
#pragma unroll 1
    for (int32_t quad = 0; quad < quads; ++quad) {
      int4 ids = reinterpret_cast<const int4*>(b.shared.ids[i])[quad];
      pairs += (ids.x == id) + (ids.y == id) + (ids.z == id) + (ids.w == id);
    }
  return pairs;
}

// One warp gives the n-th token of the batch from token `begin` on a slot on each rank, and its
// pairs their ordinals or final rows. The block has counted the tokens before the batch.
__device__ __forceinline__ BatchToken assign_slots(const DispatchBlock& b, int32_t begin, int32_t n,
                                                   bool offsets_known) {
  const ExchangePlan& plan = b.plan;
  const DispatchShared& shared = b.shared;
  int32_t lane = threadIdx.x % 32;
  // Count the pairs of this expert, and the rows for this rank, before the token.
  int32_t id = shared.ids[n][lane];
  int32_t owner = b.owner_of(id);
  uint32_t same = __match_any_sync(kAllLanes, id);
  int32_t ordinal = -1;
  if (id >= 0) ordinal = b.count[id] + pairs_in_batch(b, n, id) + __popc(same & ((1u << lane) - 1));
  int32_t slot = shared.rank_count[lane];
#pragma unroll 1
  for (int32_t i = 0; i < n; ++i) slot += shared.ranks[i] >> lane & 1u;
  // A kernel out of turn may have left other counts: no slot lies past the slab.
  if (!(shared.ranks[n] >> lane & 1u) || slot >= plan.M) slot = -1;
  // Find the first row on this lane's rank that takes the token.
  int32_t row = -1;
  if (id >= 0 && offsets_known) {
    int64_t wanted = int64_t{b.send_offset[b.column(b.location[id])]} + ordinal;
    row = wanted >= 0 && wanted < plan.max_rows ? static_cast<int32_t>(wanted) : -1;
  }
  int32_t first = -1;
#pragma unroll 1
  for (int32_t k = 0; offsets_known && k < b.args.K; ++k) {
    int32_t candidate = __shfl_sync(kAllLanes, row, k);
    if (__shfl_sync(kAllLanes, owner, k) == lane && candidate >= 0 && first < 0) first = candidate;
  }
  char* row_at = nullptr;
  float* scales_at = nullptr;
  bool own = lane == plan.rank;
  if (offsets_known && first >= 0 && !own) {
    row_at = in_window<char>(b.ex, lane, plan.rows) + first * b.kernel.row_bytes();
    scales_at = in_window<float>(b.ex, lane, plan.row_scales) +
                first * wire_scales(plan.payload_format, b.args.D);
  } else if (slot >= 0 && !offsets_known) {
    int64_t at = plan.rank * plan.M + slot;
    row_at = in_window<char>(b.ex, lane, plan.recv_x) + at * plan.x_stride_bytes;
    scales_at = in_window<float>(b.ex, lane, plan.recv_scales) + at * plan.scale_blocks;
  }
  if (offsets_known) ordinal = row < 0 ? -1 : static_cast<int32_t>(row | kFinalRow);
  int32_t own_row = owner == plan.rank ? row : -1;
  return {begin + n, n, ordinal, own_row, offsets_known, {slot, row_at, scales_at}};
}

// One warp notes the slots of a token, for combine and for the flags, and sends its pairs. It
// leaves those of this rank where combine finds them, once their rows are known.
__device__ __forceinline__ void send_pairs_of_slots(DispatchBlock& b, const BatchToken& token) {
  const ExchangePlan& plan = b.plan;
  auto R = static_cast<int32_t>(plan.R);
  int32_t K = b.args.K;
  int32_t lane = threadIdx.x % 32;
  b.shared.unsignaled_slots[token.n][lane] = token.to.slot;
  if (lane < R) in_scratch<int32_t>(b.ex, plan.slots)[int64_t{token.t} * R + lane] = token.to.slot;
#pragma unroll 1
  for (int32_t base = 0; base < R * K; base += 32) {
    int32_t rank = min((base + lane) / K, R - 1);
    int32_t k = (base + lane) % K;
    int32_t slot = __shfl_sync(kAllLanes, token.to.slot, rank);
    int32_t row_or_ordinal = __shfl_sync(kAllLanes, token.row_or_ordinal, k);
    int32_t own_row = __shfl_sync(kAllLanes, token.own_row, k);
    if (base + lane >= R * K || slot < 0) continue;
    int32_t id = b.shared.ids[token.n][k];
    int64_t pair = (plan.rank * plan.M + slot) * plan.K + k;
    if (token.received && rank == plan.rank) {
      in_scratch<int32_t>(b.ex, plan.row_of_pair)[pair] = own_row;
      in_scratch<float>(b.ex, plan.pair_weights)[pair] =
          combine_weight(b, own_row, b.shared.weights[token.n][k]);
      if (k == 0) in_window<int32_t>(b.ex, rank, plan.recv_ordinals)[pair] = kReceived;
      continue;
    }
    in_window<int32_t>(b.ex, rank, plan.recv_ids)[pair] = id < 0 ? b.shared.sentinel[rank] : id;
    in_window<int32_t>(b.ex, rank, plan.recv_ordinals)[pair] = row_or_ordinal;
    in_window<float>(b.ex, rank, plan.recv_weights)[pair] = b.shared.weights[token.n][k];
  }
}

// Warp 0 publishes the flags of a batch's tokens to all other ranks. Each warp has waited until its
// own stores have arrived, and a barrier of the block lies in between.
__device__ __forceinline__ void publish_flags(const DispatchBlock& b, int32_t tokens) {
  int32_t lane = threadIdx.x;
  auto* flags =
      in_window<Flag>(b.ex, lane < b.plan.R ? lane : 0, b.plan.recv_flags) + b.plan.rank * b.plan.M;
  if (b.plan.R == 1) return;
  release_all();
#pragma unroll 1
  for (int32_t n = 0; n < tokens; ++n) {
    int32_t slot = b.shared.unsignaled_slots[n][lane];
    if (slot >= 0 && lane != b.plan.rank) Flag::publish_released(flags + slot, b.wait.epoch);
  }
}
// The same for the flags of this rank's own slots, a token a lane. Their readers are on this GPU.
__device__ __forceinline__ void publish_own_flags(const DispatchBlock& b, int32_t tokens) {
  int32_t lane = threadIdx.x;
  auto* flags = in_window<Flag>(b.ex, b.plan.rank, b.plan.recv_flags) + b.plan.rank * b.plan.M;
  release_on_gpu();
  int32_t slot = lane < tokens ? b.shared.unsignaled_slots[lane][b.plan.rank] : -1;
  if (slot >= 0) Flag::publish_released(flags + slot, b.wait.epoch);
}

// So long the first batch of a block waits for the counts of all ranks, among up to two. Rows that
// leave without them are copied once more.
constexpr uint64_t kFirstBatchPatienceNs = 5'000;

// The send blocks send a batch of tokens at a time, each warp a chunk of a row, and publish the
// batch's flags by one release. Returns false if the round may not be opened.
template <WireFormat kFormat, typename Source, int kGroupsInFlight>
__device__ __forceinline__ bool send_rows(DispatchBlock& b, int32_t tokens, int32_t* head) {
  int32_t warp = threadIdx.x / 32;
  int32_t lane = threadIdx.x % 32;
  int32_t send_blocks = b.kernel.send_blocks;
  int32_t batch = b.kernel.batch_tokens;
  int32_t chunks = b.kernel.row_chunks;
  bool more = tokens > send_blocks * batch;
  bool offsets_known = false;
  PartCounter<kGroupsInFlight> counter(b, tokens);
  WarpChunk held(b);
  // Starts to load the tokens of a batch, and the first chunk that this warp moves.
  auto load = [&](int32_t begin) {
    int32_t count = min(batch, tokens - begin);
    if (warp < count * chunks) held.load(begin + warp / chunks, warp % chunks);
    if (warp < count) read_token(b, begin + warp, warp);
  };
  int32_t begin = b.number * batch;
  load(begin);
  if (!counter.share()) {
    if (held.loads) held.await();
    return false;
  }
  for (int32_t next; begin < tokens; begin = next) {
    int32_t count = min(batch, tokens - begin);
    int32_t items = count * chunks;
    // Quantize, and count the tokens before the batch, while the next claim is on its way.
    int32_t claimed = warp == 1 && more ? claim(head) : 0;
    if (warp < items) held.take<kFormat, Source>(warp % chunks);
    counter.count_up_to(begin);
    if (warp == 1 && lane == 0)
      b.shared.next_token = more ? (send_blocks + claimed) * batch : tokens;
    __syncthreads();
    next = b.shared.next_token;
    // The counts of many ranks cannot have arrived before the first batch leaves. Those of two
    // ranks come while it is quantized, or soon after.
    bool first = begin < send_blocks * batch;
    bool looks = !first || b.plan.R <= kLocalBoundRanks;
    offsets_known = offsets_known || (looks && b.kernel.sends_to_final_rows() &&
                                      compute_send_offsets(b, first ? kFirstBatchPatienceNs : 0));
    // Send the rows, and the pairs with the first chunk of each.
    for (int32_t item = warp; item < items; item += kWarps) {
      int32_t chunk = item % chunks;
      BatchToken token = assign_slots(b, begin, item / chunks, offsets_known);
      if (item != warp) {
        held.load(token.t, chunk);
        held.take<kFormat, Source>(chunk);
      }
      held.send<kFormat, Source>(token.to, token.own_row, token.t, chunk);
      if (chunk == 0) {
        send_pairs_of_slots(b, token);
        count_health(b, token.t);
      }
    }
    // Publish the flags once what they announce has arrived. Nobody in this kernel reads a final
    // row of its own rank.
    if (offsets_known) {
      __syncthreads();
      if (warp == 0) publish_own_flags(b, count);
    }
    tma_wait_written<0>();
    __syncthreads();
    if (warp == 0) {
      if (!offsets_known) publish_own_flags(b, count);
      publish_flags(b, count);
    }
    load(next);
  }
  return true;
}

}  // namespace epmoe::cuda
