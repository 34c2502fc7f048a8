// The send phase of dispatch, LL protocol. A row leaves without waiting for counts: its lines have
// the place of the token's number on every rank. Every rank gets the pairs of all tokens.
#pragma once
#include "cuda/dispatch/routing.cuh"
#include "cuda/exchange/ll.cuh"
#include "cuda/exchange/work_queue.cuh"

namespace epmoe::cuda {

// A chunk of a token's row on its way out, N lines a lane. Source: that of dispatch_kernel.
template <int N, WireFormat kFormat, typename Source>
struct OutgoingChunk {
  int32_t item, t;
  RowChunk<N, kFormat> chunk;
  LineData lines[N]{};
  uint32_t ranks = 0;  // the ranks that need the token, as a mask

  // Items are chunks of rows, in order of tokens.
  __device__ __forceinline__ OutgoingChunk(const DispatchBlock& b, int32_t item, int32_t chunks)
      : item(item), t(item / chunks), chunk(item - t * chunks, b.kernel.row_bytes()) {}

  // Of x as many make a line as of the row that travels.
  using Element = std::conditional_t<kQuantizes<Source>, Source, uint32_t>;
  static constexpr int kCount = kQuantizes<Source> ? kLineElements<kFormat> : 4;

  // Whether x has the lane's n-th line. Lines that fill up the last block are zeros.
  __device__ __forceinline__ bool is_in_x(const DispatchBlock& b, int n) const {
    if constexpr (!wire(kFormat).has_scales()) return chunk.inside(n);
    constexpr uint32_t kLineBytes = kCount * sizeof(Element);
    const uint32_t x_lines = static_cast<uint32_t>(b.args.x_row_bytes) / kLineBytes;
    return chunk.at(n) < static_cast<int32_t>(x_lines);
  }
  __device__ __forceinline__ void read(const DispatchBlock& b) {
    if (t >= b.args.T) return;
    Element elements[N][kCount] = {};
    auto* x = reinterpret_cast<const Element*>(b.x_at(t));
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (is_in_x(b, n)) load_vectors(x + chunk.at(n) * kCount, elements[n]);
    if constexpr (chunk.kScaled && !kQuantizes<Source>) {
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (chunk.inside(n) && chunk.has_scale(n))
          lines[n].scale = __float_as_uint(b.scales_at(t)[chunk.at(n) / kScaleLines<kFormat>]);
    }
    int32_t lane = threadIdx.x % 32;
    ranks = __reduce_or_sync(
        kAllLanes, b.rank_mask(physical(b, t, RoutedPair(b.args, t, lane, lane < b.args.K))));
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (kQuantizes<Source>) {
        float values[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[n][i]);
        lines[n] = quantized_line<kFormat>(values);
      } else {
        memcpy(&lines[n].words, elements[n], sizeof elements[n]);
      }
      lines[n].avoid_empty();
    }
  }

  // Sends to the ranks that need the token and are in `allowed`.
  __device__ __forceinline__ void send(const DispatchBlock& b, uint32_t allowed) const {
    int32_t lane = threadIdx.x % 32;
    int32_t R = static_cast<int32_t>(b.plan.R);
    // Tokens begin with different ranks, so that not all write to the same rank at once.
#pragma unroll 1
    for (int32_t i = 0, rank = t % R; i < R; ++i, rank = rank + 1 < R ? rank + 1 : 0)
      if (ranks & allowed & 1u << rank) chunk.publish(ll_row_at(b, rank, b.plan.rank, t), lines);
    if (b.args.expert_major && chunk.is_first() && lane < R)
      in_scratch<int32_t>(b.ex, b.plan.slots)[int64_t{t} * R + lane] = ranks >> lane & 1u ? t : -1;
  }
};

// The item that this warp of send block `block` sends first.
__device__ __forceinline__ int32_t first_outgoing(int32_t block, int32_t send_blocks) {
  int32_t early = min(kEarlyBlocks, send_blocks);
  return block < early ? warp_number(block, early)
                       : early * block_warps() + warp_number(block - early, send_blocks - early);
}

// Rows from more than 32 send blocks saturate NVLink, so pair lines queued behind them would arrive
// last. Later blocks therefore poll up to 400 times, 20 ns apart, for the notify blocks to finish:
// a hint, not a dependency.
__device__ __forceinline__ void await_notified(const DispatchBlock& b) {
  constexpr int kTries = 400;
  const volatile int32_t& notified = b.wait.round->notified;
  for (int i = 0; i < kTries && notified < b.kernel.notify_blocks; ++i) __nanosleep(20);
}

// The send blocks send all chunks, one a warp, first `outgoing`. kSkipSelf: this rank's own rows do
// not travel. Returns false if the round may not be opened.
template <bool kSkipSelf, int N, WireFormat kFormat, typename Source>
__device__ __forceinline__ bool send_chunks(DispatchBlock& b, int32_t tokens,
                                            OutgoingChunk<N, kFormat, Source>& outgoing) {
  int32_t chunks = num_chunks(b.kernel.row_bytes(), N);
  if (b.number >= kEarlyBlocks && threadIdx.x == 0) await_notified(b);
  __syncthreads();
  if (!b.may_open()) return false;
  WorkQueue queue(tokens * chunks, b.kernel.send_blocks * block_warps(), outgoing.item);
  uint32_t allowed = kSkipSelf ? ~(1u << b.plan.rank) : kAllLanes;
  return queue.for_each(&b.wait.round->send_queue[kDispatch], [&](int32_t item, int32_t) {
    if (item != outgoing.item) outgoing = {b, item, chunks}, outgoing.read(b);
    outgoing.send(b, allowed);
    return true;
  });
}

