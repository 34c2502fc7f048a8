// The roles that load weights in MXFP4, and the one that brings rows into the order of codes.
#pragma once
#include "cuda/hopper/fused_experts/loads.cuh"

namespace epmoe::cuda::fused {

// --- Weights ---

__device__ __forceinline__ void copy_piece(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}

// Where the scales of a weight row lie in memory, from the start of all scales.
struct ScaleRow {
  int64_t at;

  // `row` is one of the tile's, which may be in part behind the last one.
  __device__ __forceinline__ ScaleRow(const FewRowsArgs& args, const Tile& tile, int32_t row) {
    const bool up = !tile.down && row >= kHColumns;
    const int64_t column = tile.column + row % (tile.down ? kOutputs : kHColumns);
    int64_t in_expert = column;
    if (!tile.down && args.interleaved)
      in_expert = 2 * column + up;
    else if (up)
      in_expert = args.F + column;
    const int64_t rows = tile.down ? args.D : 2 * args.F;
    at = (tile.expert * rows + in_expert) * bytes(args, tile);
  }
  static __device__ __forceinline__ int32_t bytes(const FewRowsArgs& args, const Tile& tile) {
    return static_cast<int32_t>(tile.down ? args.F : args.D) / kGroup;
  }
  // Bytes of a piece in front of those of a batch.
  __device__ __forceinline__ int32_t before() const {
    return static_cast<int32_t>(at % kPieceBytes);
  }
};

// Weight rows of a pass.
template <typename T>
constexpr int kPassRows = kWeightRows / T::kPasses;

// The row in its tile of a row of a pass. That of two passes has 64 gates and their ups, or 128
// outputs.
template <typename T>
__device__ __forceinline__ int32_t row_in_tile(bool down, int32_t pass, int32_t row) {
  if constexpr (T::kPasses == 1) return row;
  if (down) return pass * kPassRows<T> + row;
  return row / 64 * kHColumns + pass * 64 + row % 64;
}

// Scales of a pass as a lane copies them: those of every 32nd weight row.
template <typename T>
class LaneWindows {
 public:
  __device__ __forceinline__ LaneWindows(const FewRowsArgs& args, const Tile& tile, int32_t pass)
      : left_(ScaleRow::bytes(args, tile)) {
    auto* scales = static_cast<const uint8_t*>(tile.down ? args.down_scales : args.gate_up_scales);
    const int32_t lane = threadIdx.x % 32;
    const int32_t rows = static_cast<int32_t>(tile.down ? args.D : args.F) - tile.column;
    to_next_ = 32 * left_ * (!tile.down && args.interleaved ? 2 : 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row_in_tile<T>(tile.down, pass, half * kRowsOfHalf + lane);
      from_[half] = scales + ScaleRow(args, tile, row).at;
      const int32_t left = rows - (tile.down ? row : row % kHColumns);
      rows_[half] = min(ceil_of(max(left, 0), 32), kRowsOfHalf / 32);
    }
  }

  // Starts to copy those of a batch.
  __device__ __forceinline__ void copy_next(uint32_t windows) {
    constexpr int32_t kBytes = kBatchSteps * kGroupsOfStep;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t before = static_cast<int32_t>(reinterpret_cast<uint64_t>(from_[half]) % 16);
      const uint8_t* piece = from_[half] - before;
      const bool both = before + min(left_, kBytes) > kPieceBytes;
      uint32_t to = windows + (half * kRowsOfHalf + threadIdx.x % 32) * kWindowBytes;
#pragma unroll(T::kPasses)
      for (int32_t i = 0; i < kRowsOfHalf / 32; ++i, piece += to_next_, to += 32 * kWindowBytes) {
        if (i >= rows_[half]) continue;
        copy_piece(to, piece);
        if (both) copy_piece(to + kPieceBytes, piece + kPieceBytes);
      }
      from_[half] += kBytes;
    }
    left_ -= kBytes;
  }

 private:
  // Of a pass: gates, or their ups, or half of its outputs.
  static constexpr int32_t kRowsOfHalf = kPassRows<T> / 2;

  const uint8_t* from_[2];  // of either half
  int32_t rows_[2];         // of this lane
  int32_t left_;            // bytes of a row
  int32_t to_next_;
};

