// Where the buffers of the exchange lie: the only place where the offsets of csrc/plan.h become
// addresses of the window's slabs. docs/protocol.md has the map of the window.
#pragma once
#include "cuda/device/common.cuh"
#include "exchange.h"
#include "launch_policy.h"

namespace epmoe::cuda {

constexpr int kMaxExchangeRanks = 32;  // a warp gives each rank one lane
constexpr int kMaxExchangeTopK = 32;   // a warp gives each pair of a token one lane

// These values stand where a pair's row index would stand: the expert belongs to another rank, or
// no row was left.
constexpr int32_t kForeign = -1;
constexpr int32_t kDropped = -2;

__device__ __forceinline__ int32_t block_threads() { return static_cast<int32_t>(blockDim.x); }
__device__ __forceinline__ int32_t block_warps() { return block_threads() / 32; }

struct Line;  // ll.cuh

template <typename T>
__device__ __forceinline__ T* in_window(const Exchange& ex, int64_t rank, int64_t offset) {
  return reinterpret_cast<T*>(ex.peers_R[rank] + offset);
}
template <typename T>
__device__ __forceinline__ T* in_scratch(const Exchange& ex, int64_t offset) {
  return reinterpret_cast<T*>(ex.scratch + offset);
}

// The buffers of the LL protocol, for a block `b` of dispatch or combine.
// Token t of `source` in `rank`'s window: a token has the slot of its number.
template <typename Block>
__device__ __forceinline__ char* ll_row_at(const Block& b, int64_t rank, int64_t source,
                                           int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<char>(b.ex, rank, plan.ll_rows) +
         (source * plan.ll_max_tokens + t) * plan.ll_row_stride_bytes;
}
// The K pair lines of token t of `source` in `rank`'s window.
template <typename Block>
__device__ __forceinline__ Line* ll_pairs_at(const Block& b, int64_t rank, int64_t source,
                                             int64_t t) {
  const ExchangePlan& plan = b.plan;
  return in_window<Line>(b.ex, rank, plan.ll_pairs) + (source * plan.ll_max_tokens + t) * plan.K;
}
// The sum that `sender` returns for the token of `slot` in `rank`'s window. Its index is 32-bit: at
// most 32 ranks times 2047 slots.
template <typename Block>
__device__ __forceinline__ int32_t ll_sum_index(const Block& b, int32_t sender, int32_t slot) {
  return sender * static_cast<int32_t>(b.plan.ll_max_tokens) + slot;
}
template <typename Block>
__device__ __forceinline__ char* ll_sum_at(const Block& b, int64_t rank, int64_t sum) {
  return in_window<char>(b.ex, rank, b.plan.ll_sums) + sum * b.plan.ll_sum_stride_bytes;
}

// A received slot: the s-th of its source.
struct Slot {
  int32_t source, s;
};

// The n-th slot in the order of work: slot 0 of all sources, then slot 1, and so on. Each rank
// starts with itself; with kOthers it has no slots.
template <bool kOthers = false>
__device__ __forceinline__ Slot slot_of(const ExchangePlan& plan, int32_t n) {
  auto R = static_cast<int32_t>(plan.R);
  auto sources = kOthers ? max(R - 1, 1) : R;
  auto s = n / sources;
  int32_t source = n - s * sources + static_cast<int32_t>(plan.rank) + kOthers;
  return {source < R ? source : source - R, s};
}

}  // namespace epmoe::cuda
