// What a warpgroup that multiplies does with its 64 rows of a tile: sums from stages, and rows that
// leave.
#pragma once
#include "cuda/hopper/ring.cuh"
#include "cuda/hopper/tiles.cuh"

namespace epmoe::cuda {

constexpr int kMultipliers = kRows / 64;
constexpr int kABytes = kRows * kLineBytes, kStageBytes = kABytes + kColumns * kLineBytes;
constexpr int kStep = 64;  // of k, or of rows that are summed over

template <Product kProduct>
__device__ __forceinline__ int32_t steps_of(const GroupedGemmArgs& args, const Tile& tile) {
  return ceil_of(kProduct == Product::kForWeights ? tile.count : static_cast<int32_t>(args.k),
                 kStep);
}

// Multiplies the first `left` of a step, by start(k) for each 16 of them.
template <int kCount = 1, typename Start>
__device__ __forceinline__ void multiply_part(int32_t left, const Start& start) {
  if constexpr (kCount < kStep / 16)
    if (left > 16 * kCount) return multiply_part<kCount + 1>(left, start);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < kCount; ++k) start(k);
  wgmma_commit();
  wgmma_wait<0>();
}

// The sums of one warpgroup over a tile of 2 kCount columns.
template <Product kProduct, typename Stages, int kCount>
__device__ __forceinline__ void multiply_tile(const GroupedGemmArgs& args, const Tile& tile,
                                              Stages& ring, float (&d)[kCount]) {
  constexpr bool kAcrossA = kProduct != Product::kByRows,
                 kAcrossB = kProduct == Product::kForWeights;
  constexpr uint32_t kStepA = kAcrossA ? 16 * kLineBytes : 32,
                     kStepB = kAcrossB ? 16 * kLineBytes : 32;
  constexpr Factors kFactors = kAcrossB   ? Factors::kAcrossBoth
                               : kAcrossA ? Factors::kAcrossA
                                          : Factors::kAlong;
  const uint32_t own = threadIdx.x / kWarpgroup * kBoxBytes;
  auto start = [&](uint32_t stage, int32_t k) {
    wgmma<kFactors>(d, wgmma_operand(stage + own + k * kStepA, kBoxBytes),
                    wgmma_operand(stage + kABytes + k * kStepB, kBoxBytes));
  };
  const int32_t left = kProduct == Product::kForWeights ? tile.count % kStep : 0;
  const int32_t steps = steps_of<kProduct>(args, tile) - (left > 0);
  if (steps)
    ring.multiply(steps, [&](uint32_t stage) {
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) start(stage, k);
    });
  if (left) {
    ring.wait_filled();
    // The lines of the last 16 that are other rows, in all boxes.
    int32_t lines = ceil_of(left, 16) * 16 - left;
    if (lines) {
      for (int32_t i = threadIdx.x; i < lines * (kStageBytes / kBoxBytes) * 8;
           i += kMultipliers * kWarpgroup) {
        uint32_t at = ring.stage() + i / 8 % (kStageBytes / kBoxBytes) * kBoxBytes +
                      (left + i / 8 / (kStageBytes / kBoxBytes)) * kLineBytes + i % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
      fence_shared_for_tma();
      barrier(1, kMultipliers * kWarpgroup);
    }
    multiply_part(left, [&](int32_t k) { start(ring.stage(), k); });
    ++ring.turn;
    ring.release(1);
  }
}

// A warpgroup's products [64 weight rows, 2 kCount rows] leave as rows, kAtOnce at a time.
template <int kAtOnce, int kCount>
__device__ __forceinline__ void store_rows(const GroupedGemmArgs& args, const Tile& tile,
                                           const char* leaving, const float (&d)[kCount]) {
  const int32_t group = threadIdx.x / kWarpgroup, part = threadIdx.x % 8,
                column = tile.m + 64 * group + part * 8;
#pragma unroll
  for (int from = 0; from < 2 * kCount; from += kAtOnce) {
    barrier(2 + group, kWarpgroup);  // what lay there has been read
    store_turned<kAtOnce>(shared_address(leaving), d, from);
    barrier(2 + group, kWarpgroup);
    auto* out = static_cast<__nv_bfloat16*>(args.out) + (tile.row + from) * args.n + column;
    for (int32_t line = threadIdx.x % kWarpgroup / 8; line < min(tile.count - from, kAtOnce);
         line += kWarpgroup / 8)
      if (column < args.n)
        *reinterpret_cast<uint4*>(out + line * args.n) =
            *reinterpret_cast<const uint4*>(leaving + in_box(line, part));
  }
}

// A warpgroup's part of a tile by rows, times kTimes. Each width has loops of its own.
template <Product kProduct, int kAtOnce, int kTimes = 1, int kWidth = kColumnStep, typename Stages>
__device__ __forceinline__ void multiply_rows(const GroupedGemmArgs& args, const Tile& tile,
                                              Stages& ring, const char* leaving) {
  if constexpr (kWidth < kColumns)
    if (tile.width > kWidth)
      return multiply_rows<kProduct, kAtOnce, kTimes, kWidth + kColumnStep>(args, tile, ring,
                                                                            leaving);
  float sums[kWidth / 2] = {};
  multiply_tile<kProduct>(args, tile, ring, sums);
  if constexpr (kTimes != 1)
#pragma unroll
    for (float& sum : sums) sum *= kTimes;
  store_rows<kAtOnce>(args, tile, leaving, sums);
}

}  // namespace epmoe::cuda
