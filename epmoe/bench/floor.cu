// The lower bound of an exchange over NVLink. One kernel stores rows into the peers' windows,
// publishes one flag in each window and waits for the peers' flags. Every address is known
// beforehand: nothing is routed, counted or summed.
#include "cuda/device/launch.cuh"
#include "cuda/exchange/signal.cuh"

namespace epmoe::cuda {

// The copy of one row.
struct RowCopy {
  const uint4* from;
  uint4* to;
};

// Of one way, in device memory. `missed` is a mask of the ranks whose flag did not come in time.
struct FloorState {
  uint32_t epoch, blocks_done, missed;
};

struct FloorArgs {
  const RowCopy* rows_n;
  int64_t n, vectors;     // rows, and 16-byte vectors a row; their product fits 31 bits
  Flag* const* flags_R;   // this rank's flag in each rank's window
  const Flag* arrived_R;  // each rank's flag in this rank's window
  FloorState* state;
  int64_t rank, R, timeout_ns;
};

constexpr int kFloorThreads = 512;
constexpr int kInFlight = 4;  // loads that a thread issues before its first store

__device__ __forceinline__ void store_rows(const FloorArgs& args) {
  auto vectors = static_cast<uint32_t>(args.vectors),
       total = static_cast<uint32_t>(args.n) * vectors;
  uint32_t stride = gridDim.x * kFloorThreads;
  for (uint32_t first = blockIdx.x * kFloorThreads + threadIdx.x; first < total;
       first += kInFlight * stride) {
    uint4 values[kInFlight];
    uint4* to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      uint32_t index = first + i * stride;
      if (index >= total) continue;
      RowCopy row = args.rows_n[index / vectors];
      values[i] = load_past_l1(row.from + index % vectors);
      to[i] = row.to + index % vectors;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * stride < total) *to[i] = values[i];
  }
}

__global__ void __launch_bounds__(kFloorThreads) floor_kernel(FloorArgs args) {
  wait_for_predecessor();
  let_successor_start();
  store_rows(args);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&args.state->blocks_done, 1) == gridDim.x - 1;
    __threadfence();
  }
  if (!__shfl_sync(kAllLanes, last, 0)) return;
  uint32_t epoch = __ldcg(&args.state->epoch) + 1;
  int lane = static_cast<int>(threadIdx.x);
  if (lane < args.R && lane != args.rank) {
    Flag::publish(args.flags_R[lane], epoch);
    uint64_t deadline_ns = now_ns() + args.timeout_ns;
    while (Flag::acquire(args.arrived_R + lane) != epoch) {
      if (now_ns() < deadline_ns) continue;
      atomicOr(&args.state->missed, 1u << lane);
      break;
    }
  }
  __syncwarp();
  if (lane == 0) args.state->blocks_done = 0, args.state->epoch = epoch;
}

}  // namespace epmoe::cuda

// Called from Python through ctypes. Returns the text of an error, or null.
extern "C" const char* epmoe_floor(const epmoe::cuda::FloorArgs* args, int blocks,
                                   cudaStream_t stream) {
  using namespace epmoe::cuda;
  cudaError_t error = launch(floor_kernel, blocks, kFloorThreads, 0, stream, *args);
  return error ? cudaGetErrorString(error) : nullptr;
}
