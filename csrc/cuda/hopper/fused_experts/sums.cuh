// The sums of a tile. Weights are the rows of the tensor core, tokens its columns: a NaN, or what a
// gap holds, stays in its column. In fp8 each step along k is a block of scales, whose sums are
// scaled in fp32 and added, in the order of few_rows_by_tma.cu and of DeepGEMM. In bf16 the tensor
// core adds all steps, as in grouped_gemm.cu. full_tiles.cuh has full tiles of fp8.
#pragma once
#include "cuda/hopper/fused_experts/shape.cuh"

namespace epmoe::cuda::fused {

// Starts the products of one step over 64 rows of the tensor core: four of 32 along k. Operands are
// uniform for a warp.
template <int kCount>
__device__ __forceinline__ void start_products(uint64_t rows, uint64_t columns,
                                               float (&sums)[kCount]) {
  constexpr int kProduct = 32;
  constexpr int kUnit = 16;  // bytes, of an operand
  wgmma_begin();
  wgmma<Factors::kFirstFp8>(sums, rows, columns);
#pragma unroll
  for (int k = kProduct; k < kStep<Fp8>; k += kProduct)
    wgmma<Factors::kFp8>(sums, rows + k / kUnit, columns + k / kUnit);
}

// The same, and all that have been started are a group.
template <int kCount>
__device__ __forceinline__ void start_step(uint64_t rows, uint64_t columns, float (&sums)[kCount]) {
  start_products(rows, columns, sums);
  wgmma_commit();
}

// Waits for these sums.
template <int kCount>
__device__ __forceinline__ void finish_step(float (&sums)[kCount]) {
  wgmma_wait<0>();
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");  // nothing reads it before
}

template <int kCount>
__device__ __forceinline__ void multiply_step(uint64_t rows, uint64_t columns,
                                              float (&sums)[kCount]) {
  start_step(rows, columns, sums);
  finish_step(sums);
}

// Adds them, times both scales. Of 8 tokens a thread has two, of two weight rows.
template <int kCount>
__device__ __forceinline__ void add_scaled(float (&sums)[kCount], const float (&step)[kCount],
                                           const float* token_scales, float weight_scale) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float2 scale = *reinterpret_cast<const float2*>(token_scales + 2 * i);
    scale.x *= weight_scale;
    scale.y *= weight_scale;
    sums[i] = fmaf(scale.x, step[i], sums[i]);
    sums[i + 1] = fmaf(scale.y, step[i + 1], sums[i + 1]);
    sums[i + 2] = fmaf(scale.x, step[i + 2], sums[i + 2]);
    sums[i + 3] = fmaf(scale.y, step[i + 3], sums[i + 3]);
  }
}

// The same with factors. A thread reads four at once.
template <int kCount>
__device__ __forceinline__ void add_with_factors(float (&sums)[kCount], const float (&step)[kCount],
                                                 const float* factors) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const float4 of_tokens = *reinterpret_cast<const float4*>(factors + 2 * i);
    sums[i] = fmaf(of_tokens.x, step[i], sums[i]);
    sums[i + 1] = fmaf(of_tokens.y, step[i + 1], sums[i + 1]);
    sums[i + 2] = fmaf(of_tokens.x, step[i + 2], sums[i + 2]);
    sums[i + 3] = fmaf(of_tokens.y, step[i + 3], sums[i + 3]);
    sums[i + 4] = fmaf(of_tokens.z, step[i + 4], sums[i + 4]);
    sums[i + 5] = fmaf(of_tokens.w, step[i + 5], sums[i + 5]);
    sums[i + 6] = fmaf(of_tokens.z, step[i + 6], sums[i + 6]);
    sums[i + 7] = fmaf(of_tokens.w, step[i + 7], sums[i + 7]);
  }
}

// A warpgroup's sums: `first` of 64 gates and `second` of their ups, or of 64 outputs each.
template <typename T, int kCount>
  requires std::is_base_of_v<Fp8, T>
