// How the host launches a kernel: overlapping its predecessor's end, with as much shared memory as it wants.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

namespace epmoe::cuda {

struct Device {
  static constexpr int kMost = 64;
  int index, multiprocessors, major;

  // Whether so many multiprocessors are few.
  bool is_scarce(int64_t count) const { return count * 2 <= multiprocessors; }

  // Blocks of one half of a stage, on so many: one on each, so that another half finds room beside it, and where it
  // waits for ranks on three quarters of all. What they wait for may need more shared memory than a waiting block
  // leaves, which a multiprocessor divides anew only when it is idle.
  int64_t blocks_of_half(int64_t count, bool waits) const {
    return waits ? std::clamp<int64_t>(multiprocessors * 3 / 4, 1, count) : count;
  }
};

// The current device's, looked up once a thread for each device.
inline cudaError_t current_device(Device& device) {
  thread_local Device known[Device::kMost] = {};
  int index = 0;
  if (cudaError_t error = cudaGetDevice(&index)) return error;
  Device& entry = known[index % Device::kMost];
  if (entry.multiprocessors == 0) {
    entry.index = index;
    if (cudaError_t error = cudaDeviceGetAttribute(&entry.major, cudaDevAttrComputeCapabilityMajor, index))
      return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&entry.multiprocessors, cudaDevAttrMultiProcessorCount, index))
      return error;
  }
  device = entry;
  return cudaSuccess;
}

// A kernel is loaded by its first launch, which may then wait for all that runs (CUDA Programming Guide, lazy loading):
// for ever, where that waits for what this rank launches next. Loads it now.
template <typename Param>
cudaError_t load(void (*kernel)(Param)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

// Lets a kernel have as much dynamic shared memory as there is beside its own; none has so much without asking. Any
// thread asks for the same, so that it does not matter which was the last.
inline cudaError_t allow_shared(const void* kernel, int device) {
  thread_local std::set<std::pair<const void*, int>> allowed;
  if (allowed.count({kernel, device})) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  most -= static_cast<int>(attributes.sharedSizeBytes);
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most)) return error;
  allowed.insert({kernel, device});
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes, cudaStream_t stream,
                   Args&&... args) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  auto* function = reinterpret_cast<const void*>(kernel);
  constexpr int64_t kPlainBytes = 24 << 10;  // of 48 KiB, beside what the kernel declares
  if (shared_bytes > kPlainBytes)
    if (cudaError_t error = allow_shared(function, device.index)) return error;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = device.major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace epmoe::cuda
