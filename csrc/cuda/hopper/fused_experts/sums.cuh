// The sums of a tile. Weights are the rows of the tensor core, tokens its columns: a NaN, or what a
// gap holds, stays in its column. Each step along k is a block of scales, whose sums are scaled in
// fp32 and added, in the order of few_rows_by_tma.cu and of DeepGEMM.
#pragma once
#include "cuda/hopper/fused_experts/shape.cuh"

namespace epmoe::cuda::fused {

// The sums of one step over 64 weight rows: four products of 32 along k.
template <int kCount>
__device__ __forceinline__ void multiply_step(uint32_t weights, uint32_t tokens,
                                              float (&sums)[kCount]) {
  constexpr int kProduct = 32;
  wgmma_begin();
  wgmma<Factors::kFirstFp8>(sums, wgmma_operand(weights), wgmma_operand(tokens));
#pragma unroll
  for (int k = kProduct; k < kStepBytes; k += kProduct)
    wgmma<Factors::kFp8>(sums, wgmma_operand(weights + k), wgmma_operand(tokens + k));
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");  // nothing reads it before
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

// A warpgroup's sums: `first` of 64 gates and `second` of their ups, or of 64 outputs each.
template <int kCount>
__device__ __forceinline__ void sum_tile(const Tile& tile, const Shared& shared, Stages& ring,
                                         float (&first)[kCount], float (&second)[kCount]) {
  const int32_t group = threadIdx.x / kWarpgroup;
  const uint32_t first_at = group * (tile.down ? 2 * kBoxBytes : kBoxBytes);
  const uint32_t second_at = first_at + (tile.down ? kBoxBytes : 2 * kBoxBytes);
  float step_sums[kCount] = {};
  for (const int32_t end = ring.turn + tile.steps; ring.turn < end;) {
    ring.wait_filled();
    const int32_t stage = ring.turn % kStages;
    const uint32_t at = ring.stage();
    const float* token_scales = shared.token_scales[stage] + 2 * (threadIdx.x % 4);
    const float2 weight_scales =
        *reinterpret_cast<const float2*>(shared.weight_scales[stage][group]);
    multiply_step(at + first_at, at + kWeightBytes, step_sums);
    add_scaled(first, step_sums, token_scales, weight_scales.x);
    multiply_step(at + second_at, at + kWeightBytes, step_sums);
    add_scaled(second, step_sums, token_scales, weight_scales.y);
    ++ring.turn;
    ring.release(1);
  }
}

}  // namespace epmoe::cuda::fused
