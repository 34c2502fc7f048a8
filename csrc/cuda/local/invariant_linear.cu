// x [T, k] · weight [n, k]ᵀ in one order of sums, whatever T is: logits of a router, and the
// gradients of its tokens.
//
// The k are cut into parts, whose number and length depend on k only. A sum runs through each part
// by itself, and then over the parts, both in order. Where tiles are too few to fill the GPU, a
// block has one part of a tile, and a second kernel adds the parts; otherwise it has all parts.
// Elements of 16 bits are multiplied by the tensor core, 16 of k at a time. Of them up to 64 tokens
// take a block with a warp for each part, and many tokens are loaded ahead through shared memory.
// Each way executes the same additions.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

// A block computes a tile.
constexpr int kThreads = 128;
constexpr int kColumns = 64;
constexpr int kStep = 32;  // elements of k in shared memory at once

// Parts of k, which blocks of their own sum, and another kernel adds.
constexpr int64_t kMostParts = 16;
constexpr int64_t kShortestPart = 128;  // a multiple of kStep
constexpr int kSumThreads = 256;

// Up to so many tokens, a tile has 8 rows of x.
constexpr int64_t kFewTokens = 64;     // with elements of 16 bits
constexpr int64_t kFewestTokens = 16;  // with fp32
constexpr int64_t kFewColumns = 16;    // of such a tile, for elements of 16 bits

// Elements of 16 bits are loaded ahead.
constexpr int kStages = 4;
constexpr int kStage = 64;            // elements of k in a stage
constexpr int kVectors = kStage / 8;  // of 16 bytes, in a row of a stage

int64_t part_length(int64_t k) {
  return std::max(kShortestPart, ceil_div(ceil_div(k, kMostParts), kStep) * kStep);
}
int32_t parts_of(int64_t k) { return static_cast<int32_t>(ceil_div(k, part_length(k))); }

// Where an element lies in shared memory: the rows of one k follow one another, in an order by
// which eight k of four rows lie in different banks. Four rows from a multiple of four stay
// together.
__device__ __forceinline__ int place(int row, int k) { return row ^ (k % 8) << 2; }

// Loads [kRows, kStep] of a matrix with rows of k elements, and zeros beyond its end.
template <int kRows>
__device__ __forceinline__ void load_tile(const void* matrix, int64_t rows, int64_t k, int64_t row,
                                          int64_t from, int64_t end, float (*tile)[kColumns]) {
  int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kRows;
       i += kThreads / 32) {  // a warp has four rows by eight k
    int r = i / 4 * 4 + lane / 8;
    int at = i % 4 * 8 + lane % 8;
    bool real = row + r < rows && from + at < end;
    tile[at][place(r, at)] =
        real ? static_cast<const float*>(matrix)[(row + r) * k + from + at] : 0.0f;
  }
}

// kPerThread: rows of x of a thread, which has four columns; a tile has 8 · kPerThread rows.
template <int kPerThread>
__global__ void __launch_bounds__(kThreads)
    multiply_floats(const __grid_constant__ InvariantLinearArgs args, int64_t length,
                    int32_t parts) {
  constexpr int kRows = 8 * kPerThread;
  __shared__ __align__(16) float x[kStep][kColumns], weight[kStep][kColumns];
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kColumns);
  const int64_t tiles = columns * ceil_div(args.T, kRows);
  const int64_t tile = blockIdx.x % tiles;
  const int64_t m = tile / columns * kRows;
  const int64_t n = tile % columns * kColumns;
  const bool all = args.parts == nullptr;
  const int first = all ? 0 : static_cast<int>(blockIdx.x / tiles);
  const int row = threadIdx.x / 16 * kPerThread;
  const int column = threadIdx.x % 16 * 4;
  float total[kPerThread][4] = {};
  for (int part = first; part < (all ? parts : first + 1); ++part) {
    const int64_t end = min(args.k, (part + 1) * length);
    float sum[kPerThread][4] = {};
    for (int64_t from = part * length; from < end; from += kStep) {
      __syncthreads();
      load_tile<kRows>(args.x_Tk, args.T, args.k, m, from, end, x);
      load_tile<kColumns>(args.weight_nk, args.n, args.k, n, from, end, weight);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        float a[kPerThread];
        if constexpr (kPerThread % 4 == 0) {
#pragma unroll
          for (int i = 0; i < kPerThread; i += 4)
            *reinterpret_cast<float4*>(&a[i]) =
                *reinterpret_cast<const float4*>(&x[k][place(row + i, k)]);
        } else {
          a[0] = x[k][place(row, k)];
        }
        const float4 b = *reinterpret_cast<const float4*>(&weight[k][place(column, k)]);
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
          sum[i][0] = fmaf(a[i], b.x, sum[i][0]), sum[i][1] = fmaf(a[i], b.y, sum[i][1]);
          sum[i][2] = fmaf(a[i], b.z, sum[i][2]), sum[i][3] = fmaf(a[i], b.w, sum[i][3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] = part == first ? sum[i][j] : total[i][j] + sum[i][j];
  }
  float* out = all ? static_cast<float*>(args.out_Tn) : args.parts + first * args.T * args.n;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (m + row + i >= args.T || n + column + j >= args.n) continue;
      out[(m + row + i) * args.n + n + column + j] = total[i][j];
    }
}

