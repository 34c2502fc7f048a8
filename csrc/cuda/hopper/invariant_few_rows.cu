// The experts stage where each expert has a few rows, in bits of the GEMMs for many rows. Libraries divide k there;
// here the tensor core sums along k in the steps of `grouped_gemm`, in fp8 in those of DeepGEMM, which scales each
// block of 128 of k on its own. Weights stream through a ring, most of a multiprocessor's shared memory.
//
//   rows ─ gate and up ─▶ [N, 2F] ─ gated activation ─▶ h ─ down ─▶ outputs
//
// A block takes tiles in turn: 64 weight rows and up to 32 rows of an expert, whose columns are rounded up to 16 or 32.
// One thread loads, by TMA and some steps of k ahead, and a warpgroup multiplies. Any number of rows is right: an
// expert's weights are read again, mostly from L2, for each further 32 rows.
#include "cuda/hopper/ring.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/local/few_rows.cuh"

namespace epmoe::cuda {
namespace {

constexpr int kLines = 64, kTokens = 32, kTokensOfBox = 16;  // of a tile: weight rows, rows of an expert at most
constexpr int kWarpgroup = 128, kThreads = kWarpgroup + 32;
// Two blocks on a multiprocessor: while one waits for its first bytes or writes products, the other one loads.
constexpr int kStages = 7, kBlocksPerSM = 2;
constexpr int kStageBytes = kBoxBytes + kTokens * kLineBytes, kLeavingBytes = kTokens * kLineBytes;
constexpr int kSwizzleBytes = 1024;  // to whose multiples boxes are aligned

// One of the two products.
struct OrderedProduct {
  Segments segments;
  int64_t N, k, n;          // n: weight rows
  const float* row_scales;  // fp8: of a row and a block of k, at these strides
  int64_t row_stride, block_stride;
  const float* weight_scales;  // fp8: [e, n / 128, k / 128]
  bool early;                  // segments and weights may be read before the predecessor has completed
  void* out;                   // bf16 [N, n]
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
  int32_t expert, row, count, m;  // rows of an expert, and the first of the weight rows

  __device__ __forceinline__ int32_t boxes() const { return (count + kTokensOfBox - 1) / kTokensOfBox; }
};

// The tiles of this block.
struct OwnTiles {
  const Expert* experts;
  int32_t num_experts, groups;  // groups of kLines weight rows

  template <typename F>
  __device__ __forceinline__ void for_each(F&& visit) const {
    for (int32_t task = blockIdx.x; task < num_experts * groups; task += gridDim.x) {
      const Expert expert = experts[task / groups];
      for (int32_t first = 0; first < expert.count; first += kTokens)
        visit(Tile{expert.index, expert.start + first, min(expert.count - first, kTokens), task % groups * kLines});
    }
  }
};

using Stages = Ring<kStages, kStageBytes>;

template <bool kFp8>
__device__ __forceinline__ void load_tiles(const OrderedProduct& p, const CUtensorMap& weights, const CUtensorMap& rows,
                                           const OwnTiles& tiles, Stages& ring, Predecessor& predecessor) {
  constexpr int kElements = kLineBytes / (kFp8 ? 1 : 2), kRowBytes = kTokensOfBox * kLineBytes;  // of a box
  const int32_t steps = static_cast<int32_t>(p.k) / kElements;
  auto load_weights = [&](const Tile& tile, int32_t step) {
    expect_bytes(ring.filled(), kBoxBytes + tile.boxes() * kRowBytes);
    load_box(weights, ring.stage(), ring.filled(), step * kElements, tile.m, tile.expert);
  };
  if (p.early)
    tiles.for_each([&](const Tile& tile) {
      for (int32_t step = 0; step < steps && ring.turn < kStages; ++step, ++ring.turn) load_weights(tile, step);
    });
  const int32_t loaded = ring.turn;
  ring.turn = 0;
  predecessor.wait();
  tiles.for_each([&](const Tile& tile) {
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      if (ring.turn >= loaded) {
        ring.wait_empty();
        load_weights(tile, step);
      }
      for (int32_t i = 0; i < tile.boxes(); ++i)
        load_box(rows, ring.stage() + kBoxBytes + i * kRowBytes, ring.filled(), step * kElements,
                 tile.row + i * kTokensOfBox, 0);
    }
  });
}

// Each step adds 64 of k, in instructions of 16.
template <int kWidth>
__device__ __forceinline__ void multiply_bf16(int32_t steps, Stages& ring, float (&sums)[kWidth / 2]) {
  for (int32_t step = 0; step < steps; ++step) {
    ring.wait_filled();
    const uint32_t a = ring.stage(), b = a + kBoxBytes;
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kLineBytes; k += 32)
      wgmma<kWidth, false, false>(sums, wgmma_operand(a + k), wgmma_operand(b + k));
    wgmma_commit();
    ++ring.turn;
    if (step) {
      wgmma_wait<1>();
      ring.release(2);
    }
  }
  wgmma_wait<0>();
  ring.release(1);
}

