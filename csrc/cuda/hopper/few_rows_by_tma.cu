// The experts stage where each expert has a few rows, with the bits of the GEMMs for many rows. The
// kernels of few_rows.cu divide k among warps; here the tensor core sums along k in the steps of
// `grouped_gemm`, or in fp8 of DeepGEMM, which scales each block of 128 of k on its own. Two
// kernels:
//
//   rows ─ gate and up, activation ─▶ h ─ down ─▶ outputs
//
// A block takes tiles in turn: up to 32 or 64 rows of an expert, in columns of a multiple of 16, by
// 64 weight rows for each of its warpgroups. One thread loads, by TMA and some steps of k ahead,
// since what takes time is to read the weights once. Products pass through shared memory, rounded
// to bf16: of gate and up 32 gates of a warpgroup meet their ups there. Any number of rows is
// right: weights are read again, mostly from L2, for each further tile of an expert.
#include "cuda/device/fp8.cuh"
#include "cuda/hopper/ring.cuh"
#include "cuda/local/few_rows.cuh"
#include "cuda/local/gates.cuh"

namespace epmoe::cuda {
namespace {

constexpr int kTokensOfBox = 16;     // lines
constexpr int kSwizzleBytes = 1024;  // of eight lines, to whose multiples boxes are aligned

// Warpgroups of a block that multiply.
constexpr int groups_of(bool fp8, bool down) {
  if (!fp8) return 1;
  return down ? 2 : 4;
}

// Scales of weights in a block of k: of gate and up, or of down.
constexpr int scales_of(bool fp8, bool down) {
  if (!fp8) return 0;
  return down ? 1 : 2;
}

// As many stages as fit into shared memory.
constexpr int stages_of(int groups, int tokens) {
  if (tokens == 32) return groups == 1 ? 7 : 4;
  return groups == 1 ? 5 : 3;
}

// A block: one thread that loads, and warpgroups. Where outputs become fp8, 128 of them share a
// scale. Two blocks share a multiprocessor else: one loads while the other one waits for its first
// bytes, or writes. A tile has kMostTokens rows at most, and the more it may have, the fewer stages
// fit.
template <bool kOfFp8, bool kOfDown, int kMostTokens>
struct Shape {
  static constexpr bool kFp8 = kOfFp8;
  static constexpr bool kDown = kOfDown;
  static constexpr int kTokens = kMostTokens;
  // Products of a warpgroup that leave.
  static constexpr int kLeavingBytes = kTokens * kLineBytes;
  static constexpr int kGroups = groups_of(kFp8, kDown);
  static constexpr int kBlocksPerSM = kGroups <= 2 ? 2 : 1;
  static constexpr int kMultipliers = kGroups * kWarpgroup;
  static constexpr int kThreads = kMultipliers + 32;
  // A stage has the weights of all warpgroups in as few boxes as can be: large ones load faster.
  static constexpr int kBoxes = kDown ? 1 : 2;
  static constexpr int kWeightsOfBox = kGroups * 64 / kBoxes;  // lines
  // Columns of `out` in a tile.
  static constexpr int kOutputs = kGroups * (kDown ? 64 : 32);
  static constexpr int kStages = stages_of(kGroups, kTokens);
  static constexpr int kStageBytes = kGroups * kBoxBytes + kTokens * kLineBytes;
  static constexpr int kScales = scales_of(kFp8, kDown);
  // Values of h that a row keeps.
  static constexpr int kLargest = kFp8 && !kDown ? kGroups : 0;
  // Elements of k in a step.
  static constexpr int kElements = kLineBytes / (kFp8 ? 1 : 2);
  using Stages = Ring<kStages, kStageBytes>;

