// A block copies one chunk of a slot's row to the expert-major rows of the slot's pairs, up to K of
// them. It reads the chunk once into registers, one V a thread and access: 16 bytes where rows are
// aligned to 16 bytes, else one byte.
#pragma once
#include "args.h"
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

// A row of `vectors` accesses, cut into `count` chunks of up to `length` accesses.
struct Chunks {
  int32_t vectors, count, length;
};

// Cuts a row into chunks of up to `longest` accesses: into at least `wanted` chunks, so that few
// rows keep many blocks busy, unless a chunk would become shorter than 64 accesses.
inline Chunks chunks_of(int64_t vectors, int64_t longest, int64_t wanted) {
  constexpr int64_t kShortest = 64;
  int64_t count = std::max<int64_t>(
      1, std::max(ceil_div(vectors, longest), std::min(wanted, vectors / kShortest)));
  return {static_cast<int32_t>(vectors), static_cast<int32_t>(count),
          static_cast<int32_t>(ceil_div(vectors, count))};
}

template <typename V, int kVectors>
struct RowCopy {
  const PermuteArgs& args;
  Chunks chunks;
  V held[kVectors];  // this thread's accesses of the chunk

  __device__ __forceinline__ RowCopy(const PermuteArgs& args, const Chunks& chunks)
      : args(args), chunks(chunks) {}

  // Calls f(j, index) for this thread's j-th access of the chunk; `index` counts accesses from the
  // start of the row.
  template <typename F>
  __device__ __forceinline__ void each(uint32_t chunk, F&& f) const {
    auto first = static_cast<int32_t>(chunk * chunks.length);
    auto last = min(first + chunks.length, chunks.vectors);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (int32_t index = first + threadIdx.x + j * blockDim.x; index < last) f(j, index);
  }

  __device__ __forceinline__ void load(int64_t slot, uint32_t chunk) {
    auto* x = reinterpret_cast<const V*>(static_cast<const char*>(args.x_SD) +
                                         slot * args.x_stride_bytes);
    each(chunk, [&](int j, int32_t index) { held[j] = x[index]; });
  }

  __device__ __forceinline__ V* row_at(int64_t row) const {
    return static_cast<V*>(args.rows_ND) + row * chunks.vectors;
  }

  // Stores the chunk into the rows rows_K of the slot's pairs, and with the first chunk the row's
  // scales. -1 is no row.
  __device__ __forceinline__ void store(const int32_t* rows_K, int64_t slot, uint32_t chunk) const {
    auto blocks = static_cast<int32_t>(ceil_div(args.D, kScaleBlock));
    for (int k = 0; k < args.K; ++k) {
      int64_t row = rows_K[k];
      if (row < 0 || row >= args.max_rows) continue;
      V* out = row_at(row);
      each(chunk, [&](int j, int32_t index) { out[index] = held[j]; });
      if (args.scales_SB && chunk == 0)
        for (int i = threadIdx.x; i < blocks; i += blockDim.x)
          args.row_scales_NB[row * blocks + i] = args.scales_SB[slot * args.scales_stride + i];
    }
  }

  // Rows [begin, end), a gap, become zeros with scale 1. The blocks of the grid share them.
  __device__ __forceinline__ void clear(int32_t begin, int32_t end) const {
    auto blocks = static_cast<int32_t>(ceil_div(args.D, kScaleBlock));
    for (int64_t row = int64_t{begin} + blockIdx.x; row < end; row += gridDim.x) {
      for (int i = threadIdx.x; i < chunks.vectors; i += blockDim.x) row_at(row)[i] = V{};
      if (args.scales_SB)
        for (int i = threadIdx.x; i < blocks; i += blockDim.x)
          args.row_scales_NB[row * blocks + i] = 1.0f;
    }
  }
};

}  // namespace epmoe::cuda
