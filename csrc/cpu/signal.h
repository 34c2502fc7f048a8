// Signals between processes. A sender writes payload, then releases the epoch in the round header; the receiver
// acquires it. A waiting rank soon sleeps on a futex, so that more ranks than cores do not starve one another.
//
// No buffer is overwritten while somebody reads it, because both stages wait for the flag of EVERY rank. A rank raises
// its combine flag of round n only after its last read of its dispatch slabs, counts and rows of n. It raises its
// dispatch flag of n+1 only after it has summed its combine slabs of n. Dispatch and combine slabs never alias, and
// each slab has one writer. The proof: docs/protocol.md, 'Why can no buffer be overwritten while read?'.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "stages.h"
#include "stream.h"

namespace epmoe::cpu {

// Offsets of the plan as pointers into a rank's window and into this rank's scratch.
template <typename T>
T* in_window(const Exchange& ex, int64_t rank, int64_t offset) {
  return reinterpret_cast<T*>(ex.peers_R[rank] + offset);
}
template <typename T>
T* in_scratch(const Exchange& ex, int64_t offset) {
  return reinterpret_cast<T*>(ex.scratch + offset);
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Wakes a rank that sleeps in wait_for_all().
inline void wake(const Exchange& ex, int64_t rank) {
  auto* doorbell = in_window<uint32_t>(ex, rank, ex.plan.doorbell);
  std::atomic_ref(*doorbell).fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, doorbell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Writes this rank's header into every window, the flag last. count_R[r] is the number of rows sent to rank r.
inline void signal_all(const Exchange& ex, int64_t signals_offset, RoundHeader header, const int32_t* count_R) {
  finish_streaming();
  for (int64_t i = 0; i < ex.plan.R; ++i) {
    int64_t rank = (ex.plan.rank + i) % ex.plan.R;
    RoundHeader* slot = in_window<RoundHeader>(ex, rank, signals_offset) + ex.plan.rank;
    slot->count = count_R[rank];
    slot->D = header.D, slot->K = header.K, slot->dtype = header.dtype;
    std::atomic_ref(slot->epoch).store(header.epoch, std::memory_order_release);
    wake(ex, rank);
  }
}

// Ranks whose flag has not reached `epoch`, as a mask.
inline uint64_t missing_ranks(const Exchange& ex, int64_t signals_offset, uint32_t epoch) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, signals_offset);
  uint64_t missing = 0;
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    uint32_t seen = std::atomic_ref(headers[r].epoch).load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - epoch) < 0) missing |= uint64_t{1} << r;
  }
  return missing;
}

// Records the first failure, reports it to every rank, and latches: the proof above no longer holds, so this rank sends
// no payload any more.
inline void fail(const Exchange& ex, Stage stage, uint32_t epoch, uint64_t missing, int64_t originator) {
  auto* state = in_scratch<RoundState>(ex, ex.plan.state);
  if (state->latched) return;
  state->latched = 1;
  ++in_scratch<int64_t>(ex, ex.plan.health_counters)[kTimeouts];
  *ex.status = {kTimeout, stage, epoch, static_cast<int64_t>(missing), originator, ex.status->needed_rows, {}};
  for (int64_t rank = 0; rank < ex.plan.R; ++rank) {
    auto* errors = in_window<uint64_t>(ex, rank, ex.plan.signal_error);
    std::atomic_ref(errors[ex.plan.rank]).store(missing, std::memory_order_release);
    wake(ex, rank);
  }
}

// Waits for the flag of every rank. Returns false after the deadline, or once another rank has reported a failure. It
// spins, then yields, then sleeps until the doorbell changes, at most 50 ms at a time.
inline bool wait_for_all(const Exchange& ex, Stage stage, int64_t signals_offset, uint32_t epoch) {
  constexpr int kSpins = 64, kYields = 16;
  constexpr int64_t kLongestSleepNs = 50'000'000;
  auto* doorbell = in_window<uint32_t>(ex, ex.plan.rank, ex.plan.doorbell);
  auto* errors = in_window<uint64_t>(ex, ex.plan.rank, ex.plan.signal_error);
  int64_t deadline_ns = now_ns() + ex.timeout_ns;
  for (int64_t polls = 0;; ++polls) {
    uint32_t doorbell_before = std::atomic_ref(*doorbell).load(std::memory_order_acquire);
    uint64_t missing = missing_ranks(ex, signals_offset, epoch);
    if (!missing) return true;
    for (int64_t r = 0; r < ex.plan.R; ++r) {
      uint64_t reported = std::atomic_ref(errors[r]).load(std::memory_order_acquire);
      if (reported) return fail(ex, stage, epoch, reported, r), false;
    }
    int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) return fail(ex, stage, epoch, missing, ex.plan.rank), false;
    if (polls < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (polls < kSpins + kYields) {
      sched_yield();
    } else {
      timespec sleep{0, std::min(left_ns, kLongestSleepNs)};
      syscall(SYS_futex, doorbell, FUTEX_WAIT, doorbell_before, &sleep, nullptr, 0);
    }
  }
}

}  // namespace epmoe::cpu
