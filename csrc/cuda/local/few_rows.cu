// The experts stage where each expert has a few rows: what takes time is to read the weights once. A weight row fills a
// row of the matrix that a tensor core multiplies, tokens are its few columns, and weights go from memory to registers
// without a stop in shared memory. Two kernels:
//
//   rows ─ gate and up, activation ─▶ h ─ down ─▶ outputs
//
// fp8 weights are widened to fp16 and multiplied exactly, with sums in fp32; each block of 128 of k is scaled on its
// own. h is fp8 then, with a power of two for every 16 columns. Weights in MXFP4 become bf16 in registers, which holds
// all their values, and are multiplied by bf16 rows. Any number of rows is right: an expert's weights are read again,
// mostly from L2, for each further kTokens of its rows.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kTiles = 2, kTileRows = 16;             // matrices of 16 weight rows that a warp multiplies
constexpr int kWeightRows = kTiles * kTileRows;       // of a task
constexpr int kLineBytes = 128;                       // of a weight row, in one step along k
constexpr int kExponentColumns = 16;                  // of h that share a power of two
constexpr int kLargestExponent = 247, kHeadroom = 7;  // 2^7 times the power of two is at most the largest value

// What was measured (H100, both kernels, Qwen3-30B-A3B and DeepSeek-V3, 1 to 128 tokens; docs/experiments.md): the more
// warps on a multiprocessor the better, so nothing is loaded ahead, which would take registers. Up to 8 tokens 16 warps
// fit, up to 16 tokens 12. Eight warps share the long k of gate and up.
template <WeightFormat kFormat, bool kDown, int kTokenTiles>
constexpr int kWarpsOf = kTokenTiles == 1 && !kDown ? 8 : 4;
template <WeightFormat kFormat, bool kDown, int kTokenTiles>
constexpr int kBlocksPerSM = kTokenTiles == 1 ? 16 / kWarpsOf<kFormat, kDown, kTokenTiles> : 3;

// One of the two products, of one dtype.
struct Product {
  const uint8_t* rows;      // [N, k], fp8 with weights in fp8, else bf16
  const float* row_scales;  // of gate and up in fp8
  int64_t row_scales_stride;
  const uint8_t* weights;  // [e, weight rows, k]
  const void* weight_scales;
  const __nv_bfloat16* bias;  // [e, weight rows], or null
  int64_t k, columns;         // columns: of `out`
  void* out;                  // [N, columns]
};

struct Expert {
  int32_t index, start, count;
};

__device__ __forceinline__ uint32_t word(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The weights of this thread: nobody else reads them.
__device__ __forceinline__ uint4 load_weights(const uint8_t* from) {
  uint4 four;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(from));
  return four;
}

// Two of four e4m3 as fp16, exactly.
__device__ __forceinline__ uint32_t widened(uint32_t four, int half) {
  auto two = static_cast<__nv_fp8x2_storage_t>(half ? four >> 16 : four);
  __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
  return both.x | static_cast<uint32_t>(both.y) << 16;
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// sums [16 weight rows, 8 tokens] += a [16, 16] · b [16, 8].
template <bool kFp8>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  // mma.sync with operands of this type
#define EPMOE_MMA(type)                                                                                                \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (kFp8)
    EPMOE_MMA("f16");
  else
    EPMOE_MMA("bf16");
#undef EPMOE_MMA
}

// The experts that have rows, in shared memory, and how many they are. The whole block builds the table.
__device__ __forceinline__ int32_t list_experts(const Segments& segments, int64_t N, Expert* experts) {
  __shared__ int32_t total;
  if (threadIdx.x < 32) {
    int32_t lane = threadIdx.x, found = 0;
    for (int32_t first = 0; first < segments.num_local_experts; first += 32) {
      int32_t i = first + lane;
      SegmentRows rows = {};
      if (i < segments.num_local_experts) rows = rows_of_expert(segments, N, i);
      uint32_t have_rows = __ballot_sync(kAllLanes, rows.count > 0);
      if (rows.count) experts[found + __popc(have_rows & ((1u << lane) - 1))] = {i, rows.begin, rows.count};
      found += __popc(have_rows);
    }
    if (lane == 0) total = found;
  }
  __syncthreads();
  return total;
}

