// rail_sum on the GPU: a thread sums 16 bytes of one token over the nodes, in their order and in
// fp32; one element where rows are not aligned to 16 bytes. It issues the loads of up to kInFlight
// rows before the first addition.
#include "cuda/device/launch.cuh"
#include "cuda/rail/slabs.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kInFlight = 4;
constexpr int kMaxThreads = 256;

// Token t's partial row of node m; null if the token does not go there.
template <typename T>
__device__ __forceinline__ const T* partial_row(const RailSumArgs& args, int64_t t, int64_t m) {
  if (m >= args.num_nodes) return nullptr;
  int64_t slot = args.slots_by_node[t * args.num_nodes + m];
  if (slot < 0 || slot >= args.slab_rows) return nullptr;
  auto* rows = static_cast<const T*>(m == args.node ? args.own : args.returned);
  return rows + (first_slot(args.slab_rows, args.node, m) + slot) * args.D;
}

template <typename T>
__device__ __forceinline__ const T* shuffled(const T* pointer, int lane) {
  return reinterpret_cast<const T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    sum_slabs(const __grid_constant__ RailSumArgs args, int32_t chunks, int64_t items) {
  using Values = Vector<T, kWidth>;
  wait_for_predecessor();
  let_successor_start();
  bool failed = args.latched && *args.latched;
  for (int32_t g = threadIdx.x; g < args.G; g += blockDim.x)
    failed |= static_cast<const volatile int64_t*>(args.missed_G)[g] != 0;
  for (int64_t m = threadIdx.x; args.latched && m < args.num_nodes; m += blockDim.x)
    if (m != args.node)
      failed |= is_void(static_cast<const T*>(args.returned) +
                        first_slot(args.slab_rows, args.node, m) * args.D);
  failed = __syncthreads_or(failed);
  if (failed &&
      threadIdx.x ==
          0) {  // the host may know of no failure: a report of the node came behind all its waits
    *args.latched = 1;
    volatile int64_t& noticed = *args.noticed;
    if (!noticed) noticed = kZeroSums;
  }
  int lane = threadIdx.x % 32;
  auto vectors = static_cast<int32_t>(args.D / kWidth);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    int64_t t = item / chunks;
    int32_t index = static_cast<int32_t>(item % chunks) * blockDim.x + threadIdx.x;
    bool active = index < vectors;
    float sum[kWidth] = {};
    for (int64_t from = 0; from < args.num_nodes && !failed; from += 32) {
      const T* mine = partial_row<T>(args, t, from + lane);  // lane m has node from + m
      for (int m = 0; m < min(args.num_nodes - from, int64_t{32}); m += kInFlight) {
        Values loaded[kInFlight];
        const T* row[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          row[j] = shuffled(mine, m + j);
          if (active && row[j])
            loaded[j] = load_past_l1(reinterpret_cast<const Values*>(row[j]) + index);
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (!row[j]) continue;
          float value[kWidth];
          to_floats(loaded[j], value);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] += value[i];
        }
      }
    }
    if (active)
      reinterpret_cast<Values*>(static_cast<T*>(args.y_TD) + t * args.D)[index] = rounded<T>(sum);
  }
}

template <typename T, int kWidth>
cudaError_t launch_sum(const RailSumArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t vectors = args.D / kWidth;
  int64_t chunks = ceil_div(vectors, kMaxThreads);
  int64_t items = args.T * chunks;
  if (items == 0 && !args.latched)
    return cudaSuccess;  // without a token, a rank learns of failures all the same
  auto threads = static_cast<int>(ceil_div(ceil_div(vectors, chunks), 32) * 32);
  int64_t blocks = std::clamp<int64_t>(items, 1, 32 * device.multiprocessors);
  return launch(sum_slabs<T, kWidth>, blocks, threads, 0, stream, args,
                static_cast<int32_t>(chunks), items);
}

}  // namespace

cudaError_t load_rail_sum() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    auto load_both = [](auto type) {
      using T = decltype(type);
      for (auto* kernel : {sum_slabs<T, kPerVector<T>>, sum_slabs<T, 1>})
        if (cudaError_t error = load(kernel)) return error;
      return cudaSuccess;
    };
    if (cudaError_t error = visit(dtype, load_both)) return error;
  }
  return cudaSuccess;
}

cudaError_t rail_sum(const RailSumArgs& args, cudaStream_t stream) {
  int64_t row_bytes = args.D * itemsize(args.dtype);
  bool wide = is_aligned(args.own, row_bytes) && is_aligned(args.returned, row_bytes) &&
              is_aligned(args.y_TD, row_bytes);
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    return wide ? launch_sum<T, kPerVector<T>>(args, stream) : launch_sum<T, 1>(args, stream);
  });
}

}  // namespace epmoe::cuda
