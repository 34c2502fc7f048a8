// Rows of few tokens as packets: 16 bytes, written and read in one access, of which the last four are the round's
// epoch. Who reads the epoch has the rest, so that no fence and no flag lies between sender and receiver (as in NCCL's
// LL protocols). 11 packets carry 128 bytes of a row and one word more, the scale of an fp8 block.
#pragma once
#include "fp8.cuh"
#include "wait.cuh"

namespace epmoe::cuda {

constexpr int kPacketsPerBlock = 11, kWordsPerBlock = 32;
constexpr int kPartBlocks = 2, kPartPackets = kPartBlocks * kPacketsPerBlock;  // of a warp: at most one packet a lane

struct alignas(16) Packet {
  uint32_t word[3];
  uint32_t epoch;
};

// One access each: with type b128 neither is torn (PTX ISA, memory consistency model).
__device__ __forceinline__ void store_packet(Packet* to, const uint32_t (&word)[3], uint32_t epoch) {
  asm volatile(
      "{\n\t.reg .b128 packet;\n\t.reg .b64 low, high;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
      "mov.b128 packet, {low, high};\n\tst.relaxed.sys.global.b128 [%0], packet;\n\t}" ::"l"(to),
      "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(epoch)
      : "memory");
}
__device__ __forceinline__ Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\t.reg .b64 low, high;\n\tld.relaxed.sys.global.b128 packet, [%4];\n\t"
      "mov.b128 {low, high}, packet;\n\tmov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
      : "=r"(packet.word[0]), "=r"(packet.word[1]), "=r"(packet.word[2]), "=r"(packet.epoch)
      : "l"(from)
      : "memory");
  return packet;
}

// What a lane carries of a part of a row: words [first, first + 3) of block `block`, the 33rd being the scale.
struct PacketPlace {
  int32_t packet, block, first;

  __device__ explicit PacketPlace(int32_t part) {
    int32_t lane = threadIdx.x % 32;
    packet = part * kPartPackets + lane;
    block = part * kPartBlocks + lane / kPacketsPerBlock;
    first = 3 * (lane % kPacketsPerBlock);
  }
  // Whether the lane has a packet of a row of so many words.
  __device__ bool holds(int32_t row_words) const {
    return threadIdx.x % 32 < kPartPackets && block * kWordsPerBlock < row_words;
  }
  __device__ int32_t word(int i) const { return block * kWordsPerBlock + first + i; }
  // Whether the i-th of the lane's words belongs to the row itself.
  __device__ bool has_word(int i, int32_t row_words) const {
    return threadIdx.x % 32 < kPartPackets && first + i < kWordsPerBlock && word(i) < row_words;
  }
  __device__ bool has_scale() const { return first + 2 == kWordsPerBlock; }
};

constexpr EPMOE_HD int32_t parts_of(int32_t row_words) {
  constexpr int32_t kPartWords = kPartBlocks * kWordsPerBlock;
  return (row_words + kPartWords - 1) / kPartWords;
}

// Quantises a part, of which each lane has four neighbouring elements of each block, and hands every lane its packet.
__device__ __forceinline__ void pack_fp8(const float (&values)[kPartBlocks][4], const PacketPlace& place,
                                         uint32_t (&word)[3]) {
  uint32_t mine[kPartBlocks];
  float scale[kPartBlocks];
#pragma unroll
  for (int b = 0; b < kPartBlocks; ++b) {
    scale[b] = block_scale<4, 32>(values[b]);
    auto packed = to_fp8(values[b], scale[b]);
    memcpy(&mine[b], &packed, sizeof mine[b]);
  }
  bool second = threadIdx.x % 32 >= kPacketsPerBlock;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    uint32_t a = __shfl_sync(kAllLanes, mine[0], place.first + i), b = __shfl_sync(kAllLanes, mine[1], place.first + i);
    word[i] = second ? b : a;
  }
  if (place.has_scale()) word[2] = __float_as_uint(second ? scale[1] : scale[0]);
}

}  // namespace epmoe::cuda
