// Experts with few rows, weights in MXFP4 or NVFP4: as in few_rows.cu, gate and up in one kernel
// and down in another. Codes become bf16 in registers, scaled exactly, and are multiplied by rows
// in bf16, with sums in fp32; h is bf16. Rows in fp8 become bf16 in registers, too, times their
// scales. Tensor scales of NVFP4 multiply sums and h.
#include "cuda/device/fp8.cuh"
#include "cuda/local/few_rows.cuh"
#include "cuda/local/mxfp4.cuh"

namespace epmoe::cuda {
namespace {

// A chunk is four groups of 32 codes of each weight row: lane 4 g + t has group t, 16 bytes, of
// rows g and g + 8 of each tile.
constexpr int kGroup = 32;
constexpr int kChunkGroups = 4;
constexpr int kGroupBytes = kGroup / 2;
template <bool kFp8Rows>
constexpr int kGroupRowBytes = kGroup * (kFp8Rows ? 1 : 2);
template <bool kFp8Rows>
constexpr int kRowChunkBytes = kChunkGroups * kGroupRowBytes<kFp8Rows>;
static_assert(kGroup * kChunkGroups == kScaleBlock);  // rows in fp8 have a scale for a chunk

// What was measured is in docs/experiments.md, "MXFP4".
constexpr int kWarps = 4;
template <int kTokenTiles>
constexpr int kBlocksPerSM = kTokenTiles <= 2 ? 4 : 3;
template <int kTokenTiles>
constexpr int kChunksOfStep = kTokenTiles <= 2 ? 2 : 1;

// 16 bytes, or zeros unless `real`. Nobody else reads the weights of this thread.
template <bool kWeights>
__device__ __forceinline__ uint4 load_if(bool real, const uint8_t* from) {
  uint4 four;
#define EPMOE_LOAD_IF(kind)                                                                      \
  asm volatile(                                                                                  \
      "{.reg .pred real; setp.ne.s32 real, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; " \
      "mov.b32 %3, 0;"                                                                           \
      "@real ld.global" kind ".v4.u32 {%0, %1, %2, %3}, [%4];}"                                  \
      : "=&r"(four.x), "=&r"(four.y), "=&r"(four.z), "=&r"(four.w)                               \
      : "l"(from), "r"(static_cast<int>(real))                                                   \
      : "memory")
  if constexpr (kWeights)
    EPMOE_LOAD_IF(".nc.L1::no_allocate.L2::128B");
  else
    EPMOE_LOAD_IF("");
#undef EPMOE_LOAD_IF
  return four;
}

// Codes i and i + 4 of eight are a pair, so columns i and i + 4 are one. Factors of two
// instructions: those of eight columns of a row, in bf16, or in fp8 times a scale.
using Pairs = uint32_t[2][2];
__device__ __forceinline__ void load_pairs(bool real, const uint8_t* from, Pairs& b) {
  constexpr uint32_t kLow = 0x5410;
  constexpr uint32_t kHigh = 0x7632;
  const uint4 eight = load_if<false>(real, from);
  b[0][0] = __byte_perm(eight.x, eight.z, kLow);
  b[0][1] = __byte_perm(eight.x, eight.z, kHigh);
  b[1][0] = __byte_perm(eight.y, eight.w, kLow);
  b[1][1] = __byte_perm(eight.y, eight.w, kHigh);
}
__device__ __forceinline__ void load_pairs(bool real, const uint8_t* from, float scale, Pairs& b) {
  Vector<uint8_t, 8> eight = {};
  if (real) eight = *reinterpret_cast<const Vector<uint8_t, 8>*>(from);
  float values[8];
  to_floats(eight, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(values[i] * scale, values[i + 4] * scale);
    b[i / 2][i % 2] = *reinterpret_cast<uint32_t*>(&pair);
  }
}

// sums += weights · rows for a chunk of this lane. rows: of its tokens, and scales of those in fp8;
// real: it has a group there.
template <bool kLarge, bool kFp8Rows, typename Scales, int kTokenTiles>
__device__ __forceinline__ void add_chunk(float (&sums)[kTiles][kTokenTiles][4],
                                          const uint4 (&codes)[kTiles][2],
                                          const Scales (&scale)[kTiles][2],
                                          const uint8_t* const (&rows)[kTokenTiles],
                                          const float (&row_scales)[kTokenTiles], int32_t chunk,
                                          bool real) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t a[2][kTiles][4];  // of two instructions
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          uint32_t value =
              multiply_bf16x2(tiny_pair(component(codes[m][i], j), pair), scale[m][i].factor(j));
          a[pair / 2][m][2 * (pair % 2) + i] =
              kLarge ? multiply_bf16x2(value, scale[m][i].more()) : value;
        }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int64_t offset = int64_t{kRowChunkBytes<kFp8Rows>} * chunk;
      Pairs b;
      if constexpr (kFp8Rows)
        load_pairs(real, rows[n] + offset + 8 * j, row_scales[n], b);
      else
        load_pairs(real, rows[n] + offset + 16 * j, b);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < kTiles; ++m) multiply<false>(sums[m][n], a[half][m], b[half]);
    }
  }
}

