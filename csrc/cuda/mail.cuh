// Flags between GPUs: payload stores, a block barrier, one fence of system scope, then the flag; the reader
// acquires. Nothing waits without a deadline, and nothing traps.
//
// Why no buffer is overwritten while somebody reads it ("returned" is stream-ordered):
//  - every rank opens a round by a mail to every rank, sent when its kernel starts, and both kernels wait for
//  all mails.
//  - a rank writes into others' dispatch slabs, flags and count rows of n+1 only after combine(n) returned,
//  so after every
//    rank had started combine(n), and therefore finished dispatch(n), the only reader of those.
//  - a rank writes into others' combine slabs of n only after dispatch(n) returned, so after every rank had
//  started
//    dispatch(n), and therefore finished combine(n-1), the only reader of those. The two never alias.
#pragma once
#include "common.cuh"
#include "exchange.h"
#include "scoring.h"

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

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// One kernel's waiting: its round, and until when.
struct Wait {
  const Exchange& ex;
  RoundState* round;
  uint32_t epoch;
  uint64_t deadline_ns;

  __device__ Wait(const Exchange& exchange, uint32_t epoch)
      : ex(exchange),
        round(in_scratch<RoundState>(exchange, exchange.plan.state)),
        epoch(epoch),
        deadline_ns(now_ns() + static_cast<uint64_t>(exchange.timeout_s * 1e9)) {}

  __device__ bool failed() const { return *reinterpret_cast<volatile uint64_t*>(&round->missing) != 0; }

  // Until `flag`, written by `rank`, has reached this round. False once any wait of this kernel has failed.
  __device__ bool for_flag(const uint32_t* flag, int64_t rank) const {
    for (uint32_t tries = 1;; ++tries) {
      if (static_cast<int32_t>(load_acquire(flag) - epoch) >= 0) return true;
      if (tries % 64) continue;
      if (failed()) return false;
      auto* errors = in_window<volatile uint64_t>(ex, ex.plan.rank, ex.plan.error_mail);
      for (int64_t r = 0; r < ex.plan.R; ++r)
        if (uint64_t theirs = errors[r]) return fail(theirs, r);
      if (now_ns() > deadline_ns) return fail(uint64_t{1} << rank, ex.plan.rank);
    }
  }

  __device__ bool fail(uint64_t missing, int64_t originator) const {
    atomicExch(&round->originator, static_cast<int32_t>(originator));
    atomicOr(reinterpret_cast<unsigned long long*>(&round->missing),
             static_cast<unsigned long long>(missing));
    return false;
  }
};

// The header of a round to every rank, by one warp or more; what the block has stored before is seen with it.
__device__ __forceinline__ void send_mail(const Exchange& ex, int64_t mail_offset, Mail mail,
                                          const int32_t* count_R) {
  for (int64_t rank = threadIdx.x; rank < ex.plan.R; rank += blockDim.x) {
    Mail* slot = in_window<Mail>(ex, rank, mail_offset) + ex.plan.rank;
    slot->count = count_R ? count_R[rank] : mail.count;
    slot->D = mail.D, slot->K = mail.K, slot->dtype = mail.dtype;
    fence_system();
    store_relaxed(&slot->epoch, mail.epoch);
  }
}

// By the whole block: true when every rank has opened the round.
__device__ __forceinline__ bool wait_for_mails(const Wait& wait, int64_t mail_offset) {
  bool arrived = true;
  for (int64_t r = threadIdx.x; r < wait.ex.plan.R; r += blockDim.x)
    arrived = wait.for_flag(&in_window<Mail>(wait.ex, wait.ex.plan.rank, mail_offset)[r].epoch, r);
  return __syncthreads_and(arrived);
}

// By the whole block, at its end: true in the last block of the grid, which sees what all others did.
__device__ __forceinline__ bool is_last_block(RoundState* round) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&round->done, 1) == static_cast<int32_t>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// By the last block: leaves the counters of the kernel at zero, and if a wait has failed, latches and tells
// everyone.
__device__ __forceinline__ bool finish(const Wait& wait, Stage stage) {
  RoundState* round = wait.round;
  bool failed = wait.failed();
  __syncthreads();
  if (threadIdx.x == 0) {
    round->ticket = 0;
    round->done = 0;
    if (failed && !round->latched) {
      round->latched = 1;
      ++in_scratch<int64_t>(wait.ex, wait.ex.plan.counters)[kTimeouts];
      Status* status = wait.ex.status;
      status->stage = stage, status->epoch = wait.epoch;
      status->missing = static_cast<int64_t>(round->missing), status->originator = round->originator;
      __threadfence_system();
      status->code = kTimeout;
      for (int64_t rank = 0; rank < wait.ex.plan.R; ++rank)
        *(in_window<volatile uint64_t>(wait.ex, rank, wait.ex.plan.error_mail) + wait.ex.plan.rank) =
            round->missing;
      __threadfence_system();
    }
  }
  return failed;
}

// Hands out units of work to warps: one each where there are enough warps, otherwise by tickets, so that
// blocks that were busy sending join when they are done. Units of a row are `pieces` parts of its columns.
struct Units {
  int64_t total, warps;
  int32_t pieces;

  __device__ Units(int64_t rows, int64_t vectors)
      : total(rows), warps(int64_t{gridDim.x} * kWarps), pieces(1) {
    while (pieces < 16 && total * 2 <= warps && vectors / (pieces * 2) >= 32) pieces *= 2, total *= 2;
  }

  template <typename F>
  __device__ void for_each(RoundState* round, F&& f) const {
    int lane = threadIdx.x % 32;
    if (total <= warps) {
      // Warps of one block take units far apart, and blocks that have nothing to send come first.
      int64_t unit = int64_t{threadIdx.x / 32} * gridDim.x + (gridDim.x - 1 - blockIdx.x);
      if (unit < total) f(unit / pieces, static_cast<int32_t>(unit % pieces));
      return;
    }
    for (;;) {
      int32_t unit = 0;
      if (lane == 0) unit = atomicAdd(&round->ticket, 1);
      unit = __shfl_sync(kAllLanes, unit, 0);
      if (unit >= total) return;
      if (!f(unit / pieces, static_cast<int32_t>(unit % pieces))) return;
    }
  }
};

// The fp8 scale of a block of 128 elements, of which each of kLanes neighbouring lanes holds kCount: amax /
// 448.
template <int kCount, int kLanes>
__device__ __forceinline__ float block_scale(const float (&values)[kCount]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (is_finite(values[i])) amax = fmaxf(amax, fabsf(values[i]));
#pragma unroll
  for (int offset = kLanes / 2; offset; offset /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, offset));
  return amax > 0.0f ? fmaxf(amax / kFloat8Max, 1.17549435e-38f) : 1.0f;
}

__device__ __forceinline__ uint8_t to_fp8(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

}  // namespace epmoe::cuda
