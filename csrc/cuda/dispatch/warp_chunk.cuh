// Simple protocol: a chunk of a token's row on its way from x through shared memory to every rank
// that needs it. Each warp of a send block has a buffer of its own, so no warp waits for another.
#pragma once
#include "cuda/device/tma.cuh"
#include "cuda/device/wire.cuh"
#include "cuda/dispatch/block.cuh"

namespace epmoe::cuda {

// Where a token's row goes, a rank a lane.
struct Destinations {
  int32_t slot;  // -1: the rank gets no row
  char* row_at;  // null: no expert of the rank has room for it
  float* scales_at;
};

// This warp's buffer, and the chunk in it.
struct WarpChunk {
  const DispatchBlock& b;
  char* buffer;
  uint64_t* mbarrier;
  float* scales;
  int32_t loads = 0;  // that have started

  __device__ __forceinline__ explicit WarpChunk(const DispatchBlock& b) : b(b) {
    int32_t warp = threadIdx.x / 32;
    buffer = b.chunks + warp * b.kernel.chunk_bytes;
    mbarrier = &b.shared.chunk_barriers[warp];
    scales = b.shared.scales[warp];
    if (threadIdx.x % 32 == 0) init_mbarrier(mbarrier);
  }
  // Of a chunk, before it is quantized. A block of elements that x does not fill ends with zeros.
  __device__ __forceinline__ int32_t bytes(int32_t chunk) const {
    auto row_bytes = static_cast<int32_t>(b.args.D * itemsize(b.args.dtype));
    return min(b.kernel.chunk_bytes, row_bytes - chunk * b.kernel.chunk_bytes);
  }
  // Of a chunk in x. Chunks begin with blocks, so each has some.
  __device__ __forceinline__ int32_t x_bytes(int32_t chunk) const {
    auto row_bytes = static_cast<int32_t>(b.args.x_row_bytes);
    return min(b.kernel.chunk_bytes, row_bytes - chunk * b.kernel.chunk_bytes);
  }
  // Starts the load of a chunk, once the last one has left the buffer.
  __device__ __forceinline__ void load(int32_t t, int32_t chunk) {
    tma_wait_read<0>();
    __syncwarp();
    tma_load(buffer, b.x_at(t) + chunk * b.kernel.chunk_bytes, x_bytes(chunk), mbarrier);
    ++loads;
  }
  // Waits for the last load.
  __device__ __forceinline__ void await() const { wait_mbarrier(mbarrier, (loads - 1) & 1); }
  // The same; then the chunk is as it travels.
  template <WireFormat kFormat, typename Source>
  __device__ __forceinline__ void take(int32_t chunk) const {
    await();
    if constexpr (kQuantizes<Source>)
      quantize<kFormat, Source>(bytes(chunk), x_bytes(chunk));
    else if constexpr (wire(kFormat).has_scales())
      fill_up(bytes(chunk), x_bytes(chunk));
  }

  // Puts zeros behind the elements that have come from x.
  __device__ __forceinline__ void fill_up(int32_t bytes, int32_t x_bytes) const {
    if (x_bytes == bytes) return;
    for (int32_t v = x_bytes / 16 + threadIdx.x % 32; v * 16 < bytes; v += 32)
      reinterpret_cast<uint4*>(buffer)[v] = {};
    fence_shared_for_tma();
    __syncwarp();
  }

  // Quantizes the chunk in place. kLanes lanes share a block of elements that have one scale. A
  // step writes only over what this step and earlier ones have read.
  template <WireFormat kFormat, typename Source>
  __device__ __forceinline__ void quantize(int32_t bytes, int32_t x_bytes) const {
    constexpr int kCount = kPerVector<Source>;
    constexpr int kLanes = wire(kFormat).block / kCount;
    constexpr int kStep = 2;
    int32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32_t first = lane; (first - lane) * 16 < bytes; first += kStep * 32) {
      WireRegisters<kFormat, kCount> packed[kStep];
      float scale[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        int32_t v = first + i * 32;
        float values[kCount] = {};
        if (v * 16 < x_bytes)
          to_floats(reinterpret_cast<const Vector<Source, kCount>*>(buffer)[v], values);
        scale[i] = block_scale<kCount, kLanes>(values);
        packed[i] = quantized<kFormat>(values, scale[i]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        int32_t v = first + i * 32;
        if (v * 16 >= bytes) continue;
        reinterpret_cast<WireRegisters<kFormat, kCount>*>(buffer)[v] = packed[i];
        if (v % kLanes == 0) scales[v / kLanes] = scale[i];
      }
    }
    fence_shared_for_tma();
    __syncwarp();
  }

  // Sends the chunk of token t to all ranks that need the token, and into the final rows of this
  // rank that are known: `own_row`, a pair a lane.
  template <WireFormat kFormat, typename Source>
  __device__ __forceinline__ void send(const Destinations& to, int32_t own_row, int32_t t,
                                       int32_t chunk) const {
    int32_t lane = threadIdx.x % 32;
    int32_t bytes = this->bytes(chunk);
    auto R = static_cast<int32_t>(b.plan.R);
    int64_t begin = int64_t{chunk} * b.kernel.chunk_bytes;
    // Lanes store one after the other. The rotation keeps all blocks from starting with rank 0.
    auto at = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to.row_at),
                          static_cast<int32_t>((lane + blockIdx.x) % R));
    char* row = lane < R ? reinterpret_cast<char*>(at) : nullptr;
    char* own = nullptr;
    if (own_row >= 0)
      own = in_window<char>(b.ex, b.plan.rank, b.plan.rows) + own_row * b.kernel.row_bytes();
    constexpr int kShrinks = kPerByte<kFormat, Source>;
    row = row ? row + begin / kShrinks : nullptr;
    own = own ? own + begin / kShrinks : nullptr;
    // A multiprocessor's copies leave one after the other. Half of the blocks store own rows first,
    // so that these do not all wait for the wire.
    bool own_first = R <= kLocalBoundRanks && b.number * 2 >= b.kernel.send_blocks;
    tma_store(own_first ? own : row, buffer, bytes / kShrinks);
    tma_store(own_first ? row : own, buffer, bytes / kShrinks);
    if constexpr (wire(kFormat).has_scales()) {
      constexpr int64_t kBlockBytes =
          wire(kFormat).row_bytes(wire(kFormat).block, 0) * kShrinks;  // of x
      int64_t first = begin / kBlockBytes;
      auto count = static_cast<int32_t>(bytes / kBlockBytes);
      auto store = [&](float* scales_at) {
        for (int32_t i = lane; i < count; i += 32)
          scales_at[first + i] = kQuantizes<Source> ? scales[i] : b.scales_at(t)[first + i];
      };
#pragma unroll 1
      for (int32_t rank = 0; rank < R; ++rank) {
        auto* scales_at = reinterpret_cast<float*>(
            __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to.scales_at), rank));
        if (scales_at) store(scales_at);
      }
      auto* row_scales = in_window<float>(b.ex, b.plan.rank, b.plan.row_scales);
      int64_t blocks = wire_scales(b.plan.payload_format, b.args.D);
#pragma unroll 1
      for (uint32_t left = __ballot_sync(kAllLanes, own_row >= 0); left; left &= left - 1)
        store(row_scales + __shfl_sync(kAllLanes, own_row, __ffs(left) - 1) * blocks);
    }
  }
};

}  // namespace epmoe::cuda
