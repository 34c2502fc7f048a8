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

constexpr Api kApi = {
    .error_string = error_string,
    .current_device = [](int* index) -> int { return cudaGetDevice(index); },
    .permute_workspace_bytes = permute_workspace_bytes,
    .route = [](const RouteArgs& args, Stream stream) -> int { return route(args, typed(stream)); },
    .permute = [](const PermuteArgs& args, Stream stream) -> int { return permute(args, typed(stream)); },
    .finalize = [](const FinalizeArgs& args, Stream stream) -> int { return finalize(args, typed(stream)); },
    .zero_padding_rows = [](const PaddingArgs& args, Stream stream) -> int {
      return zero_padding_rows(args, typed(stream));
    },
    .quantize = [](const QuantizeArgs& args, Stream stream) -> int { return quantize(args, typed(stream)); },
    .dispatch = [](const Exchange& exchange, const DispatchArgs& args, Stream stream) -> int {
      return dispatch(exchange, args, typed(stream));
    },
    .combine = [](const Exchange& exchange, const CombineArgs& args, DType dtype, Stream stream) -> int {
      return combine(exchange, args, dtype, typed(stream));
    },
};

}  // namespace
}  // namespace epmoe::cuda

extern "C" const epmoe::cuda::Api* epmoe_cuda_api() { return &epmoe::cuda::kApi; }
