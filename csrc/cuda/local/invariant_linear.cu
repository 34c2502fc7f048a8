// x [T, k] · weight [n, k]ᵀ in one order of sums, whatever T is: logits of a router, and the gradients of its tokens.
//
// The k are cut into parts, whose number and length depend on k only. A sum runs through each part by itself, and then
// over the parts, both in order. Where tiles are too few to fill the GPU, a block has one part of a tile, and a second
// kernel adds the parts; otherwise it has all parts. Both execute the same additions.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
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
    multiply(const __grid_constant__ InvariantLinearArgs args, int64_t length, int32_t parts) {
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
  if (cudaError_t error = launch(multiply<T, kPerThread>, blocks, kThreads, 0, stream, args, length, parts))
    return error;
  if (!args.parts) return cudaSuccess;
  return launch(add_parts<T>, ceil_div(args.T * args.n, kSumThreads), kSumThreads, 0, stream, args, parts);
}

constexpr int64_t kFewTokens = 16;  // up to so many, a tile has 8 rows

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
    return args.T <= kFewTokens ? launch_tiles<T, 1>(args, stream) : launch_tiles<T, 8>(args, stream);
  });
}

}  // namespace epmoe::cuda
