// x [T, k] · weight [n, k]ᵀ in one order of sums, whatever T is: logits of a router, and the gradients of its tokens.
//
// The k are cut into parts, whose number and length depend on k only. A sum runs through each part by itself, and then
// over the parts, both in order. Where tiles are too few to fill the GPU, a block has one part of a tile, and a second
// kernel adds the parts; otherwise it has all parts. Both execute the same additions. Elements of 16 bits are
// multiplied by the tensor core, 16 of k at a time.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 128, kColumns = 64;             // of a tile
constexpr int kStep = 32;                                // of k, in shared memory at once
constexpr int64_t kMostParts = 16, kShortestPart = 128;  // a multiple of kStep
constexpr int kSumThreads = 256;

int64_t part_length(int64_t k) { return std::max(kShortestPart, ceil_div(ceil_div(k, kMostParts), kStep) * kStep); }

// Where an element lies in shared memory: the rows of one k follow one another, in an order by which eight k of four
// rows lie in different banks. Four rows from a multiple of four stay together.
__device__ __forceinline__ int place(int row, int k) { return row ^ (k % 8) << 2; }

// Loads [kRows, kStep] of a matrix with rows of k elements, and zeros beyond its end.
template <typename T, int kRows>
__device__ __forceinline__ void load_tile(const void* matrix, int64_t rows, int64_t k, int64_t row, int64_t from,
                                          int64_t end, float (*tile)[kColumns]) {
  int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kRows; i += kThreads / 32) {  // a warp has four rows by eight k
    int r = i / 4 * 4 + lane / 8, at = i % 4 * 8 + lane % 8;
    bool real = row + r < rows && from + at < end;
    tile[at][place(r, at)] = real ? to_float(static_cast<const T*>(matrix)[(row + r) * k + from + at]) : 0.0f;
  }
}

// kPerThread: rows of x of a thread, which has four columns; a tile has 8 · kPerThread rows.
template <typename T, int kPerThread>
__global__ void __launch_bounds__(kThreads)
    multiply_floats(const __grid_constant__ InvariantLinearArgs args, int64_t length, int32_t parts) {
  constexpr int kRows = 8 * kPerThread;
  __shared__ __align__(16) float x[kStep][kColumns], weight[kStep][kColumns];
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kColumns), tiles = columns * ceil_div(args.T, kRows);
  const int64_t tile = blockIdx.x % tiles, m = tile / columns * kRows, n = tile % columns * kColumns;
  const bool all = args.parts == nullptr;
  const int first = all ? 0 : static_cast<int>(blockIdx.x / tiles);
  const int row = threadIdx.x / 16 * kPerThread, column = threadIdx.x % 16 * 4;
  float total[kPerThread][4] = {};
  for (int part = first; part < (all ? parts : first + 1); ++part) {
    const int64_t end = min(args.k, (part + 1) * length);
    float sum[kPerThread][4] = {};
    for (int64_t from = part * length; from < end; from += kStep) {
      __syncthreads();
      load_tile<T, kRows>(args.x_Tk, args.T, args.k, m, from, end, x);
      load_tile<T, kColumns>(args.weight_nk, args.n, args.k, n, from, end, weight);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kStep; ++k) {
        float a[kPerThread];
        if constexpr (kPerThread % 4 == 0) {
#pragma unroll
          for (int i = 0; i < kPerThread; i += 4)
            *reinterpret_cast<float4*>(&a[i]) = *reinterpret_cast<const float4*>(&x[k][place(row + i, k)]);
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
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (m + row + i >= args.T || n + column + j >= args.n) continue;
      int64_t at = (m + row + i) * args.n + n + column + j;
      if (all)
        static_cast<T*>(args.out_Tn)[at] = from_float<T>(total[i][j]);
      else
        args.parts[first * args.T * args.n + at] = total[i][j];
    }
}

// Eight elements of a row from `at` on, zeros from `end` on.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T* row, int64_t at, int64_t end, bool real, bool wide) {
  if (wide) return real && at < end ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
  Vector<T, 8> eight = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (real && at + i < end) eight.at[i] = row[at + i];
  return *reinterpret_cast<const uint4*>(&eight);
}

