// What the parts of dispatch share: the kernel's arguments, and a block's tables of experts and
// offsets.
#pragma once
#include <bit>

#include "cuda/exchange/wait.cuh"
#include "scoring.h"

namespace epmoe::cuda {

// The counts of a source start with three words: its size (LL or Simple; rows sent), the shape of
// its call, and with LL the number of its tokens. The pairs by rank and local expert follow. The
// tag of the call takes the bits that the first two words have left.
constexpr int kSizeBits = 1 + 22;
constexpr int kShapeBits = 26;
constexpr uint32_t kSizeMask = (1u << kSizeBits) - 1;
static_assert((32 - kSizeBits) + (32 - kShapeBits) ==
              std::bit_width(static_cast<uint32_t>(kMaxTag)));

// Beside the shape of a call: the source needs a round after this one.
constexpr uint32_t kMoreRounds = 1u << (kShapeBits - 1);

// What a source says of its call in its first words, and what of it must be equal on all ranks.
struct CallWords {
  uint32_t size, shape;
  int32_t ll_tokens;  // 0 with Simple

  __device__ __forceinline__ bool is_ll() const { return size & 1; }
  __device__ __forceinline__ int32_t rows() const {
    return static_cast<int32_t>((size & kSizeMask) >> 1);
  }
  __device__ __forceinline__ int32_t tag() const {
    return static_cast<int32_t>(size >> kSizeBits | shape >> kShapeBits << (32 - kSizeBits));
  }
  // Nonzero if the calls differ; the bits have no meaning.
  __device__ __forceinline__ uint32_t differs(const CallWords& other) const {
    return ((shape ^ other.shape) & ~kMoreRounds) | (size ^ other.size) >> kSizeBits;
  }
};

// Simple protocol: normally `recv_ordinals[pair]` is the pair's ordinal within (source, expert).
// With this bit set it is the final row index, and the sender has already written the row there.
constexpr uint32_t kFinalRow = 1u << 31;
// In a slot of the own rank, in place of its first pair's ordinal: the sender has written all rows,
// and what combine needs of the pairs. No row has this index.
constexpr int32_t kReceived = -2;

// Whether dispatch quantizes rows of `Source`. void stands for rows that travel as they are: the
// payload has no scales, or they come in its format, with their scales.
template <typename Source>
constexpr bool kQuantizes = !std::is_void_v<Source>;

struct DispatchKernel {
  Exchange ex;
  DispatchArgs args;
  int32_t send_blocks, notify_blocks;  // as in DispatchLaunch, like the next fields
  int32_t send_offset_entries, source_offset_entries;
  int32_t row_chunks, chunk_bytes;
  int32_t batch_tokens;
  int64_t asked;   // `more_rounds` of Progress
  CallWords call;  // this source's first words, without rows and tokens

