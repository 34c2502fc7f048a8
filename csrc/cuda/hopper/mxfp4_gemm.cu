// The grouped GEMM of Hopper by rows, with weights in MXFP4 or NVFP4: rows [N, k] · weights [e, n,
// k]ᵀ ─▶ [N, n]. Sums and bits are those of grouped_gemm.cu for the same weights in bf16. Tensor
// scales of NVFP4 are left out.
//
// A block takes tiles in turn. TMA brings codes into shared memory, two steps along k at a time. A
// warpgroup widens them into the boxes that TMA fills for weights in bf16, where a lane has a
// weight row of the tile, and loads rows beside them. Two warpgroups multiply, as in
// grouped_gemm.cu.
#include "cuda/device/launch.cuh"
#include "cuda/hopper/multiply.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

// One warpgroup widens codes, the others multiply.
constexpr int kWarps = kWarpgroup / 32;
constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
// Stages of widened weights and rows, and products that leave a warpgroup.
constexpr int kStages = 4;
constexpr int kLeavingBytes = kBoxBytes;
using Stages = Ring<kStages, kStageBytes>;
// Steps whose codes arrive together, and bytes of a row in them.
constexpr int kBatch = 2;
constexpr int kCodeBytes = kBatch * kStep / 2;
// Batches under way, of a warp that widens.
constexpr int kSlots = 2;
constexpr int kSlotBytes = 32 * kCodeBytes;
// Where they lie in shared memory.
constexpr int kSlotsAt = kStages * kStageBytes + kMultipliers * kLeavingBytes;
constexpr int kMbarriersAt = kSlotsAt + kWarps * kSlots * kSlotBytes;
constexpr int kMbarriers = 2 * kStages + kWarps * kSlots;

int64_t shared_bytes(int32_t experts) {
  return kMbarriersAt + kMbarriers * static_cast<int64_t>(sizeof(uint64_t)) +
         (experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using TilesByRows = Tiles<Product::kByRows>;

// Up to kBatch steps of a tile.
struct Batch {
  int32_t step, steps, row, boxes;  // boxes of rows; 0 behind the last batch
  uint32_t scales[kBatch];          // of this lane's two groups of 32 codes in a step
};

// Of the scales of a step, those of a group of 32 codes.
template <typename Scales>
constexpr int kScaleBits = 8 * sizeof(typename Scales::Bytes);
template <typename Scales>
constexpr uint32_t kScaleMask = (1u << kScaleBits<Scales>)-1;

template <typename Scales>
__device__ __forceinline__ bool has_large(uint32_t scales) {
  return Scales{scales & kScaleMask<Scales>}.is_large() ||
         Scales{scales >> kScaleBits<Scales>}.is_large();
}

// One of the warps that widen: 32 weight rows of each tile, a lane each.
template <typename Scales>
struct Widener {
  // The scales of a row in a step: of two groups of 32 codes.
  using StepScales = std::conditional_t<sizeof(typename Scales::Bytes) == 1, uint16_t, uint32_t>;
  const GroupedGemmArgs& args;
  const CUtensorMap &codes, &rows;
  const TilesByRows& tiles;
  const Stages& ring;
  uint32_t slots;
  uint64_t* arrived;  // codes in the slots
  const int32_t steps = static_cast<int32_t>(args.k / kStep), warp = threadIdx.x % kWarpgroup / 32,
                lane = threadIdx.x % 32;
  // What is loaded next, and the tile after it.
  int32_t number = blockIdx.x, step = 0, slot = 0;
  Tile tile = at(number), after = at(number + gridDim.x);
  const StepScales* scales = scales_of(tile, lane);

  __device__ __forceinline__ Tile at(int32_t i) const {
    return i < tiles.count() ? tiles[i] : Tile{};
  }
  // The scales of a row of this warp, or null where there is none: one StepScales in each step.
  __device__ __forceinline__ const StepScales* scales_of(const Tile& tile, int32_t row) const {
    row += tile.m + 32 * warp;
    auto* scales = reinterpret_cast<const StepScales*>(args.weight_scales);
    return tile.width && row < args.n ? scales + (tile.expert * args.n + row) * steps : nullptr;
  }
  __device__ __forceinline__ void prefetch_scales_after() const {
    if (const StepScales* first = scales_of(after, 0); lane == 0 && first)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first),
                   "r"(static_cast<int32_t>(args.k * sizeof(typename Scales::Bytes)))
                   : "memory");  // those of 32 rows
  }

  // Starts to load the codes and scales of the next batch.
  __device__ __forceinline__ Batch load() {
    if (step >= steps) {
      number += gridDim.x;
      step = 0, tile = after, after = at(number + gridDim.x);
      scales = scales_of(tile, lane);
      prefetch_scales_after();
    }
    const int32_t left = steps - step;
    Batch batch{step, min(left, kBatch), tile.row, ceil_of(tile.width, 64), {}};
    if (!batch.boxes) return batch;
    if (lane == 0) {
      expect_bytes(&arrived[slot], kSlotBytes);
      load_box(codes, slots + slot * kSlotBytes, &arrived[slot], step * (kStep / 2),
               tile.m + 32 * warp, tile.expert);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (scales && i < left) batch.scales[i] = __ldg(scales + step + i);
    step += kBatch, slot = (slot + 1) % kSlots;
    return batch;
  }

  // This lane's codes in a slot, where the 16 bytes of a group are swizzled.
  __device__ __forceinline__ void read(int32_t slot, uint4 (&groups)[kBatch][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) {
      const uint32_t from = slots + slot * kSlotBytes + lane * kCodeBytes + (i ^ lane / 2 % 4) * 16;
      uint4& codes = groups[i / 2][i % 2];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                   : "r"(from)
                   : "memory");
    }
  }

  // The codes of a step become a line of a box.
  template <bool kAlsoLarge>
  __device__ __forceinline__ void widen(const uint4 (&groups)[2], uint32_t scales,
                                        uint32_t stage) const {
    const int32_t line = 32 * warp + lane;
    const uint32_t box = stage + line / 64 * kBoxBytes;
    uint4 values[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t eights[] = {groups[i].x, groups[i].y, groups[i].z, groups[i].w};
      const Scales of_group{scales >> kScaleBits<Scales> * i & kScaleMask<Scales>};
      bf16_of_eights<kAlsoLarge>(eights, of_group, values[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& eight = values[i / 4][i % 4];
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(box + in_box(line % 64, i)),
                   "r"(eight.x), "r"(eight.y), "r"(eight.z), "r"(eight.w)
                   : "memory");
    }
  }

  __device__ __forceinline__ void run() {
    prefetch_scales_after();
    Batch here = load(), next = load();
    uint32_t turn = 0;
    for (uint32_t n = 0; here.boxes; ++n) {
      uint4 groups[kBatch][2];
      wait_mbarrier(&arrived[n % kSlots], n / kSlots & 1);
      read(n % kSlots, groups);
      fence_shared_for_tma();  // the slot has been read, and load() lets TMA write it
      __syncwarp();
      const Batch later = load();
      const bool large =
          Scales::kMayBeLarge && __any_sync(kAllLanes, has_large<Scales>(here.scales[0]) ||
                                                           has_large<Scales>(here.scales[1]));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i == here.steps) break;
        const uint32_t at = turn % kStages, stage = ring.buffers + at * kStageBytes;
        uint64_t* full = &ring.full[at];
        wait_mbarrier(&ring.empty[at], (turn / kStages + 1) & 1);
        const int32_t box = (warp + turn) % kWarps;  // of rows; warps take turns
        if (lane == 0 && box < here.boxes) {
          asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(
                           shared_address(full)),
                       "r"(kBoxBytes)
                       : "memory");
          load_box(rows, stage + kABytes + box * kBoxBytes, full, (here.step + i) * kStep,
                   here.row + 64 * box, 0);
        }
        if (large)
          widen<true>(groups[i], here.scales[i], stage);
        else
          widen<false>(groups[i], here.scales[i], stage);
        fence_shared_for_tma();
        __syncwarp();
        arrive_as_warp(full);
        ++turn;
      }
      here = next, next = later;
    }
  }
};

