// What the kernels for experts with few rows share: tasks, and what becomes of the sums of a task.
#pragma once
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/local/mxfp4.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {

// Matrices of 16 weight rows that a warp multiplies.
constexpr int kTiles = 2;
constexpr int kTileRows = 16;
constexpr int kWeightRows = kTiles * kTileRows;  // of a task
constexpr int kExponentColumns = 16;             // of h that share a power of two
// 2^7 times the power of two is at most the largest value.
constexpr int kLargestExponent = 247;
constexpr int kHeadroom = 7;

// One of the two products, of one dtype.
struct Product {
  // [N, k], fp8 with weights in fp8, else bf16; of gate and up in MXFP4 or NVFP4 either.
  const uint8_t* rows;
  int64_t row_bytes;        // from row to row
  const float* row_scales;  // of gate and up in fp8
  int64_t row_scales_stride;
  const uint8_t* weights;  // [e, weight rows, k]
  const void* weight_scales;
  const __nv_bfloat16* bias;   // [e, weight rows], or null
  int64_t k, columns;          // columns: of `out`
  void* out;                   // [N, columns]
  const float* tensor_scales;  // [e, kTensorScales], or null
};

struct Expert {
  int32_t index, start, count;
};

// The kernel before this one: the first `wait` waits for all that it wrote.
struct Predecessor {
  bool waited = false;

  __device__ __forceinline__ void wait() {
    if (waited) return;
    wait_for_predecessor();
    let_successor_start();
    waited = true;
  }
};

// Rows of each of at most `most` parts: a multiple of kTokens, at least one.
template <int kTokens>
__device__ __forceinline__ int32_t rows_of_part(int32_t count, int32_t most) {
  return max((count + most * kTokens - 1) / (most * kTokens), 1) * kTokens;
}

// Entries of the table of experts. An expert with many rows has several, so that several blocks
// share its rows.
constexpr int kTableEntries = 1024;
constexpr int kMostParts = 16;
inline int64_t table_entries(int64_t experts) {
  return std::max<int64_t>(experts, std::min<int64_t>(kTableEntries, kMostParts * experts));
}

// The experts that have rows, or parts of at least kTokens of their rows, in shared memory; and how
// many entries there are. The whole block builds the table.
template <int kTokens>
__device__ __forceinline__ int32_t list_experts(const Segments& segments, int64_t N,
                                                Expert* experts) {
  __shared__ int32_t total;
  if (threadIdx.x < 32) {
    const int32_t e = segments.num_local_experts;
    const int32_t most = min(max(kTableEntries / max(e, 1), 1), kMostParts);
    int32_t lane = threadIdx.x;
    int32_t found = 0;
    for (int32_t first = 0; first < e; first += 32) {
      int32_t i = first + lane;
      SegmentRows rows = {};
      if (i < e) rows = rows_of_expert(segments, N, i);
      uint32_t have_rows = __ballot_sync(kAllLanes, rows.count > 0);
      int32_t before = __popc(have_rows & ((1u << lane) - 1));
      int32_t here = __popc(have_rows);
      if (__any_sync(kAllLanes, rows.count > kTokens)) {
        int32_t step = rows_of_part<kTokens>(rows.count, most);
        int32_t parts = (rows.count + step - 1) / step;
        int32_t through = warp_inclusive_sum(parts);
        before = through - parts, here = __shfl_sync(kAllLanes, through, 31);
        for (int32_t part = 0; part < parts; ++part)
          experts[found + before + part] = {i, rows.begin + part * step,
                                            min(step, rows.count - part * step)};
      } else if (rows.count) {
        experts[found + before] = {i, rows.begin, rows.count};
      }
      found += here;
    }
    if (lane == 0) total = found;
  }
  __syncthreads();
  return total;
}

// The weight row for row r of a tile, in the task from this column on: of gate and up, a tile has 8
// gates and then their ups.
template <bool kDown>
__device__ __forceinline__ int64_t weight_row(const FewRowsArgs& args, const Product& p,
                                              int32_t task_column, int32_t tile, int32_t r) {
  if (kDown) return task_column + kTileRows * tile + r;
  int64_t column = task_column + 8 * tile + r % 8;
  return args.interleaved ? 2 * column + r / 8 : r / 8 * p.columns + column;
}

// Columns of `out` in a task.
template <bool kDown>
constexpr int kColumns = kDown ? kWeightRows : kWeightRows / 2;

// Adds up the sums of all warps for an expert's tokens from `first` on, and writes outputs or h.
// With kNvfp4, sums get their tensor scales, and h that of down. The whole block calls.
template <bool kFp8, bool kDown, int kWarps, int kTokenTiles, bool kNvfp4 = false>
__device__ __forceinline__ void write_outputs(const FewRowsArgs& args, const Product& p,
                                              const Expert& expert, int32_t column, int32_t first,
                                              const float (&sums)[kTiles][kTokenTiles][4]) {
  constexpr int kTokens = 8 * kTokenTiles;
  __shared__ float partial[kWarps][kTokens][kWeightRows + 1];
  const int32_t warp = threadIdx.x / 32;
  const int32_t g = threadIdx.x % 32 / 4;
  const int32_t t = threadIdx.x % 4;
  const int64_t weight_rows = kDown ? p.columns : 2 * p.columns;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[warp][8 * n + 2 * t + i % 2][kTileRows * m + 8 * (i / 2) + g] = sums[m][n][i];
  __syncthreads();
  // A thread has a column of a token, and 16 neighbouring threads the columns that share a power of
  // two.
  const int32_t outputs = min(expert.count - first, kTokens) * kColumns<kDown>;
  for (int32_t i = threadIdx.x; i < outputs; i += 32 * kWarps) {
    const int32_t here = i / kColumns<kDown>;
    const int32_t c = i % kColumns<kDown>;
    auto sum_of = [&](int32_t row) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partial[w][here][row];
      int32_t tile = row / kTileRows;
      if constexpr (kNvfp4) {
        sum *= Nvfp4Scales::kLeftOut;
        if (!kDown) sum *= p.tensor_scales[expert.index * kTensorScales + row % kTileRows / 8];
      }
      if (p.bias)
        sum += to_float(p.bias[expert.index * weight_rows +
                               weight_row<kDown>(args, p, column, tile, row % kTileRows)]);
      return sum;
    };
    const int64_t row = expert.start + first + here;
    if constexpr (kDown) {
      static_cast<__nv_bfloat16*>(p.out)[row * p.columns + column + c] =
          from_float<__nv_bfloat16>(sum_of(c));
    } else {
      int32_t gate = c / 8 * kTileRows + c % 8;
      float value = gated(sum_of(gate), sum_of(gate + 8), args.gating);
      if constexpr (kNvfp4) value *= p.tensor_scales[expert.index * kTensorScales + 2];
      if constexpr (kFp8) {
        uint32_t lanes = __activemask();
        uint32_t most = bits_of(fabsf(value));
#pragma unroll
        for (int offset = kExponentColumns / 2; offset; offset /= 2)
          most = max(most, __shfl_xor_sync(lanes, most, offset, kExponentColumns));
        int32_t power = min(max(static_cast<int32_t>(most >> 23) - kHeadroom, 1), kLargestExponent);
        // NaN and Inf become NaN: fp8 has no Inf, and a finite value would hide it.
        float scaled = is_finite(value) ? value * float_of((254 - power) << 23) : NAN;
        static_cast<uint8_t*>(p.out)[row * p.columns + column + c] =
            __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
        if (c % kExponentColumns == 0)
          args.exponents_N[(row * p.columns + column + c) / kExponentColumns] =
              static_cast<uint8_t>(power);
      } else {
        static_cast<__nv_bfloat16*>(p.out)[row * p.columns + column + c] =
            from_float<__nv_bfloat16>(value);
      }
    }
  }
  __syncthreads();
}