// Adds the products of this warp's lines of k to `sums`, with weights in bf16 or fp8. Lane 4 g + t has rows g and g + 8
// of each tile and token g of each token tile, and of each of them the bytes 16 t and 64 + 16 t of every line: which of
// the k an instruction multiplies does not matter, as long as both sides agree.
template <bool kFp8, bool kDown, int kTokenTiles, typename WeightRow, typename Token, typename Wait>
__device__ __forceinline__ void add_lines(float (&sums)[kTiles][kTokenTiles][4], const FewRowsArgs& args,
                                          const Product& p, const Expert& expert, const WeightRow& weight_row,
                                          const Token& token, int32_t warps, const Wait& wait_once) {
  constexpr int64_t kGroup = kScaleBlock / kExponentColumns;  // exponents of a block of k
  const int32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t row_bytes = kFp8 ? p.k : 2 * p.k, blocks = p.k / kScaleBlock;
  const int64_t weight_rows = kDown ? p.columns : 2 * p.columns;
  const int32_t lines = static_cast<int32_t>(row_bytes / kLineBytes);
  const int32_t first_line = lines * warp / warps, last_line = lines * (warp + 1) / warps;
  const uint8_t* weights[kTiles][2];
  const float* weight_scales[kTiles][2];
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t row = weight_row(m, 8 * i + g);
      weights[m][i] = p.weights + (expert.index * weight_rows + row) * row_bytes + 16 * t;
      int64_t scale_row = expert.index * (weight_rows / kScaleBlock) + row / kScaleBlock;
      if (kFp8) weight_scales[m][i] = static_cast<const float*>(p.weight_scales) + scale_row * blocks;
    }
  const uint8_t* rows[kTokenTiles];
  const float* row_scales[kTokenTiles][2];
  const uint8_t* exponents[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    rows[n] = p.rows + token(8 * n + g) * row_bytes + 16 * t;
    if (kFp8 && kDown) exponents[n] = args.exponents_N + token(8 * n + g) * (p.k / kExponentColumns);
    if (kFp8 && !kDown)
      for (int i = 0; i < 2; ++i) row_scales[n][i] = p.row_scales + token(8 * n + 2 * t + i) * p.row_scales_stride;
  }
#pragma unroll 1
  for (int32_t line = first_line; line < last_line; ++line) {
    uint4 a_bytes[kTiles][2][2], b_bytes[kTokenTiles][2];
    float by_row[kTiles][2], by_token[kTokenTiles][2];
    uint2 powers[kTokenTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) a_bytes[m][i][c] = load_weights(weights[m][i] + line * kLineBytes + 64 * c);
        if (kFp8) by_row[m][i] = weight_scales[m][i][line];
      }
    wait_once();
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) b_bytes[n][c] = *reinterpret_cast<const uint4*>(rows[n] + line * kLineBytes + 64 * c);
      if (kFp8 && kDown) powers[n] = *reinterpret_cast<const uint2*>(exponents[n] + line * kGroup);
      if (kFp8 && !kDown)
        for (int i = 0; i < 2; ++i) by_token[n][i] = row_scales[n][i][line];
    }
    // In a block of k, columns of h are brought to the largest of its powers of two.
    uint32_t factors[kTokenTiles][2];
    if constexpr (kFp8 && kDown) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        uint32_t most = __vmaxu4(powers[n].x, powers[n].y);
        most = __vmaxu4(most, most >> 16);
        most = max(most & 0xff, most >> 8 & 0xff);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          int32_t below = static_cast<int32_t>(most - ((c ? powers[n].y : powers[n].x) >> 8 * t & 0xff));
          uint32_t factor = max(15 - below, 0) << 10;  // 2^-below in fp16
          factors[n][c] = factor | factor << 16;
        }
        float largest = __uint_as_float(most << 23);