  // Products of scales, then the largest values of h.
  __host__ __device__ static constexpr int64_t floats(int64_t k) {
    return (kScales * (k / kScaleBlock) + kLargest) * kTokens;
  }
  static int64_t shared_bytes(int64_t k, int64_t experts) {
    int64_t fixed = kSwizzleBytes + Stages::kBytes + kGroups * kLeavingBytes;
    return fixed + floats(k) * static_cast<int64_t>(sizeof(float)) +
           table_entries(experts) * static_cast<int64_t>(sizeof(Expert));
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct Tile {
  int32_t expert, row, count, column;  // rows of an expert, and the first column of `out`

  __device__ __forceinline__ int32_t boxes() const {
    return (count + kTokensOfBox - 1) / kTokensOfBox;
  }
};

// The first weight row of a tile's i-th box: of gates and of their ups, or of both by turns.
template <typename S>
__device__ __forceinline__ int32_t box_row(const FewRowsArgs& args, const Tile& tile, int32_t i) {
  if (S::kDown) return tile.column;
  if (args.interleaved) return 2 * tile.column + i * S::kWeightsOfBox;
  return tile.column + i * static_cast<int32_t>(args.F);
}

// Down may read segments and weights while gate and up still run: these had waited for all that
// wrote them.
template <typename S, typename Tiles>
__device__ __forceinline__ void load_tiles(const FewRowsArgs& args, const Product& p,
                                           const CUtensorMap& weights, const CUtensorMap& rows,
                                           const Tiles& for_each_tile, typename S::Stages ring,
                                           Predecessor& predecessor) {
  constexpr int kRowBytes = kTokensOfBox * kLineBytes,
                kWeightBytes = S::kWeightsOfBox * kLineBytes;  // of a box
  const int32_t steps = static_cast<int32_t>(p.k) / S::kElements;
  auto load_weights = [&](const Tile& tile, int32_t step) {
    expect_bytes(ring.filled(), S::kGroups * kBoxBytes + tile.boxes() * kRowBytes);
    for (int32_t i = 0; i < S::kBoxes; ++i)
      load_box(weights, ring.stage() + i * kWeightBytes, ring.filled(), step * S::kElements,
               box_row<S>(args, tile, i), tile.expert);
  };
  if (S::kDown)
    for_each_tile([&](const Tile& tile) {
      for (int32_t step = 0; step < steps && ring.turn < S::kStages; ++step, ++ring.turn)
        load_weights(tile, step);
    });
  const int32_t loaded = ring.turn;
  ring.turn = 0;
  predecessor.wait();
  for_each_tile([&](const Tile& tile) {
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      if (ring.turn >= loaded) {
        ring.wait_empty();
        load_weights(tile, step);
      }
      for (int32_t i = 0; i < tile.boxes(); ++i)
        load_box(rows, ring.stage() + S::kGroups * kBoxBytes + i * kRowBytes, ring.filled(),
                 step * S::kElements, tile.row + i * kTokensOfBox, 0);
    }
  });
}

// The 64 weight rows of a warpgroup within a stage, in eights of lines: neighbours, or, where gates
// and ups have boxes of their own, each kGroups-th eight of both boxes. So a warpgroup has 32 gates
// and their ups.
struct WeightsOfGroup {
  uint32_t first, next;  // bytes: of the first eight, and from one to the next

