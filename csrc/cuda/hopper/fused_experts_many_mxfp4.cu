// The experts stage as one kernel, of rows in fp8 and weights in MXFP4, for calls in which an
// expert has many rows. fused_experts_mxfp4.cu, for few, widens the codes of a tile once for each
// 64 rows and scales each 32 of k by themselves. Here a tile has up to 144 rows, and scales are
// part of the widened codes. For so many rows registers hold the sums of half of a tile's weight
// rows, so that a tile is computed in two passes over k.
//
//   a warp claims ─▶ three warps load, two by TMA ─▶ two warpgroups widen, multiply ─▶ one writes
//
// fused_experts/mxfp4/ has what differs from fused_experts.cu: loads.cuh, which both kernels of
// MXFP4 have, many_loads.cuh, many_sums.cuh and many_writes.cuh.
#include "cuda/hopper/fused_experts/launch.cuh"
#include "cuda/hopper/fused_experts/mxfp4/many_sums.cuh"
#include "cuda/hopper/fused_experts/mxfp4/many_writes.cuh"
#include "cuda/hopper/fused_experts/start.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

using namespace fused;

// Registers of a thread of each role.
constexpr int kManyLoadRegisters = 48;
constexpr int kManyWriteRegisters = 48;
constexpr int kManyMathRegisters = 208;
static_assert(kManyLoadRegisters + kManyWriteRegisters + ManyMxfp4::kGroups * kManyMathRegisters <=
              4 * 128);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Each width has loops of its own. `place` is that of the tile in the queue, whose largest scales
// are known. kSomeSmall: those of some warps may be small.
template <bool kSomeSmall, int kWidth = kTokenStep>
__device__ __forceinline__ void multiply_tile(const FewRowsArgs& args, const Tile& tile,
                                              Shared<ManyMxfp4>& shared, WalkOfSteps& ring,
                                              WalkOfWindows& windows, int32_t departed,
                                              int32_t place) {
  if constexpr (kWidth < ManyMxfp4::kTokens)
    if (tile.width > kWidth)
      return multiply_tile<kSomeSmall, kWidth + kTokenStep>(args, tile, shared, ring, windows,
                                                            departed, place);
  const int32_t passes = passes_of<ManyMxfp4>(args, tile);
  const uint8_t* largest = shared.more.largest[place];
#pragma unroll 1
  for (int32_t pass = 0; pass < passes; ++pass) {
    float sums[kWidth / 2] = {};
    sum_pass<kWidth, kSomeSmall>(args, tile, shared, ring, windows, pass, largest, sums);
    // They leave in bf16, a box of each warpgroup, once what lay there has been taken.
    if (pass == 0) await_room(shared, departed);
    const int32_t thread = thread_of_tile();
    const int32_t box = 2 * pass + thread / kWarpgroup;
    store_turned<kWidth>(shared_address(shared.leaving[box]), sums, 0, thread);
  }
  __syncwarp();
  arrive_as_warp(&shared.summed);
}

#endif

__global__ void __launch_bounds__(kThreads<ManyMxfp4>, 1)
    fused_experts_many_mxfp4_kernel(const __grid_constant__ FewRowsArgs args,
                                    const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = ManyMxfp4;
  constexpr int kMath = kMultipliers<T>;
  extern __shared__ __align__(1024) char given[];
  auto& shared = *reinterpret_cast<Shared<T>*>(given);
  Stages<T> ring(shared.stages[0], shared.mbarriers, kFilling<T>, kEmptying<T>);
  ScaleStages<T> windows(shared.more.windows[0], shared.more.mbarriers, 32, kEmptying<T>);
  if (threadIdx.x == 0)
    for (auto& scaled : shared.more.scaled) init_mbarrier(&scaled, kWriters);
  make_table(shared);
  const int32_t first_claim = start(args, maps, shared);
  if (threadIdx.x >= kMath + kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kManyWriteRegisters));
    write_tiles_of_passes(args, shared);
    return;
  }
  if (threadIdx.x >= kMath) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kManyLoadRegisters));
    const auto role = static_cast<Role>((threadIdx.x - kMath) / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (role == Role::kWeights) load_codes(args, maps, shared, ring, windows);
    if (role == Role::kRows && first_lane) load_rows(args, maps, shared, ring);
    if (role == Role::kScales) load_scales_of_passes(args, shared, ring);
    if (role == Role::kClaims && first_lane) claim_tiles(args, shared, first_claim);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kManyMathRegisters));
  Tiles<T> tiles(shared, shared.claimed);
  WalkOfSteps steps(ring);
  WalkOfWindows scales(windows);
  for (int32_t departed = 0;; ++departed) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const int32_t place = tiles.place();
    wait_mbarrier(&shared.more.scaled[place], tiles.phase());
    // Such scales are rare, so they have one loop, of the largest width.
    if (shared.more.has_small(place))
      multiply_tile<true, T::kTokens>(args, tile, shared, steps, scales, departed, place);
    else
      multiply_tile<false>(args, tile, shared, steps, scales, departed, place);
    tiles.done_as_warp();
  }
#endif
}

}  // namespace

cudaError_t fused_experts_many_mxfp4(const FewRowsArgs& args, cudaStream_t stream) {
  return launch_experts<ManyMxfp4>(fused_experts_many_mxfp4_kernel, args, stream);
}

}  // namespace epmoe::cuda
