// combine, LL protocol: sums travel in lines that tell by themselves that they have arrived.
#pragma once
#include "cuda/combine/values.cuh"
#include "cuda/exchange/ll.cuh"

namespace epmoe::cuda {

// Bytes of a row on the wire, without its scales.
template <WireFormat kFormat, typename T>
__device__ __forceinline__ int64_t wire_bytes(const CombineBlock& b) {
  return wire(kFormat).row_bytes(b.args.D, sizeof(T));
}

// One warp sums a chunk of a slot's pairs into the window of its source. kCoarse: that of
// combine_kernel.
template <int N, bool kCoarse, WireFormat kFormat, typename T, typename F>
__device__ __forceinline__ void send_chunk(const CombineBlock& b, int32_t source, int32_t s,
                                           int32_t index, ReceivedPair pair, F&& prefetch) {
  constexpr int kCount = kPerVector<T>,
                kVectors = kLineElements<kFormat, T> / kCount;  // vectors of x in a line
  RowChunk<N, kFormat> chunk(index, wire_bytes<kFormat, T>(b));
  int32_t v[N * kVectors];
  bool inside[N * kVectors];
  float sum[N * kVectors][kCount];
#pragma unroll
  for (int i = 0; i < N * kVectors; ++i) {
    v[i] = chunk.at(i / kVectors) * kVectors + i % kVectors;
    inside[i] = chunk.inside(i / kVectors);
  }
  // Pairs in flight, without spilling: 4 in coarse kernels, 2 where a block has a multiprocessor,
  // otherwise 4 vectors.
  constexpr int kDepth = kCoarse ? 4 : blocks_per_sm(N) == 1 ? 2 : 4 / kVectors;
  sum_pairs<T, kDepth>(b, pair, pair.kept(), v, inside, sum, prefetch);
  LineData lines[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if constexpr (chunk.kScaled) {
      float values[kVectors * kCount];
#pragma unroll
      for (int i = 0; i < kVectors * kCount; ++i)
        values[i] = sum[n * kVectors + i / kCount][i % kCount];
      lines[n] = quantized_line<kFormat>(values);
    } else {
      auto out = rounded<T>(sum[n]);
      memcpy(&lines[n].words, &out, sizeof out);
    }
    lines[n].avoid_empty();
  }
  chunk.publish(ll_sum_at(b, source, ll_sum_index(b, static_cast<int32_t>(b.plan.rank), s)), lines);
}

// An item of the senders. kOwn: the slots of other ranks alone.
template <int N, bool kOwn, WireFormat kFormat, typename T>
__device__ __forceinline__ OutgoingSum outgoing_sum(const CombineBlock& b, int32_t item) {
  int32_t chunks = num_chunks(wire_bytes<kFormat, T>(b), N);
  return {b, {item, item % chunks, slot_of<kOwn>(b.plan, item / chunks)}};
}

// The item that this warp of a send block sends first.
template <int N, bool kOwn, WireFormat kFormat, typename T>
__device__ __forceinline__ OutgoingSum first_sum(const CombineBlock& b) {
  return outgoing_sum<N, kOwn, kFormat, T>(b, warp_number(blockIdx.x, b.kernel.send_blocks));
}

// The send blocks send the chunks of all sums, one a warp, first `outgoing`.
template <int N, bool kCoarse, bool kOwn, WireFormat kFormat, typename T, bool kValues>
__device__ __forceinline__ void send_chunks(const CombineBlock& b, OutgoingSum outgoing,
                                            int32_t* head) {
  int32_t chunks = num_chunks(wire_bytes<kFormat, T>(b), N);
  WorkQueue queue(b.num_slots(true, b.plan.R - kOwn) * chunks, b.kernel.send_blocks * block_warps(),
                  outgoing.item);
  auto read = [&](int32_t item) {
    auto next = outgoing_sum<N, kOwn, kFormat, T>(b, item);
    next.read(b);
    return next;
  };
  queue.for_each_prefetched(head, outgoing, read, [&](const OutgoingSum& sum, auto&& prefetch) {
    auto [source, s] = sum.slot;
    if (b.is_ll(source) && s < b.count_R[source] && was_received(b, sum.pair)) {
      send_chunk<N, kCoarse, kFormat, T>(b, source, s, sum.index, checked(b, sum.pair), prefetch);
      if (kValues && sum.index == 0) send_values(b, sum.slot, sum.pair.row);
    } else {
      prefetch();
    }
  });
}

// One warp sums a chunk of this rank's own sum (sum_own).
template <int N, typename T, int kCount, typename F>
__device__ __forceinline__ void sum_own_chunk(const CombineBlock& b, ReceivedPair pair,
                                              const RowChunk<N, WireFormat::kAuto>& chunk,
                                              float (&sum)[N][kCount], F&& meanwhile) {
  int32_t v[N];
  bool inside[N];
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = chunk.at(n), inside[n] = chunk.inside(n);
  sum_own<T, 2>(b, pair, v, inside, sum, meanwhile);
}

// One warp adds a chunk of the sums that all ranks return for token t, in rank order, and writes it
// to y. kOwn: it makes this rank's own sum itself. Among up to two ranks the order does not matter
// then.
template <int N, bool kOwn, WireFormat kFormat, typename T>
__device__ __forceinline__ bool sum_chunk(const CombineBlock& b, int32_t t, int32_t index,
                                          uint32_t sending_ranks) {
  constexpr int
      kDepth = 2,
      kCount = kLineElements<kFormat, T>;  // ranks whose lines are in flight; elements of a line
  using Wire = WireElement<kFormat, T>;
  const ExchangePlan& plan = b.plan;
  OutgoingSum own(b, {0, 0, {static_cast<int32_t>(plan.rank), t}});
  if (kOwn && b.args.expert_major) own.read(b);  // a token has the slot of its number
  int32_t slot = slot_of_sum(b, t, sending_ranks);
  RowChunk<N, kFormat> chunk(index, wire_bytes<kFormat, T>(b));
  float sum[N][kCount] = {};
  uint32_t returning = __ballot_sync(kAllLanes, slot >= 0);
  bool makes_own = kOwn && returning >> plan.rank & 1u;
  if (makes_own) returning &= ~(1u << plan.rank);
  if (makes_own && !b.args.expert_major)
    own.slot.s = __shfl_sync(kAllLanes, slot, own.slot.source), own.read(b);
  bool first = kOwn;
  for (uint32_t left = returning; left || first; first = false) {
    LineData lines[kDepth][N];
    char* from[kDepth];
    int32_t ranks[kDepth];
    int32_t count = 0;
    int32_t awaited = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (!left) break;
      ranks[i] = __ffs(left) - 1;
      left &= left - 1;
      from[i] = ll_sum_at(b, plan.rank,
                          ll_sum_index(b, ranks[i], __shfl_sync(kAllLanes, slot, ranks[i])));
      ++count;
    }
    uint32_t missing = chunk.mask(count);
    if constexpr (kOwn)
      if (makes_own)
        sum_own_chunk<N, T>(b, own.pair, chunk, sum, [&] { chunk.poll(from, lines, missing); });
    bool here = b.wait.until(
        [&] {
          bool all = chunk.poll(from, lines, missing);
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
        add_weighted<Wire>(sum[n], lines[i][n].words,
                           chunk.kScaled ? __uint_as_float(lines[i][n].scale) : 1.0f);
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (!chunk.inside(n)) continue;
    T out[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = from_float<T>(sum[n][i]);
    store_vectors(out, static_cast<T*>(b.args.y_TD) + int64_t{t} * b.args.D + chunk.at(n) * kCount);
  }
  __syncwarp();
#pragma unroll 1
  for (; returning; returning &= returning - 1) {
    int32_t rank = __ffs(returning) - 1;
    chunk.rearm(ll_sum_at(b, plan.rank, ll_sum_index(b, rank, __shfl_sync(kAllLanes, slot, rank))));
  }
  return true;
}

// The blocks that receive write all chunks of y.
template <int N, bool kOwn, WireFormat kFormat, typename T, bool kValues>
__device__ __forceinline__ bool sum_chunks(const CombineBlock& b, uint32_t sending_ranks,
                                           int32_t* head) {
  int32_t chunks = num_chunks(wire_bytes<kFormat, T>(b), N);
  return WorkQueue(b.args.T * chunks, b.kernel.send_blocks)
      .for_each(head, [&](int32_t item, int32_t) {
        bool ok = sum_chunk<N, kOwn, kFormat, T>(b, item / chunks, item % chunks, sending_ranks);
        if constexpr (kValues)
          ok = ok && (item % chunks || recv_values(b, item / chunks, sending_ranks));
        return ok;
      });
}

}  // namespace epmoe::cuda
