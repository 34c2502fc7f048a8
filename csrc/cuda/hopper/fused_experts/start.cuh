// How a block of the experts in one kernel starts.
#pragma once
#include "cuda/hopper/fused_experts/loads.cuh"

namespace epmoe::cuda::fused {

// Thread 0 prepares the mbarriers that all formats have, but those of stages.
template <typename T>
__device__ __forceinline__ void init_mbarriers(Shared<T>& shared) {
  for (int32_t i = 0; i < kQueue; ++i) {
    init_mbarrier(&shared.claimed[i], 1);
    init_mbarrier(&shared.readable[i], 1);
    init_mbarrier(&shared.done[i], kUsers<T>);
  }
  init_mbarrier(&shared.wanted, 1);
  init_mbarrier(&shared.summed, kMultipliers<T> / 32 * kArriving);
  init_mbarrier(&shared.taken, kWriters / 32 * kArriving);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread fetches the maps that the launch reads.
template <typename T>
__device__ __forceinline__ void prefetch_maps(const Maps& maps) {
  for (auto* map : {&maps.gates, &maps.ups, &maps.down, &maps.rows, &maps.h}) prefetch(*map);
  if constexpr (kHasFull<T>)
    for (auto* map : {&maps.full_rows, &maps.full_h}) prefetch(*map);
  if constexpr (kHasFew<T>)
    for (auto* map : {&maps.few.gates, &maps.few.ups, &maps.few.down}) prefetch(*map);
}

// Prepares the block and counts rows, once the kernel in front has ended. The thread that claims
// gets the number of its first tile. Thread 0 may have prepared further mbarriers before.
template <typename T>
__device__ __forceinline__ int32_t start(const FewRowsArgs& args, const Maps& maps,
                                         Shared<T>& shared) {
  if (threadIdx.x == 0) {
    init_mbarriers(shared);
    shared.late = false;
  }
  if (threadIdx.x == kMultipliers<T>) prefetch_maps<T>(maps);
  wait_for_predecessor();
  let_successor_start();
  // The first claim is on its way while the rows of experts are counted.
  int32_t first_claim = 0;
  if (threadIdx.x == kClaimer<T>) first_claim = claim(args);
  count_parts(args, shared);
  return first_claim;
}

}  // namespace epmoe::cuda::fused