// A warp's tokens, as the ranks see them: with layout="rank" a rank gives the tokens that it needs
// consecutive slots.
struct RankSlots {
  uint32_t ranks = 0;  // the ranks that need this lane's token, as a mask
  int32_t first = 0;   // in lane r: the slot of the warp's first token on rank r

  // One warp counts its tokens by rank, once the warps before it have done so. `p` is the lane's
  // physical expert.
  __device__ __forceinline__ RankSlots(const DispatchBlock& b, const PairLanes& lanes, int32_t p)
      : ranks(b.rank_mask(p)) {
    for (int32_t step = 1; step * lanes.tokens < 32; step *= 2)
      ranks |= __shfl_xor_sync(kAllLanes, ranks, step);
  }
  __device__ __forceinline__ uint32_t tokens_of(const PairLanes& lanes, int32_t rank) const {
    return __ballot_sync(kAllLanes, lanes.k == 0 && ranks >> rank & 1u);
  }
  __device__ __forceinline__ void count(const DispatchBlock& b, const PairLanes& lanes) {
    auto R = static_cast<int32_t>(b.plan.R);
    int32_t lane = threadIdx.x % 32;
    int32_t total = 0;
#pragma unroll 1
    for (int32_t rank = 0; rank < R; ++rank) {
      int32_t tokens = __popc(tokens_of(lanes, rank));
      if (lane == rank) total = tokens;
    }
    if (lane < R) first = b.shared.rank_count[lane], b.shared.rank_count[lane] = first + total;
  }
  // The slot of this lane's token on `rank`, -1 if it needs none. All lanes call it.
  __device__ __forceinline__ int32_t on(const PairLanes& lanes, int32_t rank) const {
    uint32_t before = tokens_of(lanes, rank) & ((1u << (threadIdx.x % 32 - lanes.k)) - 1);
    int32_t slot = __shfl_sync(kAllLanes, first, rank) + __popc(before);
    return ranks >> rank & 1u ? slot : -1;
  }
};

// The notify blocks send the pairs of all tokens to every rank, as many tokens at a time as a block
// has warps. A lane takes one pair. The block that has counted takes the last tokens.
template <int kGroupsInFlight>
__device__ __forceinline__ void send_pairs(DispatchBlock& b, int32_t tokens) {
  const ExchangePlan& plan = b.plan;
  int32_t blocks = b.kernel.notify_blocks;
  int32_t block = b.number - b.kernel.send_blocks;
  int32_t counted = 0;
  int32_t group = block_warps();
  int32_t K = b.args.K;
  int32_t R = static_cast<int32_t>(plan.R);
  int32_t lane = threadIdx.x % 32;
  int32_t warp = threadIdx.x / 32;
  bool rank_major = !b.args.expert_major;
  PairLanes lanes(K);
  if (block == 0) {
    __syncthreads();
    for (int32_t p = threadIdx.x; p < plan.P; p += block_threads()) b.count[p] = 0;
    if (threadIdx.x < R) b.shared.rank_count[threadIdx.x] = 0;
    block = blocks;
    __syncthreads();
  }
#pragma unroll 1
  for (int32_t begin = (block - 1) * group; begin < tokens; begin += blocks * group) {
    int32_t end = min(begin + group, tokens);
    int32_t t = begin + warp * lanes.tokens + lanes.t;
    int32_t ordinal = -1;
    bool real = lanes.k < K && t < end;
    RoutedPair pair(b.args, t, lanes.k, real);
    int32_t p = physical(b, t, pair);
    count_tokens<kGroupsInFlight>(b, counted, begin, rank_major);
    counted = end;
    uint32_t same = __match_any_sync(kAllLanes, p);
    uint32_t before = same & ((1u << lane) - 1);
    RankSlots slots(b, lanes, p);
    for (int32_t first = begin, turn = 0; first < end; first += lanes.tokens, ++turn) {
      __syncthreads();
      if (turn != warp) continue;
      if (rank_major) slots.count(b, lanes);
      if (p >= 0) ordinal = b.count[p] + __popc(before);
      __syncwarp();
      if (p >= 0 && !before) b.count[p] += __popc(same);
    }
    if (!b.may_open()) return;
#pragma unroll 1
    for (int32_t rank = 0; rank < R; ++rank) {
      int32_t place = rank_major ? slots.on(lanes, rank) : ordinal;
      if (!real) continue;
      int32_t id = p < 0 ? b.shared.sentinel[rank] : p;
      PairLine::publish(ll_pairs_at(b, rank, plan.rank, t) + lanes.k,
                        {id, place, p < 0 ? 0.0f : pair.weight, b.wait.epoch});
      if (rank_major && lanes.k == 0)
        in_scratch<int32_t>(b.ex, plan.slots)[int64_t{t} * R + rank] = place;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(&b.wait.round->notified, 1);
#pragma unroll 1
  for (int32_t t = (block - 1) * group + warp; t < tokens; t += blocks * group) count_health(b, t);
}

}  // namespace epmoe::cuda