// The same tiles and parts of 16-bit elements. A warp has 16 rows of the weight as the rows of its matrix, and all rows
// of x as its columns, in eights. Lane 4 g + t has rows g and g + 8 and row g of each eight, and the k from 8 t on of
// every 32: which of them an instruction multiplies does not matter, as long as both sides agree. `wide`: rows are
// aligned to 16 bytes.
template <typename T, int kPerThread>
__global__ void __launch_bounds__(kThreads)
    multiply_halves(const __grid_constant__ InvariantLinearArgs args, int64_t length, int32_t parts, bool wide) {
  constexpr int kEights = kPerThread;
  wait_for_predecessor();
  let_successor_start();
  const int64_t columns = ceil_div(args.n, kColumns), tiles = columns * ceil_div(args.T, 8 * kEights);
  const int64_t tile = blockIdx.x % tiles, m = tile / columns * 8 * kEights;
  const int64_t n = tile % columns * kColumns + threadIdx.x / 32 * 16;
  const bool all = args.parts == nullptr;
  const int first = all ? 0 : static_cast<int>(blockIdx.x / tiles), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float total[kEights][4] = {};
  for (int part = first; part < (all ? parts : first + 1); ++part) {
    const int64_t end = min(args.k, (part + 1) * length);
    float sum[kEights][4] = {};
#pragma unroll 2
    for (int64_t at = part * length + 8 * t; at - 8 * t < end; at += 32) {
      uint4 weight[2], x[kEights];
      auto row_of = [&](const void* matrix, int64_t row) { return static_cast<const T*>(matrix) + row * args.k; };
#pragma unroll
      for (int i = 0; i < 2; ++i)
        weight[i] = load_eight(row_of(args.weight_nk, n + g + 8 * i), at, end, n + g + 8 * i < args.n, wide);
#pragma unroll
      for (int i = 0; i < kEights; ++i)
        x[i] = load_eight(row_of(args.x_Tk, m + 8 * i + g), at, end, m + 8 * i + g < args.T, wide);
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
#pragma unroll
    for (int i = 0; i < kEights; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] = part == first ? sum[i][j] : total[i][j] + sum[i][j];
  }
#pragma unroll
  for (int i = 0; i < kEights; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = m + 8 * i + 2 * t + j % 2, column = n + g + j / 2 * 8, at = row * args.n + column;
      if (row >= args.T || column >= args.n) continue;
      if (all)
        static_cast<T*>(args.out_Tn)[at] = from_float<T>(total[i][j]);
      else
        args.parts[first * args.T * args.n + at] = total[i][j];
    }
}

template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    add_parts(const __grid_constant__ InvariantLinearArgs args, int32_t parts) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t count = args.T * args.n, at = blockIdx.x * static_cast<int64_t>(kSumThreads) + threadIdx.x;
  if (at >= count) return;
  float total = args.parts[at];
  for (int part = 1; part < parts; ++part) total += args.parts[part * count + at];
  static_cast<T*>(args.out_Tn)[at] = from_float<T>(total);
}

template <typename T, int kPerThread>
cudaError_t launch_tiles(const InvariantLinearArgs& args, cudaStream_t stream) {
  const int64_t length = part_length(args.k), tiles = ceil_div(args.T, 8 * kPerThread) * ceil_div(args.n, kColumns);
  const auto parts = static_cast<int32_t>(ceil_div(args.k, length));
  const int64_t blocks = args.parts ? tiles * parts : tiles;
  cudaError_t error;
  if constexpr (sizeof(T) == 2) {
    const bool wide = is_aligned(args.x_Tk, args.k * 2) && is_aligned(args.weight_nk, args.k * 2);
    error = launch(multiply_halves<T, kPerThread>, blocks, kThreads, 0, stream, args, length, parts, wide);
  } else {
    error = launch(multiply_floats<T, kPerThread>, blocks, kThreads, 0, stream, args, length, parts);
  }
  if (error) return error;
  if (!args.parts) return cudaSuccess;
  return launch(add_parts<T>, ceil_div(args.T * args.n, kSumThreads), kSumThreads, 0, stream, args, parts);
}

constexpr int64_t kFewTokens = 16;  // up to so many, a tile has 8 rows
template <typename T>
constexpr int kManyPerThread = sizeof(T) == 2 ? 4 : 8;  // then 32 or 64

}  // namespace

int64_t invariant_linear_parts(int64_t T, int64_t n, int64_t k) {
  Device device;
  if (current_device(device)) return 0;
  const int64_t parts = ceil_div(k, part_length(k)), tiles = ceil_div(T, 64) * ceil_div(n, kColumns);
  return parts > 1 && tiles < device.multiprocessors ? parts : 0;
}

cudaError_t invariant_linear(const InvariantLinearArgs& args, cudaStream_t stream) {
  if (args.T == 0 || args.n == 0) return cudaSuccess;
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    return args.T <= kFewTokens ? launch_tiles<T, 1>(args, stream) : launch_tiles<T, kManyPerThread<T>>(args, stream);
  });
}

}  // namespace epmoe::cuda
