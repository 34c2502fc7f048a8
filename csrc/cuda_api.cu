// The table of this library's functions, from which libepmoe.so calls the kernels.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/stages.h"
#include "cuda_api.h"

namespace epmoe::cuda {
namespace {

const char* error_string(int error) {
  if (error != cudaErrorNoKernelImageForDevice)
    return cudaGetErrorString(static_cast<cudaError_t>(error));
  static const std::string sentence = [] {
    std::string capabilities;
    for (int arch : {__CUDA_ARCH_LIST__})
      capabilities += " " + std::to_string(arch / 100) + "." + std::to_string(arch % 100 / 10);
    return "no kernel runs on this GPU; libepmoe_cuda.so was built for compute capability" +
           capabilities;
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

// Within one capture this becomes an edge of the graph. Between a capture and other work there is
// no order to keep: what is captured does not run yet.
int order_after(Stream stream, Stream earlier) {
  unsigned long long capture = 0, earlier_capture = 0;
  if (!capture_of(stream, capture) || !capture_of(earlier, earlier_capture)) return cudaSuccess;
  if (capture != earlier_capture) return cudaSuccess;
  cudaEvent_t event;
  if (cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) return error;
  cudaError_t error = cudaEventRecord(event, earlier);
  if (!error) error = cudaStreamWaitEvent(stream, event);
  cudaEventDestroy(event);  // it lives until it has happened
  return error;
}

// While one lives, this thread may do what CUDA refuses to all threads while one of them captures.
class Unrefused {
 public:
  Unrefused() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Unrefused() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The stream waits for none of the legacy default stream.
int make_stream(int device, int priority, Stream* stream) {
  int before = 0;
  if (cudaError_t error = cudaGetDevice(&before)) return error;
  if (cudaError_t error = cudaSetDevice(device)) return error;
  Unrefused unrefused;
  cudaError_t error = cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority);
  cudaSetDevice(before);
  return error;
}

bool end_stream(Stream stream) {
  Unrefused unrefused;
  unsigned long long capture = 0;
  bool is_idle = capture_of(stream, capture) && capture == 0;
  // To ask one that is being captured would end the capture.
  is_idle = is_idle && cudaStreamQuery(stream) == cudaSuccess;
  if (is_idle) cudaStreamDestroy(stream);
  cudaGetLastError();
  return is_idle;
}

// A function of stages.h as the table has it, where an error is an int.
template <auto kFunction>
struct Entry;
template <typename... Args, cudaError_t (*kFunction)(Args...)>
struct Entry<kFunction> {
  static int call(Args... args) { return kFunction(args...); }
};
template <auto kFunction>
constexpr auto kEntry = Entry<kFunction>::call;

constexpr Api kApi = {.error_string = error_string,
                      .current_device = [](int* index) -> int { return cudaGetDevice(index); },
                      .order_after = order_after,
                      .make_stream = make_stream,
                      .end_stream = end_stream,
                      .permute_workspace_bytes = permute_workspace_bytes,
                      .invariant_linear_parts = invariant_linear_parts,
#define EPMOE_ENTRY(name, ...) .name = kEntry<name>,
                      EPMOE_LAUNCHES(EPMOE_ENTRY)
#undef EPMOE_ENTRY
};

}  // namespace
}  // namespace epmoe::cuda

extern "C" const epmoe::cuda::Api* epmoe_cuda_api() { return &epmoe::cuda::kApi; }
