// What the parts of dispatch share: the arguments, and a block's view of experts and counts.
#pragma once
#include "scoring.h"
#include "wait.cuh"

namespace epmoe::cuda {

// Of a source's row of counts, before its pairs by rank and local expert: rows sent and whether they are those of few
// tokens, and then how many those are; shape of the call.
constexpr int kCountColumns = 2;
constexpr int kFewBits = 12, kMostFew = (1 << kFewBits) - 1;
constexpr int kPieces = 3;  // of rows, that a sending block has on their way
constexpr int64_t kMaxPieceBytes = 16 << 10;
constexpr int kMostUnflagged = 8;        // tokens that a sending block may raise flags for at once
constexpr uint32_t kInPlace = 1u << 31;  // said with a row where otherwise an ordinal is said: it is there already

// What is awaited from a source without flags: rows of so many tokens, as long as it has said.
struct FewRows {
  int32_t tokens, row_bytes, K;
};

struct DispatchKernel {
  Exchange ex;
  DispatchArgs args;
  int32_t senders, tellers;   // blocks that send rows; then the one that counts, and those that send few tokens' pairs
  int32_t bases, first_rows;  // entries of those tables in shared memory, 0 where they would be too large
  int32_t row_pieces, piece_bytes;  // of a row of x
  int32_t tokens_a_release;         // with flags

  __device__ __forceinline__ int64_t wanted_tokens() const {
    return args.num_tokens ? *args.num_tokens : args.num_rows;
  }
  // Of those, what there is.
  __device__ __forceinline__ int32_t tokens(int64_t wanted) const {
    return static_cast<int32_t>(min(max(wanted, int64_t{0}), args.T));
  }
  EPMOE_HD int64_t row_bytes() const { return ex.plan.payload_fp8 ? args.D : args.D * itemsize(args.dtype); }
  // Rows of few tokens travel without flags (lines.cuh), there if they end expert-major, and back.
  EPMOE_HD bool few() const { return args.T <= ex.plan.few_tokens; }
  EPMOE_HD bool sends_few() const { return args.expert_major && few(); }
  // Of many, those that leave when all counts are here go straight to their expert-major place, unless they change on
  // arrival.
  EPMOE_HD bool sends_in_place() const {
    return args.expert_major && args.receive && !args.weight_rows && bases && !few();
  }
  // A source's first word: few or not, tokens if few, rows.
  __device__ __forceinline__ int32_t size(int32_t rows, int32_t tokens) const {
    return few() ? 1 | tokens << 1 | rows << (1 + kFewBits) : rows << 1;
  }
  // Its second: what must be equal on all ranks.
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

// Where a token goes.
struct Sending {
  int32_t places[kMaxExchangeTopK];  // what is said of a pair: its row if in place, else its ordinal, -1 for none
  int32_t slot[kMaxExchangeRanks];
  char* row_at[kMaxExchangeRanks];  // null: no expert there has room for it
  float* scales_at[kMaxExchangeRanks];
};

struct DispatchShared {
  uint32_t epoch;
  int32_t latched;
  int64_t sink;
  int32_t rank_count[kMaxExchangeRanks];  // sending: rows for each rank before this token; receiving: rows from it
  int32_t experts[kMaxExchangeRanks];     // of each rank
  int32_t sentinel[kMaxExchangeRanks];
  FewRows few_rows[kMaxExchangeRanks];
  uint32_t differing, few;              // masks of sources: brought another shape; few tokens
  int32_t most_few, longest_few, most;  // from one source: rows without flags, their bytes; rows with flags
  int32_t next;                         // token of this block
  int32_t unflagged_slots[kMostUnflagged][kMaxExchangeRanks];  // slots of tokens that have been stored
  uint64_t arrivals[kPieces];                                  // bulk.cuh
  float scales[kMaxPieceBytes / (kScaleBlock * 2)];            // of a piece
  // Of the token that is sent and the next:
  int32_t ids[2][kMaxExchangeTopK];
  float weights[2][kMaxExchangeTopK];
  uint32_t ranks[2];
  Sending sending;
};

// One block at work.
struct DispatchBlock {
  const DispatchKernel& kernel;
  const Exchange& ex;
  const ExchangePlan& plan;
  const DispatchArgs& args;
  Wait wait;
  DispatchShared& shared;
  // In dynamic shared memory:
  char* pieces;    // [kPieces, piece_bytes]
  int32_t* place;  // [P] owner << 16 | local index
  int32_t* count;  // [P + 1] sending: pairs of each expert before this token; receiving: start of its segment
  int32_t* base;   // [R, most] first row of this source's pairs, on the expert's owner
  int32_t* first;  // [R + 1, e] pairs of a local expert from the sources before

  // After a barrier of the block: takes over what one thread has read. False if no round may be opened.
  __device__ __forceinline__ bool may_open() {
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
  // Whether a physical expert, which any number may claim to be, is one of this rank.
  __device__ __forceinline__ bool owns(int32_t id) const {
    return id >= 0 && id < plan.P && place[id] >> 16 == plan.rank;
  }
  __device__ __forceinline__ const char* x_at(int64_t t) const {
    return static_cast<const char*>(args.x_TD) + t * args.x_stride_bytes;
  }
  // The rank of a physical expert, -1 for -1; and as a mask, none for -1.
  __device__ __forceinline__ int32_t owner_of(int32_t p) const { return p < 0 ? -1 : place[p] >> 16; }
  __device__ __forceinline__ uint32_t rank_mask(int32_t p) const { return p < 0 ? 0u : 1u << owner_of(p); }
  // The row of a pair that this rank is to compute, -1 for any other; `ordinal` counts its source's pairs of the
  // expert.
  __device__ __forceinline__ int32_t row_of(int32_t id, int32_t ordinal, int32_t r) const {
    if (ordinal < 0 || !owns(id)) return -1;
    int32_t local = place[id] & 0xffff;
    int64_t row = int64_t{count[local]} + pairs_before(r, local) + ordinal;
    return row < min(int64_t{count[local + 1]}, plan.max_rows) ? static_cast<int32_t>(row) : -1;
  }
};

}  // namespace epmoe::cuda
