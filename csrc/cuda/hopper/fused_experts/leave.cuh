// What becomes of a tile's sums: h in fp8, whose gates and ups meet in one thread, or outputs. Both
// leave through shared memory, a token's columns side by side.
#pragma once
#include "cuda/device/fp8.cuh"
#include "cuda/hopper/fused_experts/claims.cuh"
#include "cuda/local/gates.cuh"

namespace epmoe::cuda::fused {

// Barriers of both warpgroups that multiply, and of each.
constexpr int kBarrierOfAll = 1;
constexpr int kBarrierOfGroup = 2;

// threadIdx.x, read anew for each tile. What the compiler derives from a value that stays the same
// it computes once, and keeps it in memory while a tile is multiplied, which needs all registers.
// To read it back took longer than all else here.
__device__ __forceinline__ int32_t thread_of_tile() {
  int32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ float rounded_to_bf16(float value) {
  return to_float(from_float<__nv_bfloat16>(value));
}
__device__ __forceinline__ float finite_magnitude(float value) {
  return is_finite(value) ? fabsf(value) : 0.0f;
}

// As to_fp8() rounds: two values of a token, as 16 bits.
__device__ __forceinline__ uint32_t two_to_fp8(float low, float high, const Division& by) {
  auto divided = [&](float value) {
    const float raised = value * by.power;
    const float first = raised * by.inverse;
    const float second = corrected(first, raised, by.scale, by.inverse);
    return is_nan(second) ? first : second;  // Inf - Inf
  };
  return __nv_cvt_float2_to_fp8x2(make_float2(divided(low), divided(high)), __NV_SATFINITE,
                                  __NV_E4M3);
}

// Lines of 8 × 8 elements of 16 bits become columns.
__device__ __forceinline__ uint32_t turned(uint32_t two) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
}

// Gates become h, in fp32. A thread has two columns, 8 apart.
template <int kCount>
__device__ __forceinline__ void activate(const FewRowsArgs& args, const Tile& tile, int32_t column,
                                         float (&gates)[kCount], const float (&ups)[kCount]) {
  float gate_bias[2] = {};
  float up_bias[2] = {};
  if (args.gate_up_bias) {
    auto* bias = static_cast<const __nv_bfloat16*>(args.gate_up_bias) + tile.expert * 2 * args.F;
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int64_t at = tile.column + column + 8 * eight;
      gate_bias[eight] = to_float(bias[args.interleaved ? 2 * at : at]);
      up_bias[eight] = to_float(bias[args.interleaved ? 2 * at + 1 : args.F + at]);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int eight = i / 2 % 2;
    const float gate = 0.0f + rounded_to_bf16(gates[i]) + gate_bias[eight];
    const float up = 0.0f + rounded_to_bf16(ups[i]) + up_bias[eight];
    gates[i] = gated_fast(gate, up, args.gating);
  }
}

// The scale of each token's columns, which both warpgroups share.
template <int kWidth>
__device__ __forceinline__ void find_scales(const FewRowsArgs& args, const Tile& tile,
                                            Shared& shared, const float (&h)[kWidth / 2],
                                            int32_t thread) {
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  // A warp's largest values of its 16 columns.
#pragma unroll
  for (int i = 0; i < kWidth / 2; i += 4) {
    float2 most = {fmaxf(finite_magnitude(h[i]), finite_magnitude(h[i + 2])),
                   fmaxf(finite_magnitude(h[i + 1]), finite_magnitude(h[i + 3]))};
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      most.x = fmaxf(most.x, __shfl_xor_sync(kAllLanes, most.x, offset));
      most.y = fmaxf(most.y, __shfl_xor_sync(kAllLanes, most.y, offset));
    }
    if (lane < 4) *reinterpret_cast<float2*>(&shared.largest[warp][2 * i + 2 * lane]) = most;
  }
  barrier(kBarrierOfAll, kMultipliers);
  // Those of all warps, by a thread for each token.
  const int32_t token = thread;
  if (token < kWidth) {
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kMultipliers / 32; ++w) most = fmaxf(most, shared.largest[w][token]);
    const float scale = scale_for(most);
    shared.division[token] = Division::by(scale);
    const int64_t block = tile.column / kHColumns;
    if (token < tile.count)
      args.h_scales_BN[block * args.h_scales_stride + tile.row + token] = scale;
  }
  barrier(kBarrierOfAll, kMultipliers);
}