// Eight elements of a row from `at` on, zeros from `end` on.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T* row, int64_t at, int64_t end, bool real,
                                            bool wide) {
  if (wide) return real && at < end ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
  Vector<T, 8> eight = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (real && at + i < end) eight.at[i] = row[at + i];
  return *reinterpret_cast<const uint4*>(&eight);
}

// How a warp multiplies 16-bit elements. It has 16 rows of the weight as the rows of its matrix,
// and all rows of x of its block's tile as its columns, in eights. Lane 4 g + t has rows g and g +
// 8 and row g of each eight, and the k from 8 t on of every 32: which of them an instruction
// multiplies does not matter, as long as both sides agree.
template <typename T, int kEights>
struct WarpSums {
  // Of all parts that ended; of this part.
  float total[kEights][4] = {};
  float sum[kEights][4] = {};

  // Adds 32 of k.
  __device__ __forceinline__ void multiply_32(const uint4 (&weight)[2], const uint4 (&x)[kEights]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4], b[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = component(weight[i % 2], 2 * half + i / 2);
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        b[0] = component(x[i], 2 * half), b[1] = component(x[i], 2 * half + 1);
        multiply<std::is_same_v<T, __half>>(sum[i], a, b);
      }
    }
  }
  __device__ __forceinline__ void end_part(bool first) {
#pragma unroll
    for (int i = 0; i < kEights; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        total[i][j] = first ? sum[i][j] : total[i][j] + sum[i][j], sum[i][j] = 0.0f;
  }
  // Calls f(index in [T, n], total) for each sum of a tile that starts at row m of x and row n of
  // the weight.
  template <typename F>
  __device__ __forceinline__ void for_each(const InvariantLinearArgs& args, int64_t m, int64_t n,
                                           F&& f) const {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kEights; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t row = m + 8 * i + 2 * t + j % 2;
        const int64_t column = n + g + j / 2 * 8;
        if (row < args.T && column < args.n) f(row * args.n + column, total[i][j]);
      }
  }
};

// Adds a part to the sums of a warp, whose tile starts at row m of x and row n of the weight.
// `wide`: rows are aligned to 16 bytes.
template <typename T, int kEights>
__device__ __forceinline__ void multiply_part(WarpSums<T, kEights>& sums,
                                              const InvariantLinearArgs& args, int64_t m, int64_t n,
                                              int64_t from, int64_t length, bool wide) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int64_t end = min(args.k, from + length);
#pragma unroll 2
  for (int64_t at = from + 8 * t; at - 8 * t < end; at += 32) {
    uint4 weight[2], x[kEights];
    auto row_of = [&](const void* matrix, int64_t row) {
      return static_cast<const T*>(matrix) + row * args.k;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i)
      weight[i] =
          load_eight(row_of(args.weight_nk, n + g + 8 * i), at, end, n + g + 8 * i < args.n, wide);
#pragma unroll
    for (int i = 0; i < kEights; ++i)
      x[i] = load_eight(row_of(args.x_Tk, m + 8 * i + g), at, end, m + 8 * i + g < args.T, wide);
    sums.multiply_32(weight, x);
  }
}

// The same tiles and parts of 16-bit elements.
template <typename T, int kEights>
__global__ void __launch_bounds__(kThreads)
    multiply_halves(const __grid_constant__ InvariantLinearArgs args, int64_t length, int32_t parts,
                    bool wide) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kColumns);
  const int64_t tiles = columns * ceil_div(args.T, 8 * kEights);
  const int64_t tile = blockIdx.x % tiles;
  const int64_t m = tile / columns * 8 * kEights;
  const int64_t n = tile % columns * kColumns + threadIdx.x / 32 * 16;
  const bool all = args.parts == nullptr;
  const int first = all ? 0 : static_cast<int>(blockIdx.x / tiles);
  WarpSums<T, kEights> sums;
  for (int part = first; part < (all ? parts : first + 1); ++part) {
    multiply_part(sums, args, m, n, part * length, length, wide);
    sums.end_part(part == first);
  }
  sums.for_each(args, m, n, [&](int64_t at, float total) {
    if (all)
      static_cast<T*>(args.out_Tn)[at] = from_float<T>(total);
    else
      args.parts[first * args.T * args.n + at] = total;
  });
}

