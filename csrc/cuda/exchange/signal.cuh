// Signals between GPUs: a `Flag` says that payload has arrived, a `Word` carries a small value with
// its epoch. docs/protocol.md has the round's timeline and the proof that no buffer is overwritten
// while somebody reads it. The proof lets no rank run a round ahead of one that still waits, so
// kernels compare epochs for equality: the flag of a slot that lay unused for 2^31 rounds must not
// look reached. Neither type needs re-arming: the next round has another epoch. A `Line` (ll.cuh)
// needs it.
#pragma once
#include "cuda/exchange/layout.cuh"

namespace epmoe::cuda {

// 4 bytes: the epoch of the last round whose payload is complete.
struct Flag {
  uint32_t epoch;

  // One thread publishes, after a barrier of all threads that stored the payload. The release waits
  // until the payload has arrived. The end of a TMA store (tma.cuh) alone does not: without a
  // release, readers saw flags before rows.
  static __device__ __forceinline__ void publish(Flag* flag, uint32_t epoch) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
  }
  // Publishes after `release_all`: one release then serves the flags of several rows.
  static __device__ __forceinline__ void publish_released(Flag* flag, uint32_t epoch) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
  }
  static __device__ __forceinline__ uint32_t acquire(const Flag* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }
  static __device__ __forceinline__ uint32_t peek(const Flag* flag) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }
};
static_assert(sizeof(Flag) == sizeof(uint32_t));

__device__ __forceinline__ void release_all() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// The same for flags that are read on this GPU. It does not wait for the wire.
__device__ __forceinline__ void release_on_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// 8 bytes: a value and the epoch of its round. One access moves both, so no reader sees one without
// the other.
struct Word {
  uint64_t bits;

  __device__ __forceinline__ uint32_t epoch() const { return static_cast<uint32_t>(bits); }
  __device__ __forceinline__ int32_t value() const { return static_cast<int32_t>(bits >> 32); }

  static __device__ __forceinline__ void publish(Word* word, uint32_t epoch, int32_t value) {
    uint64_t packed = uint64_t{static_cast<uint32_t>(value)} << 32 | epoch;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(packed) : "memory");
  }
  static __device__ __forceinline__ Word peek(const Word* word) {
    uint64_t packed;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(packed) : "l"(word) : "memory");
    return {packed};
  }
};
static_assert(sizeof(Word) == sizeof(uint64_t));

// The epoch after `epoch`. Four values never are one: a window begins with words of 0, with LL
// lines whose words are 0xffffffff, and with kEmptySeat, so that a round of this epoch would find
// signals that nobody sent. The fourth keeps even and odd epochs in turn.
__device__ __forceinline__ uint32_t next_epoch(uint32_t epoch) {
  return epoch < 0xfffffffc ? epoch + 1 : 1;
}

// Forces values to be computed now, before a wait on which they do not depend; the compiler would
// compute them after it. It cannot know that they never equal `kNever`, which alone is stored, in
// shared memory that nobody reads.
constexpr int32_t kNever = 0x7f7f7f7f;
template <typename... Values>
__device__ __forceinline__ void compute_now(int32_t* sink, Values... values) {
  int32_t value = (0 ^ ... ^ static_cast<int32_t>(values));
  if (value == kNever) *static_cast<volatile int32_t*>(sink) = value;
}

// The arguments of a launch are cold. This fetches their cache lines side by side, while the
// predecessor still runs.
template <typename K>
__device__ __forceinline__ void fetch_arguments(const K& kernel, int32_t* sink) {
  auto* words = reinterpret_cast<const int32_t*>(&kernel);
  constexpr int kLine = 64 / sizeof(int32_t);
  for (int i = threadIdx.x / 32 * kLine; i < static_cast<int>(sizeof(K) / sizeof(int32_t));
       i += block_warps() * kLine)
    if (threadIdx.x % 32 == 0) compute_now(sink, words[i]);
}

}  // namespace epmoe::cuda
