// combine for sources of few tokens: sums in lines that tell by themselves that they are here (lines.cuh).
#pragma once
#include "combine.cuh"
#include "lines.cuh"

namespace epmoe::cuda {

constexpr int kSumLines = 2;  // of a row, the most that a lane sends at a time

// In `rank`'s window, where `sender` puts what it owes the token of a slot.
__device__ __forceinline__ int32_t few_sum(const CombineBlock& b, int32_t sender, int32_t slot) {
  return sender * static_cast<int32_t>(b.plan.few_tokens) + slot;
}
__device__ __forceinline__ char* few_sum_at(const CombineBlock& b, int64_t rank, int64_t sum) {
  return in_window<char>(b.ex, rank, b.plan.few_sums) + sum * b.plan.few_sum_stride_bytes;
}

// Bytes of a row on the wire.
template <typename T, bool kFp8>
__device__ __forceinline__ int64_t wire_bytes(const CombineBlock& b) {
  return b.args.D * (kFp8 ? 1 : sizeof(T));
}

// By a warp: one part of a slot's weighted sum into the window of its source. kWide: of many pairs.
template <int N, bool kWide, typename T, bool kFp8, typename F>
__device__ __forceinline__ void send_part(const CombineBlock& b, int32_t source, int32_t s, int32_t index, Pair pair,
                                          F&& meanwhile) {
  constexpr int kCount = kPerVector<T>, kVectors = kFp8 ? 16 / kCount : 1;  // of x in a line
  Part<N, kFp8> part(index, wire_bytes<T, kFp8>(b));
  int32_t v[N * kVectors];
  bool inside[N * kVectors];
  float sum[N * kVectors][kCount];
#pragma unroll
  for (int i = 0; i < N * kVectors; ++i) {
    v[i] = part.at(i / kVectors) * kVectors + i % kVectors;
    inside[i] = part.inside(i / kVectors);
  }
  constexpr int kDepth = kWide ? 4 : blocks_together(N) == 1 ? 2 : 4 / kVectors;  // as registers allow
  sum_pairs<T, kDepth>(b, pair, pair.kept(), v, inside, sum, meanwhile);
  Line lines[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (kFp8) {
      float values[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) values[i] = sum[n * kVectors + i / kCount][i % kCount];
      lines[n] = fp8_line(values);
    } else {
      auto out = rounded<T>(sum[n]);
      memcpy(&lines[n].words, &out, sizeof out);
    }
    lines[n].make_settable();
  }
  part.store(few_sum_at(b, source, few_sum(b, static_cast<int32_t>(b.plan.rank), s)), lines);
}

// What a warp of the blocks that send takes first.
__device__ __forceinline__ int32_t first_part(const CombineBlock& b) {
  return number_of_warp(blockIdx.x, b.kernel.senders);
}

// By those blocks, a warp a part of a slot, first `owed`.
template <int N, bool kWide, typename T, bool kFp8>
__device__ __forceinline__ void send_parts(const CombineBlock& b, Owed owed, int32_t* ticket) {
  int32_t parts = parts_of(wire_bytes<T, kFp8>(b), N);
  Units units(b.slots(true) * parts, b.kernel.senders * block_warps(), owed.unit);
  auto read = [&](int32_t unit) {
    Owed next(b, unit, parts);
    next.read(b);
    return next;
  };
  units.for_each_ahead(ticket, owed, read, [&](const Owed& part, auto&& meanwhile) {
    auto [source, s] = part.slot;
    if (b.is_few(source) && s < b.count_R[source] && was_received(b, part.pair))
      send_part<N, kWide, T, kFp8>(b, source, s, part.index, checked(b, part.pair), meanwhile);
    else
      meanwhile();
  });
}

// By a warp: one part of a token's row, from all ranks that owe it, in rank order.
template <int N, typename T, bool kFp8>
__device__ __forceinline__ bool sum_part(const CombineBlock& b, int32_t t, int32_t index, uint32_t senders) {
  constexpr int kDepth = 2, kCount = kFp8 ? 16 : kPerVector<T>;  // ranks whose lines are in flight; elements of one
  using Wire = std::conditional_t<kFp8, uint8_t, T>;
  const ExchangePlan& plan = b.plan;
  int32_t slot = owed_slot(b, t, senders);
  Part<N, kFp8> part(index, wire_bytes<T, kFp8>(b));
  float sum[N][kCount] = {};
  uint32_t owing = __ballot_sync(kAllLanes, slot >= 0);
  for (uint32_t left = owing; left;) {
    Line lines[kDepth][N];
    char* from[kDepth];
    int32_t ranks[kDepth], count = 0, awaited = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (!left) break;
      ranks[i] = __ffs(left) - 1;
      left &= left - 1;
      from[i] = few_sum_at(b, plan.rank, few_sum(b, ranks[i], __shfl_sync(kAllLanes, slot, ranks[i])));
      ++count;
    }
    uint32_t missing = part.mask(count);
    bool here = b.wait.until(
        [&] {
          bool all = part.load(from, lines, missing);
#pragma unroll
          for (int i = 0; i < kDepth; ++i)
            if (missing >> i * N & ((1u << N) - 1)) awaited = ranks[i];
          return all;
        },
        awaited);
    if (!__all_sync(kAllLanes, here)) return false;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int n = 0; n < N; ++n)
        add_words<Wire>(sum[n], lines[i][n].words, kFp8 ? __uint_as_float(lines[i][n].scale) : 1.0f);
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (!part.inside(n)) continue;
    T out[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = from_float<T>(sum[n][i]);
    store_vectors(out, static_cast<T*>(b.args.y_TD) + int64_t{t} * b.args.D + part.at(n) * kCount);
  }
  __syncwarp();
#pragma unroll 1
  for (; owing; owing &= owing - 1) {
    int32_t rank = __ffs(owing) - 1;
    part.unset(few_sum_at(b, plan.rank, few_sum(b, rank, __shfl_sync(kAllLanes, slot, rank))));
  }
  return true;
}

// By the blocks that receive.
template <int N, typename T, bool kFp8>
__device__ __forceinline__ bool sum_parts(const CombineBlock& b, uint32_t senders, int32_t* ticket) {
  int32_t parts = parts_of(wire_bytes<T, kFp8>(b), N);
  return Units(b.args.T * parts, b.kernel.senders).for_each(ticket, [&](int32_t unit, int32_t) {
    return sum_part<N, T, kFp8>(b, unit / parts, unit % parts, senders);
  });
}

}  // namespace epmoe::cuda
