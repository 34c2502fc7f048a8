// Copies through shared memory by TMA (tensor memory accelerator). One thread starts a copy with
// one instruction, and a copy that waits for the wire holds up no other load or store of the
// multiprocessor. Before sm_90 the warp copies by itself: its copies are complete when the call
// returns, and the waits below do nothing. Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

#if __CUDA_ARCH__ >= 900
#define EPMOE_TMA 1
#endif

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// One thread calls it; other threads may use the mbarrier after a barrier of the block. Each phase
// of the mbarrier completes when the bytes of one TMA load have arrived.
__device__ __forceinline__ void init_mbarrier(uint64_t* mbarrier) {
#ifdef EPMOE_TMA
  asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                   shared_address(mbarrier))
               : "memory");
#endif
}

// One thread says how many bytes are to arrive in the phase, and so arrives itself.
__device__ __forceinline__ void expect_bytes(uint64_t* mbarrier, int32_t bytes) {
#ifdef EPMOE_TMA
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)),
               "r"(bytes)
               : "memory");
#endif
}

// A warp starts a TMA load from global into shared memory. Its arrival completes the next phase of
// the mbarrier.
__device__ __forceinline__ void tma_load(void* to, const void* from, int32_t bytes,
                                         uint64_t* mbarrier) {
#ifdef EPMOE_TMA
  if (threadIdx.x % 32 != 0) return;
  expect_bytes(mbarrier, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(mbarrier))
      : "memory");
#else
  for (int32_t v = threadIdx.x % 32; v < bytes / 16; v += 32)
    static_cast<uint4*>(to)[v] = __ldcg(static_cast<const uint4*>(from) + v);
  __syncwarp();
#endif
}

// Waits until a phase of the mbarrier has completed. Phases are counted from 0, and the parity of
// phase n is n % 2.
__device__ __forceinline__ void wait_mbarrier(uint64_t* mbarrier, uint32_t parity) {
#ifdef EPMOE_TMA
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n\tselp.u32 "
        "%0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(shared_address(mbarrier)), "r"(parity)
        : "memory");
#endif
}

// Whether it has completed by now. Before sm_90 it has.
__device__ __forceinline__ bool test_mbarrier(uint64_t* mbarrier, uint32_t parity) {
  uint32_t done = 1;
#ifdef EPMOE_TMA
  asm volatile(
      "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\tselp.u32 "
      "%0, 1, 0, done;\n\t}"
      : "=r"(done)
      : "r"(shared_address(mbarrier)), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

// Makes a thread's writes to shared memory visible to TMA. Each writing thread calls it before the
// barrier that precedes tma_store().
__device__ __forceinline__ void fence_shared_for_tma() {
#ifdef EPMOE_TMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A warp starts one TMA store a lane, from shared memory to the global address `to`; a lane with
// null stores nothing. Each call forms one bulk group a lane, also where the lane stores nothing.
__device__ __forceinline__ void tma_store(void* to, const void* from, int32_t bytes) {
#ifdef EPMOE_TMA
  if (to)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  for (uint32_t left = __ballot_sync(kAllLanes, to != nullptr); left; left &= left - 1) {
    auto there = reinterpret_cast<uint4*>(
        __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to), __ffs(left) - 1));
    for (int32_t v = threadIdx.x % 32; v < bytes / 16; v += 32)
      there[v] = static_cast<const uint4*>(from)[v];
  }
  __syncwarp();
#endif
}

// The lanes that called tma_store() wait until all but their last kPending bulk groups are
// complete: their writes are visible to this lane, and to others after a release (Flag::publish).
template <int kPending>
__device__ __forceinline__ void tma_wait_written() {
#ifdef EPMOE_TMA
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
// They wait until all but their last kPending bulk groups have been read from shared memory, which
// may then be overwritten.
template <int kPending>
__device__ __forceinline__ void tma_wait_read() {
#ifdef EPMOE_TMA
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// A thread starts a copy of 16 bytes from global into shared memory. It waits for no other load.
__device__ __forceinline__ void load_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
// The copies since the last call become a group, which may be empty.
__device__ __forceinline__ void commit_loads() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void await_loads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace epmoe::cuda
