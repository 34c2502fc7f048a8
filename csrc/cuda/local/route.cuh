// What both paths of route share: the scores of a row's experts, and the output of the choice. One
// warp has one row.
#pragma once
#include "args.h"
#include "cuda/device/common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

cudaError_t route_general(const RouteArgs& args, cudaStream_t stream);

constexpr int kRouteWarps = 4;  // rows a block

__device__ __forceinline__ float float_of_key(uint32_t key) {
  return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// exp(x) for the sum of a softmax. Terms far below the largest one may be inexact.
__device__ __forceinline__ float fast_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
  return result;
}

// What all scores of a row share: the largest logit and the sum of the exponentials (softmax only).
struct Row {
  float largest, sum;
  bool defined;  // all scores of the softmax are finite; true for a sigmoid
};

// No branches, so that the computations of a lane's scores overlap.
template <bool kClamp>
__device__ __forceinline__ float sigmoid_score(float logit) {
  return kClamp ? sigmoid_of_number(logit) : sigmoid(logit);
}
template <bool kClamp>
__device__ __forceinline__ float softmax_score(const Row& row, float logit) {
  float power = exp_of_number(logit - row.largest);
  bool defined = !kClamp || row.defined;
  return __fdividef(defined ? power : 0.0f, defined ? row.sum : 1.0f);
}

// Clamp a lane's logits to [low, high] and convert them to floats; NaN becomes `low`. Both bounds
// are exact in 16 bits, so that 16-bit logits are clamped two at a time.
__device__ __forceinline__ __half2 clamp_two(__half a, __half b, float low, float high) {
  return __hmin2(__hmax2(__halves2half2(a, b), __float2half2_rn(low)), __float2half2_rn(high));
}
__device__ __forceinline__ __nv_bfloat162 clamp_two(__nv_bfloat16 a, __nv_bfloat16 b, float low,
                                                    float high) {
  return __hmin2(__hmax2(__halves2bfloat162(a, b), __float2bfloat162_rn(low)),
                 __float2bfloat162_rn(high));
}
template <typename Logit, int N>
__device__ __forceinline__ void clamp_logits(const Logit (&raw)[N], float low, float high,
                                             float (&out)[N]) {
  if constexpr (sizeof(Logit) == 2 && N > 1) {
    Vector<Logit, N> clamped;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      auto two = clamp_two(raw[i], raw[i + 1], low, high);
      memcpy(&clamped.at[i], &two, sizeof two);
    }
    to_floats(clamped, out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = fminf(fmaxf(to_float(raw[i]), low), high);
  }
}

inline int32_t clamped_rows(const RouteArgs& args) {
  return static_cast<int32_t>(std::clamp<int64_t>(args.num_rows, 0, args.T));
}
__device__ __forceinline__ int32_t real_rows(const RouteArgs& args, int32_t num_rows) {
  return args.num_tokens ? min(max(*args.num_tokens, 0), static_cast<int32_t>(args.T)) : num_rows;
}

// Lane k < K writes the k-th choice. In a padded row `id` is E and `weight` is 0.
__device__ __forceinline__ void write_choice(const RouteArgs& args, int32_t t, int lane,
                                             uint32_t id, float weight) {
  if (lane >= args.K) return;
  int64_t index = int64_t{t} * args.K + lane;
  if (args.wide_ids)
    static_cast<int64_t*>(args.ids_TK)[index] = id;
  else
    static_cast<int32_t*>(args.ids_TK)[index] = static_cast<int32_t>(id);
  args.weights_TK[index] = weight;
}

// Computes the weight of the k-th choice in lane k and writes both. It reads the logit again, which
// lies in L1.
template <bool kClamp, typename Logit>
__device__ __forceinline__ void finish_row(const RouteArgs& args, const Row& row,
                                           const Logit* logits, int32_t t, int lane, uint32_t id) {
  float logit = to_float(logits[lane < args.K ? id : 0]);
  float weight = args.sigmoid ? sigmoid_score<kClamp>(logit) : softmax_score<kClamp>(row, logit);
  if (args.renormalize) {
    float sum = lane < args.K ? weight : 0.0f;
    for (int offset = 1; offset < args.K; offset *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    sum += args.epsilon;
    weight = sum == 0.0f ? weight : __fdividef(weight, sum);
  }
  write_choice(args, t, lane, id, weight * args.scale);
}

// Adds the block's rows to the health counters, by one atomic: a batch of poisoned rows takes as
// long as a clean one.
__device__ __forceinline__ void count_rows(const RouteArgs& args, int32_t real, bool sanitised) {
  if (!args.counters) return;
  int rows = __syncthreads_count(sanitised && threadIdx.x % 32 == 0);
  if (threadIdx.x) return;
  auto* counters = reinterpret_cast<unsigned long long*>(args.counters);
  if (rows) atomicAdd(counters + kSanitisedRows, rows);
  if (blockIdx.x) return;
  if (args.T > real) atomicAdd(counters + kPaddedRows, args.T - real);
  if (wanted_tokens(args) != real) atomicAdd(counters + kClampedNumTokens, 1);
}

}  // namespace epmoe::cuda
