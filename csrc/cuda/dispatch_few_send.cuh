// The sending half of dispatch for few tokens: a row leaves without waiting for counts, since a token has the slot of
// its number on every rank, and every rank is told of all pairs.
#pragma once
#include "dispatch_counts.cuh"
#include "lines.cuh"
#include "units.cuh"

namespace epmoe::cuda {

constexpr int kGroupTokens = kWarps;  // whose pairs a block sends at a time
constexpr int64_t kFewest = 16;       // tokens up to which a lane moves one line of a row at a time
template <bool kFp8>
constexpr int kLines = kFp8 ? 2 : 4;  // of more tokens; half as many are sent at a time

__device__ __forceinline__ char* few_row(const DispatchBlock& b, int64_t rank, int64_t source, int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<char>(b.ex, rank, plan.few_rows) + (source * plan.few_tokens + t) * plan.few_stride_bytes;
}
__device__ __forceinline__ uint4* few_pairs(const DispatchBlock& b, int64_t rank, int64_t source, int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<uint4>(b.ex, rank, plan.few_pairs) + (source * plan.few_tokens + t) * plan.K;
}

// A lane's lines of a part of a token's row. Source: of what fp8 is made, void where nothing is.
template <int N, typename Source>
__device__ __forceinline__ void read_part(const DispatchBlock& b, int64_t t,
                                          const Part<N, !std::is_void_v<Source>>& part, Line (&lines)[N]) {
  const char* x = static_cast<const char*>(b.args.x_TD) + t * b.args.x_stride_bytes;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (std::is_void_v<Source>) {
      lines[n] = {part.inside(n) ? reinterpret_cast<const uint4*>(x)[part.at(n)] : uint4{}, 0};
    } else {
      Source elements[16] = {};
      if (part.inside(n)) load_vectors(reinterpret_cast<const Source*>(x) + part.at(n) * 16, elements);
      float values[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) values[i] = to_float(elements[i]);
      lines[n] = fp8_line(values);
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) lines[n].make_settable();
}

// More rows than those of so many blocks fill the wire, and what is said of them would wait behind: it goes first.
// Nothing depends on it, so this does not wait for long in any case.
constexpr int32_t kAtOnce = 32;

// These blocks begin with the first tokens, so that rows arrive in the order in which receivers wait for them.
__device__ __forceinline__ int32_t first_sent(int32_t senders) {
  int32_t block = blockIdx.x, early = min(kAtOnce, senders);
  return block < early ? number_of_warp(block, early) : early * kWarps + number_of_warp(block - early, senders - early);
}
__device__ __forceinline__ void await_told(const DispatchBlock& b, const RoundState* round) {
  constexpr int kTries = 400;
  const volatile int32_t& told = round->told;
  for (int i = 0; i < kTries && told < b.kernel.tellers; ++i) __nanosleep(20);
}

// By the blocks that send, a warp a part of a token's row. False if the round may not be opened.
template <int N, typename Source>
__device__ __forceinline__ bool send_parts(DispatchBlock& b, int32_t tokens, RoundState* round) {
  int32_t lane = threadIdx.x % 32, R = static_cast<int32_t>(b.plan.R), parts = parts_of(b.kernel.row_bytes(), N);
  Units units(tokens * parts, b.kernel.senders * kWarps, first_sent(b.kernel.senders));
  Part<N, !std::is_void_v<Source>> part(units.first % parts, b.kernel.row_bytes());
  Line lines[N];
  if (units.first < units.total) read_part<N, Source>(b, units.first / parts, part, lines);  // on its way meanwhile
  if (blockIdx.x >= kAtOnce && threadIdx.x == 0) await_told(b, round);
  __syncthreads();
  if (!b.may_open()) return false;
  return units.for_each(&round->sent[kDispatch], [&](int32_t unit, int32_t) {
    int32_t t = unit / parts, p = -1;
    if (unit != units.first) {
      part = {unit % parts, b.kernel.row_bytes()};
      read_part<N, Source>(b, t, part, lines);
    }
    if (lane < b.args.K) p = physical(b, t, expert_of(b, load_id(b.args, t, lane)), load_weight(b.args, t, lane));
    uint32_t ranks = __reduce_or_sync(kAllLanes, b.rank_mask(p));
    // Tokens begin with different ranks, so that not all send to the same at once.
#pragma unroll 1
    for (int32_t i = 0, rank = t % R; i < R; ++i, rank = rank + 1 < R ? rank + 1 : 0) {
      if (ranks >> rank & 1u) part.store(few_row(b, rank, b.plan.rank, t), lines);
    }
    if (unit % parts == 0 && lane < R)
      in_scratch<int32_t>(b.ex, b.plan.slots)[int64_t{t} * R + lane] = ranks >> lane & 1u ? t : -1;
    return true;
  });
}

// By the blocks from the one that has counted on, that one last: tells every rank of all pairs, a group of tokens at a
// time. A lane takes a pair, and a warp as many tokens as fit.
__device__ __forceinline__ void send_pairs(DispatchBlock& b, int32_t tokens, RoundState* round) {
  const ExchangePlan& plan = b.plan;
  int32_t blocks = b.kernel.tellers, block = blockIdx.x - b.kernel.senders, counted = 0;
  int32_t K = b.args.K, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto [width, each, k] = PairLanes(K);
  if (block == 0) {
    __syncthreads();
    for (int32_t p = threadIdx.x; p < plan.P; p += kThreads) b.count[p] = 0;
    block = blocks;
    __syncthreads();
  }
#pragma unroll 1
  for (int32_t begin = (block - 1) * kGroupTokens; begin < tokens; begin += blocks * kGroupTokens) {
    int32_t end = min(begin + kGroupTokens, tokens), t = begin + warp * each + lane / width, p = -1, ordinal = -1;
    bool real = k < K && t < end;
    float weight = real ? load_weight(b.args, t, k) : 0.0f;
    if (real) p = physical(b, t, expert_of(b, load_id(b.args, t, k)), weight);
    count_tokens<false>(b, counted, begin);
    counted = end;
    uint32_t same = __match_any_sync(kAllLanes, p), before = same & ((1u << lane) - 1);
    for (int32_t first = begin, turn = 0; first < end; first += each, ++turn) {
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
      store_line(few_pairs(b, rank, plan.rank, t) + k,
                 {id, static_cast<uint32_t>(ordinal), __float_as_uint(p < 0 ? 0.0f : weight), b.wait.epoch});
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(&round->told, 1);
#pragma unroll 1
  for (int32_t t = (block - 1) * kGroupTokens + warp; t < tokens; t += blocks * kGroupTokens) count_health(b, t);
}

}  // namespace epmoe::cuda
