// The experts stage where each expert has a few rows: what takes time is to read the weights once.
// A weight row fills a row of the matrix that a tensor core multiplies, tokens are its few columns,
// and weights go from memory to registers without a stop in shared memory. Two kernels:
//
//   rows ─ gate and up, activation ─▶ h ─ down ─▶ outputs
//
// fp8 weights are widened to fp16 and multiplied exactly, with sums in fp32; each block of 128 of k
// is scaled on its own. h is fp8 then, with a power of two for every 16 columns. Any number of rows
// is right: an expert's weights are read again, mostly from L2, for each further 8 of its rows.
#include "cuda/local/few_rows.cuh"

namespace epmoe::cuda {
namespace {

constexpr int kLineBytes = 128;  // of a weight row, in one step along k

// What was measured (H100, both kernels, Qwen3-30B-A3B and DeepSeek-V3, 1 to 128 tokens;
// docs/experiments.md): the more warps on a multiprocessor the better, so nothing is loaded ahead,
// which would take registers. With 8 tokens 16 warps fit. Eight warps share the long k of gate and
// up.
constexpr int kTokens = 8;
template <bool kDown>
constexpr int kWarpsOf = kDown ? 4 : 8;
template <bool kDown>
constexpr int kBlocksPerSM = 16 / kWarpsOf<kDown>;

// The weights of this thread: nobody else reads them.
__device__ __forceinline__ uint4 load_weights(const uint8_t* from) {
  uint4 four;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(from));
  return four;
}

// Two of four e4m3 as fp16, exactly.
__device__ __forceinline__ uint32_t to_fp16x2(uint32_t fp8x4, int half) {
  auto two = static_cast<__nv_fp8x2_storage_t>(half ? fp8x4 >> 16 : fp8x4);
  __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  return both.x | static_cast<uint32_t>(both.y) << 16;
}

__device__ __forceinline__ uint32_t multiply_fp16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// A block takes tasks: kWeightRows weight rows of an expert. Its warps share k. Lane 4 g + t has
// rows g and g + 8 of each tile and token g, and of each of them the bytes 16 t and 64 + 16 t of
// every line: which of the k an instruction multiplies does not matter, as long as both sides
// agree.
template <bool kFp8, bool kDown>
__global__ void __launch_bounds__(32 * kWarpsOf<kDown>, kBlocksPerSM<kDown>)
    few_rows(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Product p) {
  constexpr int kWarps = kWarpsOf<kDown>;
  constexpr int64_t kGroup = kScaleBlock / kExponentColumns;  // exponents of a block of k
  extern __shared__ Expert experts[];
  Predecessor predecessor;
  if (!kDown) predecessor.wait();
  // Down may read segments and weights while gate and up still run: these had waited for all that
  // wrote them.
  const int32_t num_experts = list_experts<kTokens>(args.segments, args.N, experts);
  const int32_t lane = threadIdx.x % 32;
  const int32_t warp = threadIdx.x / 32;
  const int32_t g = lane / 4;
  const int32_t t = lane % 4;
  const int64_t row_bytes = kFp8 ? p.k : 2 * p.k;
  const int64_t blocks = p.k / kScaleBlock;
  const int64_t weight_rows = kDown ? p.columns : 2 * p.columns;
  const int32_t lines = static_cast<int32_t>(row_bytes / kLineBytes);
  const int32_t groups = static_cast<int32_t>(p.columns / kColumns<kDown>);
  const int32_t first_line = lines * warp / kWarps;
  const int32_t last_line = lines * (warp + 1) / kWarps;
  for (int64_t task = blockIdx.x; task < int64_t{num_experts} * groups; task += gridDim.x) {
    const Expert expert = experts[task / groups];
    const int32_t column = static_cast<int32_t>(task % groups) * kColumns<kDown>;
    const uint8_t* weights[kTiles][2];
    const float* weight_scales[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int64_t row = weight_row<kDown>(args, p, column, m, 8 * i + g);
        weights[m][i] = p.weights + (expert.index * weight_rows + row) * row_bytes + 16 * t;
        int64_t scale_row = expert.index * (weight_rows / kScaleBlock) + row / kScaleBlock;
        if (kFp8)
          weight_scales[m][i] = static_cast<const float*>(p.weight_scales) + scale_row * blocks;
      }
    for (int32_t first = 0; first < expert.count; first += kTokens) {
      // Tokens past the last are the last one again; nobody reads their columns.
      auto token = [&](int32_t n) -> int64_t {
        return expert.start + min(first + n, expert.count - 1);
      };
      const uint8_t* rows = p.rows + token(g) * row_bytes + 16 * t;
      const float* row_scales[2];
      const uint8_t* exponents_at;
      if (kFp8 && kDown) exponents_at = args.exponents_N + token(g) * (p.k / kExponentColumns);
      if (kFp8 && !kDown)
        for (int i = 0; i < 2; ++i)
          row_scales[i] = p.row_scales + token(2 * t + i) * p.row_scales_stride;
      float sums[kTiles][1][4] = {};
#pragma unroll 1
      for (int32_t line = first_line; line < last_line; ++line) {
        uint4 a_bytes[kTiles][2][2], b_bytes[2];
        float by_row[kTiles][2], by_token[2];
        uint2 exponents;
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < 2; ++c)
              a_bytes[m][i][c] = load_weights(weights[m][i] + line * kLineBytes + 64 * c);
            if (kFp8) by_row[m][i] = weight_scales[m][i][line];
          }
        predecessor.wait();
#pragma unroll
        for (int c = 0; c < 2; ++c)
          b_bytes[c] = *reinterpret_cast<const uint4*>(rows + line * kLineBytes + 64 * c);
        if (kFp8 && kDown)
          exponents = *reinterpret_cast<const uint2*>(exponents_at + line * kGroup);
        if (kFp8 && !kDown)
          for (int i = 0; i < 2; ++i) by_token[i] = row_scales[i][line];
        // In a block of k, columns of h are brought to the largest of its exponents.
        uint32_t factors[2];
        if constexpr (kFp8 && kDown) {
          uint32_t max_exponent = __vmaxu4(exponents.x, exponents.y);
          max_exponent = __vmaxu4(max_exponent, max_exponent >> 16);
          max_exponent = max(max_exponent & 0xff, max_exponent >> 8 & 0xff);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            int32_t shift = static_cast<int32_t>(max_exponent -
                                                 ((c ? exponents.y : exponents.x) >> 8 * t & 0xff));
            uint32_t factor = max(15 - shift, 0) << 10;  // 2^-shift in fp16
            factors[c] = factor | factor << 16;
          }
          float largest = __uint_as_float(max_exponent << 23);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            by_token[i] = __shfl_sync(kAllLanes, largest, 4 * (2 * t + i));
        }
        float block[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) block[m][i] = kFp8 ? 0.0f : sums[m][0][i];
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int j = 0; j < (kFp8 ? 4 : 2); ++j) {
            uint32_t a[kTiles][4];
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const uint4& bytes = a_bytes[m][i % 2][c];
                a[m][i] =
                    kFp8 ? to_fp16x2(component(bytes, j), i / 2) : component(bytes, 2 * j + i / 2);
              }
            uint32_t b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              b[i] =
                  kFp8 ? to_fp16x2(component(b_bytes[c], j), i) : component(b_bytes[c], 2 * j + i);
              if constexpr (kFp8 && kDown) b[i] = multiply_fp16x2(b[i], factors[c]);
            }