// The same for few tokens, with a warp for each part of a tile of 8 tokens and 16 rows of the
// weight.
template <typename T>
__global__ void __launch_bounds__(32 * kMostParts)
    multiply_few(const __grid_constant__ InvariantLinearArgs args, int64_t length, int32_t parts,
                 bool wide) {
  __shared__ float sums_of_parts[kMostParts][4][32];
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kFewColumns);
  const int64_t m = blockIdx.x / columns * 8;
  const int64_t n = blockIdx.x % columns * kFewColumns;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  WarpSums<T, 1> sums;
  multiply_part(sums, args, m, n, warp * length, length, wide);
#pragma unroll
  for (int j = 0; j < 4; ++j) sums_of_parts[warp][j][lane] = sums.sum[0][j];
  __syncthreads();
  if (warp) return;
  for (int part = 0; part < parts; ++part) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums.sum[0][j] = sums_of_parts[part][j][lane];
    sums.end_part(part == 0);
  }
  sums.for_each(args, m, n, [&](int64_t at, float total) {
    static_cast<T*>(args.out_Tn)[at] = from_float<T>(total);
  });
}

// Where 16 bytes of a row lie in a stage: a half of an even row and the same half of the next lie
// in different banks.
__device__ __forceinline__ int vector_place(int row, int vector) {
  return row * kVectors + (vector ^ row % 2 * 4);
}

// Starts to copy [kRows, kStage] of a matrix with rows of k elements, aligned to 16 bytes, and
// zeros beyond its ends.
template <typename T, int kRows>
__device__ __forceinline__ void copy_rows(const void* matrix, int64_t rows, int64_t k, int64_t row,
                                          int64_t from, uint4* stage) {
  constexpr int kAtOnce = kThreads / kVectors;  // rows
  const int r = threadIdx.x / kVectors;
  const int vector = threadIdx.x % kVectors;
  const int64_t at = from + 8 * vector;
  const int real_rows = at < k ? static_cast<int>(min(rows - row, int64_t{kRows})) : 0;
  const T* source = static_cast<const T*>(matrix) + (row + r) * k + at;
  stage += vector_place(r, vector);
#pragma unroll
  for (int i = 0; i < kRows; i += kAtOnce, source += kAtOnce * k) {
    const bool real = r + i < real_rows;
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(stage + i * kVectors)),
        "l"(real ? source : matrix), "r"(real ? 16 : 0)
        : "memory");
  }
}

// The same with all parts in a block. Stages of 64 of k are copied into a ring in shared memory,
// three ahead.
template <typename T, int kEights>
__global__ void __launch_bounds__(kThreads, 3)
    multiply_stages(const __grid_constant__ InvariantLinearArgs args, int64_t length) {
  // x, then the weight.
  constexpr int kRows = 8 * kEights;
  constexpr int kStageVectors = (kRows + kColumns) * kVectors;
  extern __shared__ uint4 ring[];
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kColumns);
  const int64_t m = blockIdx.x / columns * kRows;
  const int64_t n = blockIdx.x % columns * kColumns;
  const int warp_row = threadIdx.x / 32 * 16;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  auto stage_of = [&](int64_t from) {
    return ring + static_cast<uint32_t>(from) / kStage % kStages * kStageVectors;
  };
  auto copy = [&](int64_t from) {
    if (from < args.k) {
      uint4* stage = stage_of(from);
      copy_rows<T, kRows>(args.x_Tk, args.T, args.k, m, from, stage);
      copy_rows<T, kColumns>(args.weight_nk, args.n, args.k, n, from, stage + kRows * kVectors);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // an empty group, too: groups are counted
  };
  for (int i = 0; i < kStages - 1; ++i) copy(i * kStage);
  WarpSums<T, kEights> sums;
  int64_t end = length;  // of the part
  for (int64_t from = 0; from < args.k; from += kStage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    // This stage has come for all threads, and all have read the last one, which is copied over.
    __syncthreads();
    copy(from + (kStages - 1) * kStage);
    const uint4* stage = stage_of(from);
    uint4 weight[kStage / 32][2], x[kStage / 32][kEights];
#pragma unroll
    for (int step = 0; step < kStage / 32; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        weight[step][i] = stage[vector_place(kRows + warp_row + 8 * i + g, 4 * step + t)];
#pragma unroll
      for (int i = 0; i < kEights; ++i) x[step][i] = stage[vector_place(8 * i + g, 4 * step + t)];
    }
#pragma unroll
    for (int step = 0; step < kStage / 32; ++step) {
      const int64_t at = from + 32 * step;
      if (at >= args.k) break;
      if (at == end) sums.end_part(end == length), end += length;
      sums.multiply_32(weight[step], x[step]);
    }
  }
  sums.end_part(end == length);
  sums.for_each(args, m, n + warp_row, [&](int64_t at, float total) {
    static_cast<T*>(args.out_Tn)[at] = from_float<T>(total);
  });
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    add_parts(const __grid_constant__ InvariantLinearArgs args, int32_t parts) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t count = args.T * args.n;
  const int64_t at = blockIdx.x * static_cast<int64_t>(kSumThreads) + threadIdx.x;
  if (at >= count) return;
  float total = args.parts[at];
  for (int part = 1; part < parts; ++part) total += args.parts[part * count + at];
  static_cast<T*>(args.out_Tn)[at] = from_float<T>(total);
}

