// The experts stage as one kernel, of rows in fp8 and weights in MXFP4: tiles, their order and what
// becomes of sums are those of fused_experts.cu. Weights travel as codes, half a byte each, and
// become e4m3 in the registers of the warps that multiply.
//
//   a warp claims ─▶ three warps load, two by TMA ─▶ four warpgroups widen, multiply ─▶ one writes
//                             ─▶ a warp brings rows into the order of codes ─▶
//
// fused_experts/mxfp4/ has what differs: loads.cuh and sums.cuh.
#include "cuda/hopper/fused_experts/launch.cuh"
#include "cuda/hopper/fused_experts/mxfp4/sums.cuh"
#include "cuda/hopper/fused_experts/start.cuh"
#include "cuda/hopper/fused_experts/writes.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

using namespace fused;

// Registers of a thread of each role.
// At the start all have so many, the most that 768 threads can have.
constexpr int kMxfp4Registers = 80;
constexpr int kMxfp4LoadRegisters = 40;
constexpr int kMxfp4WriteRegisters = 56;
constexpr int kMxfp4MathRegisters = 96;
static_assert(kMxfp4LoadRegisters + kMxfp4WriteRegisters + Mxfp4::kGroups * kMxfp4MathRegisters <=
              (Mxfp4::kGroups + 2) * kMxfp4Registers);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Each width has loops of its own.
template <int kWidth = Mxfp4::kFewestColumns>
__device__ __forceinline__ void multiply_tile(const FewRowsArgs& args, const Tile& tile,
                                              Shared<Mxfp4>& shared, Stages<Mxfp4>& ring,
                                              ScaleStages<Mxfp4>& windows, int32_t departed) {
  constexpr int kNext = kWidth < kTokenStep ? kTokenStep : kWidth + kTokenStep;
  if constexpr (kWidth < Mxfp4::kTokens)
    if (tile.count > kWidth)
      return multiply_tile<kNext>(args, tile, shared, ring, windows, departed);
  float sums[kWidth / 2] = {};
  if constexpr (kWidth <= 16)
    sum_few<kWidth>(args, tile, shared, ring, windows, sums);
  else
    sum_many<kWidth>(args, tile, shared, ring, windows, sums);
  leave_box(shared, departed, sums);
}

#endif

__global__ void __launch_bounds__(kThreads<Mxfp4>, 1)
    fused_experts_mxfp4_kernel(const __grid_constant__ FewRowsArgs args,
                               const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kMath = kMultipliers<Mxfp4>;
  extern __shared__ __align__(1024) char given[];
  auto& shared = *reinterpret_cast<Shared<Mxfp4>*>(given);
  Stages<Mxfp4> ring(shared.stages[0], shared.mbarriers, kFilling<Mxfp4>, kEmptying<Mxfp4>);
  ScaleStages<Mxfp4> windows(shared.more.windows[0], shared.more.mbarriers, 32, kEmptying<Mxfp4>);
  if (threadIdx.x == 0)
    for (auto& arrived : shared.more.arrived) init_mbarrier(&arrived, 1);
  const int32_t first_claim = start(args, maps, shared);
  if (threadIdx.x >= kMath + kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMxfp4WriteRegisters));
    write_tiles(args, shared);
    return;
  }
  if (threadIdx.x >= kMath) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kMxfp4LoadRegisters));
    const auto role = static_cast<Role>((threadIdx.x - kMath) / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (role == Role::kWeights) load_codes(args, maps, shared, ring, windows);
    if (role == Role::kRows && first_lane) load_rows(args, maps, shared, ring);
    if (role == Role::kScales) load_scales_and_order(args, shared, ring);
    if (role == Role::kClaims && first_lane) claim_tiles(args, shared, first_claim);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMxfp4MathRegisters));
  Tiles<Mxfp4> tiles(shared, shared.claimed);
  for (int32_t departed = 0;; ++departed) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    multiply_tile(args, tile, shared, ring, windows, departed);
    tiles.done_as_warp();
  }
#endif
}

}  // namespace

cudaError_t fused_experts_mxfp4(const FewRowsArgs& args, cudaStream_t stream) {
  return launch_experts<Mxfp4>(fused_experts_mxfp4_kernel, args, stream);
}

}  // namespace epmoe::cuda
