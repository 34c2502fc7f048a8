// How the experts in one kernel start: their counters, what TMA reads, and the launch.
#pragma once
#include "cuda/device/launch.cuh"
#include "cuda/hopper/fused_experts/loads.cuh"

namespace epmoe::cuda::fused {

// In front of the kernel. Where its last block clears them instead, few rows take longer. The
// kernel's blocks get their place while this one still waits, and then wait for it. It may let them
// start before it waits itself: they touch no memory before it has ended.
static __global__ void clear_counters(const __grid_constant__ FewRowsArgs args) {
  let_successor_start();
  wait_for_predecessor();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < args.num_counters) args.counters[i] = 0;
}

// Where two steps are loaded together, L2 need not fetch the second one ahead. In MXFP4 two steps
// are 128 bytes.
template <typename T>
constexpr auto kFetched = T::kStepsAtOnce == 2 || T::kPacked ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                             : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

template <typename T>
cudaError_t describe_weights(const FewRowsArgs& args, WeightMaps& maps) {
  constexpr int kBytes = static_cast<int>(sizeof(typename T::Element));
  constexpr int kLine = kWeightLineBytes<T>;
  const int64_t e = args.segments.num_local_experts;
  // A row of weights, in elements, or in bytes of two codes.
  const int64_t D = T::kPacked ? args.D / 2 : args.D;
  const int64_t F = T::kPacked ? args.F / 2 : args.F;
  // Gates, and ups behind them: F lines further on, or one where they lie by turns.
  auto* gates = static_cast<const typename T::Element*>(args.gate_up_e2FD);
  const int64_t to_ups = (args.interleaved ? 1 : args.F) * D;
  const Strides strides = {(args.interleaved ? 2 : 1) * D, 2 * args.F * D};
  for (auto* map : {&maps.gates, &maps.ups}) {
    const auto* at = gates + (map == &maps.ups ? to_ups : 0);
    if (cudaError_t error =
            describe(*map, at, D, args.F, e, strides, kBoxRows<T>, kBytes, kLine, kFetched<T>))
      return error;
  }
  return describe(maps.down, args.down_eDF, F, args.D, e, kBoxRows<T>, kBytes, kLine, kFetched<T>);
}

template <typename T>
cudaError_t describe_all(const FewRowsArgs& args, Maps& maps) {
  constexpr int kBytes = static_cast<int>(sizeof(typename T::Element));
  if (cudaError_t error = describe_weights<T>(args, maps)) return error;
  if constexpr (kHasFew<T>)
    if (cudaError_t error = describe_weights<Fp8Few>(args, maps.few)) return error;
  const Strides of_rows = {args.rows_stride, args.rows_stride * args.N};
  const auto describe_rows = [&](CUtensorMap& rows, CUtensorMap& h, int lines) {
    if (cudaError_t error = describe(rows, args.rows_ND, args.D, args.N, 1, of_rows, lines, kBytes))
      return error;
    return describe(h, args.h_NF, args.F, args.N, 1, lines, kBytes);
  };
  if constexpr (kHasFull<T>)
    if (cudaError_t error = describe_rows(maps.full_rows, maps.full_h, kFullTokens)) return error;
  return describe_rows(maps.rows, maps.h, kBoxTokens<T>);
}

// A block on each multiprocessor.
template <typename T, typename Kernel>
cudaError_t launch_experts(Kernel kernel, const FewRowsArgs& args, cudaStream_t stream) {
  constexpr int kThreadsToClear = 256;
  if (args.N == 0 || args.segments.num_local_experts == 0) return cudaSuccess;
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;  // nothing was compiled for sm_90a
  Maps maps;
  if (cudaError_t error = describe_all<T>(args, maps)) return error;
  if (cudaError_t error = launch(clear_counters, ceil_div(args.num_counters, kThreadsToClear),
                                 kThreadsToClear, 0, stream, args))
    return error;
  return launch(kernel, device.multiprocessors, kThreads<T>,
                Shared<T>::bytes(args.segments.num_local_experts), stream, args, maps);
}

}  // namespace epmoe::cuda::fused
