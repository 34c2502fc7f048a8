// The role that writes: products of a tile, in bf16 in shared memory, become h, or outputs, while
// the next tile is multiplied.
#pragma once
#include "cuda/device/fp8.cuh"
#include "cuda/hopper/fused_experts/claims.cuh"
#include "cuda/local/gates.cuh"

namespace epmoe::cuda::fused {

// The barrier of all warps that write.
constexpr int kBarrierOfWriters = 1;

// A lane has eight columns of a token.
constexpr int kColumnsOfLane = 8;
using Columns8 = Vector<__nv_bfloat16, kColumnsOfLane>;
// Such columns in a box.
constexpr int kLanesOfBox = kLineBytes / static_cast<int>(sizeof(Columns8));

// The row behind those of a tile whose products lie in shared memory, of which `from` is the first.
// It is read anew where it is needed, since writing threads have few registers.
template <typename T>
__device__ __forceinline__ int32_t end_of(const Tile& tile, int32_t from) {
  if constexpr (T::kLeavingTokens == T::kTokens) return tile.count;
  return min(from + T::kLeavingTokens, tile.count);
}

// Training keeps gates and ups. Where weights have them by turns, so have rows.
__device__ __forceinline__ void keep(const FewRowsArgs& args, int64_t row, int64_t column,
                                     const Columns8& gates, const Columns8& ups) {
  auto* to = static_cast<__nv_bfloat16*>(args.gate_up_N2F) + row * 2 * args.F;
  if (!args.interleaved) {
    *reinterpret_cast<Columns8*>(to + column) = gates;
    *reinterpret_cast<Columns8*>(to + args.F + column) = ups;
    return;
  }
  Columns8 pairs[2];
#pragma unroll
  for (int i = 0; i < kColumnsOfLane; ++i) {
    pairs[2 * i / kColumnsOfLane].at[2 * i % kColumnsOfLane] = gates.at[i];
    pairs[2 * i / kColumnsOfLane].at[2 * i % kColumnsOfLane + 1] = ups.at[i];
  }
  *reinterpret_cast<Columns8*>(to + 2 * column) = pairs[0];
  *reinterpret_cast<Columns8*>(to + 2 * column + kColumnsOfLane) = pairs[1];
}

// Eight columns of h in the order of codes.
__device__ __forceinline__ void store_ordered(uint8_t* row, int64_t column,
                                              const Fp8Registers<kColumnsOfLane>& eight) {
  uint32_t fours[2];
  memcpy(fours, &eight, sizeof fours);
  auto* out = reinterpret_cast<uint32_t*>(row + column / kGroup * kGroup + column % kGroup / 2);
  out[0] = __byte_perm(fours[0], fours[1], kEvens);
  out[kGroup / 2 / sizeof(uint32_t)] = __byte_perm(fours[0], fours[1], kOdds);
}

// Gates and ups become h, and in fp8 half a warp finds the scale of a token's 128 columns. The bias
// is added to rounded products, as where an expert has many rows.
template <typename T>
__device__ __forceinline__ void write_h(const FewRowsArgs& args, const Tile& tile,
                                        const Shared<T>& shared, int32_t from_row) {
  constexpr int kLanes = kHColumns / kColumnsOfLane;
  constexpr int kTokensOfWarp = 32 / kLanes;
  const int32_t lane = threadIdx.x % kLanes;
  const int64_t column = tile.column + kColumnsOfLane * lane;
  const char* gates = shared.leaving[lane / kLanesOfBox * 2];
  const char* ups = gates + kLeavingBytes<T>;
  // The last tile of h may be wider than what is left of it.
  const bool inside = kHasWholeBlocks<T> || column < args.F;
  if (!T::kScaled && !inside) return;
  auto* out = static_cast<typename T::Element*>(args.h_NF) + tile.row * args.F + column;
  [[maybe_unused]] float* scales =
      args.h_scales_BN + column / kScaleBlock * args.h_scales_stride + tile.row;
  using Pairs = GatesAndUps<__nv_bfloat16, kColumnsOfLane, false>;
  Pairs bias(Columns8{}, Columns8{});
  if (args.gate_up_bias && inside)
    bias = Pairs(static_cast<const __nv_bfloat16*>(args.gate_up_bias) + tile.expert * 2 * args.F,
                 args.interleaved, args.F, column, kColumnsOfLane);
  // The lanes of a warp stay together, since they share shuffles.
  const int32_t warp = threadIdx.x % kWriters / 32;
#pragma unroll 1
  for (int32_t first = from_row + warp * kTokensOfWarp; first < end_of<T>(tile, from_row);
       first += kWriters / 32 * kTokensOfWarp) {
    const int32_t token = first + threadIdx.x % 32 / kLanes;
    const int32_t at = in_box(token - from_row, lane % kLanesOfBox);
    float gate[kColumnsOfLane] = {};
    float up[kColumnsOfLane] = {};
    float h[kColumnsOfLane];
    const auto& gates8 = *reinterpret_cast<const Columns8*>(gates + at);
    const auto& ups8 = *reinterpret_cast<const Columns8*>(ups + at);
    Pairs(gates8, ups8).add_to(gate, up, /*interleaved=*/false);
    bias.add_to(gate, up, args.interleaved);
#pragma unroll
    for (int i = 0; i < kColumnsOfLane; ++i) h[i] = gated_fast(gate[i], up[i], args.gating);
    if constexpr (T::kScaled) {
      const float scale = block_scale<kColumnsOfLane, kLanes>(h);
      if (token >= end_of<T>(tile, from_row) || !inside) continue;
      const auto h8 = to_fp8(h, scale);
      if constexpr (T::kOrdered)
        store_ordered(static_cast<uint8_t*>(args.h_NF) + (tile.row + token) * args.F, column, h8);
      else
        *reinterpret_cast<Fp8Registers<kColumnsOfLane>*>(out + token * args.F) = h8;
      if (lane == 0) scales[token] = scale;
    } else {
      if (token >= end_of<T>(tile, from_row)) continue;
      *reinterpret_cast<Columns8*>(out + token * args.F) = rounded<__nv_bfloat16>(h);
      if (args.gate_up_N2F) keep(args, tile.row + token, column, gates8, ups8);
    }
  }
}

// The formats of write_plain_h(), whose h lies as it is computed.
template <typename T>
constexpr bool kHasPlain = !T::kOrdered;

// Whether h is silu(gate) * up of the products as they are. In fp8 a tile of it must be whole.
template <typename T>
__device__ __forceinline__ bool is_plain(const FewRowsArgs& args) {
  const Gating& gating = args.gating;
  if constexpr (T::kScaled && !kHasWholeBlocks<T>)
    if (args.F % kHColumns) return false;
  return !args.gate_up_bias && gating.limit == INFINITY && gating.alpha == 1.0f &&
         gating.up_offset == 0.0f;
}

// That h, with the bits of gated_fast().
__device__ __forceinline__ float silu_times(float gate, float up) {
  float power;
  float sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504088896341f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return gate * sigmoid * up;
}

// write_h() where is_plain(), with the same bits, in half as many instructions. They count: warps
// that multiply wait for those that these warps issue. A lane has eight columns of either half of
// h, so that in fp8 fewer lanes find the scale of a token.
template <typename T>
__device__ __forceinline__ void write_plain_h(const FewRowsArgs& args, const Tile& tile,
                                              const Shared<T>& shared, int32_t from_row) {
  constexpr int kHalfColumns = kLanesOfBox * kColumnsOfLane;
  constexpr int kHalves = kHColumns / kHalfColumns;
  constexpr int kTokensOfWarp = 32 / kLanesOfBox;
  using Pairs = GatesAndUps<__nv_bfloat16, kColumnsOfLane, false>;
  const int32_t lane = threadIdx.x % kLanesOfBox;
  const int64_t column = tile.column + kColumnsOfLane * lane;
  auto* out = static_cast<typename T::Element*>(args.h_NF) + tile.row * args.F + column;
  [[maybe_unused]] float* scales =
      args.h_scales_BN + column / kScaleBlock * args.h_scales_stride + tile.row;
  // The lanes of a warp stay together, since they share shuffles.
  const int32_t warp = threadIdx.x % kWriters / 32;
#pragma unroll 1
  for (int32_t first = from_row + warp * kTokensOfWarp; first < end_of<T>(tile, from_row);
       first += kWriters / 32 * kTokensOfWarp) {
    const int32_t token = first + threadIdx.x % 32 / kLanesOfBox;
    const bool inside = token < end_of<T>(tile, from_row);
    [[maybe_unused]] float all[kHalves * kColumnsOfLane];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int32_t at = in_box(token - from_row, lane);
      const auto& gates8 = *reinterpret_cast<const Columns8*>(shared.leaving[2 * half] + at);
      const auto& ups8 = *reinterpret_cast<const Columns8*>(shared.leaving[2 * half + 1] + at);
      float gate[kColumnsOfLane] = {};
      float up[kColumnsOfLane] = {};
      float h[kColumnsOfLane];
      Pairs(gates8, ups8).add_to(gate, up, /*interleaved=*/false);
#pragma unroll
      for (int i = 0; i < kColumnsOfLane; ++i) h[i] = silu_times(gate[i], up[i]);
      if constexpr (T::kScaled) {
#pragma unroll
        for (int i = 0; i < kColumnsOfLane; ++i) all[half * kColumnsOfLane + i] = h[i];
      } else {
        // The last tile of h may be wider than what is left of it.
        const int64_t further = half * kHalfColumns;
        if (!inside || column + further >= args.F) continue;
        *reinterpret_cast<Columns8*>(out + token * args.F + further) = rounded<__nv_bfloat16>(h);
        if (args.gate_up_N2F) keep(args, tile.row + token, column + further, gates8, ups8);
      }
    }
    if constexpr (T::kScaled) {
      const float scale = block_scale<kHalves * kColumnsOfLane, kLanesOfBox>(all);
      if (!inside) continue;
      const uint4 packed = to_fp8(all, scale);
      auto* to = reinterpret_cast<uint2*>(out + token * args.F);
      to[0] = make_uint2(packed.x, packed.y);
      to[kHalfColumns / sizeof(uint2)] = make_uint2(packed.z, packed.w);
      if (lane == 0) scales[token] = scale;
    }
  }
}

