// The role that writes: products of a tile, in bf16 in shared memory, become h in fp8, or outputs,
// while the next tile is multiplied.
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

// Gates and ups become h, and half a warp finds the scale of a token's 128 columns. The bias is
// added to rounded products, as where an expert has many rows.
__device__ __forceinline__ void write_h(const FewRowsArgs& args, const Tile& tile,
                                        const Shared& shared) {
  constexpr int kLanes = kHColumns / kColumnsOfLane;
  constexpr int kTokensOfWarp = 32 / kLanes;
  const int32_t lane = threadIdx.x % kLanes;
  const int64_t column = tile.column + kColumnsOfLane * lane;
  const char* gates = shared.leaving[lane / kLanesOfBox * 2];
  const char* ups = gates + kLeavingBytes;
  auto* out = static_cast<uint8_t*>(args.h_NF) + tile.row * args.F + column;
  float* scales = args.h_scales_BN + column / kScaleBlock * args.h_scales_stride + tile.row;
  using Pairs = GatesAndUps<__nv_bfloat16, kColumnsOfLane, false>;
  Pairs bias(Columns8{}, Columns8{});
  if (args.gate_up_bias)
    bias = Pairs(static_cast<const __nv_bfloat16*>(args.gate_up_bias) + tile.expert * 2 * args.F,
                 args.interleaved, args.F, column, kColumnsOfLane);
  // The lanes of a warp stay together, since they share shuffles.
  const int32_t warp = threadIdx.x % kWriters / 32;
#pragma unroll 1
  for (int32_t first = warp * kTokensOfWarp; first < tile.count;
       first += kWriters / 32 * kTokensOfWarp) {
    const int32_t token = first + threadIdx.x % 32 / kLanes;
    const int32_t at = in_box(token, lane % kLanesOfBox);
    float gate[kColumnsOfLane] = {};
    float up[kColumnsOfLane] = {};
    float h[kColumnsOfLane];
    Pairs(*reinterpret_cast<const Columns8*>(gates + at),
          *reinterpret_cast<const Columns8*>(ups + at))
        .add_to(gate, up, /*interleaved=*/false);
    bias.add_to(gate, up, args.interleaved);
#pragma unroll
    for (int i = 0; i < kColumnsOfLane; ++i) h[i] = gated_fast(gate[i], up[i], args.gating);
    const float scale = block_scale<kColumnsOfLane, kLanes>(h);
    if (token >= tile.count) continue;
    *reinterpret_cast<Fp8Registers<kColumnsOfLane>*>(out + token * args.F) = to_fp8(h, scale);
    if (lane == 0) scales[token] = scale;
  }
}

// Outputs: a warp has the columns of a token.
__device__ __forceinline__ void write_outputs(const FewRowsArgs& args, const Tile& tile,
                                              const Shared& shared) {
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
  for (int32_t token = threadIdx.x % kWriters / 32; token < tile.count; token += kWriters / 32) {
    auto products = *reinterpret_cast<const Columns8*>(from + in_box(token, lane % kLanesOfBox));
#pragma unroll
    for (int i = 0; args.down_bias && i < kColumnsOfLane; ++i)
      products.at[i] = from_float<__nv_bfloat16>(to_float(products.at[i]) + to_float(bias.at[i]));
    *reinterpret_cast<Columns8*>(out + token * args.D) = products;
  }
}

// All of these warps have written h of a tile: it is counted.
__device__ __forceinline__ void count_h(const FewRowsArgs& args, const Tile& tile) {
  // TMA of other blocks reads h.
  asm volatile("fence.proxy.async;" ::: "memory");
  barrier(kBarrierOfWriters, kWriters);
  if (threadIdx.x % kWriters == 0)
    asm volatile(
        "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(&args.counters[kWritten + tile.part])
        : "memory");
}

__device__ __forceinline__ void write_tiles(const FewRowsArgs& args, Shared& shared) {
  Tiles tiles(shared, shared.claimed);
  for (int32_t turn = 0;; ++turn) {
    const Tile& tile = tiles.next();
    if (tile.expert == kNoTile) return;
    wait_mbarrier(&shared.summed, turn & 1);
    if (tile.down)
      write_outputs(args, tile, shared);
    else
      write_h(args, tile, shared);
    // Products of the next tile may take the place of these.
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.taken);
    if (!tile.down) count_h(args, tile);
    tiles.done_as_warp();
  }
}

}  // namespace epmoe::cuda::fused
