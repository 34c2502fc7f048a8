// The sending half of dispatch for few tokens: a row leaves without waiting for counts, since a token has the slot of
// its number on every rank, and every rank is told of all pairs.
#pragma once
#include "dispatch_tokens.cuh"
#include "lines.cuh"
#include "units.cuh"

namespace epmoe::cuda {

constexpr int64_t kFewest = 8;  // tokens up to which a lane moves one line of an arrived row at a time
template <bool kFp8>
constexpr int kLines = kFp8 ? 2 : 4;  // the most, of more tokens

__device__ __forceinline__ char* few_row(const DispatchBlock& b, int64_t rank, int64_t source, int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<char>(b.ex, rank, plan.few_rows) + (source * plan.few_tokens + t) * plan.few_stride_bytes;
}
__device__ __forceinline__ uint4* few_pairs(const DispatchBlock& b, int64_t rank, int64_t source, int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<uint4>(b.ex, rank, plan.few_pairs) + (source * plan.few_tokens + t) * plan.K;
}

// A part of a token's row on its way out, N lines a lane. Source: of what fp8 is made, void where nothing is.
template <int N, typename Source>
struct Leaving {
  static constexpr bool kFp8 = !std::is_void_v<Source>;
  int32_t unit, t;
  Part<N, kFp8> part;
  Line lines[N]{};
  uint32_t ranks = 0;  // that need the token

  // Units are parts of rows, in order of tokens.
  __device__ __forceinline__ Leaving(const DispatchBlock& b, int32_t unit, int32_t parts)
      : unit(unit), t(unit / parts), part(unit - t * parts, b.kernel.row_bytes()) {}

  __device__ __forceinline__ void read(const DispatchBlock& b) {
    if (t >= b.args.T) return;
    using Element = std::conditional_t<kFp8, Source, uint32_t>;
    constexpr int kCount = kFp8 ? 16 : 4;  // of a line
    Element elements[N][kCount] = {};
    auto* x = reinterpret_cast<const Element*>(b.x_at(t));
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (part.inside(n)) load_vectors(x + part.at(n) * kCount, elements[n]);
    int32_t lane = threadIdx.x % 32;
    ranks = __reduce_or_sync(kAllLanes, b.rank_mask(physical(b, t, Given(b.args, t, lane, lane < b.args.K))));
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (kFp8) {
        float values[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = to_float(elements[n][i]);
        lines[n] = fp8_line(values);
      } else {
        memcpy(&lines[n].words, elements[n], sizeof elements[n]);
      }
      lines[n].make_settable();
    }
  }

  // To those ranks that are among `others`.
  __device__ __forceinline__ void send(const DispatchBlock& b, uint32_t others) const {
    int32_t lane = threadIdx.x % 32, R = static_cast<int32_t>(b.plan.R);
    // Tokens begin with different ranks, so that not all send to the same at once.
#pragma unroll 1
    for (int32_t i = 0, rank = t % R; i < R; ++i, rank = rank + 1 < R ? rank + 1 : 0)
      if (ranks & others & 1u << rank) part.store(few_row(b, rank, b.plan.rank, t), lines);
    if (part.is_first() && lane < R)
      in_scratch<int32_t>(b.ex, b.plan.slots)[int64_t{t} * R + lane] = ranks >> lane & 1u ? t : -1;
  }
};

// More rows than those of so many blocks fill the wire, and what is said of them would wait behind: it goes first.
// Nothing depends on it, so this does not wait for long in any case.
constexpr int32_t kAtOnce = 32;

// These blocks begin with the first tokens, so that rows arrive in the order in which receivers wait for them.
__device__ __forceinline__ int32_t first_sent(int32_t senders) {
  int32_t block = blockIdx.x, early = min(kAtOnce, senders);
  return block < early ? number_of_warp(block, early)
                       : early * block_warps() + number_of_warp(block - early, senders - early);
}
__device__ __forceinline__ void await_told(const DispatchBlock& b) {
  constexpr int kTries = 400;
  const volatile int32_t& told = b.wait.round->told;
  for (int i = 0; i < kTries && told < b.kernel.tellers; ++i) __nanosleep(20);
}

// By the blocks that send, a warp a part of a token's row, first `leaving`. kStays: this rank's own tokens need not
// travel. False if the round may not be opened.
template <bool kStays, int N, typename Source>
__device__ __forceinline__ bool send_parts(DispatchBlock& b, int32_t tokens, Leaving<N, Source>& leaving) {
  int32_t parts = parts_of(b.kernel.row_bytes(), N);
  if (blockIdx.x >= kAtOnce && threadIdx.x == 0) await_told(b);
  __syncthreads();
  if (!b.may_open()) return false;
  Units units(tokens * parts, b.kernel.senders * block_warps(), leaving.unit);
  uint32_t others = kStays ? ~(1u << b.plan.rank) : kAllLanes;
  return units.for_each(&b.wait.round->sent[kDispatch], [&](int32_t unit, int32_t) {
    if (unit != leaving.unit) leaving = {b, unit, parts}, leaving.read(b);
    leaving.send(b, others);
    return true;
  });
}

// By the blocks from the one that has counted on, that one last: tells every rank of all pairs, as many tokens at a
// time as a block has warps. A lane takes a pair, and a warp as many tokens as fit.
template <int kGroups>
__device__ __forceinline__ void send_pairs(DispatchBlock& b, int32_t tokens) {
  const ExchangePlan& plan = b.plan;
  int32_t blocks = b.kernel.tellers, block = blockIdx.x - b.kernel.senders, counted = 0, group = block_warps();
  int32_t K = b.args.K, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PairLanes lanes(K);
  if (block == 0) {
    __syncthreads();
    for (int32_t p = threadIdx.x; p < plan.P; p += block_threads()) b.count[p] = 0;
    block = blocks;
    __syncthreads();
  }
#pragma unroll 1
  for (int32_t begin = (block - 1) * group; begin < tokens; begin += blocks * group) {
    int32_t end = min(begin + group, tokens), t = begin + warp * lanes.tokens + lanes.t, ordinal = -1;
    bool real = lanes.k < K && t < end;
    Given pair(b.args, t, lanes.k, real);
    int32_t p = physical(b, t, pair);
    count_tokens<kGroups, false>(b, counted, begin);
    counted = end;
    uint32_t same = __match_any_sync(kAllLanes, p), before = same & ((1u << lane) - 1);
    for (int32_t first = begin, turn = 0; first < end; first += lanes.tokens, ++turn) {
      __syncthreads();
      if (turn != warp) continue;
      if (p >= 0) ordinal = b.count[p] + __popc(before);
      __syncwarp();
      if (p >= 0 && !before) b.count[p] += __popc(same);
    }
    if (!b.may_open()) return;
#pragma unroll 1
    for (int32_t rank = 0; real && rank < plan.R; ++rank) {
      auto id = static_cast<uint32_t>(p < 0 ? b.shared.sentinel[rank] : p);
      store_line(few_pairs(b, rank, plan.rank, t) + lanes.k,
                 {id, static_cast<uint32_t>(ordinal), __float_as_uint(p < 0 ? 0.0f : pair.weight), b.wait.epoch});
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(&b.wait.round->told, 1);
#pragma unroll 1
  for (int32_t t = (block - 1) * group + warp; t < tokens; t += blocks * group) count_health(b, t);
}

}  // namespace epmoe::cuda
