// The sending half of dispatch. Slots and ordinals need no atomics' order: a block counts the tokens before its own.
#pragma once
#include "bulk.cuh"
#include "dispatch_counts.cuh"
#include "fp8.cuh"

namespace epmoe::cuda {

// By warp 0: the ordinals of token t's pairs, in row n of the table, and where it goes on each rank, a lane each.
// Counts it, too.
__device__ __forceinline__ void place_token(DispatchBlock& b, int32_t t, int32_t n, bool bases_known) {
  const ExchangePlan& plan = b.plan;
  DispatchShared& shared = b.shared;
  Sending& sending = b.shared.sending;
  int32_t lane = threadIdx.x, id = shared.ids[n][lane], owner = id < 0 ? -1 : b.place[id] >> 16;
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

// A block's rows on their way, in pieces: from x into shared memory, and from there to every rank that needs them.
struct Pieces {
  const DispatchBlock& b;
  int32_t fetched = 0, taken = 0;

  __device__ explicit Pieces(const DispatchBlock& b) : b(b) {
    if (threadIdx.x == 0)
      for (uint64_t& arrival : b.shared.arrivals) init_arrival(&arrival);
  }
  __device__ int64_t row_bytes() const { return b.args.D * itemsize(b.args.dtype); }
  __device__ int32_t of_row() const { return static_cast<int32_t>(ceil_div(row_bytes(), b.kernel.piece_bytes)); }
  __device__ int32_t bytes(int32_t piece) const {
    return static_cast<int32_t>(min(b.kernel.piece_bytes, row_bytes() - piece * b.kernel.piece_bytes));
  }
  __device__ char* buffer(int32_t n) const { return b.pieces + n % kPieces * b.kernel.piece_bytes; }

  // By warp 0: the next one, once what was in its buffer has left.
  __device__ void fetch_next(int32_t t, int32_t piece) {
    wait_read<kPieces - 2>();
    __syncwarp();
    auto* x = static_cast<const char*>(b.args.x_TD) + t * b.args.x_stride_bytes + piece * b.kernel.piece_bytes;
    fetch(buffer(fetched), x, bytes(piece), &b.shared.arrivals[fetched % kPieces]);
    ++fetched;
  }
  // The oldest that this thread has not taken, when it is here.
  __device__ char* take() {
    await(&b.shared.arrivals[taken % kPieces], taken / kPieces & 1);
    return buffer(taken++);
  }
};

// By the whole block: a piece as fp8, in its own place; kLanes threads share a block of 128 elements.
template <typename Source>
__device__ __forceinline__ void quantize_piece(const DispatchBlock& b, char* buffer, int32_t bytes) {
  constexpr int kCount = kPerVector<Source>, kLanes = kScaleBlock / kCount, kEach = kMaxPieceBytes / (16 * kThreads);
  Vector<uint8_t, kCount> packed[kEach];
  float scales[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    float values[kCount] = {};
    if (v * 16 < bytes) to_floats(reinterpret_cast<const Vector<Source, kCount>*>(buffer)[v], values);
    scales[i] = block_scale<kCount, kLanes>(values);
    packed[i] = to_fp8(values, scales[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    if (v * 16 >= bytes) continue;
    reinterpret_cast<Vector<uint8_t, kCount>*>(buffer)[v] = packed[i];
    if (v % kLanes == 0) b.shared.scales[v / kLanes] = scales[i];
  }
  publish_shared();
  __syncthreads();
}

// By warp 0: a piece to all ranks that need the token.
template <typename Source>
__device__ __forceinline__ void send_piece(const DispatchBlock& b, int32_t piece, const char* buffer, int32_t bytes) {
  int32_t lane = threadIdx.x, R = static_cast<int32_t>(b.plan.R);
  int64_t begin = piece * b.kernel.piece_bytes;
  // Lanes store one after the other: not every token to rank 0 first.
  char* to = lane < R ? b.shared.sending.row_at[(lane + blockIdx.x) % R] : nullptr;
  if constexpr (std::is_void_v<Source>) {
    store(to ? to + begin : nullptr, buffer, bytes);
  } else {
    constexpr int kSize = sizeof(Source);
    store(to ? to + begin / kSize : nullptr, buffer, bytes / kSize);
#pragma unroll 1
    for (int32_t rank = 0; rank < R; ++rank)
      if (float* scales = b.shared.sending.scales_at[rank])
        for (int32_t i = lane; i < bytes / (kScaleBlock * kSize); i += 32)
          scales[begin / (kScaleBlock * kSize) + i] = b.shared.scales[i];
  }
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

// By the blocks that send, a token at a time: warp 0 sends it, and raises its flags when it has arrived, while the
// others count those up to the next. False if the round may not be opened.
template <typename Source>
__device__ __forceinline__ bool send_rows(DispatchBlock& b, int32_t tokens, int32_t* ticket) {
  const ExchangePlan& plan = b.plan;
  int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, counted = 0, senders = b.kernel.senders;
  bool sends = warp == 0, bases_known = false;
  Pieces pieces(b);
  if (sends && blockIdx.x < tokens) pieces.fetch_next(blockIdx.x, 0);
  for (int32_t t = blockIdx.x, n = 0, next; t < tokens; t = next, n ^= 1) {
    if (warp == 1 && lane == 0) b.shared.next = tokens <= senders ? tokens : senders + atomicAdd(ticket, 1);
    if (warp == kWarps - 1) read_token(b, t, n);  // the last warps have the fewest tokens to count
    count_tokens(b, counted, t, 1);
    counted = t + 1;
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
    for (int32_t piece = 0; piece < pieces.of_row(); ++piece) {
      if (sends && piece + 1 < pieces.of_row()) pieces.fetch_next(t, piece + 1);
      if (std::is_void_v<Source> && !sends) break;
      char* buffer = pieces.take();
      if constexpr (!std::is_void_v<Source>) quantize_piece<Source>(b, buffer, pieces.bytes(piece));
      if (sends) send_piece<Source>(b, piece, buffer, pieces.bytes(piece));
    }
    if (warp == kWarps - 2) count_health(b, t);
    if (!sends) continue;
    send_pairs_of_slots(b, n);
    if (next < tokens) pieces.fetch_next(next, 0);
    wait_stored<0>();
    __syncwarp();
    if (int32_t slot = b.shared.sending.slot[lane]; slot >= 0)
      raise_flag(in_window<uint32_t>(b.ex, lane, plan.recv_flags) + plan.rank * plan.M + slot, b.wait.epoch);
  }
  return true;
}

}  // namespace epmoe::cuda
