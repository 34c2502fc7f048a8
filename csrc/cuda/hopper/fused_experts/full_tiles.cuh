// The sums of a full tile in fp8. Tokens are the rows of the tensor core and weights its columns: a
// NaN, or what lies behind the tile's rows, stays in its row. A thread has sums of two tokens, so
// that four products of scales serve 64 of them. Their order is that of sums.cuh.
//
// The tensor core rests while both warpgroups wait for something else. So a warpgroup only adds
// between the end of a product and the start of the next one: what it needs for that, it reads
// while products run.
#pragma once
#include "cuda/hopper/fused_experts/sums.cuh"

namespace epmoe::cuda::fused {

// Tokens of a warpgroup, and weights of one of its sums: gates, their ups, or half of the outputs.
constexpr int kTokensOfGroup = 64;
constexpr int kWeightsOfSum = kWeightRows / 2;
static_assert(kFullTokens == Fp8::kGroups * kTokensOfGroup);

// The scales of a step that a thread needs.
struct StepScales {
  float first_token;
  float second_token;
  float4 of_weights;  // of either half of the weights of both sums
};

// `token` is the first one of the thread. The other one lies 8 further on.
__device__ __forceinline__ StepScales read_scales(const Shared<Fp8>& shared, int32_t turn,
                                                  int32_t token) {
  const auto& scales = shared.scales[turn % Fp8::kStages];
  return {.first_token = scales.of_rows[token],
          .second_token = scales.of_rows[token + 8],
          .of_weights = *reinterpret_cast<const float4*>(scales.of_weights)};
}

// What the sums of a step are multiplied by, of both tokens and either half of the weights.
struct FullFactors {
  float2 of_first_token;
  float2 of_second_token;

  __device__ __forceinline__ FullFactors(const StepScales& scales, float low_half, float high_half)
      : of_first_token{scales.first_token * low_half, scales.first_token * high_half},
        of_second_token{scales.second_token * low_half, scales.second_token * high_half} {
    // They are made here, beside products that run, and not where they are used.
    asm volatile("" : "+f"(of_first_token.x), "+f"(of_first_token.y));
    asm volatile("" : "+f"(of_second_token.x), "+f"(of_second_token.y));
  }
};

// Adds the sums of a step, times these factors. Of 8 weights a thread has two, of two tokens.
template <int kCount>
__device__ __forceinline__ void add_full(float (&sums)[kCount], const float (&step)[kCount],
                                         const FullFactors& factors) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const bool low = i < kCount / 2;
    const float of_first = low ? factors.of_first_token.x : factors.of_first_token.y;
    const float of_second = low ? factors.of_second_token.x : factors.of_second_token.y;
    sums[i] = fmaf(of_first, step[i], sums[i]);
    sums[i + 1] = fmaf(of_first, step[i + 1], sums[i + 1]);
    sums[i + 2] = fmaf(of_second, step[i + 2], sums[i + 2]);
    sums[i + 3] = fmaf(of_second, step[i + 3], sums[i + 3]);
  }
}

// A warpgroup's sums of its tokens: `first` of gates and `second` of their ups, or of outputs.
template <int kCount>
__device__ __forceinline__ void sum_full_tile(const Tile& tile, const Shared<Fp8>& shared,
                                              Stages<Fp8>& ring, float (&first)[kCount],
                                              float (&second)[kCount]) {
  static_assert(kCount == kTokensOfGroup * kWeightsOfSum / kWarpgroup);
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const int32_t token = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int32_t end = ring.turn + tile.steps;
  float step_sums[kCount] = {};
  StepScales scales;
  bool have_scales = false;
#pragma unroll 1
  while (ring.turn < end) {
    if (!have_scales) {
      ring.wait_filled();
      scales = read_scales(shared, ring.turn, token);
    }
    const uint32_t at = ring.stage();
    const uint64_t tokens = wgmma_operand(at + kWeightBytes<Fp8> + group * kBoxBytes);
    const uint64_t first_weights = wgmma_operand(at);
    const uint64_t second_weights = wgmma_operand(at + kWeightsOfSum * kLineBytes);
    start_step(tokens, first_weights, step_sums);
    const FullFactors of_first(scales, scales.of_weights.x, scales.of_weights.y);
    finish_step(step_sums);
    add_full(first, step_sums, of_first);
    start_step(tokens, second_weights, step_sums);
    const FullFactors of_second(scales, scales.of_weights.z, scales.of_weights.w);
    ++ring.turn;
    // The next step's scales are read here if they have arrived. To wait for them would keep this
    // stage from those who load.
    have_scales = ring.turn < end && ring.is_filled();
    if (have_scales) scales = read_scales(shared, ring.turn, token);
    finish_step(step_sums);
    // All lanes have read their scales.
    __syncwarp();
    ring.release(1);
    add_full(second, step_sums, of_second);
  }
}

// The sums leave as in leave(). A warp has 16 tokens, with all columns.
template <int kCount>
__device__ __forceinline__ void leave_full_tile(const Tile& tile, Shared<Fp8>& shared,
                                                int32_t departed, const float (&first)[kCount],
                                                const float (&second)[kCount]) {
  await_room(shared, departed);
  const int32_t thread = thread_of_tile();
  // Boxes have gates and ups by turns, but outputs in their order.
  const int32_t to_half = tile.down ? 1 : 2;
  const int32_t to_second = tile.down ? 2 : 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t box = half * to_half;
    const int from = half * kCount / 2;
    store_lines(shared_address(shared.leaving[box]), first, from, thread);
    store_lines(shared_address(shared.leaving[box + to_second]), second, from, thread);
  }
  __syncwarp();
  arrive_as_warp(&shared.summed, thread);
}

}  // namespace epmoe::cuda::fused
