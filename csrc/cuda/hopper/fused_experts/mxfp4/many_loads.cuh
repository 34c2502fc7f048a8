// How scales of rows are loaded where weights are MXFP4 and an expert has many rows, and how the
// largest scales of a tile are found.
#pragma once
#include "cuda/device/mma.cuh"
#include "cuda/hopper/fused_experts/mxfp4/loads.cuh"

namespace epmoe::cuda::fused {

// --- Scales of rows ---

__device__ __forceinline__ void load_scales_of_passes(const FewRowsArgs& args,
                                                      Shared<ManyMxfp4>& shared,
                                                      Stages<ManyMxfp4> ring) {
  Tiles<ManyMxfp4> tiles(shared, shared.readable);
  while (true) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const bool spoilt = tile.down && shared.late;
    const int32_t steps = tile.steps;
    int32_t left = passes_of<ManyMxfp4>(args, tile);
    const LaneScales<ManyMxfp4> of_tile(args, tile);
    tiles.done_as_warp();
    for (; left; --left) {
      LaneScales<ManyMxfp4> scales = of_tile;
#pragma unroll 1
      for (const int32_t end = ring.turn + steps; ring.turn < end; ++ring.turn) {
        ring.wait_empty();
        scales.fill(shared, ring, spoilt);
      }
    }
  }
}

// --- The largest scales of weight rows ---

// The scale of 1.
constexpr uint32_t kOne = 127;
// Below it, the largest scale of a warp's weight rows multiplies the scales of tokens. Sums without
// it would be Inf for rows of 2^112 and more, and no factor brings these back.
constexpr uint32_t kSmallScale = 104;
// Weight rows of a warp that multiplies, which follow one another.
constexpr int kRowsOfWarp = 16;

// The largest bytes of words, as the upper bytes of two halves.
__device__ __forceinline__ uint32_t with_largest(uint32_t largest, uint32_t four) {
  return __vmaxu2(__vmaxu2(largest, four), four << 8);
}

// Which bytes of a word count, without so many in front or behind.
__device__ __forceinline__ uint32_t counted(int32_t in_front, int32_t behind) {
  const uint32_t not_in_front = __funnelshift_lc(0, ~0u, min(max(in_front, 0), 4) * 8);
  return not_in_front & __funnelshift_rc(~0u, 0, min(max(behind, 0), 4) * 8);
}

__device__ __forceinline__ void prefetch_to_l2(const uint8_t* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// The largest of `count` bytes.
__device__ __forceinline__ uint8_t largest_of(const uint8_t* bytes, int32_t count) {
  const auto before = static_cast<int32_t>(reinterpret_cast<uint64_t>(bytes) % kPieceBytes);
  const auto* pieces = reinterpret_cast<const uint4*>(bytes - before);
  const int32_t end = before + count;
  uint32_t largest = 0;
#pragma unroll 4
  for (int32_t at = 0; at < end; at += kPieceBytes) {
    const uint4 piece = __ldg(pieces + at / kPieceBytes);
    const bool is_part = at < before || at + kPieceBytes > end;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t four = component(piece, word);
      const int32_t in_word = at + 4 * word;
      if (is_part) four &= counted(before - in_word, in_word + 4 - end);
      largest = with_largest(largest, four);
    }
  }
  return static_cast<uint8_t>(max(largest >> 24, largest >> 8 & 255));
}

// The warps that write find those of a tile, a thread those of two rows. Rows behind the last count
// as 1. Returns whether a warp that multiplies has only small ones, of those that this warp finds.
__device__ __forceinline__ bool find_largest(const FewRowsArgs& args, const Tile& tile,
                                             uint8_t* largest) {
  static_assert(kWeightRows == 2 * kWriters);
  auto* scales = static_cast<const uint8_t*>(tile.down ? args.down_scales : args.gate_up_scales);
  const int32_t thread = threadIdx.x % kWriters;
  const int32_t rows = static_cast<int32_t>(tile.down ? args.D : args.F) - tile.column;
  const int32_t bytes = ScaleRow::bytes(args, tile);
  const uint8_t* from[2];
  bool inside[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = half * kWriters + thread;
    inside[half] = (tile.down ? row : thread) < rows;
    from[half] = scales + ScaleRow(args, tile, row).at;
    if (!inside[half]) continue;
#pragma unroll 1
    for (int32_t at = 0; at < bytes; at += kLineBytes) prefetch_to_l2(from[half] + at);
    prefetch_to_l2(from[half] + bytes - 1);
  }
  bool small = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t found = inside[half] ? largest_of(from[half], bytes) : kOne;
    largest[half * kWriters + thread] = static_cast<uint8_t>(found);
#pragma unroll
    for (int to = 1; to < kRowsOfWarp; to *= 2)
      found = max(found, __shfl_xor_sync(kAllLanes, found, to));
    small |= found < kSmallScale;
  }
  return __any_sync(kAllLanes, small);
}

}  // namespace epmoe::cuda::fused
