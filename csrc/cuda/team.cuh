// Warps of a block that work on one row together, each team at its own pace.
#pragma once
#include "mail.cuh"

namespace epmoe::cuda {

struct Team {
  int32_t warps, index, thread;  // warps: a power of two that divides those of a block; index: of the team in its block

  __device__ explicit Team(int32_t warps)
      : warps(warps), index(threadIdx.x / (32 * warps)), thread(threadIdx.x % (32 * warps)) {}

  __device__ int32_t threads() const { return 32 * warps; }
  __device__ int32_t teams() const { return block_warps() / warps; }  // in a block
  __device__ bool leads() const { return thread == 0; }

  // What any thread of the team stored before, its leader has seen after.
  __device__ void sync() const {
    if (warps == 1)
      __syncwarp();
    else
      asm volatile("barrier.cta.sync %0, %1;" ::"r"(index + 1), "r"(threads()) : "memory");
  }
};

}  // namespace epmoe::cuda
