// Waiting for other ranks: nothing waits without a deadline, and nothing traps. The first failure latches, is told to
// the host and to every rank, and ends all other waits.
#pragma once
#include "mail.cuh"

namespace epmoe::cuda {

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
      if (tries % 64 == 0 && !(deadline_ns = deadline_of(ex, round, rank, deadline_ns))) return false;
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

  // Whether `count` words are here, `stride` apart, and their values; `missing` is the last that is not. All are asked
  // for before the first is looked at.
  template <int N>
  __device__ __forceinline__ bool has_words(const uint64_t* first, int64_t stride, int32_t count, int32_t (&values)[N],
                                            int32_t& missing) const {
    uint64_t words[N];
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = i < count ? load_word(first + i * stride) : epoch;
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!reached(words[i])) all = false, missing = i;
      values[i] = static_cast<int32_t>(words[i] >> 32);
    }
    return all;
  }
  // Until they are: the first comes from `rank`, the next from `next` ranks on.
  template <int N>
  __device__ __forceinline__ bool for_words(const uint64_t* first, int64_t stride, int32_t rank, int32_t next,
                                            int32_t count, int32_t (&values)[N]) const {
    int32_t missing = 0, missing_rank = rank;
    return until(
        [&] {
          bool all = has_words(first, stride, count, values, missing);
          missing_rank = rank + missing * next;
          return all;
        },
        missing_rank);
  }

  // Of a wait that turns out long: until when it may go on, 0 if no longer. Takes and returns values, so that whatever
  // else the waiting is done with can stay in registers.
  static __device__ __noinline__ uint64_t deadline_of(const Exchange& ex, RoundState* round, int32_t rank,
                                                      uint64_t deadline_ns) {
    if (!deadline_ns) deadline_ns = now_ns() + ex.timeout_ns;
    if (*reinterpret_cast<volatile uint64_t*>(&round->missing)) return 0;
    auto* errors = in_window<volatile uint64_t>(ex, ex.plan.rank, ex.plan.error_mail);
    uint64_t missing = 0;
    int64_t originator = ex.plan.rank;
    for (int64_t r = 0; r < ex.plan.R && !missing; ++r) missing = errors[r], originator = r;
    if (!missing) {
      if (now_ns() < deadline_ns) return deadline_ns;
      missing = uint64_t{1} << rank, originator = ex.plan.rank;
    }
    *static_cast<volatile int16_t*>(&round->originator) = static_cast<int16_t>(originator);
    atomicOr(reinterpret_cast<unsigned long long*>(&round->missing), static_cast<unsigned long long>(missing));
    return 0;
  }

  // By the whole block, at its end. Where a wait of this block failed, true, after all blocks are done: latches, tells
  // the host and every rank, and the caller zeroes the outputs. Counting who is done releases nothing, which would hold
  // up every round that goes well; instead the one that failed gives what the others have stored time to arrive.
  __device__ bool failed(Stage stage, bool ok) const {
    ok = __syncthreads_and(ok);
    if (threadIdx.x == 0) asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(&round->done[stage]) : "memory");
    if (ok) return false;
    if (threadIdx.x == 0) {
      constexpr uint64_t kArrivedNs = 1'000'000;
      auto* done = reinterpret_cast<volatile int32_t*>(&round->done[stage]);
      while (*done < static_cast<int32_t>(gridDim.x)) __nanosleep(100);
      for (uint64_t then = now_ns(); now_ns() - then < kArrivedNs;) __nanosleep(1000);
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
