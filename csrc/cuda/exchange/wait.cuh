// Waiting for other ranks. Every wait has a deadline, and no failure traps: the first failure
// latches on this rank, reaches the host and every rank, and ends all other waits.
// docs/protocol.md: 'The deadline and what follows'.
#pragma once
#include "cuda/exchange/signal.cuh"

namespace epmoe::cuda {

// How the calls of a round differ: the ranks whose call is another, as a mask, this rank's tag, and
// `other` of Status, or kNoOther where that is 0.
constexpr int32_t kNoOther = 0x7fffffff;
struct Mismatch {
  uint32_t ranks = 0;
  int32_t tag = 0;
  int32_t other = kNoOther;
};

// The waits of one kernel: for one round, with one deadline each.
struct Wait {
  const Exchange& ex;
  RoundState* round;
  uint32_t epoch;

  __device__ Wait(const Exchange& exchange, RoundState* round, uint32_t epoch)
      : ex(exchange), round(round), epoch(epoch) {}

  __device__ bool reached(uint32_t seen) const { return seen == epoch; }

  // Polls `reached` until it returns true. Returns false once any wait of this kernel has failed.
  // `rank` names the rank that is waited for; `reached` may update it.
  template <typename F>
  __device__ __forceinline__ bool until(F&& reached, const int32_t& rank) const {
    uint64_t deadline_ns = 0;
    for (uint32_t tries = 1; !reached(); ++tries)
      if (tries % 64 == 0 && !(deadline_ns = deadline_of(ex, round, rank, deadline_ns)))
        return false;
    return true;
  }

  // Awaits a flag. An acquire empties the multiprocessor's L1 cache, so only the last look is an
  // acquire.
  __device__ bool await(const Flag* flag, int32_t rank) const {
    bool up = until(
        [&] {
          if (reached(Flag::peek(flag))) return true;
          __nanosleep(20);  // leaves the flags' memory partition to the ranks that publish
          return false;
        },
        rank);
    return up && reached(Flag::acquire(flag));
  }

