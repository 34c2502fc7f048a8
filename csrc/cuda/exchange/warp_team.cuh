// Warps of a block that work on one row together. The teams of a block do not wait for each other.
#pragma once
#include "cuda/exchange/layout.cuh"

namespace epmoe::cuda {

struct WarpTeam {
  int32_t warps, index,
      thread;  // warps: a power of two that divides the block's; index: the team's in its block

  __device__ explicit WarpTeam(int32_t warps)
      : warps(warps), index(threadIdx.x / (32 * warps)), thread(threadIdx.x % (32 * warps)) {}

  __device__ int32_t threads() const { return 32 * warps; }
  __device__ int32_t teams() const { return block_warps() / warps; }  // teams in a block
  __device__ bool leads() const { return thread == 0; }

  // The leader sees what any thread of the team stored before.
  __device__ void sync() const {
    if (warps == 1)
      __syncwarp();
    else
      asm volatile("barrier.cta.sync %0, %1;" ::"r"(index + 1), "r"(threads()) : "memory");
  }
};

}  // namespace epmoe::cuda