#endif

template <typename Scales>
__global__ void __launch_bounds__(kThreads, 1)
    mxfp4_gemm_kernel(const __grid_constant__ GroupedGemmArgs args,
                      const __grid_constant__ CUtensorMap codes,
                      const __grid_constant__ CUtensorMap rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  auto* mbarriers = reinterpret_cast<uint64_t*>(shared + kMbarriersAt);
  uint64_t* arrived = mbarriers + 2 * kStages;
  TilesByRows tiles{args, reinterpret_cast<int32_t*>(mbarriers + kMbarriers)};
  for (int32_t i = threadIdx.x; i < kWarps * kSlots; i += kThreads) init_mbarrier(&arrived[i]);
  Stages ring(shared, mbarriers, kWarps * kArriving, kMultipliers * kWarpgroup / 32);
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < 32) tiles.build();
  __syncthreads();
  const int32_t group = threadIdx.x / kWarpgroup;
  if (group == kMultipliers) {
    const int32_t first = threadIdx.x % kWarpgroup / 32 * kSlots;
    Widener<Scales>{args,           codes, rows,
                    tiles,          ring,  shared_address(shared) + kSlotsAt + first * kSlotBytes,
                    arrived + first}
        .run();
    return;
  }
  char* leaving = shared + kStages * kStageBytes + group * kLeavingBytes;
  for (int32_t number = blockIdx.x; number < tiles.count(); number += gridDim.x) {
    const Tile tile = tiles[number];
    constexpr int kTimes = static_cast<int>(Scales::kLeftOut);
    multiply_rows<Product::kByRows, kLeavingBytes / kLineBytes, kTimes>(args, tile, ring, leaving);
  }
#endif
}

}  // namespace

cudaError_t mxfp4_gemm(const GroupedGemmArgs& args, cudaStream_t stream) {
  if (args.N == 0 || args.e == 0) return cudaSuccess;
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;  // nothing was compiled for sm_90a
  CUtensorMap codes, rows;
  if (cudaError_t error =
          describe(codes, args.weights_enk, args.k / 2, args.n, args.e, 32, 1, kCodeBytes))
    return error;
  if (cudaError_t error = describe(rows, args.rows_Nk, args.k, args.N, 1)) return error;
  auto* kernel = args.format == WeightFormat::kNvfp4 ? mxfp4_gemm_kernel<Nvfp4Scales>
                                                     : mxfp4_gemm_kernel<Mxfp4Scale>;
  return launch(kernel, device.multiprocessors, kThreads, shared_bytes(args.e), stream, args, codes,
                rows);
}

}  // namespace epmoe::cuda
