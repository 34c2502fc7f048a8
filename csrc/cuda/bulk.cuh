// Rows in one piece through shared memory: bulk copies (TMA) take one instruction of one thread, and what waits for the
// wire holds up no other load or store of the multiprocessor. Before sm_90 the warp copies by itself.
// Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "common.cuh"

namespace epmoe::cuda {

#if __CUDA_ARCH__ >= 900
#define EPMOE_BULK 1
#endif

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// For one thread; others may use the barrier after one of the block.
__device__ __forceinline__ void init_arrival(uint64_t* arrival) {
#ifdef EPMOE_BULK
  asm volatile(
      "mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_address(arrival))
      : "memory");
#endif
}

// By a warp: starts a copy into shared memory, which completes the arrival's next phase.
__device__ __forceinline__ void fetch(void* to, const void* from, int32_t bytes, uint64_t* arrival) {
#ifdef EPMOE_BULK
  if (threadIdx.x % 32 != 0) return;
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
#else
  for (int32_t v = threadIdx.x % 32; v < bytes / 16; v += 32)
    static_cast<uint4*>(to)[v] = __ldcg(static_cast<const uint4*>(from) + v);
  __syncwarp();
#endif
}

// Whether the phase that fetch() began is over: the odd ones have parity 1, counted from 0.
__device__ __forceinline__ void await(uint64_t* arrival, uint32_t parity) {
#ifdef EPMOE_BULK
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n\tselp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(shared_address(arrival)), "r"(parity)
        : "memory");
#endif
}

// By each thread that has written shared memory, before the barrier after which store() reads it.
__device__ __forceinline__ void publish_shared() {
#ifdef EPMOE_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// By a warp: starts a copy out of shared memory to where each lane says, null for none. A group, also of nothing.
__device__ __forceinline__ void store(void* to, const void* from, int32_t bytes) {
#ifdef EPMOE_BULK
  if (to)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  for (uint32_t left = __ballot_sync(kAllLanes, to != nullptr); left; left &= left - 1) {
    auto there = reinterpret_cast<uint4*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to), __ffs(left) - 1));
    for (int32_t v = threadIdx.x % 32; v < bytes / 16; v += 32) there[v] = static_cast<const uint4*>(from)[v];
  }
  __syncwarp();
#endif
}

// By the lanes that called store(): until all groups but the last kPending are done for this thread, which for others a
// release makes true (raise_flag), or have left shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stored() {
#ifdef EPMOE_BULK
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void wait_read() {
#ifdef EPMOE_BULK
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace epmoe::cuda
