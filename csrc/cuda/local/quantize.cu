// Padding and fp8 on the GPU. Rows at and past the number of tokens are stale memory: the kernels
// make them zeros, and they never count in an amax.
#include "args.h"
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/stages.h"
#include "wire_format.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerLane = kScaleBlock / 32;

template <typename V>
__global__ void __launch_bounds__(kThreads) clear_rows(const __grid_constant__ PaddingArgs args) {
  wait_for_predecessor();
  let_successor_start();
  for (int64_t t = real_tokens(args) + blockIdx.x; t < args.T; t += gridDim.x) {
    V* row = reinterpret_cast<V*>(static_cast<char*>(args.x_TD) + t * args.stride_bytes);
    for (int64_t i = threadIdx.x; i < args.row_bytes / static_cast<int64_t>(sizeof(V));
         i += kThreads)
      row[i] = V{};
  }
}

// One warp has one block of kScaleBlock values of a row; each lane has kPerLane consecutive ones.
template <typename T>
struct WarpBlock {
  int64_t t, first;  // the row, and this lane's first element in it
  int count;         // of this lane's elements, 0 past the end of the row
  float value[kPerLane];

  __device__ __forceinline__ WarpBlock(const QuantizeArgs& args, int64_t index, int64_t blocks,
                                       int64_t real, bool wide) {
    int64_t block = index % blocks;
    t = index / blocks;
    first = block * kScaleBlock + threadIdx.x % 32 * kPerLane;
    count = static_cast<int>(min(max(args.D - first, int64_t{0}), int64_t{kPerLane}));
    auto* row = static_cast<const T*>(args.x_TD) + t * args.x_stride;
    bool present = t < real;
    if (present && wide && count == kPerLane) {
      to_floats(*reinterpret_cast<const Vector<T, kPerLane>*>(row + first), value);
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        value[i] = present && i < count ? to_float(row[first + i]) : 0.0f;
    }
  }

  __device__ __forceinline__ float largest() const { return warp_max(finite_amax(value)); }

  __device__ __forceinline__ void store(const QuantizeArgs& args, int64_t row_bytes, float scale,
                                        bool wide) const {
    auto* out = static_cast<uint8_t*>(args.q_TD) + t * row_bytes + first;
    Fp8Registers<kPerLane> q = to_fp8(value, scale);
    if (wide && count == kPerLane) {
      *reinterpret_cast<Fp8Registers<kPerLane>*>(out) = q;
      return;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i < count) out[i] = static_cast<uint8_t>(q >> 8 * i);
  }
};

template <typename T, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks(const __grid_constant__ QuantizeArgs args, int64_t blocks, bool wide) {
  wait_for_predecessor();
  let_successor_start();
  int64_t real = real_tokens(args);
  int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index >= args.T * blocks) return;
  WarpBlock<T> block(args, index, blocks, real, wide);
  float scale = scale_for(block.largest());
  int64_t row_bytes = kPacked ? wire(WireFormat::kPackedFp8).packed_row_bytes(args.D) : args.D;
  block.store(args, row_bytes, scale, wide);
  if (threadIdx.x % 32) return;
  if constexpr (kPacked)
    reinterpret_cast<float*>(static_cast<char*>(args.q_TD) + block.t * row_bytes +
                             args.D)[index % blocks] = scale;
  else
    args.scales_TB[index] = scale;
}

// The largest magnitude of all real rows, into args.largest, which starts as 0. Nonnegative floats
// order as their bits.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    find_largest(const __grid_constant__ QuantizeArgs args, int64_t blocks, bool wide) {
  wait_for_predecessor();
  let_successor_start();
  int64_t real = real_tokens(args);
  float largest = 0.0f;
  for (int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; index < real * blocks;
       index += gridDim.x * kWarps)
    largest = fmaxf(largest, WarpBlock<T>(args, index, blocks, real, wide).largest());
  if (threadIdx.x % 32 == 0 && largest > 0.0f) atomicMax(args.largest, __float_as_uint(largest));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor(const __grid_constant__ QuantizeArgs args, int64_t blocks, bool wide) {
  wait_for_predecessor();
  let_successor_start();
  float scale = scale_for(__uint_as_float(*args.largest));
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.scales_TB = scale;
  int64_t index = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (index < args.T * blocks)
    WarpBlock<T>(args, index, blocks, real_tokens(args), wide).store(args, args.D, scale, wide);
}

}  // namespace

cudaError_t zero_padding_rows(const PaddingArgs& args, cudaStream_t stream) {
  if (args.row_bytes == 0) return cudaSuccess;
  bool wide = is_aligned(args.x_TD, args.stride_bytes) && args.row_bytes % 16 == 0;
  return launch_at_most(8, wide ? clear_rows<uint4> : clear_rows<unsigned char>, args.T, kThreads,
                        0, stream, args);
}

cudaError_t quantize(const QuantizeArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    bool wide = args.D % kPerLane == 0 && args.x_stride % kPerLane == 0 &&
                reinterpret_cast<uintptr_t>(args.x_TD) % (kPerLane * sizeof(T)) == 0;
    int64_t blocks = ceil_div(args.D, kScaleBlock);
    int64_t grid = ceil_div(args.T * blocks, kWarps);
    if (args.block) {
      if (!grid) return cudaSuccess;
      auto* kernel = args.scales_TB ? quantize_blocks<T, false> : quantize_blocks<T, true>;
      return launch(kernel, grid, kThreads, 0, stream, args, blocks, wide);
    }
    if (cudaError_t error = cudaMemsetAsync(args.largest, 0, sizeof(uint32_t), stream))
      return error;
    int64_t readers = std::clamp<int64_t>(grid, 1, 8 * device.multiprocessors);
    if (cudaError_t error =
            launch(find_largest<T>, readers, kThreads, 0, stream, args, blocks, wide))
      return error;
    return launch(quantize_tensor<T>, std::max<int64_t>(grid, 1), kThreads, 0, stream, args, blocks,
                  wide);
  });
}

}  // namespace epmoe::cuda
