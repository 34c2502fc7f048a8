// combine of many tokens where partial rows need no sums and multiprocessors are few: rows leave as they are, by bulk
// copies of one warp of a block, while the block's other warps sum what comes back.
#pragma once
#include "bulk.cuh"
#include "combine.cuh"

namespace epmoe::cuda {

constexpr int kForwarded = 4;                  // pieces of rows, that a block has on their way through shared memory
constexpr int kPiecesARelease = 16;            // whose flags wait for one another
constexpr int64_t kForwardedBytes = 16 << 10;  // of a piece

// The pieces of the rows that a block forwards, by one warp. Rows are handed out by tickets.
struct Forwarding {
  const CombineBlock& b;
  int32_t* ticket;
  int64_t row_bytes;
  int32_t slots, drawn, left = 0;  // slots to look at; the next of them, in lane 0; pieces of this one's row
  Slot slot{};

  __device__ __forceinline__ Forwarding(const CombineBlock& b, int64_t row_bytes, int32_t* ticket)
      : b(b), ticket(ticket), row_bytes(row_bytes), slots(b.slots(false)), drawn(draw(ticket)) {}

  // Goes on to the next piece: where it begins in the row of `slot`, -1 if there is none.
  __device__ __forceinline__ int64_t next() {
    auto pieces = static_cast<int32_t>(ceil_div(row_bytes, kForwardedBytes));
    while (!left) {
      int32_t n = __shfl_sync(kAllLanes, drawn, 0);
      if (n >= slots) return -1;
      drawn = draw(ticket);
      slot = slot_of(b.plan, n);
      if (slot.s < b.count_R[slot.source] && !b.is_few(slot.source)) left = pieces;
    }
    return (pieces - left--) * kForwardedBytes;
  }
};

// By one warp. Releases of a multiprocessor wait for each other, so that flags are raised for several rows at once, and
// those of the pieces that left last only the next time.
template <typename T>
__device__ __forceinline__ void forward_rows(const CombineBlock& b, char* shared, int32_t* ticket) {
  __shared__ uint64_t arrivals[kForwarded];
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  Ring<kForwarded> ring(shared, arrivals, kForwardedBytes, lane == 0);
  __syncwarp();
  Forwarding rows(b, b.args.D * sizeof(T), ticket);
  // Of the piece that is in the lane's buffer: where it goes, and the flag of its row if it is the last.
  char* to = nullptr;
  uint32_t* flag = nullptr;
  int32_t bytes = 0;
  auto fetch_next = [&] {
    int64_t begin = rows.next();
    if (begin < 0) return;
    auto [source, s] = rows.slot;
    auto length = static_cast<int32_t>(min(kForwardedBytes, rows.row_bytes - begin));
    auto* row = static_cast<const char*>(b.args.rows) + (source * plan.M + s) * b.args.rows_stride_bytes;
    ring.fetch_next(row + begin, length);
    if (lane != (ring.fetched - 1) % kForwarded) return;
    int64_t place = plan.rank * plan.M + s;
    to = in_window<char>(b.ex, source, plan.combine_rows) + place * plan.combine_stride_bytes + begin;
    flag = rows.left ? nullptr : in_window<uint32_t>(b.ex, source, plan.combine_flags) + place;
    bytes = length;
  };
#pragma unroll 1
  for (int i = 0; i < kForwarded - 1; ++i) fetch_next();
  uint32_t* unraised = nullptr;  // in lane i % 32, of the i-th piece
#pragma unroll 1
  for (int32_t i = 0; i < ring.fetched; ++i) {
    int32_t buffer = i % kForwarded;
    auto* there = reinterpret_cast<char*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(to), buffer));
    auto* said = reinterpret_cast<uint32_t*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(flag), buffer));
    int32_t length = __shfl_sync(kAllLanes, bytes, buffer);
    store(lane == 0 ? there : nullptr, ring.take(), length);
    if (lane == i % 32) unraised = said;
    fetch_next();
    if (i % kPiecesARelease != kPiecesARelease - 1) continue;
    wait_stored<kForwarded>();
    __syncwarp();
    bool stored = (i - lane) % 32 >= kForwarded;
    if (unraised && stored) raise_flag(unraised, b.wait.epoch), unraised = nullptr;
    __syncwarp();
  }
  wait_stored<0>();
  __syncwarp();
  if (unraised) raise_flag(unraised, b.wait.epoch);
}

}  // namespace epmoe::cuda