// Each step is a block of 128 of k, whose sums are scaled in fp32. `scales` [steps, kWidth] are products of both
// scales.
template <int kWidth>
__device__ __forceinline__ void multiply_fp8(int32_t steps, Stages& ring, const float* scales,
                                             float (&sums)[kWidth / 2]) {
  float block[kWidth / 2] = {};
  scales += 2 * (threadIdx.x % 4);
  for (int32_t step = 0; step < steps; ++step, scales += kWidth) {
    ring.wait_filled();
    const uint32_t a = ring.stage(), b = a + kBoxBytes;
    wgmma_begin();
    wgmma_fp8<kWidth, false>(block, wgmma_operand(a), wgmma_operand(b));
#pragma unroll
    for (int k = 32; k < kLineBytes; k += 32)
      wgmma_fp8<kWidth, true>(block, wgmma_operand(a + k), wgmma_operand(b + k));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (float& sum : block) asm volatile("" : "+f"(sum)::"memory");  // nothing reads it before
    ++ring.turn;
    ring.release(1);
#pragma unroll
    for (int i = 0; i < kWidth / 2; i += 4) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + 2 * i);
      sums[i] = fmaf(scale.x, block[i], sums[i]);
      sums[i + 1] = fmaf(scale.y, block[i + 1], sums[i + 1]);
      sums[i + 2] = fmaf(scale.x, block[i + 2], sums[i + 2]);
      sums[i + 3] = fmaf(scale.y, block[i + 3], sums[i + 3]);
    }
  }
}

// The warpgroup's products [64 weight rows, kWidth rows] leave as rows.
template <bool kFp8, int kWidth>
__device__ __forceinline__ void multiply_tile(const OrderedProduct& p, const Tile& tile, Stages& ring, float* scales,
                                              char* leaving) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sums[kWidth / 2] = {};
  barrier(1, kWarpgroup);  // what the last tile has in shared memory has been read
  if constexpr (kFp8) {
    const int32_t blocks = static_cast<int32_t>(p.k / kScaleBlock);
    const float* of_weights = p.weight_scales + (tile.expert * p.n + tile.m) / kScaleBlock * blocks;
    for (int32_t i = threadIdx.x; i < blocks * kWidth; i += kWarpgroup) {
      int32_t column = i % kWidth, block = i / kWidth;
      scales[i] = column < tile.count
                      ? p.row_scales[(tile.row + column) * p.row_stride + block * p.block_stride] * of_weights[block]
                      : 0.0f;
    }
    barrier(1, kWarpgroup);
    multiply_fp8<kWidth>(blocks, ring, scales, sums);
  } else {
    multiply_bf16<kWidth>(static_cast<int32_t>(p.k) / (kLineBytes / 2), ring, sums);
  }
#pragma unroll
  for (int c = 0; c < kWidth; c += 16) {
    const float* d = &sums[c / 2];
    int32_t line = c + lane / 16 * 8 + lane % 8, part = warp * 2 + lane / 8 % 2;
    store_matrices<true>(shared_address(leaving) + in_box(line, part), packed(d[0], d[1]), packed(d[2], d[3]),
                         packed(d[4], d[5]), packed(d[6], d[7]));
  }
  barrier(1, kWarpgroup);
  const int32_t part = threadIdx.x % 8;
  auto* out = static_cast<__nv_bfloat16*>(p.out) + tile.row * p.n + tile.m + part * 8;
  for (int32_t line = threadIdx.x / 8; line < tile.count; line += kWarpgroup / 8)
    *reinterpret_cast<uint4*>(out + line * p.n) = *reinterpret_cast<const uint4*>(leaving + in_box(line, part));
}

