// The pairs of tokens as a source reads them from its call, and what may be wrong with them; see
// also cpu/pairs.h.
#pragma once
#include "copies.h"
#include "cuda/device/common.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// A pair as the caller gave it: a logical expert and a weight; id -1 where there is no pair.
struct RoutedPair {
  int64_t id = -1;
  float weight = 0.0f;

  RoutedPair() = default;
  // No branches, so that the loads after these do not wait. Where `real` is false, it loads pair 0
  // of token 0, which exists wherever a token exists.
  template <typename Args>
  __device__ __forceinline__ RoutedPair(const Args& args, int64_t t, int32_t k, bool real) {
    int64_t index = real ? t * args.ids_stride + k : 0;
    int64_t logical = args.wide_ids ? static_cast<const int64_t*>(args.ids_TK)[index]
                                    : static_cast<const int32_t*>(args.ids_TK)[index];
    float value =
        load_float(args.weights_TK, args.weights_dtype, real ? t * args.weights_stride + k : 0);
    if (real) id = logical, weight = value;
  }

  // The logical expert of E, -1 for an id that is out of range.
  __device__ __forceinline__ int32_t expert(int64_t E) const {
    return id >= 0 && id < E ? static_cast<int32_t>(id) : -1;
  }
  // Whether there is something to compute: a logical expert of E, and a finite weight, not 0 unless
  // `any_weight`.
  __device__ __forceinline__ bool is_live(int64_t E, bool any_weight) const {
    return id >= 0 && id < E && is_finite(weight) && (any_weight || weight != 0.0f);
  }
};

// The physical expert of a pair; -1 where there is nothing to compute. Where experts have several
// copies, copy_of(expert) is the one.
template <typename F>
__device__ __forceinline__ int32_t physical(const RoutedPair& pair, int64_t E, int64_t copies,
                                            F&& copy_of, bool any_weight = false) {
  if (!pair.is_live(E, any_weight)) return -1;
  auto expert = static_cast<int32_t>(pair.id);
  return copies == 1 ? expert : copy_of(expert);
}

// One warp, a pair a lane, adds what is wrong with a token's pairs to the health counters. Once a
// token.
__device__ __forceinline__ void count_wrong(const RoutedPair& pair, int64_t E, int64_t* counters) {
  int32_t lane = threadIdx.x % 32;
  int32_t expert = pair.expert(E);
  bool valid = expert >= 0;
  uint32_t same = __match_any_sync(kAllLanes, valid ? expert : -1 - lane);
  auto add = [&](Counter counter, bool wrong) {
    uint32_t votes = __ballot_sync(kAllLanes, wrong);
    if (votes && lane == 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(counters) + counter,
                static_cast<unsigned long long>(__popc(votes)));
  };
  add(kOutOfRangeIds, !valid && pair.id != -1 && pair.id != E);  // -1 and E mean "no expert"
  add(kDuplicateIds, valid && same & ((1u << lane) - 1));
  add(kNonfiniteWeights, !is_finite(pair.weight));
}

}  // namespace epmoe::cuda
