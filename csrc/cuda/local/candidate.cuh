// Candidates of route's warp path: a lane sorts its candidates in registers, and a warp reduces
// over the lanes' best.
#pragma once
#include "cuda/device/common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// Two 16-bit logits at once: NaN becomes -Inf, -0 becomes +0.
__device__ __forceinline__ __half2 at_least_minus_inf(__half a, __half b) {
  return __hadd2(__hmax2(__halves2half2(a, b), __float2half2_rn(-INFINITY)),
                 __float2half2_rn(0.0f));
}
__device__ __forceinline__ __nv_bfloat162 at_least_minus_inf(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __hadd2(__hmax2(__halves2bfloat162(a, b), __float2bfloat162_rn(-INFINITY)),
                 __float2bfloat162_rn(0.0f));
}

// A candidate as one signed integer: 16 bits of key, then the inverted id. It serves 16-bit logits
// without a bias. order() returns a key whose unsigned order is the order of the values.
struct Packed {
  int32_t bits;

  __device__ Packed() : bits(INT32_MIN) {}  // no candidate
  // `logit` holds the 16 bits of the logit on top; NaN has become -Inf, and -0 has become +0.
  __device__ Packed(uint32_t logit, uint32_t id) {
    auto value = static_cast<int32_t>(logit);
    bits = (value ^ (value >> 31 & 0x7fff0000)) + static_cast<int32_t>(0xffffu - id);
  }
  __device__ uint32_t id() const { return 0xffffu - (bits & 0xffffu); }
  __device__ uint32_t order() const { return static_cast<uint32_t>(bits) ^ 0x80000000u; }
  __device__ bool is_best_of_warp() const { return bits == __reduce_max_sync(kAllLanes, bits); }
};

// A candidate as 64 bits: 32 bits of key, then the inverted id.
struct Wide {
  uint64_t bits;

  __device__ Wide() : bits(0) {}  // no candidate
  __device__ Wide(float value, uint32_t id)
      : bits(static_cast<uint64_t>(order_key(value)) << 32 | ~id) {}
  __device__ uint32_t id() const { return ~static_cast<uint32_t>(bits); }
  __device__ uint32_t order() const { return static_cast<uint32_t>(bits >> 32); }
  __device__ bool is_best_of_warp() const {  // lower lanes have lower ids
    bool best = order() == __reduce_max_sync(kAllLanes, order());
    unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
    return (__ballot_sync(kAllLanes, best) & lower_lanes) == 0 && best;
  }
};

template <typename Logit, int N>
__device__ __forceinline__ void make_candidates(const Logit (&raw)[N], uint32_t first,
                                                Packed (&candidate)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    auto two = at_least_minus_inf(raw[i], raw[i + 1 < N ? i + 1 : i]);
    uint32_t bits;
    memcpy(&bits, &two, sizeof bits);
    candidate[i] = Packed(bits << 16, first + i);
    if (i + 1 < N) candidate[i + 1] = Packed(bits & 0xffff0000u, first + i + 1);
  }
}
template <typename Value, int N>
__device__ __forceinline__ void make_candidates(const Value (&value)[N], uint32_t first,
                                                Wide (&candidate)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) candidate[i] = Wide(to_float(value[i]), first + i);
}

// merge<1, 1>(c) sorts N candidates in descending order; N is a power of two. It is Batcher's
// odd-even merge sort, unrolled so that all indices are constants.
template <typename Candidate>
__device__ __forceinline__ void order_two(Candidate& a, Candidate& b) {
  auto high = max(a.bits, b.bits);
  b.bits = min(a.bits, b.bits);
  a.bits = high;
}
template <int P, int K, int N, typename Candidate>
__device__ __forceinline__ void merge(Candidate (&c)[N]) {
#pragma unroll
  for (int i = K % P; i + K < N; ++i)
    if ((i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) order_two(c[i], c[i + K]);
  if constexpr (K > 1)
    merge<P, K / 2>(c);
  else if constexpr (2 * P < N)
    merge<2 * P, 2 * P>(c);
}

// Chooses the K best candidates of the warp; lane k returns the id of the k-th. In each step the
// heads of the lanes' sorted candidates compete, and the lane that wins removes its head. A lane
// without `kept` takes no part. `chosen` is shared memory of the warp for 32 ids.
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

// choose() for at most 4 values a lane and ids below 256: a candidate is a key of 32 bits, and the
// ids of a lane are the bytes of one register. If the heads of several lanes have the same key, all
// of them win; the number of wins then shows it, and choose() makes the choice again.
template <int N>
__device__ __forceinline__ uint32_t choose_small(const float (&value)[N], uint32_t first, bool kept,
                                                 int K, uint32_t* chosen) {
  static_assert(N <= 4);
  uint32_t key[N], ids = first * 0x01010101u + 0x03020100u;
#pragma unroll
  for (int i = 0; i < N; ++i) key[i] = order_key(value[i]);
#pragma unroll
  for (int step = 0; step < N;
       ++step)  // swaps neighbours only if the right one is larger: ties stay in order
#pragma unroll
    for (int i = step % 2; i + 1 < N; i += 2) {
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
