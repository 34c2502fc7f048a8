// Rows of fp8 with their scales behind them, as values again: what training makes of rows that have
// arrived.
#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/stages.h"
#include "wire_format.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 4;
constexpr int kInFlight = 4;  // vectors that a thread loads at once

// A block has a row at a time. A thread loads the elements of a store of 16 bytes, which share a
// scale.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    unpack_rows(const __grid_constant__ UnpackArgs args) {
  extern __shared__ int32_t table[];
  wait_for_predecessor();
  let_successor_start();
  RealRows rows(args.segments, args.N, table);
  constexpr int kCount = kPerVector<T>;
  constexpr int kStep = kThreads * kCount;
  static_assert(kScaleBlock % kCount == 0);
  using Packed = Vector<uint8_t, kCount>;
  int64_t row_bytes = wire(WireFormat::kPackedFp8).packed_row_bytes(args.D);
  for (uint32_t n = blockIdx.x; n < rows.count(); n += gridDim.x) {
    int64_t t = rows[n].t;
    auto* packed = static_cast<const uint8_t*>(args.packed_N) + t * row_bytes;
    auto* scales = reinterpret_cast<const float*>(packed + args.D);
    T* out = static_cast<T*>(args.rows_ND) + t * args.D;
    for (int64_t first = threadIdx.x * kCount; first < args.D; first += kInFlight * kStep) {
      Packed parts[kInFlight];
      float scale[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        int64_t at = first + i * kStep;
        if (at >= args.D) continue;
        parts[i] = *reinterpret_cast<const Packed*>(packed + at);
        scale[i] = scales[at / kScaleBlock];
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        int64_t at = first + i * kStep;
        if (at >= args.D) continue;
        float values[kCount];
        to_floats(parts[i], values);
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] *= scale[i];
        *reinterpret_cast<Vector<T, kCount>*>(out + at) = rounded<T>(values);
      }
    }
  }
}

}  // namespace

cudaError_t unpack(const UnpackArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    return launch_at_most(kBlocksPerSM, unpack_rows<decltype(type)>, args.N, kThreads,
                          RealRows::shared_bytes(args.segments.num_local_experts), stream, args);
  });
}

}  // namespace epmoe::cuda
