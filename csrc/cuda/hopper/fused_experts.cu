// The experts stage in fp8 or bf16 as one kernel, for calls of any size. Its bits are those of
// few_rows_by_tma.cu, and of DeepGEMM in fp8 and grouped_gemm.cu in bf16.
//
//   rows ─ gate and up, activation ─▶ h ─ down ─▶ outputs
//
// A block claims tiles: 256 weight rows by up to 144 rows of an expert. All tiles of h come before
// those of outputs, and a counter for each tile of rows says that its h is written. While some
// blocks still write h, others load weights of outputs, so that memory never rests between the
// products.
//
//   a warp claims ─▶ three warps load, two by TMA ─▶ two warpgroups multiply ─▶ one writes
//
// fused_experts/ has a file for each role: claims.cuh, loads.cuh, sums.cuh with full_tiles.cuh and
// overfull_tiles.cuh, and writes.cuh.
#include "cuda/hopper/fused_experts/launch.cuh"
#include "cuda/hopper/fused_experts/overfull_tiles.cuh"
#include "cuda/hopper/fused_experts/start.cuh"
#include "cuda/hopper/fused_experts/sums.cuh"
#include "cuda/hopper/fused_experts/writes.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

using namespace fused;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The width behind this one.
template <typename T>
constexpr EPMOE_HD int next_width(int width) {
  if (!kHasFull<T> || width < kMostColumns) return width + kTokenStep;
  return width < kFullTokens ? kFullTokens : T::kTokens;
}

// Each width has loops of its own.
template <typename T, int kWidth = kTokenStep>
__device__ __forceinline__ void multiply_tile(const Tile& tile, Shared<T>& shared, Stages<T>& ring,
                                              int32_t departed) {
  if constexpr (kWidth < T::kTokens)
    if (tile.width > kWidth)
      return multiply_tile<T, next_width<T>(kWidth)>(tile, shared, ring, departed);
  if constexpr (kHasFull<T> && kWidth > kFullTokens) {
    OverfullSums sums = {};
    sum_overfull_tile(tile, shared, ring, sums);
    leave_overfull_tile(tile, shared, departed, sums);
  } else {
    float first[kWidth / 2] = {};
    float second[kWidth / 2] = {};
    if constexpr (kHasFull<T> && kWidth == kFullTokens) {
      sum_full_tile(tile, shared, ring, first, second);
      leave_full_tile(tile, shared, departed, first, second);
    } else {
      sum_tile(tile, shared, ring, first, second);
      leave(shared, departed, first, second);
    }
  }
}

// What a warp does for its role.
template <typename T>
__device__ __forceinline__ void take_role(const FewRowsArgs& args, const Maps& maps,
                                          const WeightMaps& weights, Shared<T>& shared,
                                          Stages<T> ring, int32_t first_claim) {
  if (threadIdx.x >= kMultipliers<T> + kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kWriteRegisters));
    write_tiles(args, shared);
    return;
  }
  if (threadIdx.x >= kMultipliers<T>) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoadRegisters));
    const auto role = static_cast<Role>((threadIdx.x - kMultipliers<T>) / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (role == Role::kWeights && first_lane) load_weights(args, weights, shared, ring);
    if (role == Role::kRows && first_lane) load_rows(args, maps, shared, ring);
    if constexpr (T::kScaled)
      if (role == Role::kScales) load_scales(args, shared, ring);
    if (role == Role::kClaims && first_lane) claim_tiles(args, shared, first_claim);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMathRegisters));
  Tiles<T> tiles(shared, shared.claimed);
  for (int32_t departed = 0;; ++departed) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    multiply_tile(tile, shared, ring, departed);
    departed += further_departures<T>(tile);
    tiles.done_as_warp();
  }
}

#endif

template <typename T>
__global__ void __launch_bounds__(kThreads<T>, 1)
    fused_experts_kernel(const __grid_constant__ FewRowsArgs args,
                         const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char given[];
  auto& shared = *reinterpret_cast<Shared<T>*>(given);
  Stages<T> ring(shared.stages[0], shared.mbarriers, kFilling<T>, kEmptying<T>);
  if constexpr (kHasFew<T>) {
    auto& with_few = *reinterpret_cast<Shared<Fp8Few>*>(given);
    Stages<Fp8Few> few_ring(with_few.stages[0], shared.other.mbarriers, kFilling<T>, kEmptying<T>);
    const int32_t first_claim = start(args, maps, shared);
    if (shared.few)
      take_role(args, maps, maps.few, with_few, few_ring, first_claim);
    else
      take_role(args, maps, maps, shared, ring, first_claim);
  } else {
    const int32_t first_claim = start(args, maps, shared);
    take_role(args, maps, maps, shared, ring, first_claim);
  }
#endif
}

}  // namespace

cudaError_t fused_experts(const FewRowsArgs& args, cudaStream_t stream) {
  return args.format == WeightFormat::kFp8
             ? launch_experts<Fp8>(fused_experts_kernel<Fp8>, args, stream)
             : launch_experts<Bf16>(fused_experts_kernel<Bf16>, args, stream);
}

}  // namespace epmoe::cuda
