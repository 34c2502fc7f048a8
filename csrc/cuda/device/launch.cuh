// How the host launches a kernel: it overlaps the end of its predecessor and gets the dynamic
// shared memory it needs.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

namespace epmoe::cuda {

struct Device {
  static constexpr int kMaxDevices = 64;
  int index, multiprocessors;
  // Of the compute capability that this library's kernels were compiled for, not the GPU's: see
  // below.
  int major;
  int shared_bytes;  // of a multiprocessor
};

// Never launched. Its code stands for that of all kernels, which nvcc compiles for the same
// architectures.
static __global__ void any_kernel() {}

// The properties of the current device. Each host thread looks them up once for each device.
// A GPU of sm_90 may run code that was compiled for sm_80, from its PTX. This code has no
// `griddepcontrol` and no TMA: nothing in it would wait for a predecessor that lets it start early.
// Static, since a process may hold two libraries that were compiled for different architectures,
// and they would share the table of an inline function.
static cudaError_t current_device(Device& device) {
  thread_local Device known[Device::kMaxDevices] = {};
  int index = 0;
  if (cudaError_t error = cudaGetDevice(&index)) return error;
  Device& entry = known[index % Device::kMaxDevices];
  if (entry.multiprocessors == 0) {
    cudaFuncAttributes compiled;
    if (cudaError_t error =
            cudaFuncGetAttributes(&compiled, reinterpret_cast<const void*>(any_kernel)))
      return error;
    entry.index = index, entry.major = compiled.ptxVersion / 10;
    if (cudaError_t error = cudaDeviceGetAttribute(
            &entry.shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index))
      return error;
    // Last: it says that the others are known.
    if (cudaError_t error =
            cudaDeviceGetAttribute(&entry.multiprocessors, cudaDevAttrMultiProcessorCount, index))
      return error;
  }
  device = entry;
  return cudaSuccess;
}

// Loads a kernel now. Otherwise its first launch loads it and may wait for all running kernels
// (CUDA Programming Guide, lazy loading). That wait never ends if a running kernel waits for what
// this rank launches next.
template <typename... Params>
cudaError_t load(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

// Lets a kernel use all dynamic shared memory that its static shared memory leaves; without this
// call it may use 48 KiB in all. Every host thread sets the same value, so the order of threads
// does not matter.
inline cudaError_t allow_shared(const void* kernel, int device) {
  thread_local std::set<std::pair<const void*, int>> allowed;
  if (allowed.count({kernel, device})) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
    return error;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  most -= static_cast<int>(attributes.sharedSizeBytes);
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most))
    return error;
  allowed.insert({kernel, device});
  return cudaSuccess;
}

// Launches `kernel` with programmatic dependent launch on sm_90 and later.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  auto* function = reinterpret_cast<const void*>(kernel);
  constexpr int64_t kPlainBytes = 24 << 10;  // of 48 KiB; the rest is for what a kernel declares
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

// The same with so many blocks, but at most `most` for each multiprocessor: a block takes up work
// until there is none.
template <typename... Params, typename... Args>
cudaError_t launch_at_most(int64_t most, void (*kernel)(Params...), int64_t blocks, int threads,
                           int64_t shared_bytes, cudaStream_t stream, Args&&... args) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  blocks = std::min<int64_t>(blocks, most * device.multiprocessors);
  return blocks ? launch(kernel, blocks, threads, shared_bytes, stream, std::forward<Args>(args)...)
                : cudaSuccess;
}

}  // namespace epmoe::cuda
