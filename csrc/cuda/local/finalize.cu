// finalize on the GPU: a thread sums 16 bytes of one slot over its K rows, in the order of k and in
// fp32; one element where rows are not aligned to 16 bytes. It issues the loads of up to kInFlight
// rows before the first addition.
#include "args.h"
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kInFlight = 8;
constexpr int kMaxThreads = 256;
// Up to 256 slots finish sooner in blocks of 256 threads, because fewer blocks have to start. More
// slots stream faster through blocks of 128.
constexpr int64_t kMaxSlotsInLargeBlocks = 256;

// The row that a pair contributes to its slot, and the pair's weight. Rows of weight 0 are skipped,
// so that 0 * NaN never arises.
struct WeightedRow {
  int32_t row;
  float weight;
};

__device__ __forceinline__ WeightedRow load_weighted_row(const FinalizeArgs& args, int64_t slot,
                                                         int k) {
  if (k >= args.K) return {0, 0.0f};
  int32_t row = args.row_of_pair_SK[slot * args.row_of_pair_stride + k];
  float weight = load_float(args.weights_SK, args.weights_dtype, slot * args.weights_stride + k);
#if !defined(EPMOE_MUTATE_FINALIZE_GUARD)
  if (row < 0 || row >= args.num_rows) weight = 0.0f;
#endif
  return {row, weight};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads, 4)
    sum_rows(const __grid_constant__ FinalizeArgs args, Slots slots, uint32_t chunks,
             uint32_t items) {
  using Values = Vector<T, kWidth>;
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32;
  auto vectors = static_cast<int32_t>(args.D / kWidth);
  for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {  // chunks of real slots
    int64_t slot = slots.real_slot(item / chunks);
    if (slot < 0) return;
    int32_t index = (item % chunks) * blockDim.x + threadIdx.x;
    bool active = index < vectors;
    float sum[kWidth] = {};
    for (int from = 0; from < args.K; from += 32) {
      WeightedRow mine = load_weighted_row(args, slot, from + lane);  // lane k has pair from + k
      for (int k = 0; k < min(args.K - from, 32); k += kInFlight) {
        Values loaded[kInFlight];
        float weight[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          int64_t row = __shfl_sync(kAllLanes, mine.row, k + j);
          weight[j] = __shfl_sync(kAllLanes, mine.weight, k + j);
          auto* values = static_cast<const char*>(args.rows_ND) + row * args.rows_stride_bytes;
          if (active && weight[j] != 0.0f)
            loaded[j] = load_past_l1(reinterpret_cast<const Values*>(values) + index);
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (weight[j] == 0.0f) continue;
          float value[kWidth];
          to_floats(loaded[j], value);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sum[i] += weight[j] * value[i];
        }
      }
    }
    // As by `rounded`; written out, since by it nvcc makes 8 % more instructions, which nobody has
    // timed.
    Values out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) out.at[i] = from_float<T>(sum[i]);
    if (active)
      reinterpret_cast<Values*>(static_cast<T*>(args.partial_SD) + slot * args.D)[index] = out;
  }
}

template <typename T, int kWidth>
cudaError_t launch_sum(const FinalizeArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t vectors = args.D / kWidth;
  int64_t chunks =
      ceil_div(vectors, args.S <= kMaxSlotsInLargeBlocks ? kMaxThreads : kMaxThreads / 2);
  auto threads =
      static_cast<int>(ceil_div(ceil_div(vectors, std::max<int64_t>(chunks, 1)), 32) * 32);
  int64_t items = args.S * chunks;
  if (items == 0) return cudaSuccess;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  int64_t blocks = args.counts_R ? std::min<int64_t>(items, 16 * device.multiprocessors) : items;
  return launch(sum_rows<T, kWidth>, blocks, threads, 0, stream, args, slots_of(args),
                static_cast<uint32_t>(chunks), static_cast<uint32_t>(items));
}

}  // namespace

cudaError_t finalize(const FinalizeArgs& args, cudaStream_t stream) {
  bool wide = is_aligned(args.rows_ND, args.rows_stride_bytes) &&
              is_aligned(args.partial_SD, args.D * itemsize(args.dtype));
  return visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    return wide ? launch_sum<T, kPerVector<T>>(args, stream) : launch_sum<T, 1>(args, stream);
  });
}

}  // namespace epmoe::cuda
