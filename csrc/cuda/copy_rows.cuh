// A block copies one stretch of a row to up to K places: read once into registers, one V a thread and access, which is
// 16 bytes wherever rows are aligned to them.
#pragma once
#include "args.h"
#include "common.cuh"

namespace epmoe::cuda {

// A row of `vectors` accesses, in `count` stretches of up to `length`.
struct Chunks {
  int32_t vectors, count, length;
};

// At least `wanted` stretches, so that few rows keep many blocks busy, none needlessly short.
inline Chunks chunks_of(int64_t vectors, int64_t longest, int64_t wanted) {
  constexpr int64_t kShortest = 64;
  int64_t count = std::max<int64_t>(1, std::max(ceil_div(vectors, longest), std::min(wanted, vectors / kShortest)));
  return {static_cast<int32_t>(vectors), static_cast<int32_t>(count), static_cast<int32_t>(ceil_div(vectors, count))};
}

template <typename V, int kVectors>
struct RowCopy {
  const PermuteArgs& args;
  Chunks chunks;
  V held[kVectors];

  __device__ __forceinline__ RowCopy(const PermuteArgs& args, const Chunks& chunks) : args(args), chunks(chunks) {}

  // Calls f(j, vector) for each vector that this thread has of the stretch.
  template <typename F>
  __device__ __forceinline__ void each(uint32_t chunk, F&& f) const {
    auto first = static_cast<int32_t>(chunk * chunks.length), last = min(first + chunks.length, chunks.vectors);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (int32_t at = first + threadIdx.x + j * blockDim.x; at < last) f(j, at);
  }

  __device__ __forceinline__ void load(int64_t slot, uint32_t chunk) {
    auto* x = reinterpret_cast<const V*>(static_cast<const char*>(args.x_SD) + slot * args.x_stride_bytes);
    each(chunk, [&](int j, int32_t at) { held[j] = x[at]; });
  }

  __device__ __forceinline__ V* row_at(int64_t row) const {
    return static_cast<V*>(args.rows_ND) + row * chunks.vectors;
  }

  // `rows_K`: where the slot's row goes, -1 for nowhere.
  __device__ __forceinline__ void store(const int32_t* rows_K, int64_t slot, uint32_t chunk) const {
    auto blocks = static_cast<int32_t>(ceil_div(args.D, kScaleBlock));
    for (int k = 0; k < args.K; ++k) {
      int64_t row = rows_K[k];
      if (row < 0 || row >= args.max_rows) continue;
      V* out = row_at(row);
      each(chunk, [&](int j, int32_t at) { out[at] = held[j]; });
      if (args.scales_SB && chunk == 0)
        for (int i = threadIdx.x; i < blocks; i += blockDim.x)
          args.row_scales_NB[row * blocks + i] = args.scales_SB[slot * args.scales_stride + i];
    }
  }

  // Rows [begin, end), which belong to no pair, become zeros; the grid shares them.
  __device__ __forceinline__ void clear(int32_t begin, int32_t end) const {
    auto blocks = static_cast<int32_t>(ceil_div(args.D, kScaleBlock));
    for (int64_t row = int64_t{begin} + blockIdx.x; row < end; row += gridDim.x) {
      for (int i = threadIdx.x; i < chunks.vectors; i += blockDim.x) row_at(row)[i] = V{};
      if (args.scales_SB)
        for (int i = threadIdx.x; i < blocks; i += blockDim.x) args.row_scales_NB[row * blocks + i] = 1.0f;
    }
  }
};

}  // namespace epmoe::cuda
