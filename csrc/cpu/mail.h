// Flags between processes: payload, then a release of the epoch; the reader acquires. A waiter soon sleeps in the
// kernel, so that more ranks than cores do not starve one another.
//
// Why no buffer is overwritten while somebody reads it:
//  - a rank writes into others' dispatch slabs of round n+1 only after combine(n) returned, which waited for EVERY
//    rank's combine flag of n; a rank raises that flag after its last read of its dispatch slabs, counts and rows of n.
//  - a rank writes into others' combine slabs of round n only after dispatch(n) saw EVERY rank's dispatch flag of n; a
//    rank raises that flag after it has summed its combine slabs of n-1.
//  - dispatch and combine slabs never alias, and each slab has one writer.
// A stage in halves raises its flag in the one and waits in the other. Whoever sends first received the stage before.
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

// Offsets of the plan as pointers: into a rank's window, and into this rank's scratch.
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

inline void ring(const Exchange& ex, int64_t rank) {
  auto* bell = in_window<uint32_t>(ex, rank, ex.plan.doorbell);
  std::atomic_ref(*bell).fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Puts a header into every rank's window, the flag last. count_R[r] is what rank r is told.
inline void send_mail(const Exchange& ex, int64_t mail_offset, Mail mail, const int32_t* count_R) {
  finish_streaming();
  for (int64_t i = 0; i < ex.plan.R; ++i) {
    int64_t rank = (ex.plan.rank + i) % ex.plan.R;
    Mail* slot = in_window<Mail>(ex, rank, mail_offset) + ex.plan.rank;
    slot->count = count_R[rank];
    slot->D = mail.D, slot->K = mail.K, slot->dtype = mail.dtype;
    std::atomic_ref(slot->epoch).store(mail.epoch, std::memory_order_release);
    ring(ex, rank);
  }
}

inline uint64_t missing_ranks(const Exchange& ex, int64_t mail_offset, uint32_t epoch) {
  Mail* mail = in_window<Mail>(ex, ex.plan.rank, mail_offset);
  uint64_t missing = 0;
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    uint32_t seen = std::atomic_ref(mail[r].epoch).load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - epoch) < 0) missing |= uint64_t{1} << r;
  }
  return missing;
}

// Records the failure, tells everyone, and latches: the reasons above no longer hold, so nothing may be sent any more.
inline void fail(const Exchange& ex, Stage stage, uint32_t epoch, uint64_t missing, int64_t originator) {
  auto* state = in_scratch<RoundState>(ex, ex.plan.state);
  if (state->latched) return;
  state->latched = 1;
  ++in_scratch<int64_t>(ex, ex.plan.counters)[kTimeouts];
  *ex.status = {kTimeout, stage, epoch, static_cast<int64_t>(missing), originator, ex.status->needed_rows, {}};
  for (int64_t rank = 0; rank < ex.plan.R; ++rank) {
    auto* errors = in_window<uint64_t>(ex, rank, ex.plan.error_mail);
    std::atomic_ref(errors[ex.plan.rank]).store(missing, std::memory_order_release);
    ring(ex, rank);
  }
}

// Waits for every rank's flag. False after the deadline, or when another rank has told of its own failure.
inline bool wait_for_all(const Exchange& ex, Stage stage, int64_t mail_offset, uint32_t epoch) {
  constexpr int kSpins = 64, kYields = 16;
  constexpr int64_t kLongestSleepNs = 50'000'000;
  auto* bell = in_window<uint32_t>(ex, ex.plan.rank, ex.plan.doorbell);
  auto* errors = in_window<uint64_t>(ex, ex.plan.rank, ex.plan.error_mail);
  int64_t deadline_ns = now_ns() + ex.timeout_ns;
  for (int64_t tries = 0;; ++tries) {
    uint32_t heard = std::atomic_ref(*bell).load(std::memory_order_acquire);
    uint64_t missing = missing_ranks(ex, mail_offset, epoch);
    if (!missing) return true;
    for (int64_t r = 0; r < ex.plan.R; ++r) {
      uint64_t theirs = std::atomic_ref(errors[r]).load(std::memory_order_acquire);
      if (theirs) return fail(ex, stage, epoch, theirs, r), false;
    }
    int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) return fail(ex, stage, epoch, missing, ex.plan.rank), false;
    if (tries < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (tries < kSpins + kYields) {
      sched_yield();
    } else {
      timespec sleep{0, std::min(left_ns, kLongestSleepNs)};
      syscall(SYS_futex, bell, FUTEX_WAIT, heard, &sleep, nullptr, 0);
    }
  }
}

}  // namespace epmoe::cpu