  __device__ __forceinline__ int32_t tokens(int64_t wanted) const {
    return static_cast<int32_t>(min(max(wanted, int64_t{0}), args.T));
  }
  // As wire_row_bytes; written out, since another text gives one kernel other registers, which
  // nobody has measured.
  EPMOE_HD int64_t row_bytes() const {
    static_assert(kBytesWithScales);
    return ex.plan.payload_format != WireFormat::kAuto ? args.D : args.D * itemsize(args.dtype);
  }
  // The protocol of dispatch's rows and of combine's.
  EPMOE_HD bool uses_ll() const { return args.T <= ex.plan.ll_max_tokens; }
  // Simple protocol: whether rows that leave after all counts are known go straight to their first
  // expert-major row. Rows that are weighted on arrival do not. Where other ranks do not see these
  // rows, there are no entries.
  EPMOE_HD bool sends_to_final_rows() const {
    return args.expert_major && args.receive && !args.weight_rows && send_offset_entries &&
           !uses_ll();
  }
  // `call`, as the host computes it. The first word: bit 0 says LL; then the rows.
  CallWords call_without_rows(uint32_t tag) const {
    CallShape shape{.D4_less_1 = static_cast<uint32_t>((args.D >> 2) - 1),
                    .aligned = ex.plan.alignment > 1,
                    .K_less_1 = static_cast<uint32_t>(args.K - 1),
                    .dtype = static_cast<uint32_t>(args.dtype),
                    .expert_major = args.expert_major && !args.returns_values,
                    .weight_rows = args.weight_rows || args.adds_only,
                    .trains = args.to_caller,
                    .more_rounds = 0,
                    .tag_high = tag >> (32 - kSizeBits)};
    return {uint32_t{uses_ll()} | tag << kSizeBits, std::bit_cast<uint32_t>(shape), 0};
  }
  // This source's first word.
  __device__ __forceinline__ uint32_t size(int32_t rows) const { return call.size | rows << 1; }
  __device__ __forceinline__ int64_t count_columns() const {
    return ex.plan.R * ex.plan.most_local_experts + kCountColumns;
  }
  // The blocks that send: the send blocks, then the notify blocks.
  __device__ __forceinline__ int32_t sending_blocks() const { return send_blocks + notify_blocks; }
  // A block's number. The first notify block, which counts, starts first: without its counts no
  // rank goes on.
  __device__ __forceinline__ int32_t block_number() const {
    int32_t block = blockIdx.x;
    if (block == 0) return send_blocks;
    return block <= send_blocks ? block - 1 : block;
  }
  // The most pairs that a source can have for an expert. Counts come from peers and may be any
  // number.
  __device__ __forceinline__ int32_t valid_count(int32_t pairs) const {
    return min(max(pairs, 0), static_cast<int32_t>(ex.plan.M * ex.plan.K));
  }
  // The counts of `source` in `rank`'s window.
  __device__ __forceinline__ Word* counts(int64_t rank, int64_t source) const {
    return in_window<Word>(ex, rank, ex.plan.recv_counts) + source * count_columns();
  }
};

struct DispatchShared {
  Quotas quotas;
  uint32_t epoch;
  int32_t latched;  // as in RoundState; in the leader also not 0 where its phase is out of turn
  int32_t tokens;   // real ones
  int32_t late;     // whether this block has sent while another that sends has not started
  int32_t sink;
  // Sending: rows for each rank before this token; receiving: rows from it.
  int32_t rank_count[kMaxExchangeRanks];
  int32_t num_experts[kMaxExchangeRanks];
  int32_t sentinel[kMaxExchangeRanks];
  int32_t ll_tokens[kMaxExchangeRanks];  // of a source; 0 if it uses the Simple protocol
  uint32_t mismatched, ll_mask;          // masks of sources: another call; the LL protocol
  int32_t other;                         // as in Status
  int32_t more_rounds;                   // whether a source needs a round after this one
  int32_t ll_most_tokens;                // the largest of any LL source
  int32_t simple_most_rows;              // the largest of any Simple source
  // Simple protocol, of a batch of tokens:
  int32_t next_token;  // the first of the next batch that this block sends
  int32_t unsignaled_slots[kMaxBatchTokens]
                          [kMaxExchangeRanks];  // stored, but their flags are not published
  alignas(16) int32_t ids[kMaxBatchTokens][kMaxExchangeTopK];
  float weights[kMaxBatchTokens][kMaxExchangeTopK];
  uint32_t ranks[kMaxBatchTokens];
  // Of the chunk that a warp has in its buffer:
  uint64_t chunk_barriers[kWarps];  // mbarrier of its TMA load
  float scales[kWarps][kMaxChunkBytes / (kLeastScaleBlock * 2)];
};
static_assert(sizeof(DispatchShared) <= kDeclaredSharedBytes);

// One block at work.
struct DispatchBlock {
  const DispatchKernel& kernel;
  const Exchange& ex;
  const ExchangePlan& plan;
  const DispatchArgs& args;
  Wait wait;
  DispatchShared& shared;
  int32_t number;  // of the block
  // In dynamic shared memory:
  char* chunks;       // [kWarps, chunk_bytes]
  int32_t* location;  // [P] of a physical expert: its rank << 16 | its local index
  // [P + 1] sending: pairs of each expert before this token; receiving: first row of its segment.
  int32_t* count;
  int32_t* send_offset;    // [R, most] first row of this source's pairs, on the expert's rank
  int32_t* source_offset;  // [R + 1, e] pairs of a local expert from the sources before
  // [E] where experts have copies: the one that every token takes, -1 where tokens choose.
  int32_t* only_copy;
  bool trains;  // a round of training: `to_caller`; known to the compiler in the usual case

