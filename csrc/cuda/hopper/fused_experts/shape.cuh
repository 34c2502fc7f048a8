// What the roles of the experts in one kernel share: the sizes of a tile, and the shared memory of
// a block.
#pragma once
#include "cuda/hopper/fused_experts/formats.cuh"
#include "cuda/hopper/ring.cuh"
#include "cuda/local/real_rows.cuh"

namespace epmoe::cuda::fused {

// --- A tile ---

// Weight rows of a tile: 128 gates and their ups, or 256 outputs.
constexpr int kWeightRows = 256;
// Columns of h in a tile: those that share a scale.
constexpr int kHColumns = static_cast<int>(kScaleBlock);
// Outputs in a tile.
constexpr int kOutputs = kWeightRows;
// A tile's rows are rounded up to a multiple of it, which is also the lines of a box.
constexpr int kTokenStep = 16;
// Tokens in a box.
template <typename T>
constexpr int kBoxTokens = T::kPasses == 1 ? kTokenStep : 3 * kTokenStep;
// Weight rows in a box: half of a pass.
template <typename T>
constexpr int kBoxRows = kWeightRows / 2 / T::kPasses;
// Elements along k in a step: a line. In fp8 they share a scale.
template <typename T>
constexpr int kStep = kLineBytes / static_cast<int>(sizeof(typename T::Element));
static_assert(kStep<Fp8> == kScaleBlock && kStep<Mxfp4> == kScaleBlock);
// Bytes of a weight row in a step.
template <typename T>
constexpr int kWeightLineBytes = T::kPacked ? kLineBytes / 2 : kLineBytes;

// --- The block ---

// Threads that multiply: each warpgroup has as many of the weight rows.
template <typename T>
constexpr int kMultipliers = T::kGroups * kWarpgroup;
// A warpgroup loads, one role a warp.
enum class Role { kWeights, kRows, kScales, kClaims };
// The thread that claims tiles.
template <typename T>
constexpr int kClaimer = kMultipliers<T> + 32 * static_cast<int>(Role::kClaims);
// The last warpgroup writes what the others have summed, while they go on.
constexpr int kWriters = kWarpgroup;
template <typename T>
constexpr int kThreads = kMultipliers<T> + kWarpgroup + kWriters;
// Registers of a thread that loads, writes or multiplies: together all that a block gets.
constexpr int kLoadRegisters = 40;
constexpr int kWriteRegisters = 56;
constexpr int kMathRegisters = 208;
static_assert(kLoadRegisters + kWriteRegisters + Fp8::kGroups * kMathRegisters <= 4 * 128);

// --- Shared memory ---

template <typename T>
constexpr int kWeightBytes = kWeightRows / T::kPasses * kWeightLineBytes<T>;
template <typename T>
constexpr int kStageBytes = kWeightBytes<T> + T::kTokens * kLineBytes;
template <typename T>
using Stages = Ring<T::kStages, kStageBytes<T>>;
// Who fills a stage: the thread that loads weights, the one that loads rows, or the warp that
// brings them into order, and each lane of the warp that loads scales of rows.
template <typename T>
constexpr int kFilling = 1 + (T::kOrdered ? kArriving : 1) + (T::kScaled ? 32 : 0);
template <typename T>
constexpr int kEmptying = kMultipliers<T> / 32;
// Places for tiles on their way from the warp that claims. One keeps its place while it is
// multiplied, since warps that multiply have no registers for it.
constexpr int kQueue = 4;
// Who uses a tile: the thread that loads rows; the thread, or in MXFP4 the warp, that loads
// weights; and the warps that load scales, that multiply, and that write.
template <typename T>
constexpr int kUsers = 1 + (T::kPacked ? kArriving : 1) +
                       ((T::kScaled ? 1 : 0) + kMultipliers<T> / 32 + kWriters / 32) * kArriving;
// Boxes of a tile's products in bf16, of 64 columns each: of 64 gates and of their ups by turns, or
// of outputs.
template <typename T>
constexpr int kLeavingBytes = T::kLeavingTokens * kLineBytes;
constexpr int kLeavingBoxes = kWeightRows / 64;

// --- Scales of weights in MXFP4 ---

// Columns that share a scale, and such groups in a step along k.
constexpr int kGroup = static_cast<int>(kMxfp4Group);
constexpr int kGroupsOfStep = static_cast<int>(kScaleBlock) / kGroup;
// The order in which codes are widened, and rows lie: of each group the even columns, then the odd
// ones. These select them of eight.
constexpr uint32_t kEvens = 0x6420;
constexpr uint32_t kOdds = 0x7531;
// Steps whose scales are loaded together: 16 bytes of each row. Rows start at any byte, so a window
// has the two aligned pieces of 16 bytes that hold them.
constexpr int kBatchSteps = 4;
constexpr int kPieceBytes = 16;
constexpr int kWindowBytes = 2 * kPieceBytes;
template <typename T>
constexpr int kWindowsBytes = kWeightRows / T::kPasses * kWindowBytes;
template <typename T>
using ScaleStages = Ring<T::kScaleStages, kWindowsBytes<T>>;

// Scales, which are exponents, are at most so far apart.
constexpr int kMostBelow = 255;
// A table of what scales make of codes has an entry for each distance, also for those the other way
// round, and one more.
constexpr int kTableEntries = 2 * kMostBelow + 2;

// --- A tile on its way ---

struct Tile {
  int32_t expert;  // kNoTile behind the last tile
  int32_t row;     // the first
  int32_t count;   // of rows
  int32_t width;   // so many are computed
  int32_t column;  // the first of h, or of outputs
  int32_t part;    // the number of its rows' tile among all experts'
  int32_t steps;   // along k
  bool down;       // outputs, else h
};
constexpr int32_t kNoTile = -1;

// How often a tile's products leave, beyond once.
template <typename T>
__device__ __forceinline__ int32_t further_departures(const Tile& tile) {
  return T::kLeavingTokens < T::kTokens ? (tile.width - 1) / T::kLeavingTokens : 0;
}

// threadIdx.x, read anew for each tile. What the compiler derives from a value that stays the same
// it computes once, and keeps it in memory while a tile is multiplied, which needs all registers.
// To read it back took longer than all else there.
__device__ __forceinline__ int32_t thread_of_tile() {
  int32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Scales of a step along k: those of rows, and in fp8 of the weights of each warpgroup's two sums.
// In a full tile they are those of either half of the weights of each sum.
template <typename T>
struct Scales {
  // A lane has each 32nd row. bf16 has none, and an array has at least one element.
  static constexpr int kRows = T::kScaled ? (T::kTokens + 31) / 32 * 32 : 1;
  float of_rows[kRows];
  alignas(16) float of_weights[Fp8::kGroups][2];
};

// In fp8 the widest tile whose tokens are columns has the products of both scales instead, the
// factors of each warpgroup's two sums. The threads that add would make each of them 16 times anew,
// which costs as much as a third of adding; one warp makes them in front. In narrower tiles memory
// decides, and copies that no thread waits for are faster.
struct ScaleFactors {
  float of_tokens[2 * Fp8::kGroups][kMostColumns];
};
template <typename T>
__device__ __forceinline__ bool has_factors(const Tile& tile) {
  return kHasFull<T> && tile.width == kMostColumns;
}

// The width of a tile of so many tokens.
template <typename T>
__device__ __forceinline__ int32_t width_of(int32_t tokens) {
  if constexpr (kHasFull<T>) {
    if (tokens > kFullTokens) return T::kTokens;
    if (tokens > kMostColumns) return kFullTokens;
  }
  return (tokens + kTokenStep - 1) / kTokenStep * kTokenStep;
}
// Whether it is full or overfull.
template <typename T>
__device__ __forceinline__ bool is_full(const Tile& tile) {
  return kHasFull<T> && tile.width >= kFullTokens;
}

// What MXFP4 adds.
template <typename T>
struct MoreShared {};
template <>
struct MoreShared<Mxfp4> {
  alignas(16) char windows[Mxfp4::kScaleStages][kWindowsBytes<Mxfp4>];
  uint64_t mbarriers[2 * Mxfp4::kScaleStages];
  // Of stages: rows have arrived, not yet in order.
  uint64_t arrived[Mxfp4::kStages];
};
template <>
struct MoreShared<ManyMxfp4> {
  alignas(16) char windows[ManyMxfp4::kScaleStages][kWindowsBytes<ManyMxfp4>];
  // The negative values of e2m1 in e4m3, a byte each, by how far a scale is below the largest of
  // its weight row.
  uint2 table[kTableEntries];
  uint64_t mbarriers[2 * ManyMxfp4::kScaleStages];
  // Of the places of the queue: the largest scale of each weight row, whether each warp that found
  // them has found small ones, and that all are known.
  uint64_t scaled[kQueue];
  alignas(4) bool some_small[kQueue][kWriters / 32];
  uint8_t largest[kQueue][kWeightRows];

  __device__ __forceinline__ bool has_small(int32_t place) const {
    static_assert(sizeof(some_small[0]) == sizeof(uint32_t));
    return *reinterpret_cast<const uint32_t*>(some_small[place]) != 0;
  }
};

// What else a launch has that chooses between two formats: the mbarriers of the stages of the other
// one, and for the smaller one room for what is larger in the other. So all behind lies at the same
// place with both.
template <typename T>
struct OtherStages {};
template <>
struct OtherStages<Fp8> {
  uint64_t mbarriers[2 * Fp8Few::kStages];
};
template <>
struct OtherStages<Fp8Few> {
  uint64_t mbarriers[2 * Fp8::kStages];
};
// Bytes of stages, of what leaves and of scales.
template <typename T>
constexpr int kLargeBytes = T::kStages * kStageBytes<T> + kLeavingBoxes * kLeavingBytes<T> +
                            T::kStages * static_cast<int>(sizeof(Scales<T>));
template <typename T>
struct OtherRoom {};
template <>
struct OtherRoom<Fp8Few> {
  char bytes[kLargeBytes<Fp8> - kLargeBytes<Fp8Few>];
};

// Whether the rows of experts lie in shared memory. In fp8 tiles leave no room for them: the thread
// that claims reads them from memory.
template <typename T>
constexpr bool kListsRows = !std::is_base_of_v<Fp8, T>;

template <typename T>
struct Shared {
  char stages[T::kStages][kStageBytes<T>];
  // Products of a tile, on their way out.
  char leaving[kLeavingBoxes][kLeavingBytes<T>];
  // Of a stage. They begin at a multiple of 16 bytes, as all in front of them does.
  Scales<T> scales[T::kScaled ? T::kStages : 1];
  [[no_unique_address]] OtherRoom<T> room;
  Tile queue[kQueue];
  uint64_t mbarriers[2 * T::kStages];
  [[no_unique_address]] OtherStages<T> other;
  // Of the places of the queue: a tile has been claimed, its rows or its h may be read, and all its
  // users are done.
  uint64_t claimed[kQueue];
  uint64_t readable[kQueue];
  uint64_t done[kQueue];
  // All products of a tile lie in `leaving`; and all have been read there.
  uint64_t summed;
  uint64_t taken;
  // The next tile is to be claimed.
  uint64_t wanted;
  // This block has waited for h in vain.
  bool late;
  // Tiles are those of Fp8Few.
  bool few;
  [[no_unique_address]] MoreShared<T> more;
  // Tiles of rows before each expert, e + 1 of them; and behind them its rows, if kListsRows.
  int32_t first[];

  __device__ __forceinline__ SegmentRows* rows(int32_t experts) {
    return reinterpret_cast<SegmentRows*>(first + experts + 1);
  }
  // Those of a stage lie in its lines for the tokens beyond a full tile, which only overfull tiles
  // have.
  __device__ __forceinline__ ScaleFactors& factors(int32_t stage) {
    constexpr int kLines = kOverTokens * kLineBytes;
    static_assert(sizeof(ScaleFactors) <= kLines);
    return *reinterpret_cast<ScaleFactors*>(stages[stage] + kStageBytes<T> - kLines);
  }
  static constexpr int64_t bytes(int64_t experts) {
    const int64_t rows = kListsRows<T> ? experts * sizeof(SegmentRows) : 0;
    return static_cast<int64_t>(sizeof(Shared) + (experts + 1) * sizeof(int32_t)) + rows;
  }
};

// Waits until `leaving` has room: products have been taken that left before. `departed` counts how
// often some have.
template <typename T>
__device__ __forceinline__ void await_room(Shared<T>& shared, int32_t departed) {
  if (departed) wait_mbarrier(&shared.taken, (departed - 1) & 1);
}

// A launch that chooses has the same memory for either: only stages, what leaves, scales, and
// mbarriers of stages differ.
static_assert(offsetof(Shared<Fp8>, queue) == offsetof(Shared<Fp8Few>, queue));
static_assert(offsetof(Shared<Fp8>, claimed) == offsetof(Shared<Fp8Few>, claimed));
static_assert(offsetof(Shared<Fp8>, first) == offsetof(Shared<Fp8Few>, first));
// Either has the threads and the arrivals of the other.
static_assert(kThreads<Fp8> == kThreads<Fp8Few> && kMultipliers<Fp8> == kMultipliers<Fp8Few>);
static_assert(kFilling<Fp8> == kFilling<Fp8Few> && kEmptying<Fp8> == kEmptying<Fp8Few>);
static_assert(kUsers<Fp8> == kUsers<Fp8Few>);

// The shared memory of a multiprocessor, without what CUDA takes of it for a block.
constexpr int64_t kMostSharedBytes = 227 << 10;
static_assert(Shared<Fp8>::bytes(Fp8::kMostExperts) <= kMostSharedBytes);
static_assert(Shared<Bf16>::bytes(Bf16::kMostExperts) <= kMostSharedBytes);
static_assert(Shared<Mxfp4>::bytes(Mxfp4::kMostExperts) <= kMostSharedBytes);
static_assert(Shared<ManyMxfp4>::bytes(ManyMxfp4::kMostExperts) <= kMostSharedBytes);

}  // namespace epmoe::cuda::fused
