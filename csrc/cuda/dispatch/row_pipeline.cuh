// Simple protocol: a token's row on its way from x through shared memory to every rank that needs
// it, chunk by chunk.
#pragma once
#include "cuda/device/tma.cuh"
#include "cuda/device/wire.cuh"
#include "cuda/dispatch/block.cuh"

namespace epmoe::cuda {

// The chunks that a block has on their way.
struct RowPipeline : TmaRing<kPipelineStages> {
  const DispatchBlock& b;

  __device__ explicit RowPipeline(const DispatchBlock& b)
      : TmaRing(b.chunks, b.shared.chunk_barriers, b.kernel.chunk_bytes, threadIdx.x == 0), b(b) {}
  __device__ int32_t bytes(int32_t chunk) const {
    auto row_bytes = static_cast<int32_t>(b.args.D * itemsize(b.args.dtype));
    return min(stride_bytes, row_bytes - chunk * stride_bytes);
  }
  // Warp 0 calls this.
  __device__ void load_chunk(int32_t t, int32_t chunk) {
    load_next(b.x_at(t) + chunk * stride_bytes, bytes(chunk));
  }
};

// The whole block quantizes a chunk, in place. kLanes threads share a block of elements that have
// one scale.
template <WireFormat kFormat, typename Source>
__device__ __forceinline__ void quantize_chunk(const DispatchBlock& b, char* buffer,
                                               int32_t bytes) {
  constexpr int kCount = kPerVector<Source>;
  constexpr int kLanes = wire(kFormat).block / kCount;
  constexpr int kEach = kMaxChunkBytes / (16 * kThreads);
  WireRegisters<kFormat, kCount> packed[kEach];
  float scales[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    float values[kCount] = {};
    if (v * 16 < bytes)
      to_floats(reinterpret_cast<const Vector<Source, kCount>*>(buffer)[v], values);
    scales[i] = block_scale<kCount, kLanes>(values);
    packed[i] = quantized<kFormat>(values, scales[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int32_t v = i * kThreads + threadIdx.x;
    if (v * 16 >= bytes) continue;
    reinterpret_cast<WireRegisters<kFormat, kCount>*>(buffer)[v] = packed[i];
    if (v % kLanes == 0) b.shared.scales[v / kLanes] = scales[i];
  }
  fence_shared_for_tma();
  __syncthreads();
}

// Warp 0 sends a chunk of token t to all ranks that need the token. `bytes`: of the chunk in x.
template <WireFormat kFormat, typename Source>
__device__ __forceinline__ void send_chunk(const DispatchBlock& b, int32_t t, int32_t chunk,
                                           const char* buffer, int32_t bytes) {
  int32_t lane = threadIdx.x;
  int32_t R = static_cast<int32_t>(b.plan.R);
  int64_t begin = chunk * b.kernel.chunk_bytes;
  // Lanes store one after the other. The rotation keeps all blocks from starting with rank 0.
  char* to = lane < R ? b.shared.destinations.row_at[(lane + blockIdx.x) % R] : nullptr;
  if constexpr (!wire(kFormat).has_scales()) {
    tma_store(to ? to + begin : nullptr, buffer, bytes);
  } else {
    constexpr int kShrinks = kPerByte<kFormat, Source>;
    constexpr int64_t kBlockBytes =
        wire(kFormat).row_bytes(wire(kFormat).block, 0) * kShrinks;  // of x
    tma_store(to ? to + begin / kShrinks : nullptr, buffer, bytes / kShrinks);
#pragma unroll 1
    for (int32_t rank = 0; rank < R; ++rank)
      if (float* scales = b.shared.destinations.scales_at[rank])
        for (int32_t i = lane; i < bytes / kBlockBytes; i += 32)
          scales[begin / kBlockBytes + i] =
              kQuantizes<Source> ? b.shared.scales[i] : b.scales_at(t)[begin / kBlockBytes + i];
  }
}

}  // namespace epmoe::cuda