__device__ __forceinline__ void sum_tile(const Tile& tile, Shared<T>& shared, Stages<T>& ring,
                                         float (&first)[kCount], float (&second)[kCount]) {
  // The shuffle tells the compiler that a warp has one group, so that operands need no registers of
  // each thread.
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const uint32_t first_at = group * (tile.down ? 2 * kBoxBytes : kBoxBytes);
  const uint32_t to_second = tile.down ? kBoxBytes : 2 * kBoxBytes;
  float step_sums[kCount] = {};
  for (const int32_t end = ring.turn + tile.steps; ring.turn < end;) {
    ring.wait_filled();
    const int32_t stage = ring.turn % T::kStages;
    const uint32_t at = ring.stage();
    const uint64_t first_weights = wgmma_operand(at + first_at);
    const uint64_t second_weights = wgmma_operand(at + first_at + to_second);
    const uint64_t tokens = wgmma_operand(at + kWeightBytes<T>);
    const auto& scales = shared.scales[stage];
    if constexpr (kHasFull<T> && 2 * kCount == kMostColumns) {
      const ScaleFactors& factors = shared.factors(stage);
      multiply_step(first_weights, tokens, step_sums);
      add_with_factors(first, step_sums, factors.of_tokens[2 * group] + 4 * (threadIdx.x % 4));
      multiply_step(second_weights, tokens, step_sums);
      add_with_factors(second, step_sums, factors.of_tokens[2 * group + 1] + 4 * (threadIdx.x % 4));
    } else {
      const float* token_scales = scales.of_rows + 2 * (threadIdx.x % 4);
      const float2 weight_scales = *reinterpret_cast<const float2*>(scales.of_weights[group]);
      multiply_step(first_weights, tokens, step_sums);
      add_scaled(first, step_sums, token_scales, weight_scales.x);
      multiply_step(second_weights, tokens, step_sums);
      add_scaled(second, step_sums, token_scales, weight_scales.y);
    }
    ++ring.turn;
    // All lanes have read their scales.
    __syncwarp();
    ring.release(1);
  }
}

// The same in bf16. A step's products go on while the next ones start.
template <int kCount>
__device__ __forceinline__ void sum_tile(const Tile& tile, const Shared<Bf16>&, Stages<Bf16>& ring,
                                         float (&first)[kCount], float (&second)[kCount]) {
  constexpr int kProductBytes = 32;
  constexpr int kUnit = 16;  // bytes, of an operand
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const uint32_t first_at = group * (tile.down ? 2 * kBoxBytes : kBoxBytes);
  const uint32_t to_second = tile.down ? kBoxBytes : 2 * kBoxBytes;
  ring.multiply(tile.steps, [&](uint32_t stage) {
    const uint64_t first_weights = wgmma_operand(stage + first_at);
    const uint64_t second_weights = wgmma_operand(stage + first_at + to_second);
    const uint64_t tokens = wgmma_operand(stage + kWeightBytes<Bf16>);
#pragma unroll
    for (int k = 0; k < kLineBytes / kUnit; k += kProductBytes / kUnit)
      wgmma<Factors::kAlong>(first, first_weights + k, tokens + k);
#pragma unroll
    for (int k = 0; k < kLineBytes / kUnit; k += kProductBytes / kUnit)
      wgmma<Factors::kAlong>(second, second_weights + k, tokens + k);
  });
}

// The sums leave in bf16, a token's columns side by side, once what lay there has been taken.
// `departed` counts how often some have.
template <typename T, int kCount>
__device__ __forceinline__ void leave(Shared<T>& shared, int32_t departed,
                                      const float (&first)[kCount], const float (&second)[kCount]) {
  constexpr int kWidth = 2 * kCount;
  constexpr int kAtOnce = kWidth < T::kLeavingTokens ? kWidth : T::kLeavingTokens;
#pragma unroll
  for (int from = 0; from < kWidth; from += kAtOnce, ++departed) {
    await_room(shared, departed);
    const int32_t thread = thread_of_tile();
    const int32_t box = thread / kWarpgroup * 2;
    store_turned<kAtOnce>(shared_address(shared.leaving[box]), first, from, thread);
    store_turned<kAtOnce>(shared_address(shared.leaving[box + 1]), second, from, thread);
    __syncwarp();
    arrive_as_warp(&shared.summed, thread);
  }
}

}  // namespace epmoe::cuda::fused