__device__ __forceinline__ void spoil(Columns8& products) {
#pragma unroll
  for (auto& product : products.at) product = from_float<__nv_bfloat16>(NAN);
}

// Outputs: a warp has the columns of a token.
template <typename T>
__device__ __forceinline__ void write_outputs(const FewRowsArgs& args, const Tile& tile,
                                              const Shared<T>& shared, int32_t from_row) {
  static_assert(kOutputs == 32 * kColumnsOfLane);
  const int32_t lane = threadIdx.x % 32;
  const int64_t column = tile.column + kColumnsOfLane * lane;
  if (column >= args.D) return;
  const char* from = shared.leaving[lane / kLanesOfBox];
  auto* out = static_cast<__nv_bfloat16*>(args.out_ND) + tile.row * args.D + column;
  Columns8 bias = {};
  if (args.down_bias)
    bias = *reinterpret_cast<const Columns8*>(static_cast<const __nv_bfloat16*>(args.down_bias) +
                                              tile.expert * args.D + column);
#pragma unroll 4
  for (int32_t token = from_row + threadIdx.x % kWriters / 32; token < end_of<T>(tile, from_row);
       token += kWriters / 32) {
    auto products =
        *reinterpret_cast<const Columns8*>(from + in_box(token - from_row, lane % kLanesOfBox));
#pragma unroll
    for (int i = 0; args.down_bias && i < kColumnsOfLane; ++i)
      products.at[i] = from_float<__nv_bfloat16>(to_float(products.at[i]) + to_float(bias.at[i]));
    // Where h has not come in time there are no scales to spoil.
    if constexpr (!T::kScaled)
      if (shared.late) spoil(products);
    *reinterpret_cast<Columns8*>(out + token * args.D) = products;
  }
}