  template <typename S>
  static __device__ __forceinline__ WeightsOfGroup of(const FewRowsArgs& args, int32_t group) {
    if (S::kDown || args.interleaved)
      return {static_cast<uint32_t>(group) * kBoxBytes, kSwizzleBytes};
    return {static_cast<uint32_t>(group) * kSwizzleBytes, S::kGroups * kSwizzleBytes};
  }
  __device__ __forceinline__ uint64_t operand(uint32_t stage, int32_t k) const {
    return wgmma_operand(stage + first + k, 0, next);
  }
};

// The sums of a warpgroup in fp8: each step is a block of 128 of k, whose sums are scaled in fp32.
// Addresses are those within a stage. `scales` [steps, kWidth] are products of the scales of rows
// and weights.
template <int kWidth, typename Stages>
__device__ __forceinline__ void multiply_fp8(int32_t steps, Stages& ring, WeightsOfGroup a,
                                             uint32_t b, const float* scales,
                                             float (&sums)[kWidth / 2]) {
  float block[kWidth / 2] = {};
  scales += 2 * (threadIdx.x % 4);
  for (int32_t step = 0; step < steps; ++step, scales += kWidth) {
    ring.wait_filled();
    const uint32_t stage = ring.stage();
    wgmma_begin();
    wgmma<Factors::kFirstFp8>(block, a.operand(stage, 0), wgmma_operand(stage + b));
#pragma unroll
    for (int k = 32; k < kLineBytes; k += 32)
      wgmma<Factors::kFp8>(block, a.operand(stage, k), wgmma_operand(stage + b + k));
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

// All warpgroups write the products of both scales, [S::kScales, blocks of k, kWidth].
template <typename S, int kWidth>
__device__ __forceinline__ void write_scales(const FewRowsArgs& args, const Product& p,
                                             const Tile& tile, float* scales) {
  const int32_t blocks = static_cast<int32_t>(p.k / kScaleBlock);
  const int64_t weight_rows = S::kDown ? p.columns : 2 * p.columns;
  auto* of_weights = static_cast<const float*>(p.weight_scales) +
                     tile.expert * (weight_rows / kScaleBlock) * blocks;
  for (int32_t i = threadIdx.x; i < S::kScales * blocks * kWidth; i += S::kMultipliers) {
    const int32_t column = i % kWidth, block = i / kWidth % blocks, which = i / kWidth / blocks;
    const int64_t row = tile.row + column;
    const int32_t block_row = box_row<S>(args, tile, which) / kScaleBlock;
    scales[i] = 0.0f;
    if (column < tile.count)
      scales[i] = (S::kDown ? args.h_scales_BN[block * args.h_scales_stride + row]
                            : p.row_scales[row * p.row_scales_stride + block]) *
                  of_weights[block_row * blocks + block];
  }
}

// Gates and ups [32, 64] of a warpgroup, from the tile's row `first` on, in bf16 in its part of
// shared memory, become h. A thread has 8 columns of a row.
template <typename S>
__device__ __forceinline__ void write_activated(const FewRowsArgs& args, const Product& p,
                                                const Tile& tile, const char* leaving,
                                                float* largest, int32_t first) {
  using T = __nv_bfloat16;
  constexpr int kCount = kPerVector<T>;
  const int32_t group = threadIdx.x / kWarpgroup, token = first + threadIdx.x % kWarpgroup / 4,
                part = threadIdx.x % 4;
  const int32_t eight = args.interleaved ? 4 * group + part : group + S::kGroups * part;
  const int64_t row = tile.row + token, column = tile.column + kCount * eight;
  const bool real = token < tile.count;
  float gate[kCount] = {}, up[kCount] = {}, value[kCount] = {};
  if (real) {
    auto products = [&](int32_t at) {
      return *reinterpret_cast<const Vector<T, kCount>*>(leaving + in_box(token, at));
    };
    int32_t first_part = args.interleaved ? 2 * part : part;
    int32_t second_part = args.interleaved ? first_part + 1 : first_part + 4;
    GatesAndUps<T, kCount, true>(products(first_part), products(second_part))
        .add_to(gate, up, args.interleaved);
    if (p.bias)
      GatesAndUps<T, kCount, false>(p.bias + int64_t{tile.expert} * 2 * args.F, args.interleaved,
                                    args.F, column, kCount)
          .add_to(gate, up, args.interleaved);
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = gated_fast(gate[i], up[i], args.gating);
  }
  if constexpr (S::kFp8) {
    float most = finite_amax(value);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    if (part == 0) largest[group * S::kTokens + token] = most;
    barrier(1, S::kMultipliers);
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) most = fmaxf(most, largest[i * S::kTokens + token]);
    if (!real) return;
    const float scale = scale_for(most);
    *reinterpret_cast<Fp8Registers<kCount>*>(static_cast<uint8_t*>(p.out) + row * p.columns +
                                             column) = to_fp8(value, scale);
    if (group == 0 && part == 0)
      args.h_scales_BN[column / kScaleBlock * args.h_scales_stride + row] = scale;
  } else if (real) {
    *reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(p.out) + row * p.columns + column) =
        rounded<T>(value);
  }
}

// The warpgroup's products of a tile, as outputs or as h. `scales` has those of write_scales, then
// room for the largest values of each warpgroup.
template <typename S, int kWidth = kTokensOfBox>
__device__ __forceinline__ void multiply_tile(const FewRowsArgs& args, const Product& p,
                                              const Tile& tile, typename S::Stages& ring,
                                              char* leaving, float* scales) {
  if constexpr (kWidth < S::kTokens)
    if (tile.count > kWidth)
      return multiply_tile<S, kWidth + kTokensOfBox>(args, p, tile, ring, leaving, scales);
  const int32_t group = threadIdx.x / kWarpgroup, warp = threadIdx.x % kWarpgroup / 32;
  const int32_t steps = static_cast<int32_t>(p.k) / S::kElements;
  const auto a = WeightsOfGroup::of<S>(args, group);
  const uint32_t b = S::kGroups * kBoxBytes;
  float sums[kWidth / 2] = {};
  barrier(1, S::kMultipliers);  // what the last tile has in shared memory has been read
  if constexpr (S::kFp8) {
    write_scales<S, kWidth>(args, p, tile, scales);
    barrier(1, S::kMultipliers);
    const int32_t which = S::kDown ? 0 : args.interleaved ? group / 2 : warp / 2;
    multiply_fp8<kWidth>(steps, ring, a, b, scales + which * steps * kWidth, sums);
  } else {
    ring.multiply(steps, [&](uint32_t stage) {
#pragma unroll
      for (int k = 0; k < kLineBytes; k += 32)
        wgmma<Factors::kAlong>(sums, a.operand(stage, k), wgmma_operand(stage + b + k));
    });
  }
  leaving += group * S::kLeavingBytes;
  store_turned<kWidth>(shared_address(leaving), sums);
  barrier(2 + group, kWarpgroup);
  if constexpr (S::kDown) {
    using Part = Vector<__nv_bfloat16, 8>;
    const int32_t part = threadIdx.x % 8;
    const int64_t column = tile.column + 64 * group + 8 * part;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + tile.row * p.columns + column;
    Part bias = {};
#pragma unroll
    for (int i = 0; p.bias && i < 8; ++i) bias.at[i] = p.bias[tile.expert * p.columns + column + i];
    for (int32_t line = threadIdx.x % kWarpgroup / 8; line < tile.count; line += kWarpgroup / 8) {
      Part products = *reinterpret_cast<const Part*>(leaving + in_box(line, part));
#pragma unroll
      for (int i = 0; p.bias && i < 8;
           ++i)  // to rounded products, as where an expert has many rows
        products.at[i] = from_float<__nv_bfloat16>(to_float(products.at[i]) + to_float(bias.at[i]));
      *reinterpret_cast<Part*>(out + line * p.columns) = products;
    }
  } else {
    for (int32_t first = 0; first < kWidth; first += 32)
      write_activated<S>(args, p, tile, leaving, scales + S::kScales * steps * S::kTokens, first);
  }
}

#endif

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSM)
    rows_by_tma(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Product p,
                const __grid_constant__ CUtensorMap weights,
                const __grid_constant__ CUtensorMap rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char given[];
  char* stages = given + (-shared_address(given) & (kSwizzleBytes - 1));
  char* leaving = stages + S::kStages * S::kStageBytes;
  auto* mbarriers = reinterpret_cast<uint64_t*>(leaving + S::kGroups * S::kLeavingBytes);
  auto* scales = reinterpret_cast<float*>(mbarriers + 2 * S::kStages);
  auto* experts = reinterpret_cast<Expert*>(scales + S::floats(p.k));
  typename S::Stages ring(stages, mbarriers, 1, S::kMultipliers / 32);
  if (threadIdx.x == S::kMultipliers) prefetch(weights), prefetch(rows);
  Predecessor predecessor;
  if (!S::kDown) predecessor.wait();
  const int32_t num_experts = list_experts<S::kTokens>(args.segments, args.N, experts);
  auto for_each_tile = [&](auto&& visit) {
    const int32_t across = static_cast<int32_t>(p.columns) / S::kOutputs;
    for (int32_t task = blockIdx.x; task < num_experts * across; task += gridDim.x) {
      const Expert expert = experts[task / across];
      for (int32_t first = 0; first < expert.count; first += S::kTokens)
        visit(Tile{expert.index, expert.start + first, min(expert.count - first, S::kTokens),
                   task % across * S::kOutputs});
    }
  };
  if (threadIdx.x == S::kMultipliers)
    load_tiles<S>(args, p, weights, rows, for_each_tile, ring, predecessor);
  predecessor.wait();
  if (threadIdx.x >= S::kMultipliers) return;
  for_each_tile([&](const Tile& tile) { multiply_tile<S>(args, p, tile, ring, leaving, scales); });
#endif
}

template <bool kFp8, int kTokens>
cudaError_t launch_of(const FewRowsArgs& args, cudaStream_t stream) {
  return launch_both(args, [&](const Product& p, auto down) {
    using S = Shape<kFp8, down.value, kTokens>;
    constexpr int kBytes = kFp8 ? 1 : 2;  // of an element
    const int64_t e = args.segments.num_local_experts,
                  weight_rows = S::kDown ? p.columns : 2 * p.columns;
    CUtensorMap weights, rows;
    // Were L2 to fetch 256 bytes where a line of 128 is missing, it would cost up to 6 %.
    if (cudaError_t error = describe(weights, p.weights, p.k, weight_rows, e, S::kWeightsOfBox,
                                     kBytes, kLineBytes, CU_TENSOR_MAP_L2_PROMOTION_L2_128B))
      return error;
    if (cudaError_t error = describe(rows, p.rows, p.k, args.N, 1, kTokensOfBox, kBytes))
      return error;
    return launch_at_most(S::kBlocksPerSM, rows_by_tma<S>, e * (p.columns / S::kOutputs),
                          S::kThreads, S::shared_bytes(p.k, e), stream, args, p, weights, rows);
  });
}

}  // namespace

cudaError_t few_rows_by_tma(const FewRowsArgs& args, cudaStream_t stream) {
  constexpr int64_t kMostD = 8192,
                    kMostF = 32'768;  // in fp8: scales of more do not fit beside tiles of 64 rows
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;  // nothing was compiled for sm_90a
  const bool fp8 = args.format == WeightFormat::kFp8;
  if (args.token_tiles == 8 && (!fp8 || (args.D <= kMostD && args.F <= kMostF)))
    return fp8 ? launch_of<true, 64>(args, stream) : launch_of<false, 64>(args, stream);
  return fp8 ? launch_of<true, 32>(args, stream) : launch_of<false, 32>(args, stream);
}

}  // namespace epmoe::cuda