template <typename T>
__device__ __forceinline__ void load_codes(const FewRowsArgs& args, const Maps& maps,
                                           Shared<T>& shared, Stages<T> ring,
                                           ScaleStages<T> windows) {
  constexpr int kHalf = kBoxRows<T> * kWeightLineBytes<T>;
  const bool first_lane = threadIdx.x % 32 == 0;
  Tiles<T> tiles(shared, shared.claimed);
  while (true) {
    const Tile tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const CUtensorMap& first = tile.down ? maps.down : maps.gates;
    const CUtensorMap& second = tile.down ? maps.down : maps.ups;
    const int32_t passes = passes_of<T>(args, tile);
#pragma unroll 1
    for (int32_t pass = 0; pass < passes; ++pass) {
      const int32_t row = tile.column + pass * (tile.down ? kPassRows<T> : kPassRows<T> / 2);
      const int32_t second_row = tile.down ? row + kBoxRows<T> : row;
      // Half of the last outputs may lie behind the last one.
      const bool both = !tile.down || second_row < args.D;
      LaneWindows<T> scales(args, tile, pass);
#pragma unroll 1
      for (int32_t step = 0; step < tile.steps; ++step, ++ring.turn) {
        if (step % kBatchSteps == 0) {
          windows.wait_empty();
          scales.copy_next(windows.stage());
          arrive_with_copies(windows.filled());
          ++windows.turn;
        }
        ring.wait_empty();
        if (!first_lane) continue;
        const int32_t x = step * kWeightLineBytes<T>;
        expect_bytes(ring.filled(), both ? 2 * kHalf : kHalf);
        load_box(first, ring.stage(), ring.filled(), x, row, tile.expert);
        if (both) load_box(second, ring.stage() + kHalf, ring.filled(), x, second_row, tile.expert);
      }
    }
    tiles.done_as_warp();
  }
}

// --- Rows ---

__device__ __forceinline__ uint4 load_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_16(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// A warp brings rows of a tile into the order of codes.
__device__ __forceinline__ void order_rows(uint32_t rows, int32_t width) {
#pragma unroll 2
  for (int32_t i = threadIdx.x % 32; i < width * kGroupsOfStep; i += 32) {
    const int32_t line = i / kGroupsOfStep;
    const int32_t part = i % kGroupsOfStep * 2;
    const uint32_t first = rows + in_box(line, part);
    const uint32_t second = rows + in_box(line, part + 1);
    const uint4 a = load_16(first);
    const uint4 b = load_16(second);
    store_16(first, {__byte_perm(a.x, a.y, kEvens), __byte_perm(a.z, a.w, kEvens),
                     __byte_perm(b.x, b.y, kEvens), __byte_perm(b.z, b.w, kEvens)});
    store_16(second, {__byte_perm(a.x, a.y, kOdds), __byte_perm(a.z, a.w, kOdds),
                      __byte_perm(b.x, b.y, kOdds), __byte_perm(b.z, b.w, kOdds)});
  }
  fence_shared_for_tma();
}

// The warp that loads scales of rows brings the rows into order, too. h has been written so.
__device__ __forceinline__ void load_scales_and_order(const FewRowsArgs& args,
                                                      Shared<Mxfp4>& shared, Stages<Mxfp4> ring) {
  Tiles<Mxfp4> tiles(shared, shared.readable);
  while (true) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const bool spoilt = tile.down && shared.late;
    // The rows that are multiplied.
    int32_t width = max(tile.count, Mxfp4::kFewestColumns);
    if (width > Mxfp4::kFewestColumns) width = tile.width;
    if (tile.down) width = 0;
    const int32_t end = ring.turn + tile.steps;
    LaneScales<Mxfp4> scales(args, tile);
    tiles.done_as_warp();
#pragma unroll 1
    for (; ring.turn < end; ++ring.turn) {
      const int32_t stage = ring.turn % Mxfp4::kStages;
      ring.wait_empty();
      scales.fill(shared, ring, spoilt);
      wait_mbarrier(&shared.more.arrived[stage], ring.turn / Mxfp4::kStages & 1);
      if (width) order_rows(ring.stage() + kWeightBytes<Mxfp4>, width);
      __syncwarp();
      arrive_as_warp(ring.filled());
    }
  }
}

}  // namespace epmoe::cuda::fused