#pragma unroll
            for (int m = 0; m < kTiles; ++m) multiply<kFp8>(block[m], a[m], b);
          }
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[m][0][i] =
                kFp8 ? fmaf(block[m][i], by_row[m][i / 2] * by_token[i % 2], sums[m][0][i])
                     : block[m][i];
      }
      predecessor.wait();
      write_outputs<kFp8, kDown, kWarps, 1>(args, p, expert, column, first, sums);
    }
  }
  predecessor.wait();  // also where there is nothing to do: the next kernel counts on it
}

template <bool kFp8>
cudaError_t launch_of(const FewRowsArgs& args, cudaStream_t stream) {
  return launch_both(args, [&](const Product& p, auto down) {
    return launch_tasks<down.value>(few_rows<kFp8, down.value>, kBlocksPerSM<down.value>,
                                    32 * kWarpsOf<down.value>, args, p, stream);
  });
}

}  // namespace

cudaError_t few_rows(const FewRowsArgs& args, cudaStream_t stream) {
  if (args.N == 0 || args.segments.num_local_experts == 0) return cudaSuccess;
  if (is_packed(args.format)) return few_rows_mxfp4(args, stream);
  if (args.token_tiles > 1) return few_rows_by_tma(args, stream);
  return args.format == WeightFormat::kFp8 ? launch_of<true>(args, stream)
                                           : launch_of<false>(args, stream);
}

}  // namespace epmoe::cuda
