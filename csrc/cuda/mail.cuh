// Flags between GPUs. Small values travel in words that carry their own epoch; a row is stored, then comes a block
// barrier, one fence of system scope and the flag of its slot, which the reader acquires; rows of few tokens travel as
// packets (packets.cuh). Nothing waits without a deadline, and nothing traps. The epoch is read where the kernel before
// wrote it, and written where the next one reads it.
//
// Why no buffer is overwritten while somebody reads it ("returned" is stream-ordered):
//  - every rank opens a round by a word to every rank, sent by a running kernel, and both stages wait for all of them.
//  - a rank writes into others' dispatch slabs, packets, flags and counts of n+1 only after combine(n) returned, so
//    after every rank had started combine(n), and therefore finished dispatch(n), the only reader of those.
//  - a rank writes into others' expert-major rows of n+1 only after it has their words of dispatch(n+1), which they
//  send
//    after their combine(n), the last reader of the rows.
//  - a rank writes into others' combine slabs of n only after dispatch(n) returned, so after every rank had started
//    dispatch(n), and therefore finished combine(n-1), the only reader of those. The two never alias.
// So no rank is a round ahead of one that still waits, and epochs are compared for equality: the flag of a slot that
// lay unused for 2^31 rounds must not look as if it were reached.
#pragma once
#include "common.cuh"
#include "exchange.h"

namespace epmoe::cuda {

constexpr int kMaxExchangeRanks = 32;  // one lane a rank
constexpr int kMaxExchangeTopK = 32;   // one lane a pair
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

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
// By one thread, after a barrier of the block that stored what the flag stands for.
__device__ __forceinline__ void raise_flag(uint32_t* flag, uint32_t epoch) {
  asm volatile("fence.acq_rel.sys;\n\tst.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
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

// A launch's arguments are cold: their lines are fetched side by side, while the kernel before still runs. `sink` is
// shared memory that nobody reads.
template <typename K>
__device__ __forceinline__ void fetch_arguments(const K& kernel, int64_t* sink) {
  auto* words = reinterpret_cast<const int64_t*>(&kernel);
  constexpr int kLine = 8;
  for (int i = threadIdx.x / 32 * kLine; i < static_cast<int>(sizeof(K) / sizeof(int64_t)); i += kWarps * kLine)
    if (threadIdx.x % 32 == 0) *static_cast<volatile int64_t*>(sink) = words[i];
}

// One kernel's waiting: for which round, and until when.
struct Wait {
  const Exchange& ex;
  RoundState* round;
  uint32_t epoch;

  __device__ Wait(const Exchange& exchange, RoundState* round, uint32_t epoch)
      : ex(exchange), round(round), epoch(epoch) {}

  __device__ bool reached(uint64_t word) const { return static_cast<uint32_t>(word) == epoch; }

  // Tries until `reached` says so. False once any wait of this kernel has failed; `rank` is the one waited for.
  template <typename F>
  __device__ __forceinline__ bool until(F&& reached, const int32_t& rank) const {
    uint64_t deadline_ns = 0;
    for (uint32_t tries = 1; !reached(); ++tries)
      if (tries % 64 == 0 && !may_go_on(ex, round, rank, deadline_ns)) return false;
    return true;
  }

  // Acquiring empties the multiprocessor's cache, so that it is done once, not at every look.
  __device__ bool for_flag(const uint32_t* flag, int32_t rank) const {
    bool up = until(
        [&] {
          if (reached(load_relaxed(flag))) return true;
          __nanosleep(20);  // leaves the flags' part of the memory to those who raise them
          return false;
        },
        rank);
    return up && reached(load_acquire(flag));
  }

  // `count` words, `stride` apart, the next from `next` ranks on: all are asked for before the first is looked at.
  template <int N>
  __device__ __forceinline__ bool for_words(const uint64_t* first, int64_t stride, int32_t rank, int32_t next,
                                            int32_t count, int32_t (&values)[N]) const {
    int32_t missing = rank;
    return until(
        [&] {
          uint64_t words[N];
#pragma unroll
          for (int i = 0; i < N; ++i) words[i] = i < count ? load_word(first + i * stride) : epoch;
          bool all = true;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            if (!reached(words[i])) all = false, missing = rank + i * next;
            values[i] = static_cast<int32_t>(words[i] >> 32);
          }
          return all;
        },
        missing);
  }

  // Of a wait that turns out long. Static, so that the rest of it can stay in registers.
  static __device__ __noinline__ bool may_go_on(const Exchange& ex, RoundState* round, int32_t rank,
                                                uint64_t& deadline_ns) {
    if (!deadline_ns) deadline_ns = now_ns() + static_cast<uint64_t>(ex.timeout_s * 1e9);
    if (*reinterpret_cast<volatile uint64_t*>(&round->missing)) return false;
    auto* errors = in_window<volatile uint64_t>(ex, ex.plan.rank, ex.plan.error_mail);
    uint64_t missing = 0;
    int64_t originator = ex.plan.rank;
    for (int64_t r = 0; r < ex.plan.R && !missing; ++r) missing = errors[r], originator = r;
    if (!missing) {
      if (now_ns() < deadline_ns) return true;
      missing = uint64_t{1} << rank, originator = ex.plan.rank;
    }
    atomicExch(&round->originator, static_cast<int32_t>(originator));
    atomicOr(reinterpret_cast<unsigned long long*>(&round->missing), static_cast<unsigned long long>(missing));
    return false;
  }

  // By the whole block, at its end. Where a wait of this block failed, true, after all blocks are done: latches, tells
  // the host and every rank, and the caller zeroes the outputs.
  __device__ bool failed(Stage stage, bool ok) const {
    ok = __syncthreads_and(ok);
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(&round->done[stage]) : "memory");
    if (ok) return false;
    if (threadIdx.x == 0) {
      auto* done = reinterpret_cast<volatile int32_t*>(&round->done[stage]);
      while (*done < static_cast<int32_t>(gridDim.x)) __nanosleep(100);
      __threadfence();
      if (atomicExch(&round->latched, 1) == 0) tell(ex, round, epoch, stage);
    }
    __syncthreads();
    return true;
  }

  static __device__ __noinline__ void tell(const Exchange& ex, RoundState* round, uint32_t epoch, Stage stage) {
    ++in_scratch<int64_t>(ex, ex.plan.counters)[kTimeouts];
    volatile Status* status = ex.status;
    status->stage = stage, status->epoch = epoch;
    status->missing = static_cast<int64_t>(round->missing), status->originator = round->originator;
    __threadfence_system();
    status->code = kTimeout;
    for (int64_t rank = 0; rank < ex.plan.R; ++rank)
      in_window<volatile uint64_t>(ex, rank, ex.plan.error_mail)[ex.plan.rank] = round->missing;
    __threadfence_system();
  }
};

}  // namespace epmoe::cuda
