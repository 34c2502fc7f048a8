// The sums of an overfull tile in fp8: those of a full one, and of up to kOverTokens tokens more. A
// tile of their own would read all weights again, which takes half as long as a full one or longer.
//
// For the tokens beyond, weights are the rows of the tensor core, 128 for each warpgroup. So that
// registers have room for their sums, the others are computed in four quarters of the weights, and
// not in two halves. The order of each sum is that of full_tiles.cuh.
#pragma once
#include "cuda/hopper/fused_experts/full_tiles.cuh"

namespace epmoe::cuda::fused {

constexpr int kQuarters = 4;
constexpr int kWeightsOfQuarter = kWeightRows / kQuarters;
// A thread's sums of a quarter, and of the tokens beyond by 64 weights.
constexpr int kSumsOfQuarter = kTokensOfGroup * kWeightsOfQuarter / kWarpgroup;
constexpr int kSumsBeyond = 64 * kOverTokens / kWarpgroup;

struct OverfullSums {
  float of_quarters[kQuarters][kSumsOfQuarter];
  // Of the quarters 2 * group and the next one, by the tokens beyond.
  float beyond[2][kSumsBeyond];
};

// The scales of a thread's tokens beyond: two neighbours, and those 8 further on.
__device__ __forceinline__ float4 read_scales_beyond(const Shared<Fp8>& shared, int32_t turn) {
  const float* scales = &shared.scales[turn % Fp8::kStages].of_rows[kFullTokens];
  const float2 first = *reinterpret_cast<const float2*>(scales + 2 * (threadIdx.x % 4));
  const float2 second = *reinterpret_cast<const float2*>(scales + 8 + 2 * (threadIdx.x % 4));
  return {first.x, first.y, second.x, second.y};
}

// Adds the sums of a step, times both scales. Of 8 tokens a thread has two, of two weights.
__device__ __forceinline__ void add_beyond(float (&sums)[kSumsBeyond],
                                           const float (&step)[kSumsBeyond],
                                           const float4& of_tokens, float of_weights) {
  const float first[] = {of_tokens.x * of_weights, of_tokens.y * of_weights};
  const float second[] = {of_tokens.z * of_weights, of_tokens.w * of_weights};
#pragma unroll
  for (int i = 0; i < kSumsBeyond; ++i)
    sums[i] = fmaf(i < kSumsBeyond / 2 ? first[i % 2] : second[i % 2], step[i], sums[i]);
}

// Adds the sums of a step, times these factors. Of 8 weights a thread has two, of two tokens.
__device__ __forceinline__ void add_quarter(float (&sums)[kSumsOfQuarter],
                                            const float (&step)[kSumsOfQuarter], float of_first,
                                            float of_second) {
#pragma unroll
  for (int i = 0; i < kSumsOfQuarter; ++i)
    sums[i] = fmaf(i % 4 < 2 ? of_first : of_second, step[i], sums[i]);
}

// A warpgroup's sums of its tokens, and of its weights by the tokens beyond.
__device__ __forceinline__ void sum_overfull_tile(const Tile& tile, const Shared<Fp8>& shared,
                                                  Stages<Fp8>& ring, OverfullSums& sums) {
  constexpr int kToQuarter = kWeightsOfQuarter * kLineBytes;
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const int32_t token = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int32_t end = ring.turn + tile.steps;
  float step_sums[kSumsOfQuarter] = {};
  StepScales scales;
  bool have_scales = false;
#pragma unroll 1
  while (ring.turn < end) {
    if (!have_scales) {
      ring.wait_filled();
      scales = read_scales(shared, ring.turn, token);
    }
    const uint32_t weights = ring.stage();
    const uint32_t tokens = weights + kWeightBytes<Fp8>;
    const uint64_t own_tokens = wgmma_operand(tokens + group * kBoxBytes);
    // The tokens beyond, beside the first quarter.
    const uint64_t tokens_beyond = wgmma_operand(tokens + kFullTokens * kLineBytes);
    const uint32_t own_weights = weights + 2 * group * kToQuarter;
    float low[kSumsBeyond] = {};
    float high[kSumsBeyond] = {};
    start_products(wgmma_operand(own_weights), tokens_beyond, low);
    start_products(wgmma_operand(own_weights + kToQuarter), tokens_beyond, high);
    start_step(own_tokens, wgmma_operand(weights), step_sums);
    const float4 scales_beyond = read_scales_beyond(shared, ring.turn);
    const float of_low = group ? scales.of_weights.z : scales.of_weights.x;
    const float of_high = group ? scales.of_weights.w : scales.of_weights.y;
    finish_step(step_sums);
    finish_step(low);
    finish_step(high);
    add_beyond(sums.beyond[0], low, scales_beyond, of_low);
    add_beyond(sums.beyond[1], high, scales_beyond, of_high);
    const float of_quarters[] = {scales.of_weights.x, scales.of_weights.y, scales.of_weights.z,
                                 scales.of_weights.w};
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      if (quarter) start_step(own_tokens, wgmma_operand(weights + quarter * kToQuarter), step_sums);
      const float of_first = scales.first_token * of_quarters[quarter];
      const float of_second = scales.second_token * of_quarters[quarter];
      if (quarter == kQuarters - 1) {
        ++ring.turn;
        // As in a full tile.
        have_scales = ring.turn < end && ring.is_filled();
        if (have_scales) scales = read_scales(shared, ring.turn, token);
      }
      if (quarter) finish_step(step_sums);
      if (quarter == kQuarters - 1) {
        __syncwarp();
        ring.release(1);
      }
      add_quarter(sums.of_quarters[quarter], step_sums, of_first, of_second);
    }
  }
}

// The sums leave as in leave_full_tile(), with lines of the tokens beyond behind the others.
__device__ __forceinline__ void leave_overfull_tile(const Tile& tile, Shared<Fp8>& shared,
                                                    int32_t departed, const OverfullSums& sums) {
  await_room(shared, departed);
  const int32_t thread = thread_of_tile();
  // Boxes have gates and ups by turns, but outputs in their order.
  const int32_t to_next = tile.down ? 1 : 2;
  const int32_t to_second = tile.down ? 2 : 1;
#pragma unroll
  for (int quarter = 0; quarter < kQuarters; ++quarter) {
    const int32_t box = quarter % 2 * to_next + quarter / 2 * to_second;
    store_lines(shared_address(shared.leaving[box]), sums.of_quarters[quarter], 0, thread);
  }
#pragma unroll
  for (int next = 0; next < 2; ++next) {
    const int32_t box = next * to_next + thread / kWarpgroup * to_second;
    const uint32_t lines = shared_address(shared.leaving[box]) + kFullTokens * kLineBytes;
    store_turned<kOverTokens>(lines, sums.beyond[next], 0, thread);
  }
  __syncwarp();
  arrive_as_warp(&shared.summed, thread);
}

}  // namespace epmoe::cuda::fused