// A warpgroup's 64 gates and ups become h of all 128 columns, and the tile is counted.
template <int kWidth>
__device__ __forceinline__ void leave_as_h(const FewRowsArgs& args, const Tile& tile,
                                           Shared& shared, float (&gates)[kWidth / 2],
                                           const float (&ups)[kWidth / 2]) {
  const int32_t thread = thread_of_tile();
  const int32_t warp = thread / 32;
  const int32_t lane = thread % 32;
  activate(args, tile, 16 * warp + lane / 4, gates, ups);
  find_scales<kWidth>(args, tile, shared, gates, thread);
  // A thread's two columns of two tokens are turned: then it has two pairs of neighbouring columns
  // of one token.
#pragma unroll
  for (int i = 0; i < kWidth / 2; i += 4) {
    const Division* by = &shared.division[2 * i + 2 * (lane % 4)];
    const uint32_t of_tokens = two_to_fp8(gates[i], gates[i + 2], by[0]) |
                               two_to_fp8(gates[i + 1], gates[i + 3], by[1]) << 16;
    const uint32_t pairs = __byte_perm(turned(of_tokens), 0, 0x3120);
    char* to = shared.leaving + in_box(2 * i + lane / 4, warp) + 2 * (lane % 4);
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(pairs);
    *reinterpret_cast<uint16_t*>(to + 8) = static_cast<uint16_t>(pairs >> 16);
  }
  barrier(kBarrierOfAll, kMultipliers);
  const int32_t part = thread % 8;
  auto* h = static_cast<uint8_t*>(args.h_NF) + tile.row * args.F + tile.column + 16 * part;
  for (int32_t line = thread / 8; line < tile.count; line += kMultipliers / 8)
    *reinterpret_cast<uint4*>(h + line * args.F) =
        *reinterpret_cast<const uint4*>(shared.leaving + in_box(line, part));
  // TMA of other blocks reads h, once it has been counted.
  asm volatile("fence.proxy.async;" ::: "memory");
  barrier(kBarrierOfAll, kMultipliers);
  if (thread == 0)
    asm volatile(
        "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(&args.counters[kWritten + tile.part])
        : "memory");
}

// 64 outputs of a warpgroup, from this column on, in bf16. The bias is added to rounded products,
// as where an expert has many rows.
template <int kWidth>
__device__ __forceinline__ void leave_as_outputs(const FewRowsArgs& args, const Tile& tile,
                                                 Shared& shared, const float (&sums)[kWidth / 2],
                                                 int32_t column) {
  using Part = Vector<__nv_bfloat16, 8>;
  constexpr int kAtOnce = 64;  // tokens
  static_assert(kGroups * kAtOnce * kLineBytes <= sizeof(Shared::leaving));
  const int32_t thread = thread_of_tile();
  const int32_t group = thread / kWarpgroup;
  const int32_t part = thread % 8;
  char* leaving = shared.leaving + group * kAtOnce * kLineBytes;
  column += 8 * part;
  Part bias = {};
  if (args.down_bias)
    bias = *reinterpret_cast<const Part*>(static_cast<const __nv_bfloat16*>(args.down_bias) +
                                          tile.expert * args.D + column);
  auto* out = static_cast<__nv_bfloat16*>(args.out_ND) + tile.row * args.D + column;
#pragma unroll
  for (int from = 0; from < kWidth; from += kAtOnce) {
    barrier(kBarrierOfGroup + group, kWarpgroup);  // what lay there has been read
    store_turned<kAtOnce>(shared_address(leaving), sums, from, thread);
    barrier(kBarrierOfGroup + group, kWarpgroup);
    const int32_t lines = min(tile.count - from, kAtOnce);
    for (int32_t line = thread % kWarpgroup / 8; line < lines; line += kWarpgroup / 8) {
      Part products = *reinterpret_cast<const Part*>(leaving + in_box(line, part));
#pragma unroll
      for (int i = 0; args.down_bias && i < 8; ++i)
        products.at[i] = from_float<__nv_bfloat16>(to_float(products.at[i]) + to_float(bias.at[i]));
      *reinterpret_cast<Part*>(out + (from + line) * args.D) = products;
    }
  }
}

}  // namespace epmoe::cuda::fused
