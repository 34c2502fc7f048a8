// combine for sources of few tokens, by packets (packets.cuh): no fence and no flag on the way back either.
#pragma once
#include "combine.cuh"
#include "packets.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ Packet* combine_packets_of(const CombineBlock& b, int64_t rank, int64_t source,
                                                      int64_t slot) {
  const ExchangePlan& plan = b.plan;
  return in_window<Packet>(b.ex, rank, plan.combine_packet_rows) +
         (source * plan.few_tokens + slot) * plan.combine_packets;
}

// Words of a row on the wire.
template <typename T, bool kFp8>
__device__ __forceinline__ int32_t wire_words(const CombineBlock& b) {
  return static_cast<int32_t>(b.args.D * (kFp8 ? 1 : sizeof(T)) / 4);
}

// By a warp: one part of a slot's weighted sum into the window of its source.
template <typename T, bool kFp8>
__device__ __forceinline__ void send_part(const CombineBlock& b, int32_t source, int32_t s, int32_t part, Pair pair) {
  uint32_t kept = pair.kept(), words[3] = {};
  int32_t row_words = wire_words<T, kFp8>(b);
  PacketPlace place(part);
  if constexpr (kFp8) {
    int32_t v[kPartBlocks];
    bool inside[kPartBlocks];
    float values[kPartBlocks][4];
#pragma unroll
    for (int i = 0; i < kPartBlocks; ++i) {
      v[i] = (part * kPartBlocks + i) * static_cast<int32_t>(kScaleBlock / 4) + threadIdx.x % 32;
      inside[i] = v[i] * 4 < b.args.D;
    }
    sum_pairs<T, 4>(b, pair, kept, v, inside, values);
    pack_fp8(values, place, words);
  } else {
    int32_t word[3];
    bool inside[3];
    float sum[3][4 / sizeof(T)];
#pragma unroll
    for (int i = 0; i < 3; ++i) word[i] = place.word(i), inside[i] = place.has_word(i, row_words);
    sum_pairs<T, 4>(b, pair, kept, word, inside, sum);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      auto out = rounded<T>(sum[i]);
      if (inside[i]) memcpy(&words[i], &out, sizeof words[i]);
    }
  }
  if (place.holds(row_words))
    store_packet(combine_packets_of(b, source, b.plan.rank, s) + place.packet, words, b.wait.epoch);
}

// By the blocks that send: a warp takes a part of a slot, first this one.
__device__ __forceinline__ int32_t first_part(const CombineBlock& b) {
  return threadIdx.x / 32 * b.kernel.senders + blockIdx.x;
}

// `ahead` is the pair of the first one's slot.
template <typename T, bool kFp8>
__device__ __forceinline__ void send_parts(const CombineBlock& b, Pair ahead) {
  int32_t parts = parts_of(wire_words<T, kFp8>(b)), R = static_cast<int32_t>(b.plan.R), most = 0;
#pragma unroll 1
  for (int32_t r = 0; r < R; ++r)
    if (b.now.few >> r & 1u) most = max(most, b.count_R[r]);
  int32_t first = first_part(b), step = b.kernel.senders * kWarps;
#pragma unroll 1
  for (int32_t unit = first; unit < most * R * parts; unit += step) {
    int32_t part = unit % parts, slot = unit / parts, source = source_of(b, slot), s = slot / R;
    if (unit != first) ahead = read_pair(b, source, s);
    if (b.now.few >> source & 1u && s < b.count_R[source]) send_part<T, kFp8>(b, source, s, part, checked(b, ahead));
  }
}

// By a warp: one part of a token's row, from all ranks that owe it, in rank order.
template <typename T, bool kFp8>
__device__ __forceinline__ bool sum_part(const CombineBlock& b, int32_t t, int32_t part, uint32_t senders) {
  constexpr int kDepth = 4, kCount = kFp8 ? 4 : 4 / sizeof(T);  // packets in flight; elements of a word
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32, row_words = wire_words<T, kFp8>(b);
  int32_t slot = owed_slot(b, t, senders);
  PacketPlace place(part);
  bool holds = place.holds(row_words);
  int32_t scale_lane = lane / kPacketsPerBlock * kPacketsPerBlock + kPacketsPerBlock - 1;
  float sum[3][kCount] = {};
  for (uint32_t left = __ballot_sync(kAllLanes, slot >= 0); left;) {
    Packet packets[kDepth];
    const Packet* from[kDepth];
    int32_t count = 0, rank = 0;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (!left) break;
      rank = __ffs(left) - 1;
      left &= left - 1;
      from[i] = combine_packets_of(b, plan.rank, rank, __shfl_sync(kAllLanes, slot, rank)) + place.packet;
      ++count;
    }
    bool here = !holds || b.wait.until(
                              [&] {
                                bool all = true;
#pragma unroll
                                for (int i = 0; i < kDepth; ++i)
                                  if (i < count) packets[i] = load_packet(from[i]);
#pragma unroll
                                for (int i = 0; i < kDepth; ++i)
                                  if (i < count) all = all && b.wait.reached(packets[i].epoch);
                                return all;
                              },
                              rank);
    if (!__all_sync(kAllLanes, here)) return false;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (i >= count) break;
      float scale = kFp8 ? __uint_as_float(__shfl_sync(kAllLanes, packets[i].word[2], scale_lane)) : 1.0f;
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if constexpr (kFp8) {
#pragma unroll
          for (int e = 0; e < kCount; ++e)
            sum[j][e] += scale * from_fp8(from_words<Vector<uint8_t, 4>>(packets[i].word[j]).at[e]);
        } else {
          add_words<T>(sum[j], packets[i].word[j], 1.0f);
        }
      }
    }
  }
  auto* y = reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(b.args.y_TD) + int64_t{t} * b.args.D);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (place.has_word(i, row_words)) y[place.word(i)] = rounded<T>(sum[i]);
  return true;
}

// By all blocks, those that only receive first.
template <typename T, bool kFp8>
__device__ __forceinline__ bool sum_parts(const CombineBlock& b, uint32_t senders) {
  int32_t parts = parts_of(wire_words<T, kFp8>(b)), blocks = gridDim.x;
  int32_t block = (blockIdx.x - b.kernel.senders + blocks) % blocks;
  for (int32_t unit = block * kWarps + threadIdx.x / 32; unit < b.args.T * parts; unit += blocks * kWarps)
    if (!sum_part<T, kFp8>(b, unit / parts, unit % parts, senders)) return false;
  return true;
}

}  // namespace epmoe::cuda