// Launches both kernels, by launch(product, whether it is down, a constant).
template <typename Launch>
cudaError_t launch_both(const FewRowsArgs& args, const Launch& launch) {
  auto bytes = [](const void* at) { return static_cast<const uint8_t*>(at); };
  auto bias = [](const void* at) { return static_cast<const __nv_bfloat16*>(at); };
  const bool fp8 = args.format == WeightFormat::kFp8;
  const bool fp8_rows = fp8 || args.row_scales_NB;
  Product gate_up = {bytes(args.rows_ND),
                     args.rows_stride * (fp8_rows ? 1 : 2),
                     args.row_scales_NB,
                     args.row_scales_stride,
                     bytes(args.gate_up_e2FD),
                     args.gate_up_scales,
                     bias(args.gate_up_bias),
                     args.D,
                     args.F,
                     args.h_NF,
                     args.tensor_scales};
  Product down = {bytes(args.h_NF),  args.F * (fp8 ? 1 : 2), nullptr, 0,      bytes(args.down_eDF),
                  args.down_scales,  bias(args.down_bias),   args.F,  args.D, args.out_ND,
                  args.tensor_scales};
  if (cudaError_t error = launch(gate_up, std::false_type{})) return error;
  return launch(down, std::true_type{});
}

// Launches a kernel for the tasks of a product, with so many blocks at most for each
// multiprocessor.
template <bool kDown>
cudaError_t launch_tasks(void (*kernel)(FewRowsArgs, Product), int64_t most, int threads,
                         const FewRowsArgs& args, const Product& p, cudaStream_t stream) {
  const int64_t e = args.segments.num_local_experts;
  return launch_at_most(most, kernel, e * (p.columns / kColumns<kDown>), threads,
                        table_entries(e) * static_cast<int64_t>(sizeof(Expert)), stream, args, p);
}

// The stage with weights in MXFP4 or NVFP4; and in bf16 and fp8 with weights through shared memory.
cudaError_t few_rows_mxfp4(const FewRowsArgs& args, cudaStream_t stream);
cudaError_t few_rows_by_tma(const FewRowsArgs& args, cudaStream_t stream);

}  // namespace epmoe::cuda