#pragma unroll
        for (int i = 0; i < 2; ++i) by_token[n][i] = __shfl_sync(kAllLanes, largest, 4 * (2 * t + i));
      }
    }
    float block[kTiles][kTokenTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) block[m][n][i] = kFp8 ? 0.0f : sums[m][n][i];
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
            a[m][i] = kFp8 ? widened(word(bytes, j), i / 2) : word(bytes, 2 * j + i / 2);
          }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          uint32_t b[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            b[i] = kFp8 ? widened(word(b_bytes[n][c], j), i) : word(b_bytes[n][c], 2 * j + i);
            if constexpr (kFp8 && kDown) b[i] = times(b[i], factors[n][c]);
          }
#pragma unroll
          for (int m = 0; m < kTiles; ++m) multiply<kFp8>(block[m][n], a[m], b);
        }
      }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[m][n][i] =
              kFp8 ? fmaf(block[m][n][i], by_row[m][i / 2] * by_token[n][i % 2], sums[m][n][i]) : block[m][n][i];
  }
}

// In MXFP4 a lane's 16 bytes are a group of codes: lane 4 g + t has group t of each chunk of four.
constexpr int kChunkGroups = 4, kChunks = 2;  // chunks of a step along k
constexpr int kGroupBytes = kMxfp4Group / 2, kRowBytes = kMxfp4Group * 2;

// Both are zeros unless `real`.
__device__ __forceinline__ uint4 load_group(const uint8_t* from, bool real) {
  uint4 four;
  asm volatile(
      "{.reg .pred real; setp.ne.s32 real, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "@real ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(four.x), "=&r"(four.y), "=&r"(four.z), "=&r"(four.w)
      : "l"(from), "r"(static_cast<int>(real)));
  return four;
}
__device__ __forceinline__ uint4 load_row(const uint8_t* from, bool real) {
  uint4 four;
  asm volatile(
      "{.reg .pred real; setp.ne.s32 real, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      "@real ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(four.x), "=&r"(four.y), "=&r"(four.z), "=&r"(four.w)
      : "l"(from), "r"(static_cast<int>(real))
      : "memory");
  return four;
}

// The same with weights in MXFP4, chunk by chunk. first_row: of this expert, among all experts' weight rows.
template <int kTokenTiles, typename WeightRow, typename Token, typename Wait>
__device__ __forceinline__ void add_chunks(float (&sums)[kTiles][kTokenTiles][4], const Product& p, int64_t first_row,
                                           const WeightRow& weight_row, const Token& token, int32_t warps,
                                           const Wait& wait_once) {
  const int32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int32_t groups_of_row = static_cast<int32_t>(p.k / kMxfp4Group);
  const int32_t chunks = (groups_of_row + kChunkGroups - 1) / kChunkGroups, last = chunks * (warp + 1) / warps;
  auto* scales = static_cast<const uint8_t*>(p.weight_scales);
  int64_t groups[kTiles][2];  // of this lane, the first in each row
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) groups[m][i] = (first_row + weight_row(m, 8 * i + g)) * groups_of_row + t;
  const uint8_t* rows[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) rows[n] = p.rows + kRowBytes * (token(8 * n + g) * groups_of_row + t);
#pragma unroll 1
  for (int32_t first = chunks * warp / warps; first < last; first += kChunks) {
    uint4 bytes[kChunks][kTiles][2];
    Mxfp4Scale scale[kChunks][kTiles][2];
    bool real[kChunks];  // the last chunk of a row may have fewer groups
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      real[c] = first + c < last && kChunkGroups * (first + c) + t < groups_of_row;
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int64_t group = groups[m][i] + kChunkGroups * (first + c);
          bytes[c][m][i] = load_group(p.weights + kGroupBytes * group, real[c]);
          scale[c][m][i] = {__ldg(scales + (real[c] ? group : 0))};
        }
    }
    wait_once();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      bool large = false;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) large |= scale[c][m][0].is_large() || scale[c][m][1].is_large();
      large = __any_sync(kAllLanes, large);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[2][kTiles][4];  // of two instructions
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
              uint32_t& value = a[pair / 2][m][2 * (pair % 2) + i];
              value = times_bf16(tiny_pair(word(bytes[c][m][i], j), pair), scale[c][m][i].factor());
              if (large) value = times_bf16(value, scale[c][m][i].more());
            }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          // Codes i and i + 4 of eight are a pair, so columns i and i + 4 are one.
          const uint4 eight = load_row(rows[n] + kRowBytes * kChunkGroups * (first + c) + 16 * j, real[c]);
          uint32_t b[2][2] = {{__byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632)},
                              {__byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632)}};
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < kTiles; ++m) multiply<false>(sums[m][n], a[half][m], b[half]);
        }
      }
    }
  }
}

