// Grouped GEMMs of Hopper in bf16: rows by the weights of their experts, in both directions, and
// gradients of weights.
//
//   rows [N, k] · weights [e, n, k]ᵀ or [e, k, n] ─▶ [N, n]        grad [N, n]ᵀ · rows [N, k] ─▶
//   [e, n, k]
//
// A block takes tiles in turn. One thread loads, by TMA and some steps ahead; two warpgroups
// multiply 64 rows of a tile each. By rows, products are turned as they leave. For weights, rows
// are what is summed over, in steps of 64, and 16 at last; rows of others that the last step has
// loaded are zeroed.
#include "cuda/device/launch.cuh"
#include "cuda/hopper/multiply.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;

// Products leave through shared memory, gradients of weights all at once: while TMA stores them the
// next tile starts.
template <Product kProduct>
constexpr int kStages = kProduct == Product::kForWeights ? 3 : 4;
template <Product kProduct>
using Stages = Ring<kStages<kProduct>, kStageBytes>;
template <Product kProduct>
constexpr int kLeavingBoxes = kProduct == Product::kForWeights ? 4 : 2;  // of a warpgroup

template <Product kProduct>
int64_t shared_bytes(int32_t experts) {
  return Stages<kProduct>::kBytes + kMultipliers * kLeavingBoxes<kProduct> * kBoxBytes +
         (experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <Product kProduct>
__device__ __forceinline__ void load_tile(const GroupedGemmArgs& args, const CUtensorMap& a,
                                          const CUtensorMap& b, const Tile& tile,
                                          Stages<kProduct>& ring) {
  int32_t boxes = kProduct == Product::kForWeights ? kColumns / 64 : ceil_of(tile.width, 64);
  for (int32_t step = 0; step < steps_of<kProduct>(args, tile); ++step, ++ring.turn) {
    ring.wait_empty();
    uint32_t to = ring.stage();
    uint64_t* full = ring.filled();
    expect_bytes(full, kABytes + boxes * kBoxBytes);
    for (int32_t i = 0; i < kMultipliers; ++i) {
      int32_t m = tile.m + 64 * i;
      if (kProduct == Product::kByRows)
        load_box(a, to + i * kBoxBytes, full, step * kStep, m, tile.expert);
      else if (kProduct == Product::kByRowsTransposed)
        load_box(a, to + i * kBoxBytes, full, m, step * kStep, tile.expert);
      else
        load_box(a, to + i * kBoxBytes, full, m, tile.row + step * kStep, 0);
    }
    for (int32_t i = 0; i < boxes; ++i) {
      if (kProduct == Product::kForWeights)
        load_box(b, to + kABytes + i * kBoxBytes, full, tile.c + 64 * i, tile.row + step * kStep,
                 0);
      else
        load_box(b, to + kABytes + i * kBoxBytes, full, step * kStep, tile.row + 64 * i, 0);
    }
  }
}

// A warpgroup's gradients of weights [64, kColumns] leave by TMA.
__device__ __forceinline__ void store_gradients(const CUtensorMap& map, const Tile& tile,
                                                uint32_t leaving, const float (&d)[kColumns / 2]) {
  const int32_t group = threadIdx.x / kWarpgroup, lane = threadIdx.x % 32,
                warp = threadIdx.x % kWarpgroup / 32;
  const bool stores = threadIdx.x % kWarpgroup == 0;
  if (stores) tma_wait_read<0>();
  barrier(2 + group, kWarpgroup);
#pragma unroll
  for (int c = 0; c < kColumns; c += 16) {
    int32_t line = warp * 16 + lane % 16, part = c / 8 % 8 + lane / 16;
    store_matrices<false>(leaving + c / 64 * kBoxBytes + in_box(line, part), &d[c / 2]);
  }
  fence_shared_for_tma();
  barrier(2 + group, kWarpgroup);
  if (!stores) return;
  for (int32_t i = 0; i < kColumns / 64; ++i)
    store_box(map, leaving + i * kBoxBytes, tile.c + 64 * i, tile.m + 64 * group, tile.expert);
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

#endif

template <Product kProduct>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemmArgs args,
                        const __grid_constant__ CUtensorMap a,
                        const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ CUtensorMap out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  constexpr int kLeaving = kLeavingBoxes<kProduct> * kBoxBytes;
  char* leaving = shared + kStages<kProduct> * kStageBytes;
  auto* mbarriers = reinterpret_cast<uint64_t*>(leaving + kMultipliers * kLeaving);
  Stages<kProduct> ring(shared, mbarriers, 1, kMultipliers * kWarpgroup / 32);
  Tiles<kProduct> tiles{args, reinterpret_cast<int32_t*>(mbarriers + 2 * kStages<kProduct>)};
  wait_for_predecessor();
  let_successor_start();
  if (threadIdx.x < 32) tiles.build();
  __syncthreads();
  const int32_t count = tiles.count();
  if (threadIdx.x >= kMultipliers * kWarpgroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != kMultipliers * kWarpgroup) return;
    for (int32_t number = blockIdx.x; number < count; number += gridDim.x)
      load_tile<kProduct>(args, a, b, tiles[number], ring);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  leaving += threadIdx.x / kWarpgroup * kLeaving;
  for (int32_t number = blockIdx.x; number < count; number += gridDim.x) {
    const Tile tile = tiles[number];
    if constexpr (kProduct == Product::kForWeights) {
      float sums[kColumns / 2] = {};
      multiply_tile<kProduct>(args, tile, ring, sums);
      store_gradients(out, tile, shared_address(leaving), sums);
    } else {
      multiply_rows<kProduct, kLeaving / kLineBytes>(args, tile, ring, leaving);
    }
  }
  if (kProduct == Product::kForWeights && threadIdx.x % kWarpgroup == 0) tma_wait_written<0>();
#endif
}

template <Product kProduct>
cudaError_t launch_product(const GroupedGemmArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;  // nothing was compiled for sm_90a
  CUtensorMap a, b, out = {};
  if (cudaError_t error = describe(b, args.rows_Nk, args.k, args.N, 1)) return error;
  cudaError_t error = kProduct == Product::kByRows
                          ? describe(a, args.weights_enk, args.k, args.n, args.e)
                      : kProduct == Product::kByRowsTransposed
                          ? describe(a, args.weights_enk, args.n, args.k, args.e)
                          : describe(a, args.grad_Nn, args.n, args.N, 1);
  if (error) return error;
  if (kProduct == Product::kForWeights)
    if (cudaError_t error = describe(out, args.out, args.k, args.n, args.e)) return error;
  return launch(grouped_gemm_kernel<kProduct>, device.multiprocessors, kThreads,
                shared_bytes<kProduct>(args.e), stream, args, a, b, out);
}

}  // namespace

cudaError_t grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream) {
  if (args.N == 0 || args.e == 0) return cudaSuccess;
  if (!args.weights_enk) return launch_product<Product::kForWeights>(args, stream);
  return args.transposed ? launch_product<Product::kByRowsTransposed>(args, stream)
                         : launch_product<Product::kByRows>(args, stream);
}

}  // namespace epmoe::cuda
