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

// A candidate as one integer: 16 bits of key, then the inverted id. Enough for 16-bit logits without a bias. `order()`
// orders the values of candidates as unsigned integers.
struct Packed {
  int32_t bits;

  __device__ Packed() : bits(INT32_MIN) {}  // none
  // The logit's 16 bits on top, where NaN has become -Inf and -0 is +0.
  __device__ Packed(uint32_t logit, uint32_t id) {
    auto value = static_cast<int32_t>(logit);
    bits = (value ^ (value >> 31 & 0x7fff0000)) + static_cast<int32_t>(0xffffu - id);
  }
  __device__ uint32_t id() const { return 0xffffu - (bits & 0xffffu); }
  __device__ uint32_t order() const { return static_cast<uint32_t>(bits) ^ 0x80000000u; }
  __device__ bool is_best_of_warp() const { return bits == __reduce_max_sync(kAllLanes, bits); }
};

// A candidate with all 32 bits of its key, and the inverted id below.
struct Wide {
  uint64_t bits;

  __device__ Wide() : bits(0) {}  // none
  __device__ Wide(float value, uint32_t id) : bits(static_cast<uint64_t>(order_key(value)) << 32 | ~id) {}
  __device__ uint32_t id() const { return ~static_cast<uint32_t>(bits); }
  __device__ uint32_t order() const { return static_cast<uint32_t>(bits >> 32); }
  __device__ bool is_best_of_warp() const {  // lower lanes have lower ids
    bool best = order() == __reduce_max_sync(kAllLanes, order());
    unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
    return (__ballot_sync(kAllLanes, best) & lower_lanes) == 0 && best;
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

// Sorts N (a power of two) descending: Batcher's odd-even merge sort, unrolled so that indices are constants.
template <typename Candidate>
__device__ __forceinline__ void exchange(Candidate& a, Candidate& b) {
  auto high = max(a.bits, b.bits);
  b.bits = min(a.bits, b.bits);
  a.bits = high;
}
template <int P, int K, int N, typename Candidate>
__device__ __forceinline__ void merge(Candidate (&c)[N]) {
#pragma unroll
  for (int i = K % P; i + K < N; ++i)
    if ((i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) exchange(c[i], c[i + K]);
  if constexpr (K > 1)
    merge<P, K / 2>(c);
  else if constexpr (2 * P < N)
    merge<2 * P, 2 * P>(c);
}
// The warp's K best, in order, lane k's own as the result: the lanes' heads compete, the winner pops its own. A lane
// that is not `kept` takes no part. `chosen` has room for K of the warp.
template <int N, typename Candidate>
__device__ __forceinline__ uint32_t choose(Candidate (&c)[N], bool kept, int K, uint32_t* chosen) {
  if constexpr (N > 1) merge<1, 1>(c);
  if (!kept) c[0] = Candidate();
  for (int k = 0; k < K; ++k) {
    if (!c[0].is_best_of_warp()) continue;
    chosen[k] = c[0].id();
#pragma unroll
    for (int i = 0; i + 1 < N; ++i) c[i] = c[i + 1];
    c[N - 1] = Candidate();
  }
  __syncwarp();
  return chosen[threadIdx.x % 32];
}

// The same for at most 4 values a lane and ids below 256: keys of 32 bits, and a lane's ids as bytes of one word. Lanes
// that have the same key at once would all be picked; the choice is then made again, with the ids.
template <int N>
__device__ __forceinline__ uint32_t choose_of_few(const float (&value)[N], uint32_t first, bool kept, int K,
                                                  uint32_t* chosen) {
  static_assert(N <= 4);
  uint32_t key[N], ids = first * 0x01010101u + 0x03020100u;
#pragma unroll
  for (int i = 0; i < N; ++i) key[i] = order_key(value[i]);
#pragma unroll
  for (int round = 0; round < N; ++round)  // neighbours change places only where they have to: ties stay in order
#pragma unroll
    for (int i = round % 2; i + 1 < N; i += 2) {
      if (key[i + 1] > key[i]) ids = __byte_perm(ids, 0, 0x3210 - (0xf << 4 * i));
      uint32_t high = max(key[i], key[i + 1]);
      key[i + 1] = min(key[i], key[i + 1]);
      key[i] = high;
    }
  if (!kept) key[0] = 0;
  int picks = 0;
#pragma unroll 4
  for (int k = 0; k < K; ++k) {
    if (key[0] != __reduce_max_sync(kAllLanes, key[0])) continue;
    chosen[k] = ids;
    ids >>= 8;
    ++picks;
#pragma unroll
    for (int i = 0; i + 1 < N; ++i) key[i] = key[i + 1];
    key[N - 1] = 0;
  }
  if (__reduce_add_sync(kAllLanes, picks) == K) {
    __syncwarp();
    return chosen[threadIdx.x % 32] & 0xffu;
  }
  Wide candidate[N];
  make_candidates(value, first, candidate);
  return choose(candidate, kept, K, chosen);
}

}  // namespace epmoe::cuda
