// What the host sees of a transfer while the GPU runs ahead of it: counts of transfers that have
// started and ended, in memory of the host, and calls of other nodes that do not match. Replays of
// a CUDA graph count and compare as well.
#include "cuda/device/launch.cuh"
#include "cuda/exchange/signal.cuh"
#include "cuda/rail/slabs.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void count_transfer(const __grid_constant__ RailMarkArgs args) {
  constexpr uint64_t kLongestNs = 10'000'000'000;  // the host answers within 2 s
  wait_for_predecessor();
  volatile RailStop* stop = args.stop;
  if (args.ends) {
    // The host has perhaps ended the transfer. Then its rows are leftovers, and the kernels behind
    // it must know before they take them. A copy could come too late: the driver may hold copies
    // back until the GPU is idle.
    if (stop && stop->cut) *args.latched = 1;
  } else if (args.latched && *args.latched) {
    stop->wanted = 1;
    for (uint64_t begin_ns = now_ns(); !stop->done && now_ns() - begin_ns < kLongestNs;)
      __nanosleep(10'000);
    for (int32_t i = 0; args.sent && i < args.slabs; ++i)
      make_void(args.sent + i * args.slab_bytes);
  }
  let_successor_start();
  *static_cast<volatile int64_t*>(args.shown) = ++*args.count;
}

__global__ void __launch_bounds__(kThreads)
    compare_tags(const __grid_constant__ RailTagsArgs args) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ int32_t first;
  if (threadIdx.x == 0) first = INT32_MAX;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < args.slabs; i += kThreads) {
    auto& tag = *reinterpret_cast<const RailTag*>(args.first_tag + i * args.slab_bytes);
    auto& want = args.want;
    if (tag.D != want.D || tag.K != want.K || tag.dtype != want.dtype || tag.epoch != want.epoch)
      atomicMin(&first, i);
  }
  __syncthreads();
  if (threadIdx.x == 0 && first != INT32_MAX)
    *static_cast<volatile int64_t*>(args.differing) = first + 1;
}

}  // namespace

cudaError_t rail_mark(const RailMarkArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  // The first transfer, at which no kernel waits, loads what later ones need.
  if (thread_local bool loaded[Device::kMaxDevices] = {};
      !loaded[device.index % Device::kMaxDevices]) {
    if (cudaError_t error = load(compare_tags)) return error;
    for (auto* load_kernels : {load_rail_pack, load_rail_sum})
      if (cudaError_t error = load_kernels()) return error;
    loaded[device.index % Device::kMaxDevices] = true;
  }
  return launch(count_transfer, 1, 1, 0, stream, args);
}

cudaError_t rail_tags(const RailTagsArgs& args, cudaStream_t stream) {
  return args.slabs ? launch(compare_tags, 1, kThreads, 0, stream, args) : cudaSuccess;
}

}  // namespace epmoe::cuda