  // Loads `count` words, `stride` apart, and takes their values. Returns whether all have this
  // epoch, or are of an empty seat; `missing` is the last that has not. All loads are issued before
  // the first result is used.
  template <int N>
  __device__ __forceinline__ bool have_arrived(const Word* first, int64_t stride, int32_t count,
                                               int32_t (&values)[N], int32_t& missing) const {
    Word words[N];
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = i < count ? Word::peek(first + i * stride) : Word{epoch};
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!reached(words[i].epoch()) && words[i].epoch() != kEmptySeat) all = false, missing = i;
      values[i] = words[i].value();
    }
    return all;
  }
  // Awaits `count` words: the first comes from `rank`, each next one from `next` ranks further on.
  template <int N>
  __device__ __forceinline__ bool await(const Word* first, int64_t stride, int32_t rank,
                                        int32_t next, int32_t count, int32_t (&values)[N]) const {
    int32_t missing = 0;
    int32_t missing_rank = rank;
    return until(
        [&] {
          bool all = have_arrived(first, stride, count, values, missing);
          missing_rank = rank + missing * next;
          return all;
        },
        missing_rank);
  }

  // Awaits N neighbouring words of `rank`. The first block adds the time that it waited after its
  // first look.
  template <int N>
  __device__ __forceinline__ bool await_counted(const Word* first, int32_t rank,
                                                int32_t (&values)[N]) const {
    int32_t missing;
    if (have_arrived(first, 1, N, values, missing)) return true;
    uint64_t begin_ns = now_ns();
    bool arrived = await(first, 1, rank, 0, N, values);
    auto* waited_ns = in_scratch<unsigned long long>(ex, ex.plan.health_waited_ns) + rank;
    if (blockIdx.x == 0) atomicAdd(waited_ns, static_cast<unsigned long long>(now_ns() - begin_ns));
    return arrived;
  }

  // The slow path of a long wait: returns the deadline, or 0 if the wait must end. It takes and
  // returns values, so that the state of the waiting code can stay in registers. The host says that
  // a rank has ended only after its last words have long arrived (epmoe/exchange/window_nvlink.py).
  static __device__ __noinline__ uint64_t deadline_of(const Exchange& ex, RoundState* round,
                                                      int32_t rank, uint64_t deadline_ns) {
    if (!deadline_ns) deadline_ns = now_ns() + ex.timeout_ns;
    if (*reinterpret_cast<volatile uint64_t*>(&round->missing)) return 0;
    auto* errors = in_window<volatile uint64_t>(ex, ex.plan.rank, ex.plan.signal_error);
    uint64_t missing = 0;
    int64_t originator = ex.plan.rank;
    for (int64_t r = 0; r < ex.plan.R && !missing; ++r) missing = errors[r], originator = r;
    if (!missing) {
      uint32_t dead = *in_window<volatile uint32_t>(ex, ex.plan.rank,
                                                    ex.plan.signal_dead);  // of at most 32 ranks
      if (now_ns() < deadline_ns && !(dead >> rank & 1)) return deadline_ns;
      missing = uint64_t{1} << rank, originator = ex.plan.rank;
    }
    *static_cast<volatile int16_t*>(&round->originator) = static_cast<int16_t>(originator);
    atomicOr(reinterpret_cast<unsigned long long*>(&round->missing),
             static_cast<unsigned long long>(missing));
    return 0;
  }

  // Rule finish-first: 0 if this kernel's phase is due on this rank. Another one is where graphs of
  // single stages are replayed in another order, or where streams overlap; then the kernel does
  // nothing but fail. `phases` are those of the state as the kernel found it. Only the block that
  // starts first asks, since others may start after it has moved `phases` on. It moves them after
  // it has sent, when nobody waits for it. A number, since a branch costs registers.
  static __device__ __forceinline__ int32_t out_of_turn(Stage stage, bool sends, int32_t phases) {
    return phases ^ (2 * stage + !sends);
  }

  // A block that sends says that it has started. Blocks start in the order of their numbers, and
  // those that send come first. Another kernel may hold so many multiprocessors that some cannot
  // start while others wait for ranks, which in turn wait for rows that the absent blocks should
  // send. So a block that has sent asks whether all that send have started. If not, it does not
  // receive: it ends, and an absent block finds its place. One thread calls each.
  __device__ __forceinline__ void say_started(Stage stage) const {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(&round->started[stage])
                 : "memory");
  }
  __device__ __forceinline__ bool have_started(Stage stage, int32_t blocks) const {
    constexpr uint64_t kStartNs =
        20'000;  // blocks that have places start within microseconds of one another
    auto* started = static_cast<volatile int32_t*>(&round->started[stage]);
    if (*started >= blocks) return true;
    for (uint64_t begin_ns = now_ns(); now_ns() - begin_ns < kStartNs;)
      if (*started >= blocks) return true;
    return false;
  }

  // The block begins to receive: from here on it may write outputs. One thread calls it.
  __device__ __forceinline__ void begin(Stage stage) const {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(&round->receiving[stage])
                 : "memory");
  }

  // The whole block calls this at its end, having begun. Where the block has failed, it latches,
  // reports to the host and every rank, waits for the other blocks, and returns true; the caller
  // then zeroes the outputs. `mismatch` names ranks where their calls are why. The count of
  // finished blocks is relaxed, since a release would slow down every round that goes well.
  // Instead, the failing block gives the stores of the other blocks 1 ms to arrive. Blocks that
  // have not begun are not waited for: another kernel may keep them from running, and when they run
  // they find the latch.
  __device__ bool failed(Stage stage, bool ok, Mismatch mismatch = {}) const {
    ok = __syncthreads_and(ok);
    if (threadIdx.x == 0)
      asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(&round->done[stage]) : "memory");
    if (ok) return false;
    if (threadIdx.x == 0) {
      report(ex, round, epoch, stage, mismatch);
      await_others(round, stage);
    }
    __syncthreads();
    return true;
  }

  // The first call latches, and reports to the host and, unless it is a mismatch, to every rank.
  // Later ones report to the host again, so that a host that has cleared its status sees it again.
  // Every rank sees a mismatch by itself. Where the first block has failed though all calls agree
  // and no wait has missed a rank, the stage was out of turn.
  static __device__ __noinline__ void report(const Exchange& ex, RoundState* round, uint32_t epoch,
                                             Stage stage, Mismatch mismatch) {
    volatile Status &kept = round->failure, &status = *ex.status;
    uint64_t missing = *static_cast<volatile uint64_t*>(&round->missing);
    StatusCode code = mismatch.ranks ? kMismatch : missing || blockIdx.x ? kTimeout : kOutOfTurn;
    bool first = atomicExch(&round->latched, 1) == 0;
    if (first) {
      if (mismatch.ranks) missing = mismatch.ranks;
      if (code == kOutOfTurn)
        missing = uint64_t{1} << ex.plan.rank, epoch = next_epoch(round->combine_epoch);
      kept.stage = stage, kept.epoch = epoch, kept.missing = static_cast<int64_t>(missing);
      kept.originator =
          code == kTimeout ? *static_cast<volatile int16_t*>(&round->originator) : ex.plan.rank;
      kept.phases = round->phases;
      kept.tag = mismatch.tag, kept.other = mismatch.other == kNoOther ? 0 : mismatch.other;
      if (code == kTimeout) ++in_scratch<int64_t>(ex, ex.plan.health_counters)[kTimeouts];
      __threadfence();
      kept.code = code;
    }
    if (!first && (blockIdx.x != 0 || kept.code == kOk)) return;
    status.stage = kept.stage, status.epoch = kept.epoch, status.missing = kept.missing,
    status.originator = kept.originator, status.phases = kept.phases, status.tag = kept.tag,
    status.other = kept.other;
    __threadfence_system();
    status.code = kept.code;
    for (int64_t rank = 0; rank < ex.plan.R && first && code != kMismatch; ++rank)
      in_window<volatile uint64_t>(ex, rank, ex.plan.signal_error)[ex.plan.rank] = missing;
    __threadfence_system();
  }

  static __device__ __noinline__ void await_others(RoundState* round, Stage stage) {
    constexpr uint64_t kLongestNs = 100'000'000;
    constexpr uint64_t kArrivedNs = 1'000'000;
    auto *receiving = static_cast<volatile int32_t*>(&round->receiving[stage]),
         *done = static_cast<volatile int32_t*>(&round->done[stage]);
    for (uint64_t begin_ns = now_ns(); *done < *receiving && now_ns() - begin_ns < kLongestNs;)
      __nanosleep(1000);
    for (uint64_t begin_ns = now_ns(); now_ns() - begin_ns < kArrivedNs;) __nanosleep(1000);
    __threadfence();
  }
};

}  // namespace epmoe::cuda
