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

// Pieces of rows on their way through shared memory, in turns: one warp fetches and stores, any thread may look on.
template <int kBuffers>
struct Ring {
  char* buffers;       // [kBuffers, stride_bytes], aligned as bulk copies want it
  uint64_t* arrivals;  // [kBuffers]
  int32_t stride_bytes, fetched = 0, taken = 0;

  // `first` in one thread, which prepares the arrivals.
  __device__ __forceinline__ Ring(char* buffers, uint64_t* arrivals, int32_t stride_bytes, bool first)
      : buffers(buffers), arrivals(arrivals), stride_bytes(stride_bytes) {
    for (int i = 0; first && i < kBuffers; ++i) init_arrival(&arrivals[i]);
  }
  __device__ __forceinline__ char* buffer(int32_t n) const { return buffers + n % kBuffers * stride_bytes; }

  // By the warp: the next piece, once what was in its buffer has left, which was stored before the last one.
  __device__ __forceinline__ void fetch_next(const void* from, int32_t bytes) {
    static_assert(kBuffers > 2);
    wait_read<1>();
    __syncwarp();
    fetch(buffer(fetched), from, bytes, &arrivals[fetched % kBuffers]);
    ++fetched;
  }
  // The oldest that this thread has not taken, when it is here.
  __device__ __forceinline__ char* take() {
    await(&arrivals[taken % kBuffers], taken / kBuffers & 1);
    return buffer(taken++);
  }
};

}  // namespace epmoe::cuda