// All of these warps have written h of a tile: it is counted.
__device__ __forceinline__ void count_h(const FewRowsArgs& args, const Tile& tile) {
  // TMA of other blocks reads h.
  asm volatile("fence.proxy.async;" ::: "memory");
  barrier(kBarrierOfWriters, kWriters);
#if defined(EPMOE_MUTATE_LOST_H)
  if (tile.part == 1 && tile.column == 0) return;
#endif
  if (threadIdx.x % kWriters == 0)
    asm volatile(
        "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(&args.counters[kWritten + tile.part])
        : "memory");
}

// Some rows of a tile. `departed` counts how often products have left.
template <typename T>
__device__ __forceinline__ void write_rows(const FewRowsArgs& args, const Tile& tile,
                                           Shared<T>& shared, int32_t departed, int32_t from_row) {
  wait_mbarrier(&shared.summed, departed & 1);
  if (tile.down)
    write_outputs(args, tile, shared, from_row);
  else if (kHasPlain<T> && is_plain<T>(args))
    write_plain_h(args, tile, shared, from_row);
  else
    write_h(args, tile, shared, from_row);
  // The next products may take the place of these.
  __syncwarp();
  arrive_as_warp(&shared.taken);
}

template <typename T>
__device__ __forceinline__ void write_tiles(const FewRowsArgs& args, Shared<T>& shared) {
  Tiles<T> tiles(shared, shared.claimed);
  for (int32_t departed = 0;; ++departed) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    write_rows(args, tile, shared, departed, 0);
    if constexpr (T::kLeavingTokens < T::kTokens)
      for (int32_t from_row = T::kLeavingTokens; from_row < tile.width;
           from_row += T::kLeavingTokens)
        write_rows(args, tile, shared, ++departed, from_row);
    if (!tile.down) count_h(args, tile);
    tiles.done_as_warp();
  }
}

}  // namespace epmoe::cuda::fused
