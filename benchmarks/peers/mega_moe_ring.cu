// Launches the sm_90 MegaMoE kernel of sgl-deep-gemm 0.2.5 from the headers of its wheel, without
// the wheel's library. There is one library for each set of the constants LAYER_…, which
// mega_moe_ring.py defines.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <deep_gemm/impls/sm90_fp8_mega_moe.cuh>
#include <deep_gemm/impls/sm90_mega_moe_pre_dispatch.cuh>

constexpr float inf =
    cute::numeric_limits<float>::infinity();  // the name that nvcc writes in its stub for the host

namespace {

namespace layout = deep_gemm::layout;

constexpr int64_t R = LAYER_RANKS, M = LAYER_MAX_TOKENS, K = LAYER_TOP_K, D = LAYER_HIDDEN,
                  F = LAYER_INTERMEDIATE;
constexpr int64_t e = LAYER_EXPERTS / R;
constexpr int64_t kBlock = 128, kTileN = 256;
constexpr int kPool = layout::get_num_max_pool_tokens_sm90<int>(R, M, K, e);
constexpr int kRows =
    LAYER_RING_TOKENS ? LAYER_RING_TOKENS : kPool;  // that the window has at a time
constexpr int kScales = layout::get_num_sf_ring_tokens<int>(kRows, 64);
constexpr int kTileM = LAYER_TILE_M;
constexpr bool kPaired = kTileM == 128;  // clusters of two blocks, which share weights
constexpr bool kCounts = kPaired || LAYER_COUNTS;
constexpr bool kEarly = LAYER_EARLY;  // launched before the kernel ahead of it has ended

constexpr auto layer = deep_gemm::sm90_fp8_mega_moe_impl < M, D, F, LAYER_EXPERTS, K, LAYER_WAVE,
               kTileM, kTileN, kBlock, kPool, kScales, kRows, LAYER_STAGES, 64, 64, 256, LAYER_SMS,
               R, inf, true, 0, kPaired, kCounts, !kCounts, kPaired, kPaired ? 2 : 1, kPaired,
               LAYER_LAG, kPaired ? 4 : 0, false, false, LAYER_STORES, kEarly, LAYER_EARLY_COMBINE,
               1, kEarly > ;

enum Part {
  kX,
  kXScales,
  kIds,
  kWeights,
  kIn,
  kInScales,
  kInWeights,
  kMid,
  kMidScales,
  kOut,
  kParts
};

// Where the parts of a window start, in bytes, and where the last one ends. The kernel has the same
// sums.
std::array<int64_t, kParts + 1> starts() {
  layout::SM90Workspace signals(nullptr, R, LAYER_EXPERTS, M, K, kRows < kPool ? kRows : 0);
  std::array<int64_t, kParts + 1> sums = {int64_t(signals.get_num_bytes()),
                                          M * D,
                                          M * D / 32,
                                          M * K * 8,
                                          M * K * 4,
                                          kRows * D,
                                          kScales * D / 32,
                                          kRows * 4,
                                          kRows * F,
                                          kScales * F / 32,
                                          M * K * D * 2};
  for (int i = 0; i < kParts; ++i) sums[i + 1] += sums[i];
  return sums;
}

// How TMA copies boxes of a matrix, of bytes or of floats. Throws what went wrong.
CUtensorMap boxes(const void* matrix, bool floats, int64_t columns, int64_t rows, int width,
                  int height, bool swizzled) {
  static auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  CUtensorMap map{};
  cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)},
             pitch[] = {cuuint64_t(columns) * (floats ? 4 : 1)};
  cuuint32_t box[] = {cuuint32_t(width), cuuint32_t(height)}, steps[] = {1, 1};
  auto type = floats ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  auto swizzle = swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  if (!encode || encode(&map, type, 2, const_cast<void*>(matrix), sizes, pitch, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw "a tensor map was refused";
  return map;
}

}  // namespace

// As mega_moe_ring.py has it. Tensors are contiguous. gate_up has 8 rows of each by turns.
struct Args {
  const __nv_bfloat16* x_TD;
  const int32_t* ids_TK;
  const float* weights_TK;
  __nv_bfloat16* y_TD;
  const __nv_fp8_e4m3 *gate_up, *down;
  const float *gate_up_scales, *down_scales;
  const int64_t* windows_R;  // addresses, in host memory
  int64_t rank, T;
};

extern "C" int64_t window_bytes() { return starts()[kParts]; }

// Launches the kernel that quantizes, and the layer. Returns what went wrong, or null.
extern "C" const char* launch(const Args* args, cudaStream_t stream) try {
  std::array<int64_t, R> windows;
  std::copy_n(args->windows_R, R, windows.begin());
  auto at = [start = starts(), window = reinterpret_cast<char*>(windows[args->rank])](
                Part part) -> void* { return window + start[part]; };
  int threads = D / 8, unused = (M - args->T) * K;
  deep_gemm::sm90_mega_moe_pre_dispatch_kernel<kBlock, false>
      <<<args->T + (unused + threads - 1) / threads, threads, 0, stream>>>(
          args->x_TD, args->ids_TK, args->weights_TK, static_cast<__nv_fp8_e4m3*>(at(kX)),
          static_cast<float*>(at(kXScales)), static_cast<int64_t*>(at(kIds)),
          static_cast<float*>(at(kWeights)), args->T, M, D, D / kBlock, K, 1.0f);

  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kPaired ? 2 : 1, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {.gridDim = LAYER_SMS,
                               .blockDim = 384,
                               .dynamicSmemBytes = LAYER_SHARED_BYTES,
                               .stream = stream};
  config.attrs = attributes;
  config.numAttrs = kEarly ? 2 : 1;
  auto problem =
      cudaFuncSetAttribute(layer, cudaFuncAttributeMaxDynamicSharedMemorySize, LAYER_SHARED_BYTES);
  if (problem == cudaSuccess)
    problem = cudaLaunchKernelEx(&config, layer, static_cast<void*>(args->y_TD),
                                 static_cast<int*>(nullptr), static_cast<uint32_t>(args->T),
                                 layout::SymBuffer<R>(windows, static_cast<uint32_t>(args->rank)),
                                 boxes(at(kIn), false, D, kRows, kBlock, kTileM, true),
                                 boxes(at(kInScales), true, kScales, D / kBlock, kTileM, 1, false),
                                 boxes(args->gate_up, false, D, e * F * 2, kBlock, kTileN, true),
                                 args->gate_up_scales,
                                 boxes(at(kMid), false, F, kRows, kBlock, 64, kPaired),
                                 boxes(at(kMid), false, F, kRows, kBlock, kTileM, true),
                                 boxes(at(kMidScales), true, kScales, F / kBlock, kTileM, 1, false),
                                 boxes(args->down, false, F, e * D, kBlock, kTileN, true),
                                 args->down_scales, static_cast<uint64_t*>(nullptr));
  return problem == cudaSuccess ? nullptr : cudaGetErrorString(problem);
} catch (const char* problem) {
  return problem;
}
