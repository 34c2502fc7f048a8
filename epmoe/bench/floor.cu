// The least that an exchange over NVLink can cost: one kernel that stores rows into the windows of others, raises one
// flag for each of them and waits for theirs. It knows where everything goes: nothing is routed, counted or summed.
#include "cuda/launch_kernel.cuh"
#include "cuda/mail.cuh"

namespace epmoe::cuda {

struct Row {
  const uint4* from;
  uint4* to;
};

struct FloorState {
  uint32_t epoch, blocks_done, missed;
};

struct FloorArgs {
  const Row* rows_n;
  int64_t n, vectors;         // rows, and the 16-byte words of each; their product fits 31 bits
  uint32_t* const* flags_R;   // this rank's flag in everyone's window
  const uint32_t* arrived_R;  // everyone's flag in this rank's
  FloorState* state;
  int64_t rank, R, timeout_ns;
};

constexpr int kInFlight = 4;  // loads of a thread before its first store

__device__ __forceinline__ void push_rows(const FloorArgs& args) {
  auto vectors = static_cast<uint32_t>(args.vectors), total = static_cast<uint32_t>(args.n) * vectors;
  uint32_t stride = gridDim.x * kThreads;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < total; first += kInFlight * stride) {
    uint4 words[kInFlight];
    uint4* to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      uint32_t at = first + i * stride;
      if (at >= total) continue;
      Row row = args.rows_n[at / vectors];
      words[i] = load_past_l1(row.from + at % vectors);
      to[i] = row.to + at % vectors;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * stride < total) *to[i] = words[i];
  }
}

__global__ void __launch_bounds__(kThreads) floor_kernel(FloorArgs args) {
  wait_for_predecessor();
  let_successor_start();
  push_rows(args);
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
    raise_flag(args.flags_R[lane], epoch);
    uint64_t deadline_ns = now_ns() + args.timeout_ns;
    while (load_acquire(args.arrived_R + lane) != epoch) {
      if (now_ns() < deadline_ns) continue;
      atomicOr(&args.state->missed, 1u << lane);
      break;
    }
  }
  __syncwarp();
  if (lane == 0) args.state->blocks_done = 0, args.state->epoch = epoch;
}

}  // namespace epmoe::cuda

// Called from Python by its address: what is wrong as text, or null.
extern "C" const char* epmoe_floor(const epmoe::cuda::FloorArgs* args, int blocks, cudaStream_t stream) {
  using namespace epmoe::cuda;
  cudaError_t error = launch(floor_kernel, blocks, kThreads, 0, stream, *args);
  return error ? cudaGetErrorString(error) : nullptr;
}
