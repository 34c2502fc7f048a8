// The table of this library's functions, from which libepmoe.so calls the kernels.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/stages.h"
#include "cuda_api.h"

namespace epmoe::cuda {
namespace {

cudaStream_t typed(Stream stream) { return static_cast<cudaStream_t>(stream); }

const char* error_string(int error) {
  if (error != cudaErrorNoKernelImageForDevice) return cudaGetErrorString(static_cast<cudaError_t>(error));
  static const std::string sentence = [] {
    std::string capabilities;
    for (int arch : {__CUDA_ARCH_LIST__})
      capabilities += " " + std::to_string(arch / 100) + "." + std::to_string(arch % 100 / 10);
    return "no kernel runs on this GPU; libepmoe_cuda.so was built for compute capability" + capabilities;
  }();
  return sentence.c_str();
}

// 0 for a stream that is not being captured. A stream that cannot tell is not ordered.
bool capture_of(cudaStream_t stream, unsigned long long& id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  id = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &id) == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

// Within one capture this becomes an edge of the graph. Between a capture and other work there is no order to keep:
// what is captured does not run yet.
int order_after(Stream stream, Stream earlier) {
  unsigned long long capture = 0, earlier_capture = 0;
  if (!capture_of(typed(stream), capture) || !capture_of(typed(earlier), earlier_capture)) return cudaSuccess;
  if (capture != earlier_capture) return cudaSuccess;
  cudaEvent_t event;
  if (cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) return error;
  cudaError_t error = cudaEventRecord(event, typed(earlier));
  if (!error) error = cudaStreamWaitEvent(typed(stream), event);
  cudaEventDestroy(event);  // it lives until it has happened
  return error;
}

constexpr Api kApi = {
    .error_string = error_string,
    .current_device = [](int* index) -> int { return cudaGetDevice(index); },
    .order_after = order_after,
    .permute_workspace_bytes = permute_workspace_bytes,
    .route = [](const RouteArgs& args, Stream stream) -> int { return route(args, typed(stream)); },
    .permute = [](const PermuteArgs& args, Stream stream) -> int { return permute(args, typed(stream)); },
    .finalize = [](const FinalizeArgs& args, Stream stream) -> int { return finalize(args, typed(stream)); },
    .zero_padding_rows = [](const PaddingArgs& args, Stream stream) -> int {
      return zero_padding_rows(args, typed(stream));
    },
    .quantize = [](const QuantizeArgs& args, Stream stream) -> int { return quantize(args, typed(stream)); },
    .gated_activation = [](const GatedActivationArgs& args, Stream stream) -> int {
      return gated_activation(args, typed(stream));
    },
    .scales_by_block = [](const ScalesByBlockArgs& args, Stream stream) -> int {
      return scales_by_block(args, typed(stream));
    },
    .few_rows = [](const FewRowsArgs& args, Stream stream) -> int { return few_rows(args, typed(stream)); },
    .weighted_gates = [](const WeightedGatesArgs& args, Stream stream) -> int {
      return weighted_gates(args, typed(stream));
    },
    .unpack = [](const UnpackArgs& args, Stream stream) -> int { return unpack(args, typed(stream)); },
    .weighted_rows_backward = [](const WeightedRowsArgs& args, Stream stream) -> int {
      return weighted_rows_backward(args, typed(stream));
    },
    .dispatch = [](const Exchange& exchange, const DispatchArgs& args, Stream stream) -> int {
      return dispatch(exchange, args, typed(stream));
    },
    .combine = [](const Exchange& exchange, const CombineArgs& args, DType dtype, Stream stream) -> int {
      return combine(exchange, args, dtype, typed(stream));
    },
    .rail_pack = [](const RailPackArgs& args, Stream stream) -> int { return rail_pack(args, typed(stream)); },
    .rail_sum = [](const RailSumArgs& args, Stream stream) -> int { return rail_sum(args, typed(stream)); },
    .rail_mark = [](const RailMarkArgs& args, Stream stream) -> int { return rail_mark(args, typed(stream)); },
    .rail_tags = [](const RailTagsArgs& args, Stream stream) -> int { return rail_tags(args, typed(stream)); },
};

}  // namespace
}  // namespace epmoe::cuda

extern "C" const epmoe::cuda::Api* epmoe_cuda_api() { return &epmoe::cuda::kApi; }
