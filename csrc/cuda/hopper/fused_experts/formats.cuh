// The formats of the experts in one kernel: what the dtypes of weights, rows and h decide of a
// tile.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "args.h"

namespace epmoe::cuda::fused {

// Weights, rows and h in fp8, with scales.
struct Fp8 {
  using Element = uint8_t;
  static constexpr bool kScaled = true;
  // Weights are codes of half a byte.
  static constexpr bool kPacked = false;
  // Rows lie in the order in which codes are widened.
  static constexpr bool kOrdered = false;
  // Parts of a tile's weight rows, one after the other, each with all of k.
  static constexpr int kPasses = 1;
  // Rows of an expert in a tile, at most.
  static constexpr int kTokens = static_cast<int>(kFusedFp8Tokens);
  // Warpgroups that multiply.
  static constexpr int kGroups = 2;
  static constexpr int kStages = 3;
  // Steps along k whose weights are loaded together.
  static constexpr int kStepsAtOnce = 1;
  // Rows of a tile whose products leave at once: all of them.
  static constexpr int kLeavingTokens = kTokens;
  static constexpr int64_t kMostExperts = kFusedFp8Experts;
};

// The same in launches where few experts have more rows than such a tile, and reading weights
// decides. A fourth stage has room, so that two steps are loaded together: memory is faster where
// 256 bytes of a row of weights are read at once.
struct Fp8Few : Fp8 {
  static constexpr int kTokens = static_cast<int>(kFusedFewTokens);
  static constexpr int kStages = 4;
  static constexpr int kStepsAtOnce = 2;
  static constexpr int kLeavingTokens = kTokens;
};

// Tiles in fp8 of more tokens than kMostColumns have tokens as the rows of the tensor core, 64 for
// each warpgroup, and weights as its columns: a thread that adds then has two tokens, so that it
// makes few factors for many sums. Such a tile is full, or overfull: with up to kOverTokens more,
// which are columns. A thread's sums of more, and those of one block of k, leave no registers.
constexpr int kMostColumns = 96;
constexpr int kFullTokens = 128;
constexpr int kOverTokens = Fp8::kTokens - kFullTokens;
template <typename T>
constexpr bool kHasFull = std::is_same_v<T, Fp8>;

// Whether a launch chooses between these tiles and those of Fp8Few.
template <typename T>
constexpr bool kHasFew = std::is_same_v<T, Fp8>;
// It takes the smaller ones if they are at most a ninth more. Each further one reads weights again.
constexpr int32_t kNinth = 9;

// Weights in MXFP4, rows and h in fp8.
struct Mxfp4 {
  using Element = uint8_t;  // of rows and h
  static constexpr bool kScaled = true;
  static constexpr bool kPacked = true;
  static constexpr bool kOrdered = true;
  static constexpr int kPasses = 1;
  // Widened weights and sums of a scale take registers, too.
  static constexpr int kTokens = static_cast<int>(kFusedMxfp4Tokens);
  // Each widens a quarter of the weights: while one waits for its products, others widen.
  static constexpr int kGroups = 4;
  static constexpr int kStages = 6;
  static constexpr int kScaleStages = 3;
  // Up to so many rows are columns of one product by themselves.
  static constexpr int kFewestColumns = 8;
  static constexpr int kStepsAtOnce = 1;
  static constexpr int kLeavingTokens = kTokens;
  static constexpr int64_t kMostExperts = kFusedExperts;
};

// The same with many rows of an expert.
struct ManyMxfp4 {
  using Element = uint8_t;  // of rows and h
  static constexpr bool kScaled = true;
  static constexpr bool kPacked = true;
  static constexpr bool kOrdered = false;
  // With half of the weight rows at a time registers have room for so many tokens. An expert that
  // has 128 or 256 rows on average seldom has more than one or two tiles of them.
  static constexpr int kPasses = 2;
  static constexpr int kTokens = static_cast<int>(kFusedManyMxfp4Tokens);
  static constexpr int kGroups = 2;
  static constexpr int kStages = 5;
  static constexpr int kScaleStages = 2;
  static constexpr int kStepsAtOnce = 1;
  static constexpr int kLeavingTokens = kTokens;
  static constexpr int64_t kMostExperts = kFusedManyMxfp4Experts;
};

// The same in bf16, without scales.
struct Bf16 {
  using Element = __nv_bfloat16;
  static constexpr bool kScaled = false;
  static constexpr bool kPacked = false;
  static constexpr bool kOrdered = false;
  static constexpr int kPasses = 1;
  // Tiles of 144 to 176 rows, which leave room for three stages only, were slower.
  static constexpr int kTokens = static_cast<int>(kFusedTokens);
  static constexpr int kGroups = 2;
  // A step takes half as long as in fp8, where sums are scaled. With three stages loads came too
  // late, which cost up to 18 % with many rows.
  static constexpr int kStages = 4;
  static constexpr int kStepsAtOnce = 1;
  // Half of the rows leave, then the others: so there is room for the fourth stage.
  static constexpr int kLeavingTokens = kTokens / 2;
  static constexpr int64_t kMostExperts = kFusedExpertsBf16;
};

}  // namespace epmoe::cuda::fused
