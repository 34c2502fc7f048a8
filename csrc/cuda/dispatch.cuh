// What the parts of dispatch share: the arguments, and a block's view of experts and counts.
#pragma once
#include "scoring.h"
#include "wait.cuh"

namespace epmoe::cuda {

constexpr int kStagedSlots = 32;  // sent while the counts are still on their way; later ones where they belong
// Of a source's row of counts, before its pairs by rank and local expert: rows sent and how, shape of the call.
constexpr int kCountColumns = 2;
enum Way : uint32_t { kFew = 1, kDirect = 2 };  // low bits of the first column
constexpr int kMaxFewTokens = 32;               // one lane a token
constexpr int kMaxBatch = 8;                    // tokens that a block sends side by side

struct DispatchKernel {
  Exchange ex;
  DispatchArgs args;
  int32_t senders;            // blocks that send; the next one counts
  int32_t batch, team;        // tokens that such a block sends at a time, and warps for each
  int32_t bases, first_rows;  // entries of those tables in shared memory, 0 where they would be too large

  __device__ __forceinline__ int64_t wanted_tokens() const {
    return args.num_tokens ? *args.num_tokens : args.num_rows;
  }
  __device__ __forceinline__ int32_t tokens() const {
    return static_cast<int32_t>(min(max(wanted_tokens(), int64_t{0}), args.T));
  }
  EPMOE_HD int64_t row_bytes() const { return ex.plan.payload_fp8 ? args.D : args.D * itemsize(args.dtype); }
  EPMOE_HD int32_t row_words() const { return static_cast<int32_t>(row_bytes() / 4); }
  // Rows of few tokens travel as packets, there if they end expert-major, and back. Of many, those past the staged
  // slots go straight to their expert-major place, which takes every rank's counts first: not in a stage that must not
  // wait, nor for rows that change on arrival.
  EPMOE_HD uint32_t way() const {
    if (args.T <= ex.plan.few_tokens) return kFew;
    return args.expert_major && args.send && args.receive && !args.weight_rows && bases ? kDirect : 0;
  }
  EPMOE_HD bool sends_packets() const { return args.expert_major && way() == kFew; }
  // What must be equal on all ranks, in one word.
  __device__ __forceinline__ int32_t shape() const {
    return static_cast<int32_t>(args.D | int64_t{args.K} << 17 | static_cast<int64_t>(args.dtype) << 24 |
                                int64_t{args.expert_major} << 28 | int64_t{args.weight_rows} << 29);
  }
  __device__ __forceinline__ int64_t count_columns() const {
    return ex.plan.R * ex.plan.most_local_experts + kCountColumns;
  }
  // Where `rank` finds what `source` has counted.
  __device__ __forceinline__ uint64_t* counts(int64_t rank, int64_t source) const {
    return in_window<uint64_t>(ex, rank, ex.plan.recv_counts) + source * count_columns();
  }
};

// Where a token of a batch goes.
struct Sending {
  int32_t ordinals[kMaxExchangeTopK], rows[kMaxExchangeTopK];
  int32_t slot[kMaxExchangeRanks];
  char* row_at[kMaxExchangeRanks];  // null: no expert there has room for it
  float* scales_at[kMaxExchangeRanks];
  uint32_t in_place;  // ranks where it goes straight to its expert-major place, a mask
};

struct DispatchShared {
  uint32_t epoch;
  int32_t latched;
  int64_t sink;
  int32_t rank_count[kMaxExchangeRanks];  // sending: rows for each rank before this token; receiving: rows from it
  int32_t experts[kMaxExchangeRanks];     // of each rank
  int32_t sentinel[kMaxExchangeRanks];
  uint32_t differing, few, direct;  // masks of sources: brought another shape; few tokens; some rows into place
  int32_t most_few, most;           // rows from one source of a kind
  // Of each token of a batch, or of few:
  int32_t ids[kMaxFewTokens][kMaxExchangeTopK];
  float weights[kMaxFewTokens][kMaxExchangeTopK];
  uint32_t ranks[kMaxFewTokens];
  Sending sending[kMaxBatch];
};

// One block at work.
struct DispatchBlock {
  const DispatchKernel& kernel;
  const Exchange& ex;
  const ExchangePlan& plan;
  const DispatchArgs& args;
  Wait& wait;
  DispatchShared& shared;
  // In dynamic shared memory:
  int32_t* place;  // [P] owner << 16 | local index
  int32_t* count;  // [P + 1] sending: pairs of each expert before this token; receiving: start of its segment
  int32_t* base;   // [R, most] first row of this source's pairs, on the expert's owner
  int32_t* first;  // [R + 1, e] pairs of a local expert from the sources before

  // After a barrier of the block: takes over the state that one thread has read. False if no round may be opened.
  __device__ __forceinline__ bool may_open() const {
    wait.epoch = shared.epoch;
    return !shared.latched;
  }
  __device__ __forceinline__ int64_t column(int32_t place) const {
    return (place >> 16) * plan.most_local_experts + (place & 0xffff);
  }
  // Pairs of a local expert from sources before r; from all with r = R.
  __device__ __forceinline__ int32_t pairs_before(int32_t r, int32_t local) const {
    if (kernel.first_rows) return first[r * static_cast<int32_t>(plan.num_local_experts) + local];
    auto* words = kernel.counts(plan.rank, 0) + kCountColumns + plan.rank * plan.most_local_experts + local;
    int32_t sum = 0;
#pragma unroll 1
    for (int32_t s = 0; s < r; ++s) sum += static_cast<int32_t>(load_word(words + s * kernel.count_columns()) >> 32);
    return sum;
  }
  __device__ __forceinline__ int32_t pairs_of(int32_t local) const {
    return pairs_before(static_cast<int32_t>(plan.R), local);
  }
  // The row of a pair that this rank is to compute, -1 for any other; `ordinal` counts its source's pairs of the
  // expert.
  __device__ __forceinline__ int32_t row_of(int32_t id, int32_t ordinal, int32_t r) const {
    if (id < 0 || id >= plan.P || ordinal < 0) return -1;
    int32_t at = place[id], local = at & 0xffff;
    if (at >> 16 != plan.rank) return -1;
    int64_t row = int64_t{count[local]} + pairs_before(r, local) + ordinal;
    return row < min(int64_t{count[local + 1]}, plan.max_rows) ? static_cast<int32_t>(row) : -1;
  }
};

}  // namespace epmoe::cuda
