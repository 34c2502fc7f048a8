// Flags between GPUs. Small values travel in words that carry their own epoch; a row is stored, then comes a barrier
// and a release of system scope, the flag of its slot, which the reader acquires; rows of few tokens need no flag
// (lines.cuh). The epoch is read where the kernel before wrote it, and written where the next one reads it.
//
// Why no buffer is overwritten while somebody reads it ("returned" is stream-ordered):
//  - every rank opens a round by a word to every rank, sent by a running kernel, and both stages wait for all of them.
//  - a rank writes into others' dispatch slabs, lines, flags and counts of n+1 only after combine(n) returned, so
//    after every rank had started combine(n), and therefore finished dispatch(n), the only reader of those.
//  - a rank writes into others' expert-major rows of n+1 only after it has their words of dispatch(n+1), sent after
//    their combine(n), the last reader of the rows.
//  - a rank writes into others' combine slabs and lines of n only after dispatch(n) returned, so after every rank
//    had started dispatch(n), and therefore finished combine(n-1), the only reader of those. The two never alias.
// So no rank is a round ahead of one that still waits, and epochs are compared for equality: the flag of a slot that
// lay unused for 2^31 rounds must not look as if it were reached.
#pragma once
#include "common.cuh"
#include "exchange.h"

namespace epmoe::cuda {

constexpr int kMaxExchangeRanks = 32;  // one lane a rank
constexpr int kMaxExchangeTopK = 32;   // one lane a pair
constexpr int kThreads = 512;          // of a block, at most
constexpr int kWarps = kThreads / 32;
constexpr int32_t kNotHere = -1, kDropped = -2;  // in place of a pair's row: another rank's, or none is left for it

__device__ __forceinline__ int32_t block_threads() { return static_cast<int32_t>(blockDim.x); }
__device__ __forceinline__ int32_t block_warps() { return block_threads() / 32; }

template <typename T>
__device__ __forceinline__ T* in_window(const Exchange& ex, int64_t rank, int64_t offset) {
  return reinterpret_cast<T*>(ex.peers_R[rank] + offset);
}
template <typename T>
__device__ __forceinline__ T* in_scratch(const Exchange& ex, int64_t offset) {
  return reinterpret_cast<T*>(ex.scratch + offset);
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
// By one thread, after a barrier of those that stored what the flag stands for. It waits until all of that has arrived,
// which the end of a bulk copy (bulk.cuh) alone does not say: without a release, rows were seen that were not there
// yet.
__device__ __forceinline__ void raise_flag(uint32_t* flag, uint32_t epoch) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

// The same for flags of several rows, after one release of them all.
__device__ __forceinline__ void release_all() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void raise_released(uint32_t* flag, uint32_t epoch) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

// A value and the round it belongs to: one access of 8 bytes, so neither is seen without the other.
__device__ __forceinline__ void store_word(uint64_t* word, uint32_t epoch, int32_t value) {
  uint64_t packed = uint64_t{static_cast<uint32_t>(value)} << 32 | epoch;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(packed) : "memory");
}
__device__ __forceinline__ uint64_t load_word(const uint64_t* word) {
  uint64_t packed;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(packed) : "l"(word) : "memory");
  return packed;
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Values are to be computed now, before a wait that they do not depend on: the compiler would put that off. `sink` is
// shared memory that nobody reads.
template <typename... Values>
__device__ __forceinline__ void compute_now(int64_t* sink, Values... values) {
  *static_cast<volatile int64_t*>(sink) = (int64_t{0} ^ ... ^ static_cast<int64_t>(values));
}

// A launch's arguments are cold: their lines are fetched side by side, while the kernel before still runs.
template <typename K>
__device__ __forceinline__ void fetch_arguments(const K& kernel, int64_t* sink) {
  auto* words = reinterpret_cast<const int64_t*>(&kernel);
  constexpr int kLine = 8;
  for (int i = threadIdx.x / 32 * kLine; i < static_cast<int>(sizeof(K) / sizeof(int64_t)); i += block_warps() * kLine)
    if (threadIdx.x % 32 == 0) *static_cast<volatile int64_t*>(sink) = words[i];
}

}  // namespace epmoe::cuda
