// dispatch of few tokens, by packets: nothing waits for more than its own 16 bytes and the counts.
#pragma once
#include "dispatch_send.cuh"
#include "packets.cuh"
#include "weighted.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ Packet* packets_of(const DispatchBlock& b, int64_t rank, int64_t source, int64_t slot) {
  const ExchangePlan& plan = b.plan;
  return in_window<Packet>(b.ex, rank, plan.recv_packets) + (source * plan.few_tokens + slot) * plan.dispatch_packets;
}

// A lane's slot of token t on the lane's rank, -1 where it does not go.
__device__ __forceinline__ int32_t slot_of(const DispatchBlock& b, int32_t t) {
  int32_t lane = threadIdx.x % 32, slot = 0;
#pragma unroll 1
  for (int32_t before = 0; before < t; ++before) slot += b.shared.ranks[before] >> lane & 1u;
  return b.shared.ranks[t] >> lane & 1u ? slot : -1;
}

// By a warp: a token's pairs, a packet each, and its slots for combine.
__device__ __forceinline__ void send_pairs(const DispatchBlock& b, int32_t t, int32_t slot) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32, id = b.shared.ids[t][lane], ordinal = 0;
#pragma unroll 1
  for (int32_t before = 0; before < t; ++before)
#pragma unroll 4
    for (int32_t k = 0; k < b.args.K; ++k) ordinal += b.shared.ids[before][k] == id;
  ordinal += __popc(__match_any_sync(kAllLanes, id) & ((1u << lane) - 1));
  if (lane < plan.R) in_scratch<int32_t>(b.ex, plan.slots)[t * plan.R + lane] = slot;
#pragma unroll 1
  for (uint32_t left = b.shared.ranks[t]; left; left &= left - 1) {
    int32_t rank = __ffs(left) - 1, there = __shfl_sync(kAllLanes, slot, rank);
    uint32_t words[3] = {static_cast<uint32_t>(id < 0 ? b.shared.sentinel[rank] : id),
                         static_cast<uint32_t>(id < 0 ? -1 : ordinal), __float_as_uint(b.shared.weights[t][lane])};
    if (lane < b.args.K) store_packet(packets_of(b, rank, plan.rank, there) + lane, words, b.wait.epoch);
  }
}

// By a warp: what its lanes' packets of a part of a row hold. Source: of what fp8 is made, void where nothing is.
template <typename Source>
__device__ __forceinline__ void load_part(const DispatchBlock& b, int64_t t, int32_t part, const PacketPlace& place,
                                          uint32_t (&words)[3]) {
  const char* x = static_cast<const char*>(b.args.x_TD) + t * b.args.x_stride_bytes;
  words[0] = words[1] = words[2] = 0;
  if constexpr (std::is_void_v<Source>) {
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (place.has_word(i, b.kernel.row_words())) words[i] = reinterpret_cast<const uint32_t*>(x)[place.word(i)];
  } else {
    float values[kPartBlocks][4] = {};
#pragma unroll
    for (int i = 0; i < kPartBlocks; ++i) {
      int64_t at = (int64_t{part} * kPartBlocks + i) * kScaleBlock + threadIdx.x % 32 * 4;
      if (at >= b.args.D) continue;
      auto four = *reinterpret_cast<const Vector<Source, 4>*>(reinterpret_cast<const Source*>(x) + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i][j] = to_float(four.at[j]);
    }
    pack_fp8(values, place, words);
  }
}

