// Candidates of the warp path's choice: what a lane sorts in registers and a warp reduces.
#pragma once
#include "common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// Two 16-bit logits at once: NaN becomes -Inf, -0 becomes +0.
__device__ __forceinline__ __half2 at_least_minus_inf(__half a, __half b) {
  return __hadd2(__hmax2(__halves2half2(a, b), __float2half2_rn(-INFINITY)), __float2half2_rn(0.0f));
}
__device__ __forceinline__ __nv_bfloat162 at_least_minus_inf(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __hadd2(__hmax2(__halves2bfloat162(a, b), __float2bfloat162_rn(-INFINITY)), __float2bfloat162_rn(0.0f));
}

// A candidate as one integer: 16 bits of key, then the inverted id. Enough for 16-bit logits without a bias.
struct Packed {
  int32_t bits;

  __device__ Packed() : bits(INT32_MIN) {}  // none
  // The logit's 16 bits on top, where NaN has become -Inf and -0 is +0.
  __device__ Packed(uint32_t logit, uint32_t id) {
    auto value = static_cast<int32_t>(logit);
    bits = (value ^ (value >> 31 & 0x7fff0000)) + static_cast<int32_t>(0xffffu - id);
  }
  __device__ uint32_t id() const { return 0xffffu - (bits & 0xffffu); }
  __device__ bool operator==(const Packed& other) const { return bits == other.bits; }
  __device__ bool operator>(const Packed& other) const { return bits > other.bits; }
  __device__ Packed best_of_warp() const {
    Packed best;
    best.bits = __reduce_max_sync(kAllLanes, bits);
    return best;
  }
  __device__ Packed from_lane(int lane) const {
    Packed other;
    other.bits = __shfl_sync(kAllLanes, bits, lane);
    return other;
  }
};

// A candidate with all 32 bits of its key; equal keys rank by id.
struct Wide {
  uint32_t key, expert;

  __device__ Wide() : key(0), expert(0xffffffffu) {}  // none
  __device__ Wide(float value, uint32_t id) : key(order_key(value)), expert(id) {}
  __device__ uint32_t id() const { return expert; }
  __device__ bool operator==(const Wide& other) const { return expert == other.expert; }
  __device__ bool operator>(const Wide& other) const { return key > other.key; }
  __device__ Wide best_of_warp() const {
    Wide best;
    best.key = __reduce_max_sync(kAllLanes, key);
    best.expert = __reduce_min_sync(kAllLanes, key == best.key ? expert : 0xffffffffu);
    return best;
  }
  __device__ Wide from_lane(int lane) const {
    Wide other;
    other.key = __shfl_sync(kAllLanes, key, lane);
    other.expert = __shfl_sync(kAllLanes, expert, lane);
    return other;
  }
};

template <typename Logit, int N>
__device__ __forceinline__ void make_candidates(const Logit (&raw)[N], uint32_t first, Packed (&candidate)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    auto pair = at_least_minus_inf(raw[i], raw[i + 1 < N ? i + 1 : i]);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    candidate[i] = Packed(bits << 16, first + i);
    if (i + 1 < N) candidate[i + 1] = Packed(bits & 0xffff0000u, first + i + 1);
  }
}
template <typename Value, int N>
__device__ __forceinline__ void make_candidates(const Value (&value)[N], uint32_t first, Wide (&candidate)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) candidate[i] = Wide(to_float(value[i]), first + i);
}

// Sorts N (a power of two) descending: Batcher's odd-even merge sort, which keeps indices constant. It is not stable,
// so equal keys are told apart by what `>` sees: Packed holds the id; Wide compares it where keys are equal.
__device__ __forceinline__ void order(Packed& a, Packed& b) {
  int32_t high = max(a.bits, b.bits);
  b.bits = min(a.bits, b.bits);
  a.bits = high;
}
__device__ __forceinline__ void order(Wide& a, Wide& b) {
  bool swap = b.key > a.key || (b.key == a.key && b.expert < a.expert);
  Wide high = swap ? b : a;
  b = swap ? a : b;
  a = high;
}
template <int P, int K, int N, typename Candidate>
__device__ __forceinline__ void merge(Candidate (&c)[N]) {
#pragma unroll
  for (int i = K % P; i + K < N; ++i)
    if ((i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) order(c[i], c[i + K]);
  if constexpr (K > 1) merge<P, K / 2>(c);
  else if constexpr (2 * P < N) merge<2 * P, 2 * P>(c);
}
template <int N, typename Candidate>
__device__ __forceinline__ void sort(Candidate (&c)[N]) {
  if constexpr (N > 1) merge<1, 1>(c);
}

}  // namespace epmoe::cuda