#endif

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    ordered_product(const __grid_constant__ OrderedProduct p, const __grid_constant__ CUtensorMap weights,
                    const __grid_constant__ CUtensorMap rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char given[];
  char* stages = given + (-shared_address(given) & (kSwizzleBytes - 1));
  char* leaving = stages + kStages * kStageBytes;
  auto* full = reinterpret_cast<uint64_t*>(leaving + kLeavingBytes);
  auto* scales = reinterpret_cast<float*>(full + 2 * kStages);
  auto* experts = reinterpret_cast<Expert*>(scales + (kFp8 ? p.k / kScaleBlock * kTokens : 0));
  Stages ring{shared_address(stages), full, full + kStages};
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kStages; ++i) init_mbarrier(&ring.full[i], 1), init_mbarrier(&ring.empty[i], 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  Predecessor predecessor;
  if (!p.early) predecessor.wait();
  const OwnTiles tiles{experts, list_experts<kTokens>(p.segments, p.N, experts), static_cast<int32_t>(p.n) / kLines};
  if (threadIdx.x == kWarpgroup) load_tiles<kFp8>(p, weights, rows, tiles, ring, predecessor);
  predecessor.wait();
  if (threadIdx.x >= kWarpgroup) return;
  tiles.for_each([&](const Tile& tile) {
    if (tile.boxes() == 1)
      multiply_tile<kFp8, kTokensOfBox>(p, tile, ring, scales, leaving);
    else
      multiply_tile<kFp8, kTokens>(p, tile, ring, scales, leaving);
  });
#endif
}

template <bool kFp8>
cudaError_t launch_product(const OrderedProduct& p, const void* weights, const void* rows, cudaStream_t stream) {
  constexpr int kElementBytes = kFp8 ? 1 : 2;
  const int64_t e = p.segments.num_local_experts;
  CUtensorMap of_weights, of_rows;
  if (cudaError_t error = describe(of_weights, weights, p.k, p.n, e, kLines, kElementBytes)) return error;
  if (cudaError_t error = describe(of_rows, rows, p.k, p.N, 1, kTokensOfBox, kElementBytes)) return error;
  int64_t scales = kFp8 ? p.k / kScaleBlock * kTokens * static_cast<int64_t>(sizeof(float)) : 0;
  int64_t shared = kSwizzleBytes + kStages * (kStageBytes + 2 * static_cast<int64_t>(sizeof(uint64_t))) +
                   kLeavingBytes + scales + table_entries(e) * static_cast<int64_t>(sizeof(Expert));
  return launch_at_most(kBlocksPerSM, ordered_product<kFp8>, e * (p.n / kLines), kThreads, shared, stream, p,
                        of_weights, of_rows);
}

template <bool kFp8>
cudaError_t launch_stage(const FewRowsArgs& args, cudaStream_t stream) {
  auto scales = [](const void* at) { return static_cast<const float*>(at); };
  const OrderedProduct gate_up{
      .segments = args.segments,
      .N = args.N,
      .k = args.D,
      .n = 2 * args.F,
      .row_scales = args.row_scales_NB,
      .row_stride = args.row_scales_stride,
      .block_stride = 1,
      .weight_scales = scales(args.gate_up_scales),
      .early = false,
      .out = args.gate_up_N2F,
  };
  if (cudaError_t error = launch_product<kFp8>(gate_up, args.gate_up_e2FD, args.rows_ND, stream)) return error;
  const GatedActivationArgs activation{
      .gate_up_N2F = args.gate_up_N2F,
      .dtype = DType::kBFloat16,
      .gate_up_stride = 2 * args.F,
      .segments = args.segments,
      .bias_e2F = args.gate_up_bias,
      .N = args.N,
      .F = args.F,
      .interleaved = args.interleaved,
      .gating = args.gating,
      .out_NF = args.h_NF,
      .scales_BN = kFp8 ? args.h_scales_BN : nullptr,
      .scales_stride = args.h_scales_stride,
  };
  if (cudaError_t error = gated_activation(activation, stream)) return error;
  // All that wrote segments and weights had completed before the activation began.
  const OrderedProduct down{
      .segments = args.segments,
      .N = args.N,
      .k = args.F,
      .n = args.D,
      .row_scales = args.h_scales_BN,
      .row_stride = 1,
      .block_stride = args.h_scales_stride,
      .weight_scales = scales(args.down_scales),
      .early = true,
      .out = args.out_ND,
  };
  return launch_product<kFp8>(down, args.down_eDF, args.h_NF, stream);
}

}  // namespace

cudaError_t invariant_few_rows(const FewRowsArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;  // nothing was compiled for sm_90a
  return args.format == WeightFormat::kFp8 ? launch_stage<true>(args, stream) : launch_stage<false>(args, stream);
}

}  // namespace epmoe::cuda
