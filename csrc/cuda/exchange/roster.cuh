// Who sends for whom. Another kernel may hold so many multiprocessors that some blocks of this one cannot start while
// the others wait for ranks, which in turn wait for rows that the absent blocks should send. So each block that sends
// says that it has started, and the first block, before it waits, covers for those that have not: it does their
// sending. Receiving needs no such care: it ends without the absent blocks, which then find room.
//
// A block that starts must not wait for an answer. It sets its bit in `started` without a reply, then reads `covers`
// with the rest of the round's state. Only where it reads 1 does it ask, by its bit in `taken`, whether its sending is
// still its own. The first block sets `covers` and gives the `started` bits of blocks that have read 0 a millisecond to
// arrive: they left before. Then it takes the sending of all blocks without such a bit.
#pragma once
#include "cuda/exchange/signal.cuh"

namespace epmoe::cuda {

struct Roster {
  RoundState* round;
  Stage stage;
  int32_t blocks;  // those that send, from number 0 on

  static __device__ __forceinline__ uint32_t bit(int32_t number) { return 1u << number % 32; }

  // One thread calls it, and loads `covers` after it.
  __device__ __forceinline__ void say_started(int32_t number) const {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(&round->started[stage][number / 32]), "r"(bit(number))
                 : "memory");
  }

  // One warp of the first block calls it. Returns whether all blocks that send have started. It waits for them a
  // little, since the blocks of a kernel start within microseconds of one another.
  __device__ __forceinline__ bool all_started() const {
    constexpr uint64_t kLateNs = 20'000;
    int32_t lane = threadIdx.x % 32, here = min(max(blocks - lane * 32, 0), 32);
    uint32_t wanted = here == 32 ? ~0u : (1u << here) - 1;
    uint64_t begin_ns = 0;
    while (true) {
      uint32_t seen = wanted ? static_cast<volatile uint32_t*>(round->started[stage])[lane] : 0;
      if (__all_sync(kAllLanes, (seen & wanted) == wanted)) return true;
      if (!begin_ns) begin_ns = now_ns();
      if (__any_sync(kAllLanes, now_ns() - begin_ns > kLateNs)) return false;
    }
  }

  // One thread of the first block calls it before it takes any sending.
  __device__ __forceinline__ void begin_to_cover() const {
    constexpr uint64_t kArrivedNs = 1'000'000;
    atomicExch(&round->covers[stage], 1);
    for (uint64_t begin_ns = now_ns(); now_ns() - begin_ns < kArrivedNs;) __nanosleep(1000);
  }

  // One thread calls it. Returns whether the sending of block `number` has become the caller's.
  __device__ __forceinline__ bool take(int32_t number) const {
    return !(atomicOr(&round->taken[stage][number / 32], bit(number)) & bit(number));
  }

  // One thread of the first block calls it: takes the last sending below `number` that nobody does. Returns its number,
  // -1 for none.
  __device__ __forceinline__ int32_t take_below(int32_t number) const {
    auto* started = static_cast<volatile uint32_t*>(round->started[stage]);
    do --number;
    while (number >= 0 && (started[number / 32] & bit(number) || !take(number)));
    return number;
  }

  // One block clears the bits of a stage whose kernels have ended.
  static __device__ __forceinline__ void clear(RoundState* round, Stage stage) {
    if (threadIdx.x < kStartedWords) round->started[stage][threadIdx.x] = round->taken[stage][threadIdx.x] = 0;
  }
};

}  // namespace epmoe::cuda