// A block takes tasks: kWeightRows weight rows of an expert. Its warps share k.
template <WeightFormat kFormat, bool kDown, int kTokenTiles>
__global__ void __launch_bounds__(32 * kWarpsOf<kFormat, kDown, kTokenTiles>, kBlocksPerSM<kFormat, kDown, kTokenTiles>)
    few_rows(const __grid_constant__ FewRowsArgs args, const __grid_constant__ Product p) {
  constexpr int kWarps = kWarpsOf<kFormat, kDown, kTokenTiles>, kTokens = 8 * kTokenTiles;
  constexpr bool kFp8 = kFormat == WeightFormat::kFp8;
  constexpr int kColumns = kDown ? kWeightRows : kWeightRows / 2;  // of `out`, in a task
  __shared__ float partial[kWarps][kTokens][kWeightRows + 1];
  extern __shared__ Expert experts[];
  if (!kDown) {
    wait_for_predecessor();
    let_successor_start();
  }
  // Down may read segments and weights while gate and up still run: these had waited for all that wrote them.
  const int32_t num_experts = list_experts(args.segments, args.N, experts);
  bool waited = !kDown;
  auto wait_once = [&] {
    if (waited) return;
    wait_for_predecessor();
    let_successor_start();
    waited = true;
  };
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t weight_rows = kDown ? p.columns : 2 * p.columns;
  const int32_t groups = static_cast<int32_t>(p.columns / kColumns);
  // The weight row for row r of a tile: of gate and up, a tile has 8 gates and then their ups.
  auto weight_row_at = [&](int32_t task_column, int32_t tile, int32_t r) -> int64_t {
    if (kDown) return task_column + kTileRows * tile + r;
    int64_t column = task_column + 8 * tile + r % 8;
    return args.interleaved ? 2 * column + r / 8 : r / 8 * p.columns + column;
  };
  for (int64_t task = blockIdx.x; task < int64_t{num_experts} * groups; task += gridDim.x) {
    const Expert expert = experts[task / groups];
    const int32_t column = static_cast<int32_t>(task % groups) * kColumns;
    auto weight_row = [&](int32_t tile, int32_t r) { return weight_row_at(column, tile, r); };
    for (int32_t first = 0; first < expert.count; first += kTokens) {
      // Tokens past the last are the last one again; nobody reads their columns.
      auto token = [&](int32_t n) -> int64_t { return expert.start + min(first + n, expert.count - 1); };
      float sums[kTiles][kTokenTiles][4] = {};
      if constexpr (kFormat == WeightFormat::kMxfp4)
        add_chunks(sums, p, expert.index * weight_rows, weight_row, token, kWarps, wait_once);
      else
        add_lines<kFp8, kDown>(sums, args, p, expert, weight_row, token, kWarps, wait_once);
      wait_once();
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            partial[warp][8 * n + 2 * t + i % 2][kTileRows * m + 8 * (i / 2) + g] = sums[m][n][i];
      __syncthreads();
      // A thread has a column of a token, and 16 neighbouring threads the columns that share a power of two.
      const int32_t outputs = min(expert.count - first, kTokens) * kColumns;
      for (int32_t i = threadIdx.x; i < outputs; i += 32 * kWarps) {
        const int32_t here = i / kColumns, c = i % kColumns;
        auto sum_of = [&](int32_t row) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += partial[w][here][row];
          int32_t tile = row / kTileRows;
          if (p.bias) sum += to_float(p.bias[expert.index * weight_rows + weight_row(tile, row % kTileRows)]);
          return sum;
        };
        const int64_t row = expert.start + first + here;
        if constexpr (kDown) {
          static_cast<__nv_bfloat16*>(p.out)[row * p.columns + column + c] = from_float<__nv_bfloat16>(sum_of(c));
        } else {
          int32_t gate = c / 8 * kTileRows + c % 8;
          float value = gated(sum_of(gate), sum_of(gate + 8), args.gating);
          if constexpr (kFp8) {
            uint32_t lanes = __activemask(), most = bits_of(fabsf(value));
#pragma unroll
            for (int offset = kExponentColumns / 2; offset; offset /= 2)
              most = max(most, __shfl_xor_sync(lanes, most, offset, kExponentColumns));
            int32_t power = min(max(static_cast<int32_t>(most >> 23) - kHeadroom, 1), kLargestExponent);
            // NaN and Inf become NaN: fp8 has no Inf, and a finite value would hide it.
            float scaled = is_finite(value) ? value * float_of((254 - power) << 23) : NAN;
            static_cast<uint8_t*>(p.out)[row * p.columns + column + c] =
                __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
            if (c % kExponentColumns == 0)
              args.exponents_N[(row * p.columns + column + c) / kExponentColumns] = static_cast<uint8_t>(power);
          } else {
            static_cast<__nv_bfloat16*>(p.out)[row * p.columns + column + c] = from_float<__nv_bfloat16>(value);
          }
        }
      }
      __syncthreads();
    }
  }
  wait_once();  // also where there is nothing to do: the next kernel counts on it
}

