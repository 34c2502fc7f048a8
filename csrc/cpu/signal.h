// Signals between processes. A sender writes payload, then releases the epoch in the round header;
// the receiver acquires it. A waiting rank soon sleeps on a futex, so that more ranks than cores do
// not starve one another.
//
// No buffer is overwritten while somebody reads it, because both stages wait for the flag of EVERY
// rank. The proof: docs/protocol.md, 'Why can no buffer be overwritten while read?'.
//
// A rank that aborts round n raises its combine flag of n at once, perhaps before it has seen any
// dispatch flag of n. A slow rank may then still sum round n-1 and read the count that this rank
// sent with that flag. Headers therefore hold the counts of two rounds, and twice whether the rank
// has aborted the round. The next flag that would overwrite the count of n-1 is that of n+1. It
// follows this rank's dispatch of n+1, and so every combine flag of n. For the same reason they
// hold `more_rounds` twice: a rank that has aborted round n may look for it while others have
// opened n+1.
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>

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

// Writes this rank's header of round `epoch` into every window, the flag last. count_R[r] is the
// number of rows sent to rank r; null aborts the round.
inline void signal_all(const Exchange& ex, int64_t signals_offset, uint32_t epoch,
                       const RoundState& round, const int32_t* count_R) {
  finish_streaming();
  for (int64_t i = 0; i < ex.plan.R; ++i) {
    int64_t rank = (ex.plan.rank + i) % ex.plan.R;
    RoundHeader* slot = in_window<RoundHeader>(ex, rank, signals_offset) + ex.plan.rank;
    slot->counts[epoch % 2] = count_R ? count_R[rank] : 0;
    slot->aborted[epoch % 2] = !count_R;
    slot->D = round.D, slot->K = round.K, slot->dtype = round.dtype, slot->mode = round.mode;
    slot->tag = static_cast<int32_t>(round.progress.tag);
    slot->needed_rows = static_cast<int32_t>(std::min<int64_t>(ex.status->needed_rows, INT32_MAX));
    slot->more_rounds[epoch % 2] = round.progress.more_rounds & 1;
    std::atomic_ref(slot->epoch).store(epoch, std::memory_order_release);
    wake(ex, rank);
  }
}

// Notes for the host whether any rank has more rounds after `epoch`. All headers of dispatch are
// here.
inline void note_more_rounds(const Exchange& ex, uint32_t epoch, Progress& progress) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, ex.plan.signal_dispatch);
  auto has_more = [&](const RoundHeader& header) { return header.more_rounds[epoch % 2]; };
  int64_t round = (progress.phases + 3) / 4;  // as epmoe/exchange/round_state.py counts
  progress.has_more_rounds = round << 1 | std::any_of(headers, headers + ex.plan.R, has_more);
}

// Ranks whose flag has not reached `epoch`, as a mask.
inline uint64_t missing_ranks(const Exchange& ex, int64_t signals_offset, uint32_t epoch) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, signals_offset);
  uint64_t missing = 0;
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    uint32_t seen = std::atomic_ref(headers[r].epoch).load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - epoch) < 0 && !headers[r].empty) missing |= uint64_t{1} << r;
  }
  return missing;
}

// A rank that left reports itself missing: the host writes this word into every window
// (epmoe/exchange/node.py).
inline uint64_t departure_of(int64_t rank) { return uint64_t{1} << rank; }

// Records the first failure, reports it to every rank, and latches: the proof above no longer
// holds, so this rank sends no payload any more. It repeats the word of a rank that left, so that
// no rank sees the report before that word.
inline void fail(const Exchange& ex, Stage stage, uint32_t epoch, uint64_t missing,
                 int64_t originator) {
  auto* state = in_scratch<RoundState>(ex, ex.plan.state);
  if (state->latched) return;
  state->latched = 1;
  ++in_scratch<int64_t>(ex, ex.plan.health_counters)[kTimeouts];
  *ex.status = {.code = kTimeout,
                .stage = stage,
                .epoch = epoch,
                .missing = static_cast<int64_t>(missing),
                .originator = originator,
                .needed_rows = ex.status->needed_rows};
  for (int64_t rank = 0; rank < ex.plan.R; ++rank) {
    auto* errors = in_window<uint64_t>(ex, rank, ex.plan.signal_error);
    if (missing == departure_of(originator)) std::atomic_ref(errors[originator]).store(missing);
    std::atomic_ref(errors[ex.plan.rank]).store(missing, std::memory_order_release);
    wake(ex, rank);
  }
}