// By the blocks that send: a warp takes a part of a token's row, or its pairs.
template <typename Source>
__device__ __forceinline__ void send_packets(DispatchBlock& b, int32_t tokens) {
  const ExchangePlan& plan = b.plan;
  int32_t warp = threadIdx.x / 32, parts = parts_of(b.kernel.row_words());
  int32_t unit = warp * b.kernel.senders + blockIdx.x, units = tokens * (parts + 1);
  uint32_t words[3];
  if (unit < units) {  // on its way while the block reads the tokens' pairs
    int32_t part = unit % (parts + 1);
    load_part<Source>(b, unit / (parts + 1), part, PacketPlace(part), words);
  }
  for (int32_t t = warp; t < tokens; t += kWarps) read_token(b, t, t);
  __syncthreads();
  if (!b.may_open()) return;
  for (int32_t next = unit; next < units; next += b.kernel.senders * kWarps) {
    int32_t t = next / (parts + 1), part = next % (parts + 1), slot = slot_of(b, t);
    if (part == parts) {
      send_pairs(b, t, slot);
      continue;
    }
    PacketPlace place(part);
    if (next != unit) load_part<Source>(b, t, part, place, words);
#pragma unroll 1
    for (uint32_t left = b.shared.ranks[t]; left; left &= left - 1) {
      int32_t rank = __ffs(left) - 1, there = __shfl_sync(kAllLanes, slot, rank);
      if (place.holds(b.kernel.row_words()))
        store_packet(packets_of(b, rank, plan.rank, there) + plan.K + place.packet, words, b.wait.epoch);
    }
  }
  for (int32_t t = warp; blockIdx.x == 0 && t < tokens; t += kWarps) count_health(b, t);
}

// By a warp: one part of a received row to each of its expert-major places, as soon as it is here.
template <bool kFp8>
__device__ __forceinline__ bool move_part(const DispatchBlock& b, int32_t r, int32_t s, int32_t part) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32, row_words = b.kernel.row_words();
  PacketPlace place(part);
  const Packet* from = packets_of(b, plan.rank, r, s);
  bool holds = place.holds(row_words), has_pair = lane < b.args.K;
  Packet data, pair;
  bool here = b.wait.until(
      [&] {
        if (holds) data = load_packet(from + plan.K + place.packet);
        if (has_pair) pair = load_packet(from + lane);
        return (!holds || b.wait.reached(data.epoch)) && (!has_pair || b.wait.reached(pair.epoch));
      },
      r);
  if (!__all_sync(kAllLanes, here)) return false;
  float weight = has_pair ? __uint_as_float(pair.word[2]) : 0.0f;
  int32_t row = has_pair ? b.row_of(static_cast<int32_t>(pair.word[0]), static_cast<int32_t>(pair.word[1]), r) : -1;
  if (part == 0 && has_pair) {
    int64_t at = (r * plan.M + s) * plan.K + lane;
    in_scratch<int32_t>(b.ex, plan.row_of_pair)[at] = row;
    in_scratch<float>(b.ex, plan.pair_weights)[at] = b.args.weight_rows ? 1.0f : weight;
  }
#pragma unroll 1
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left; left &= left - 1) {
    int32_t k = __ffs(left) - 1;
    int64_t to = __shfl_sync(kAllLanes, row, k);
    float factor = b.args.weight_rows ? __shfl_sync(kAllLanes, weight, k) : 1.0f;
    if (!holds) continue;
    auto* words = in_window<uint32_t>(b.ex, plan.rank, plan.rows) + to * row_words;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      uint32_t word = b.args.weight_rows && !kFp8 ? weighted(data.word[i], b.args.dtype, factor) : data.word[i];
      if (place.has_word(i, row_words)) words[place.word(i)] = word;
    }
    if (kFp8 && place.has_scale())
      in_window<float>(b.ex, plan.rank, plan.row_scales)[to * ceil_div(b.args.D, kScaleBlock) + place.block] =
          __uint_as_float(data.word[2]) * factor;
  }
  return true;
}

// By all blocks, those that send and count last: everything that comes as packets.
template <bool kFp8>
__device__ __forceinline__ bool move_packets(const DispatchBlock& b) {
  int32_t parts = parts_of(b.kernel.row_words()), R = static_cast<int32_t>(b.plan.R), blocks = gridDim.x;
  int32_t units = R * b.shared.most_few * parts, block = blockIdx.x - (b.kernel.senders + 1) % blocks;
  if (block < 0) block += blocks;
  for (int32_t unit = block * kWarps + threadIdx.x / 32; unit < units; unit += blocks * kWarps) {
    int32_t part = unit % parts, slot = unit / parts, r = slot % R, s = slot / R;
    bool sent = b.shared.few >> r & 1u && s < b.shared.rank_count[r];
    if (sent && !move_part<kFp8>(b, r, s, part)) return false;
  }
  return true;
}

}  // namespace epmoe::cuda
