// The tiles of a launch, in one order: those of h of all experts, then those of outputs. Blocks
// claim them from a counter in memory, so that faster blocks take more.
//
// Claims are in order, and a block works in order. So the first tile that is not finished belongs
// to a running block, and it waits for tiles before it alone, which are finished. No block waits
// for one that has not begun, whatever else the GPU runs.
#pragma once
#include "cuda/device/scan.cuh"
#include "cuda/hopper/fused_experts/shape.cuh"

namespace epmoe::cuda::fused {

// args.counters: claims, then for each tile of rows how many tiles of its h are written.
constexpr int kClaims = 0;
constexpr int kWritten = 1;

__device__ __forceinline__ int32_t ceil_of(int32_t a, int32_t b) { return a ? (a - 1) / b + 1 : 0; }

// How many tiles an expert with so many rows has. In fp8 full ones take the least time a row, so
// all but the last one are full, and that one is overfull where few rows are left.
template <typename T>
__device__ __forceinline__ int32_t tiles_of(int32_t rows) {
  if constexpr (!kHasFull<T>) return ceil_of(rows, T::kTokens);
  const int32_t full = rows / kFullTokens;
  const int32_t left = rows % kFullTokens;
  const bool one_is_overfull = full > 0 && left <= kOverTokens;
  return left == 0 || one_is_overfull ? full : full + 1;
}

// Whether the launch takes the smaller tiles. All blocks find the same. A warp calls it.
__device__ __forceinline__ bool takes_few(const int32_t* rows_of_experts, int32_t e) {
  int32_t few = 0;
  int32_t many = 0;
  for (int32_t i = threadIdx.x % 32; i < e; i += 32) {
    few += tiles_of<Fp8Few>(rows_of_experts[i]);
    many += tiles_of<Fp8>(rows_of_experts[i]);
  }
  few = __reduce_add_sync(kAllLanes, few);
  many = __reduce_add_sync(kAllLanes, many);
  return few - many <= many / kNinth;
}

// Reads the rows of each expert, chooses between tiles, and counts tiles of rows before it: each
// thread reads those of some experts, and the first warp counts. Segments that overlap could have
// more tiles than there are counters.
template <typename T>
__device__ __forceinline__ void count_parts(const FewRowsArgs& args, Shared<T>& shared) {
  const int32_t e = args.segments.num_local_experts;
  const auto most = static_cast<int32_t>(args.num_counters - kWritten);
  int32_t* first = shared.first;
  for (int32_t i = threadIdx.x; i < e; i += kThreads<T>) {
    const SegmentRows rows = rows_of_expert(args.segments, args.N, i);
    if constexpr (kListsRows<T>) shared.rows(e)[i] = rows;
    first[i] = rows.count;
  }
  __syncthreads();
  const int32_t lane = threadIdx.x;
  if (lane < 32) {
    bool few = false;
    if constexpr (kHasFew<T>) {
      few = takes_few(first, e);
      if (lane == 0) shared.few = few;
    }
    int32_t before = 0;
    for (int32_t i = lane; i - lane < e; i += 32) {
      const int32_t rows = i < e ? first[i] : 0;
      const int32_t parts = min(few ? tiles_of<Fp8Few>(rows) : tiles_of<T>(rows), most);
      const int32_t through = warp_inclusive_sum(parts);
      if (i < e) first[i] = min(before + through - parts, most);
      before = min(before + __shfl_sync(kAllLanes, through, 31), most);
    }
    if (lane == 0) first[e] = before;
  }
  __syncthreads();
}

template <typename T>
__device__ __forceinline__ SegmentRows rows_of(const FewRowsArgs& args, Shared<T>& shared,
                                               int32_t expert) {
  if constexpr (kListsRows<T>) return shared.rows(args.segments.num_local_experts)[expert];
  return rows_of_expert(args.segments, args.N, expert);
}

// Whether D and F are multiples of 128, so that no tile and no step is in part behind the end.
template <typename T>
constexpr bool kHasWholeBlocks = T::kScaled && !T::kPacked;

// Tiles of h side by side.
template <typename T>
__device__ __forceinline__ int32_t h_tiles(int32_t F) {
  return kHasWholeBlocks<T> ? F / kHColumns : ceil_of(F, kHColumns);
}

// How many parts of a tile's weight rows there are: the second of outputs may lie behind the last.
template <typename T>
__device__ __forceinline__ int32_t passes_of(const FewRowsArgs& args, const Tile& tile) {
  if constexpr (T::kPasses == 1) return 1;
  return tile.down && tile.column + kOutputs / T::kPasses >= args.D ? 1 : T::kPasses;
}

// The tile of a number. Tiles of the same weights follow one another.
template <typename T>
__device__ __forceinline__ Tile tile_of(const FewRowsArgs& args, Shared<T>& shared,
                                        int32_t number) {
  const int32_t* first = shared.first;
  const int32_t e = args.segments.num_local_experts;
  const auto D = static_cast<int32_t>(args.D);
  const auto F = static_cast<int32_t>(args.F);
  const int32_t tiles_of_h = first[e] * h_tiles<T>(F);
  const bool down = number >= tiles_of_h;
  if (down) number -= tiles_of_h;
  const int32_t columns = down ? kOutputs : kHColumns;
  const int32_t across = ceil_of(down ? D : F, columns);
  const int32_t part = number / across;
  if (part >= first[e]) return {.expert = kNoTile};
  const int32_t expert = segment_at(first, e, part);
  const int32_t in_expert = number - first[expert] * across;
  const int32_t parts = first[expert + 1] - first[expert];
  const int32_t in_rows = in_expert % parts;
  const SegmentRows rows = rows_of(args, shared, expert);
  // Tiles of an expert that has too many rows for one have as many each, or are full.
  const int32_t each = ceil_of(rows.count, ceil_of(rows.count, T::kTokens));
  const int32_t step = kHasFull<T> ? kFullTokens : ceil_of(each, kTokenStep) * kTokenStep;
  const bool may_be_overfull = kHasFull<T> && in_rows == parts - 1;
  const int32_t before = in_rows * step;
  const int32_t count = min(rows.count - before, may_be_overfull ? T::kTokens : step);
  return {.expert = expert,
          .row = rows.begin + before,
          .count = count,
          .width = width_of<T>(count),
          .column = in_expert / parts * columns,
          .part = first[expert] + in_rows,
          .steps = T::kPacked ? ceil_of(down ? F : D, kStep<T>) : (down ? F : D) / kStep<T>,
          .down = down};
}

__device__ __forceinline__ int32_t claim(const FewRowsArgs& args) {
  return atomicAdd(&args.counters[kClaims], 1);
}

// One thread claims tiles for its block until there is none. The first number is given. It claims
// the next one when the loader of rows nears the end of its last one: a tile that is claimed early
// may wait behind a long one.
template <typename T>
__device__ __forceinline__ void claim_tiles(const FewRowsArgs& args, Shared<T>& shared,
                                            int32_t number) {
  for (int32_t turn = 0;; ++turn) {
    const int32_t place = turn % kQueue;
    if (turn) wait_mbarrier(&shared.wanted, (turn - 1) & 1);
    if (turn >= kQueue) wait_mbarrier(&shared.done[place], (turn / kQueue - 1) & 1);
    if (turn) number = claim(args);
    const Tile tile = tile_of(args, shared, number);
    shared.queue[place] = tile;
    arrive(&shared.claimed[place]);
    if (tile.expert == kNoTile) return;
  }
}

// The tiles of this block in turn, as another role uses them.
template <typename T>
class Tiles {
 public:
  // `told` are the mbarriers of the places that it waits for.
  __device__ __forceinline__ Tiles(Shared<T>& shared, uint64_t* told)
      : shared_(shared), told_(told) {}

  __device__ __forceinline__ int32_t place() const { return turn_ % kQueue; }
  // The phase of the mbarriers of its place.
  __device__ __forceinline__ uint32_t phase() const { return turn_ / kQueue & 1; }
  // Waits for the tile whose turn it is. It keeps its place until its users are done.
  __device__ __forceinline__ const Tile& current() const {
    wait_mbarrier(&told_[place()], phase());
    return shared_.queue[place()];
  }
  // It is the turn of the next one, though this user is not done.
  __device__ __forceinline__ void advance() { ++turn_; }
  // The same where one thread of each user says that it is done.
  __device__ __forceinline__ void done() { arrive(&shared_.done[turn_++ % kQueue]); }
  // The same for a warp.
  __device__ __forceinline__ void done_as_warp() {
    __syncwarp();
    int32_t turn = turn_;
    // In fp8 the place is computed anew, since writing warps have no register to keep it.
    if constexpr (std::is_base_of_v<Fp8, T>) asm volatile("" : "+r"(turn));
    arrive_as_warp(&shared_.done[turn % kQueue]);
    ++turn_;
  }

 private:
  Shared<T>& shared_;
  uint64_t* told_;
  int32_t turn_ = 0;
};

}  // namespace epmoe::cuda::fused