template <WeightFormat kFormat, bool kDown, int kTokenTiles>
cudaError_t launch_product(const FewRowsArgs& args, const Product& product, const Device& device, cudaStream_t stream) {
  constexpr int kWarps = kWarpsOf<kFormat, kDown, kTokenTiles>, kBlocks = kBlocksPerSM<kFormat, kDown, kTokenTiles>;
  int64_t tasks = args.segments.num_local_experts * (product.columns / (kDown ? kWeightRows : kWeightRows / 2));
  int64_t grid = std::min<int64_t>(tasks, kBlocks * device.multiprocessors);
  int64_t shared = args.segments.num_local_experts * static_cast<int64_t>(sizeof(Expert));
  return launch(few_rows<kFormat, kDown, kTokenTiles>, grid, 32 * kWarps, shared, stream, args, product);
}

template <WeightFormat kFormat, int kTokenTiles>
cudaError_t launch_both(const FewRowsArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  auto bytes = [](const void* at) { return static_cast<const uint8_t*>(at); };
  auto bias = [](const void* at) { return static_cast<const __nv_bfloat16*>(at); };
  Product gate_up = {bytes(args.rows_ND),
                     args.row_scales_NB,
                     args.row_scales_stride,
                     bytes(args.gate_up_e2FD),
                     args.gate_up_scales,
                     bias(args.gate_up_bias),
                     args.D,
                     args.F,
                     args.h_NF};
  Product down = {bytes(args.h_NF),     nullptr, 0,      bytes(args.down_eDF), args.down_scales,
                  bias(args.down_bias), args.F,  args.D, args.out_ND};
  if (cudaError_t error = launch_product<kFormat, false, kTokenTiles>(args, gate_up, device, stream)) return error;
  return launch_product<kFormat, true, kTokenTiles>(args, down, device, stream);
}

template <WeightFormat kFormat>
cudaError_t launch_tiles(const FewRowsArgs& args, cudaStream_t stream) {
  return args.token_tiles == 1 ? launch_both<kFormat, 1>(args, stream) : launch_both<kFormat, 2>(args, stream);
}

}  // namespace

cudaError_t few_rows(const FewRowsArgs& args, cudaStream_t stream) {
  if (args.N == 0 || args.segments.num_local_experts == 0) return cudaSuccess;
  switch (args.format) {
    case WeightFormat::kBf16:
      return launch_tiles<WeightFormat::kBf16>(args, stream);
    case WeightFormat::kFp8:
      return launch_tiles<WeightFormat::kFp8>(args, stream);
    case WeightFormat::kMxfp4:
      return args.token_tiles == 4 ? launch_both<WeightFormat::kMxfp4, 4>(args, stream)
                                   : launch_tiles<WeightFormat::kMxfp4>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace epmoe::cuda
