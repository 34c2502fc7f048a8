// The gated activation of outputs of 16 bits or fewer, and gates and ups in registers.
#pragma once
#include "cuda/device/common.cuh"
#include "gating.h"

namespace epmoe::cuda {

// gated() of gating.h for outputs of 16 bits or fewer: with the exponential and the reciprocal of the hardware, 2e-6
// in all, it takes half as many instructions.
__device__ __forceinline__ float gated_fast(float gate, float up, const Gating& gating) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(gate) : "f"(gating.limit));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(gating.limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(up) : "f"(-gating.limit));
  float power, sigmoid;  // of a large -gate the power is Inf and the sigmoid 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * (gating.alpha * -1.44269504088896341f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + power));
  return gate * sigmoid * (up + gating.up_offset);
}

// kCount gates and ups of a row, from the first-th on, as they lie in registers. Past the end of the row, where `count`
// ends, they are 0. kWide: rows are aligned to vectors, so a lane has all of them or none.
template <typename T, int kCount, bool kWide>
struct GatesAndUps {
  using Part = Vector<T, kCount>;
  Part first_half = {}, second_half = {};  // gates, ups; or by turns

  __device__ __forceinline__ GatesAndUps(const Part& first_half, const Part& second_half)
      : first_half(first_half), second_half(second_half) {}
  __device__ __forceinline__ GatesAndUps(const T* row, bool interleaved, int64_t F, int64_t first, int count) {
    const T* halves[] = {row + (interleaved ? 2 * first : first), row + (interleaved ? 2 * first + kCount : F + first)};
    if constexpr (kWide) {
      if (!count) return;
      first_half = load_past_l1(reinterpret_cast<const Part*>(halves[0]));
      second_half = load_past_l1(reinterpret_cast<const Part*>(halves[1]));
    } else {
      int here[] = {interleaved ? 2 * count : count, interleaved ? 2 * count - kCount : count};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < here[0]) first_half.at[i] = halves[0][i];
        if (i < here[1]) second_half.at[i] = halves[1][i];
      }
    }
  }

  __device__ __forceinline__ void add_to(float (&gate)[kCount], float (&up)[kCount], bool interleaved) const {
    float values[2][kCount];
    to_floats(first_half, values[0]);
    to_floats(second_half, values[1]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      gate[i] += interleaved ? values[i >= kCount / 2][2 * i % kCount] : values[0][i];
      up[i] += interleaved ? values[i >= kCount / 2][(2 * i + 1) % kCount] : values[1][i];
    }
  }
};

}  // namespace epmoe::cuda
