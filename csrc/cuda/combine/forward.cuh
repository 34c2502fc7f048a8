// combine, Simple protocol, rows that need no sums (layout="rank") on few multiprocessors: one warp of each block
// forwards rows as they are by TMA, while the block's other warps sum what comes back.
#pragma once
#include "cuda/combine/block.cuh"
#include "cuda/device/tma.cuh"

namespace epmoe::cuda {

constexpr int kForwardStages = 4;                 // chunks of rows that a block has on their way through shared memory
constexpr int kChunksPerRelease = 16;             // chunks whose flags are published after one release
constexpr int64_t kForwardChunkBytes = 16 << 10;  // of a chunk
static_assert(kForwardStages * kForwardChunkBytes <= kSendBufferBytes);

// The chunks that one warp forwards. The warp claims whole rows.
struct ForwardQueue {
  const CombineBlock& b;
  int32_t* head;
  int64_t row_bytes;
  int32_t num_slots, claimed, left = 0;  // slots to look at; the next claimed one, in lane 0; chunks left of this row
  Slot slot{};

  __device__ __forceinline__ ForwardQueue(const CombineBlock& b, int64_t row_bytes, int32_t* head)
      : b(b), head(head), row_bytes(row_bytes), num_slots(b.num_slots(false, b.plan.R)), claimed(claim(head)) {}

  // Goes on to the next chunk. Returns where it begins in the row of `slot`, or -1 if no chunk is left.
  __device__ __forceinline__ int64_t next() {
    auto chunks = static_cast<int32_t>(ceil_div(row_bytes, kForwardChunkBytes));
    while (!left) {
      int32_t n = __shfl_sync(kAllLanes, claimed, 0);
      if (n >= num_slots) return -1;
      claimed = claim(head);
      slot = slot_of(b.plan, n);
      if (slot.s < b.count_R[slot.source] && !b.is_ll(slot.source)) left = chunks;
    }
    return (chunks - left--) * kForwardChunkBytes;
  }
};

// One warp calls this. The releases of a multiprocessor wait for each other, so one release serves the flags of several
// rows. The flags of the chunks that left last are published after the next release.
template <typename T>
__device__ __forceinline__ void forward_rows(const CombineBlock& b, char* shared, int32_t* head) {
  __shared__ uint64_t barriers[kForwardStages];
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  TmaRing<kForwardStages> ring(shared, barriers, kForwardChunkBytes, lane == 0);
  __syncwarp();
  ForwardQueue rows(b, b.args.D * sizeof(T), head);
  // Of the chunk in the lane's buffer: where it goes, and its row's flag if it is the last chunk of the row.
  char* to = nullptr;
  Flag* flag = nullptr;
  int32_t bytes = 0;
  auto load_next = [&] {
    int64_t begin = rows.next();
    if (begin < 0) return;
    auto [source, s] = rows.slot;
    auto length = static_cast<int32_t>(min(kForwardChunkBytes, rows.row_bytes - begin));
    auto* row = static_cast<const char*>(b.args.rows) + (source * plan.M + s) * b.args.rows_stride_bytes;
    ring.load_next(row + begin, length);
    if (lane != (ring.loaded - 1) % kForwardStages) return;
    int64_t at = plan.rank * plan.M + s;
    to = in_window<char>(b.ex, source, plan.combine_rows) + at * plan.combine_stride_bytes + begin;
    flag = rows.left ? nullptr : in_window<Flag>(b.ex, source, plan.combine_flags) + at;
    bytes = length;
  };
#pragma unroll 1
  for (int i = 0; i < kForwardStages - 1; ++i) load_next();
  Flag* unpublished = nullptr;  // lane i % 32 holds the flag of the i-th chunk
#pragma unroll 1
  for (int32_t i = 0; i < ring.loaded; ++i) {
    int32_t buffer = i % kForwardStages;
    auto* there = reinterpret_cast<char*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to), buffer));
    auto* its_flag = reinterpret_cast<Flag*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(flag), buffer));
    int32_t length = __shfl_sync(kAllLanes, bytes, buffer);
    tma_store(lane == 0 ? there : nullptr, ring.take(), length);
    if (lane == i % 32) unpublished = its_flag;
    load_next();
    if (i % kChunksPerRelease != kChunksPerRelease - 1) continue;
    tma_wait_written<kForwardStages>();
    __syncwarp();
    bool stored = (i - lane) % 32 >= kForwardStages;
    if (unpublished && stored) Flag::publish(unpublished, b.wait.epoch), unpublished = nullptr;
    __syncwarp();
  }
  tma_wait_written<0>();
  __syncwarp();
  if (unpublished) Flag::publish(unpublished, b.wait.epoch);
}

}  // namespace epmoe::cuda