// Whether a rank has reported a failure; if so, it becomes this rank's failure. Where a rank left,
// that rank is named as the originator, whoever repeats its word.
inline bool failed_elsewhere(const Exchange& ex, Stage stage, uint32_t epoch) {
  auto* errors = in_window<uint64_t>(ex, ex.plan.rank, ex.plan.signal_error);
  uint64_t all =
      ~uint64_t{0} >> (kMaxRanks - ex.plan.R);  // a word comes from a peer and may have any bits
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    uint64_t reported = std::atomic_ref(errors[r]).load(std::memory_order_acquire) & all;
    if (!reported) continue;
    int64_t missing = std::countr_zero(reported);
    bool left =
        reported == departure_of(missing) && std::atomic_ref(errors[missing]).load() == reported;
    fail(ex, stage, epoch, reported, left ? missing : r);
    return true;
  }
  return false;
}

// Ranks whose processes have ended, as a mask, which the host keeps (epmoe/group/deaths.py). All
// their signals have arrived.
inline uint64_t dead_ranks(const Exchange& ex) {
  auto* dead = in_window<uint64_t>(ex, ex.plan.rank, ex.plan.signal_dead);
  return std::atomic_ref(*dead).load(std::memory_order_acquire);
}

// Adds to the time that this rank has waited for each of `ranks`, a mask.
inline void add_waited(const Exchange& ex, uint64_t ranks, int64_t waited_ns) {
  auto* total_ns = in_scratch<int64_t>(ex, ex.plan.health_waited_ns);
  for (; ranks; ranks &= ranks - 1) total_ns[std::countr_zero(ranks)] += waited_ns;
}

enum class Wait { kArrived, kFailed, kInterrupted };

// Waits for the flag of every rank. It fails after the deadline, or once another rank has reported
// a failure, or once a rank that it misses has ended. It spins, then yields, then sleeps until the
// doorbell changes. A signal, or 100 ms of sleep, interrupts it, so that Python can run its signal
// handlers: the host then calls the operator of the same phase again, and the deadline stays the
// same. Its time counts for each rank until the signal of that rank is seen, signal handlers
// included.
inline Wait wait_for_all(const Exchange& ex, Stage stage, int64_t signals_offset, uint32_t epoch) {
  constexpr int kSpins = 64;   // looks at the flags, before this thread yields
  constexpr int kYields = 16;  // before it sleeps on the doorbell
  // A sleep ends by a signal of a rank. So often, Python may run signal handlers.
  constexpr int64_t kLongestSleepNs = 100'000'000;
  auto* doorbell = in_window<uint32_t>(ex, ex.plan.rank, ex.plan.doorbell);
  Progress& progress = in_scratch<RoundState>(ex, ex.plan.state)->progress;
  int64_t deadline_ns = std::exchange(progress.deadline_ns, 0);
  if (!deadline_ns) {
    progress.missing = static_cast<int64_t>(missing_ranks(ex, signals_offset, epoch));
    if (!progress.missing) return Wait::kArrived;
    progress.counted_ns = now_ns();
    deadline_ns = progress.counted_ns + ex.timeout_ns;
  }
  uint64_t missing = progress.missing;
  for (int64_t polls = 0;; ++polls) {
    uint32_t doorbell_before = std::atomic_ref(*doorbell).load(std::memory_order_acquire);
    // Before the flags: the last flag of a rank comes before its end.
    uint64_t dead = dead_ranks(ex);
    uint64_t still_missing = missing_ranks(ex, signals_offset, epoch);
    int64_t time_ns = now_ns();
    add_waited(ex, missing & ~still_missing, time_ns - progress.counted_ns);
    missing = still_missing;
    if (!missing) return Wait::kArrived;
    bool failed = failed_elsewhere(ex, stage, epoch);
    // Ranks that have ended, at once; or all that are missing, at the deadline.
    uint64_t lost = missing & dead;
    if (!lost && time_ns >= deadline_ns) lost = missing;
    if (!failed && lost) {
      fail(ex, stage, epoch, lost, ex.plan.rank);
      failed = true;
    }
    if (failed) {
      add_waited(ex, missing, time_ns - progress.counted_ns);
      return Wait::kFailed;
    }
    if (polls < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (polls < kSpins + kYields) {
      sched_yield();
    } else {
      timespec sleep{0, std::min(deadline_ns - time_ns, kLongestSleepNs)};
      bool woken =
          syscall(SYS_futex, doorbell, FUTEX_WAIT, doorbell_before, &sleep, nullptr, 0) == 0;
      if (woken || errno == EAGAIN) continue;
      int64_t counted_ns = std::exchange(progress.counted_ns, now_ns());
      add_waited(ex, missing, progress.counted_ns - counted_ns);
      progress.missing = static_cast<int64_t>(missing), progress.deadline_ns = deadline_ns;
      return Wait::kInterrupted;
    }
  }
}

}  // namespace epmoe::cpu
