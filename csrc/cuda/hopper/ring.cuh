// What kernels of Hopper pass through shared memory: stages of boxes, from the thread that loads
// them to the warpgroups that multiply, and products on their way out.
#pragma once
#include "cuda/hopper/boxes.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace epmoe::cuda {

constexpr int kWarpgroup = 128;

__device__ __forceinline__ void init_mbarrier(uint64_t* mbarrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* mbarrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(mbarrier)) : "memory");
}
// How many lanes of a warp arrive for it. racecheck of compute-sanitizer does not see that lanes
// have met before one of them arrives. So tests/sanitizer.py asks it of a build in which each does.
#if defined(EPMOE_EACH_LANE_ARRIVES)
constexpr int32_t kArriving = 32;
#else
constexpr int32_t kArriving = 1;
#endif
// A warp arrives, whose lanes have met. `thread` is threadIdx.x.
__device__ __forceinline__ void arrive_as_warp(uint64_t* mbarrier, int32_t thread = threadIdx.x) {
  if (static_cast<uint32_t>(thread) % 32 < kArriving) arrive(mbarrier);
}
__device__ __forceinline__ void barrier(int32_t number, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The stages between those who load and the warpgroups, in shared memory.
template <int kCount, int kStageBytes>
struct Ring {
  static constexpr int kStages = kCount;
  static constexpr int kStage = kStageBytes;
  static constexpr int64_t kBytes =
      kCount * (kStageBytes + 2 * sizeof(uint64_t));  // of stages and their mbarriers
  uint32_t buffers;
  uint64_t *full, *empty;
  int32_t turn = 0;

  // Thread 0 prepares [2, kCount] mbarriers. `filling` arrivals complete a phase of `full`, and
  // those of the warps that empty a stage one of `empty`. Others may use them after a barrier of
  // the block.
  __device__ __forceinline__ Ring(const char* stages, uint64_t* mbarriers, int32_t filling,
                                  int32_t emptying_warps)
      : buffers(shared_address(stages)), full(mbarriers), empty(mbarriers + kCount) {
    if (threadIdx.x) return;
    for (int32_t i = 0; i < kCount; ++i)
      init_mbarrier(&full[i], filling), init_mbarrier(&empty[i], emptying_warps * kArriving);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ uint32_t stage() const {
    return buffers + turn % kCount * kStageBytes;
  }
  __device__ __forceinline__ uint64_t* filled() const { return &full[turn % kCount]; }
  __device__ __forceinline__ void wait_empty() const {
    if (turn >= kCount) wait_mbarrier(&empty[turn % kCount], (turn / kCount - 1) & 1);
  }
  __device__ __forceinline__ void wait_filled() const {
    wait_mbarrier(filled(), turn / kCount & 1);
  }
  // Whether it is filled by now, without a wait.
  __device__ __forceinline__ bool is_filled() const {
    return test_mbarrier(filled(), turn / kCount & 1);
  }
  // This warp has no use for the stage of `turn - back` any more.
  __device__ __forceinline__ void release(int32_t back) const {
    arrive_as_warp(&empty[(turn - back) % kCount]);
  }

  // A warpgroup multiplies so many stages, at least one: start(stage) starts the products of one.
  // They go on while the next ones start.
  template <typename Start>
  __device__ __forceinline__ void multiply(int32_t steps, const Start& start) {
    for (int32_t step = 0; step < steps; ++step) {
      wait_filled();
      wgmma_begin();
      start(stage());
      wgmma_commit();
      ++turn;
      if (!step) continue;
      wgmma_wait<1>();
      release(2);
    }
    wgmma_wait<0>();
    release(1);
  }
};

// Two neighbouring sums as bf16.
__device__ __forceinline__ uint32_t packed(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}
// A warp's sums of 16 columns leave as four 8 × 8 matrices. Each lane gives the address of one
// line. kTurned: lines become columns.
template <bool kTurned>
__device__ __forceinline__ void store_matrices(uint32_t to, const float* d) {
  const uint32_t sums[] = {packed(d[0], d[1]), packed(d[2], d[3]), packed(d[4], d[5]),
                           packed(d[6], d[7])};
#define EPMOE_STORE_MATRICES(turned)                                  \
  asm volatile("stmatrix.sync.aligned.m8n8.x4" turned                 \
               ".shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),       \
               "r"(sums[0]), "r"(sums[1]), "r"(sums[2]), "r"(sums[3]) \
               : "memory")
  if constexpr (kTurned)
    EPMOE_STORE_MATRICES(".trans");
  else
    EPMOE_STORE_MATRICES("");
#undef EPMOE_STORE_MATRICES
}
// A warpgroup's sums [64, 2 kCount], from column `from` on, become up to kLines lines of one or two
// boxes. `thread` is threadIdx.x.
template <int kLines, int kCount>
__device__ __forceinline__ void store_turned(uint32_t box, const float (&sums)[kCount],
                                             int from = 0, int32_t thread = threadIdx.x) {
  const int32_t lane = thread % 32, part = thread % kWarpgroup / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int c = 0; c < kLines; c += 16)
    if (from + c < 2 * kCount)
      store_matrices<true>(box + in_box(c + lane / 16 * 8 + lane % 8, part), &sums[(from + c) / 2]);
}

// Sums [64, 64] of a warpgroup, which begin at `from`, become 64 lines of a box: those behind the
// lines of the warpgroups before it.
template <int kCount>
__device__ __forceinline__ void store_lines(uint32_t box, const float (&sums)[kCount], int from,
                                            int32_t thread) {
  constexpr int kColumns = 16;
  const int32_t line = thread / 32 * 16 + thread % 16;
  const int32_t part = thread % 32 / 16;
#pragma unroll
  for (int c = 0; c < 64; c += kColumns)
    store_matrices<false>(box + in_box(line, c / 8 + part), &sums[from + c / 2]);
}

}  // namespace epmoe::cuda
