// A token's row on its way from x to every rank that needs it, in pieces that fit into shared memory.
#pragma once
#include "bulk.cuh"
#include "dispatch.cuh"
#include "fp8.cuh"

namespace epmoe::cuda {

// A block's rows on their way: from x into shared memory, and from there to every rank that needs them.
struct Pieces : Ring<kPieces> {
  const DispatchBlock& b;

  __device__ explicit Pieces(const DispatchBlock& b)
      : Ring(b.pieces, b.shared.arrivals, b.kernel.piece_bytes, threadIdx.x == 0), b(b) {}
  __device__ int32_t bytes(int32_t piece) const {
    auto row_bytes = static_cast<int32_t>(b.args.D * itemsize(b.args.dtype));
    return min(stride_bytes, row_bytes - piece * stride_bytes);
  }
  // By warp 0.
  __device__ void fetch_piece(int32_t t, int32_t piece) { fetch_next(b.x_at(t) + piece * stride_bytes, bytes(piece)); }
};

// By the whole block: a piece as fp8, in its own place; kLanes threads share a block of 128 elements.
template <typename Source>
__device__ __forceinline__ void quantize_piece(const DispatchBlock& b, char* buffer, int32_t bytes) {
  constexpr int kCount = kPerVector<Source>, kLanes = kScaleBlock / kCount, kEach = kMaxPieceBytes / (16 * kThreads);
  Fp8Words<kCount> packed[kEach];
  float scales[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    float values[kCount] = {};
    if (v * 16 < bytes) to_floats(reinterpret_cast<const Vector<Source, kCount>*>(buffer)[v], values);
    scales[i] = block_scale<kCount, kLanes>(values);
    packed[i] = to_fp8(values, scales[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    if (v * 16 >= bytes) continue;
    reinterpret_cast<Fp8Words<kCount>*>(buffer)[v] = packed[i];
    if (v % kLanes == 0) b.shared.scales[v / kLanes] = scales[i];
  }
  publish_shared();
  __syncthreads();
}

// By warp 0: a piece to all ranks that need the token.
template <typename Source>
__device__ __forceinline__ void send_piece(const DispatchBlock& b, int32_t piece, const char* buffer, int32_t bytes) {
  int32_t lane = threadIdx.x, R = static_cast<int32_t>(b.plan.R);
  int64_t begin = piece * b.kernel.piece_bytes;
  // Lanes store one after the other: not every token to rank 0 first.
  char* to = lane < R ? b.shared.sending.row_at[(lane + blockIdx.x) % R] : nullptr;
  if constexpr (std::is_void_v<Source>) {
    store(to ? to + begin : nullptr, buffer, bytes);
  } else {
    constexpr int kSize = sizeof(Source);
    store(to ? to + begin / kSize : nullptr, buffer, bytes / kSize);
#pragma unroll 1
    for (int32_t rank = 0; rank < R; ++rank)
      if (float* scales = b.shared.sending.scales_at[rank])
        for (int32_t i = lane; i < bytes / (kScaleBlock * kSize); i += 32)
          scales[begin / (kScaleBlock * kSize) + i] = b.shared.scales[i];
  }
}

}  // namespace epmoe::cuda