// A block takes tasks: kWeightRows weight rows of an expert. Its warps share k.
template <typename Scales, bool kDown, int kTokenTiles, bool kFp8Rows>
__global__ void __launch_bounds__(32 * kWarps, kBlocksPerSM<kTokenTiles>)
    few_rows_mxfp4(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Product p) {
  constexpr int kTokens = 8 * kTokenTiles;
  constexpr int kChunks = kChunksOfStep<kTokenTiles>;
  extern __shared__ Expert experts[];
  Predecessor predecessor;
  if (!kDown) predecessor.wait();
  // Down may read segments and weights while gate and up still run: these had waited for all that
  // wrote them.
  const int32_t num_experts = list_experts<kTokens>(args.segments, args.N, experts);
  const int32_t warp = threadIdx.x / 32;
  const int32_t g = threadIdx.x % 32 / 4;
  const int32_t t = threadIdx.x % 4;
  const int32_t groups_of_row = static_cast<int32_t>(p.k / kGroup);
  const int32_t chunks = (groups_of_row + kChunkGroups - 1) / kChunkGroups;
  const int32_t first_chunk = chunks * warp / kWarps;
  const int32_t last_chunk = chunks * (warp + 1) / kWarps;
  const int64_t weight_rows = kDown ? p.columns : 2 * p.columns;
  const int32_t of_expert = static_cast<int32_t>(p.columns / kColumns<kDown>);  // tasks
  auto* scales = static_cast<const typename Scales::Bytes*>(p.weight_scales);
  for (int64_t task = blockIdx.x; task < int64_t{num_experts} * of_expert; task += gridDim.x) {
    const Expert expert = experts[task / of_expert];
    const int32_t column = static_cast<int32_t>(task % of_expert) * kColumns<kDown>;
    int64_t groups[kTiles][2];  // of this lane, the first in each of its weight rows
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int64_t row = expert.index * weight_rows + weight_row<kDown>(args, p, column, m, 8 * i + g);
        groups[m][i] = row * groups_of_row + t;
      }
    for (int32_t first = 0; first < expert.count; first += kTokens) {
      const uint8_t* rows[kTokenTiles];
      [[maybe_unused]] const float* scales_of_rows[kTokenTiles];
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        // Tokens past the last are the last one again; nobody reads their columns.
        int64_t token = expert.start + min(first + 8 * n + g, expert.count - 1);
        rows[n] = p.rows + token * p.row_bytes + kGroupRowBytes<kFp8Rows> * t;
        if constexpr (kFp8Rows) scales_of_rows[n] = p.row_scales + token * p.row_scales_stride;
      }
      float sums[kTiles][kTokenTiles][4] = {};
#pragma unroll 1
      for (int32_t chunk = first_chunk; chunk < last_chunk; chunk += kChunks) {
        uint4 codes[kChunks][kTiles][2];
        Scales scale[kChunks][kTiles][2];
        float row_scales[kChunks][kTokenTiles];
        bool real[kChunks];  // the last chunk of a row may have fewer groups
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          real[c] = chunk + c < last_chunk && kChunkGroups * (chunk + c) + t < groups_of_row;
#pragma unroll
          for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              int64_t group = groups[m][i] + kChunkGroups * (chunk + c);
              codes[c][m][i] = load_if<true>(real[c], p.weights + kGroupBytes * group);
              scale[c][m][i] = {real[c] ? __ldg(scales + group) : 0u};
            }
#pragma unroll
          for (int n = 0; kFp8Rows && n < kTokenTiles; ++n)
            row_scales[c][n] = real[c] ? scales_of_rows[n][chunk + c] : 0.0f;
        }
        predecessor.wait();
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          bool large = false;
#pragma unroll
          for (int m = 0; m < kTiles; ++m)
            large |= scale[c][m][0].is_large() || scale[c][m][1].is_large();
          if (Scales::kMayBeLarge && __any_sync(kAllLanes, large))
            add_chunk<true, kFp8Rows>(sums, codes[c], scale[c], rows, row_scales[c], chunk + c,
                                      real[c]);
          else
            add_chunk<false, kFp8Rows>(sums, codes[c], scale[c], rows, row_scales[c], chunk + c,
                                       real[c]);
        }
      }
      predecessor.wait();
      constexpr bool kNvfp4 = std::is_same_v<Scales, Nvfp4Scales>;
      write_outputs<false, kDown, kWarps, kTokenTiles, kNvfp4>(args, p, expert, column, first,
                                                               sums);
    }
  }
  predecessor.wait();  // also where there is nothing to do: the next kernel counts on it
}

template <typename Scales, int kTokenTiles>
cudaError_t launch_of(const FewRowsArgs& args, cudaStream_t stream) {
  return launch_both(args, [&](const Product& p, auto down) {
    auto* kernel = few_rows_mxfp4<Scales, down.value, kTokenTiles, false>;
    if constexpr (!down.value)
      if (args.row_scales_NB) kernel = few_rows_mxfp4<Scales, false, kTokenTiles, true>;
    return launch_tasks<down.value>(kernel, kBlocksPerSM<kTokenTiles>, 32 * kWarps, args, p,
                                    stream);
  });
}

template <typename Scales>
cudaError_t launch_with(const FewRowsArgs& args, cudaStream_t stream) {
  if (args.token_tiles == 1) return launch_of<Scales, 1>(args, stream);
  if (args.token_tiles == 2) return launch_of<Scales, 2>(args, stream);
  return launch_of<Scales, 4>(args, stream);
}

}  // namespace

cudaError_t few_rows_mxfp4(const FewRowsArgs& args, cudaStream_t stream) {
  if (args.format == WeightFormat::kNvfp4) return launch_with<Nvfp4Scales>(args, stream);
  return launch_with<Mxfp4Scale>(args, stream);
}

}  // namespace epmoe::cuda