  __device__ __forceinline__ DispatchBlock(const DispatchKernel& kernel, DispatchShared& shared,
                                           uint32_t epoch, bool trains)
      : kernel(kernel),
        ex(kernel.ex),
        plan(ex.plan),
        args(kernel.args),
        wait(ex, in_scratch<RoundState>(ex, plan.state), epoch),
        shared(shared),
        number(kernel.block_number()),
        trains(trains) {
    extern __shared__ __align__(128) char dynamic[];
    chunks = dynamic;
    location = reinterpret_cast<int32_t*>(dynamic + kWarps * kernel.chunk_bytes);
    count = location + plan.P;
    send_offset = count + plan.P + 1;
    source_offset = send_offset + kernel.send_offset_entries;
    only_copy = source_offset + kernel.source_offset_entries;
  }

  // Call this after a barrier of the block: it takes over the epoch that one thread has read.
  // Returns false if no round may be opened.
  __device__ __forceinline__ bool may_open() {
    wait.epoch = shared.epoch;
    return !shared.latched;
  }
  __device__ __forceinline__ int64_t column(int32_t location) const {
    return (location >> 16) * plan.most_local_experts + (location & 0xffff);
  }
  // Pairs of a local expert from the sources before r; with r = R from all sources.
  __device__ __forceinline__ int32_t pairs_before(int32_t r, int32_t local) const {
    if (kernel.source_offset_entries)
      return source_offset[r * static_cast<int32_t>(plan.num_local_experts) + local];
    Word* words =
        kernel.counts(plan.rank, 0) + kCountColumns + plan.rank * plan.most_local_experts + local;
    int32_t sum = 0;
#pragma unroll 1
    for (int32_t s = 0; s < r; ++s)
      sum += kernel.valid_count(Word::peek(words + s * kernel.count_columns()).value());
    return sum;
  }
  __device__ __forceinline__ int32_t pairs_of(int32_t local) const {
    return pairs_before(static_cast<int32_t>(plan.R), local);
  }
  // Whether this rank holds a physical expert. `id` comes from a peer and may be any number.
  __device__ __forceinline__ bool owns(int32_t id) const {
    return id >= 0 && id < plan.P && location[id] >> 16 == plan.rank;
  }
  __device__ __forceinline__ const char* x_at(int64_t t) const {
    return static_cast<const char*>(args.x_TD) + t * args.x_stride_bytes;
  }
  __device__ __forceinline__ const float* scales_at(int64_t t) const {
    return args.scales_TB + t * args.scales_stride;
  }
  // The rank of a physical expert, -1 for expert -1; and the same as a mask, empty for expert -1.
  __device__ __forceinline__ int32_t owner_of(int32_t p) const {
    return p < 0 ? -1 : location[p] >> 16;
  }
  __device__ __forceinline__ uint32_t rank_mask(int32_t p) const {
    return p < 0 ? 0u : 1u << owner_of(p);
  }
  // The expert-major row of a pair, -1 if this rank does not compute it or no row is left.
  // `ordinal` counts the pairs of source r for the expert.
  __device__ __forceinline__ int32_t row_of(int32_t id, int32_t ordinal, int32_t r) const {
    if (ordinal < 0 || !owns(id)) return -1;
    int32_t local = location[id] & 0xffff;
    int64_t row = int64_t{count[local]} + pairs_before(r, local) + ordinal;
    return row < min(int64_t{count[local + 1]}, plan.max_rows) ? static_cast<int32_t>(row) : -1;
  }
};

// For training: what a pair's row is multiplied by. The weight comes from a peer and may be any
// number.
__device__ __forceinline__ float factor_of(float weight) {
  return is_finite(weight) ? weight : 0.0f;
}

// For training: hands out the weight of a pair's row, and returns what combine multiplies the row
// by. Out of line, so that the usual case stays short.
static __device__ __noinline__ float kept_weight(const DispatchArgs& args, int32_t row,
                                                 float weight) {
  weight = factor_of(weight);
  if (args.row_weights_N && row >= 0) args.row_weights_N[row] = weight;
  return args.adds_only ? 1.0f : weight;
}
__device__ __forceinline__ float combine_weight(const DispatchBlock& b, int32_t row, float weight) {
  if (b.trains) return kept_weight(b.args, row, weight);
  return b.args.weight_rows ? 1.0f : weight;
}

}  // namespace epmoe::cuda