// Whether rows of 16-bit elements are aligned to 16 bytes.
bool is_wide(const InvariantLinearArgs& args) {
  return is_aligned(args.x_Tk, args.k * 2) && is_aligned(args.weight_nk, args.k * 2);
}

template <typename T, int kPerThread>
cudaError_t launch_tiles(const InvariantLinearArgs& args, cudaStream_t stream) {
  const int64_t length = part_length(args.k);
  const int64_t tiles = ceil_div(args.T, 8 * kPerThread) * ceil_div(args.n, kColumns);
  const int32_t parts = parts_of(args.k);
  const int64_t blocks = args.parts ? tiles * parts : tiles;
  cudaError_t error;
  if constexpr (sizeof(T) == 2)
    error = launch(multiply_halves<T, kPerThread>, blocks, kThreads, 0, stream, args, length, parts,
                   is_wide(args));
  else
    error = launch(multiply_floats<kPerThread>, blocks, kThreads, 0, stream, args, length, parts);
  if (error || !args.parts) return error;
  return launch(add_parts<T>, ceil_div(args.T * args.n, kSumThreads), kSumThreads, 0, stream, args,
                parts);
}

template <typename T>
cudaError_t launch_few(const InvariantLinearArgs& args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.T, int64_t{8}) * ceil_div(args.n, kFewColumns);
  const int32_t parts = parts_of(args.k);
  return launch(multiply_few<T>, blocks, 32 * std::max(parts, 1), 0, stream, args,
                part_length(args.k), parts, is_wide(args));
}

template <typename T, int kEights>
cudaError_t launch_stages(const InvariantLinearArgs& args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(args.T, 8 * kEights) * ceil_div(args.n, kColumns);
  constexpr int64_t kBytes = int64_t{kStages} * (8 * kEights + kColumns) * kStage * sizeof(T);
  return launch(multiply_stages<T, kEights>, blocks, kThreads, kBytes, stream, args,
                part_length(args.k));
}

int64_t tiles_of_64(const InvariantLinearArgs& args) {
  return ceil_div(args.T, 64) * ceil_div(args.n, kColumns);
}

bool takes_few(const InvariantLinearArgs& args) {
  return args.dtype != DType::kFloat32 && args.T <= kFewTokens;
}
bool fits_stages(const InvariantLinearArgs& args) {
  return args.dtype != DType::kFloat32 && is_wide(args);
}

}  // namespace

// Parts pass through memory in fp32, but for few tokens of 16 bits. Where stages are loaded ahead,
// this costs more than multiprocessors that idle, as soon as half of them has a tile of 32 rows.
int64_t invariant_linear_parts(const InvariantLinearArgs& args) {
  Device device;
  if (takes_few(args) || current_device(device)) return 0;
  const int64_t parts = parts_of(args.k);
  const int64_t tiles = tiles_of_64(args);
  return parts > 1 && tiles * (fits_stages(args) ? 4 : 1) < device.multiprocessors ? parts : 0;
}

cudaError_t invariant_linear(const InvariantLinearArgs& args, cudaStream_t stream) {
  if (args.T == 0 || args.n == 0) return cudaSuccess;
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (takes_few(args)) return launch_few<T>(args, stream);
      if (args.parts || !fits_stages(args)) return launch_tiles<T, 4>(args, stream);
      Device device;
      if (cudaError_t error = current_device(device)) return error;
      return 2 * tiles_of_64(args) > device.multiprocessors ? launch_stages<T, 8>(args, stream)
                                                            : launch_stages<T, 4>(args, stream);
    } else {
      return args.T <= kFewestTokens ? launch_tiles<T, 1>(args, stream)
                                     : launch_tiles<T, 8>(args, stream);
    }
  });
}

}  // namespace epmoe::cuda
