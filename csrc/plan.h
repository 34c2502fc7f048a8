// The memory of the exchange as the kernels see it. epmoe/exchange/memory.py computes every size
// and offset once and hands them over as int64, by the names of the fields of `ExchangePlan`
// (csrc/ops_layouts.cpp reports them). docs/protocol.md has the map of the window: writer, reader,
// signal and re-arming of each buffer.
#pragma once
#include <cstddef>

#include "wire_format.h"

namespace epmoe {

constexpr int kMaxRanks = 64;  // a set of ranks is one 64-bit mask

// Parts of a call's tokens that blocks of dispatch count for one another; CUDA only.
constexpr int kMaxParts = 512;
// Counts of a part in a line of 16 bytes, beside the epoch.
constexpr int kPartCounts = 6;

// The same on CPU and CUDA unless a comment says otherwise; kernels only read it. Letters as in
// args.h. "[R, M, K]" after a buffer is its shape; index 0 is the source rank. An unused buffer has
// 0 bytes.
struct ExchangePlan {
  // Sizes. Where seats may be empty, "rank" in this file means a seat.
  int64_t R;     // ranks of the group, or its seats
  int64_t rank;  // this rank in the group, or its seat
  int64_t M;     // tokens a rank may bring to one call: the slots of a slab
  int64_t K;     // experts a token, of the config: the stride of pairs; a call may use fewer
  int64_t D;     // elements of a row, of the config; a call may use fewer
  int64_t E;     // logical experts
  int64_t P;     // physical experts: E and the redundant copies
  int64_t num_local_experts;  // physical experts of this rank
  // Columns of table_copies: the most copies that a logical expert has; of quotas, a multiple of 4.
  int64_t copies;
  int64_t max_rows;   // N: expert-major rows that fit
  int64_t alignment;  // rows: an expert's segment starts at a multiple of it
  // The same on a rank of few tokens, where all sources use LL; divides `alignment`.
  int64_t small_alignment;
  int64_t small_alignment_tokens;  // most tokens of such a rank; at most ll_max_tokens
  WireFormat payload_format;       // of rows that dispatch sends
  WireFormat combine_format;       // of rows that combine sends
  int64_t x_stride_bytes;          // between slots of recv_x
  int64_t combine_stride_bytes;    // between slots of combine_rows
  int64_t scale_blocks;            // scales between slots of recv_scales
  int64_t combine_scale_blocks;    // scales between slots of combine_scales: multiples of 16 bytes
  int64_t most_local_experts;      // the largest num_local_experts of any rank
  int64_t layers;  // whose experts move: table_copies has quotas for each of them; 0: experts stay
  int64_t
      few_tokens;  // most tokens of a call that takes the first of a layer's two tables of quotas
  // Sizes that only the CUDA kernels use.
  int64_t num_sms;  // multiprocessors that a kernel may use, at most
  // Tokens of a call up to which its source uses the LL protocol: slots of an ll_ slab.
  int64_t ll_max_tokens;
  int64_t ll_row_stride_bytes;  // between slots of ll_rows: the row and its scales
  int64_t ll_sum_stride_bytes;  // between slots of ll_sums: the sum and its scales
  int64_t
      dispatch_senders;  // blocks of dispatch that start as senders; 0: the launch policy chooses
  int64_t combine_senders;  // blocks of combine that start as senders; 0: the launch policy chooses
  int64_t combine_team;  // warps of combine that send a row together; 0: the launch policy chooses

  // Offsets in bytes from the start of a window. Each rank has one window, and every rank writes
  // into all windows.
  int64_t signal_dispatch;  // RoundHeader [R]: dispatch send -> dispatch receive; CPU only
  // RoundHeader [R]: combine send -> combine receive. On the CPU it is stored last, and says that
  // all sums are there. On CUDA, which uses its first 8 bytes, it is stored first, and says that
  // the source has opened combine.
  int64_t signal_combine;
  // uint64 [R]: masks of missing ranks, from each rank whose wait failed -> every wait.
  int64_t signal_error;
  int64_t signal_dead;  // uint64: mask of the ranks that have ended; this rank's host -> every wait
  // uint32: a futex that every signal increments, and on which this rank sleeps; CPU only.
  int64_t doorbell;
  // Rows [R, M, D]: dispatch send -> dispatch receive, or the caller with layout="rank".
  int64_t recv_x;
  int64_t recv_scales;   // float [R, M, scale_blocks]: with recv_x, in formats with scales
  int64_t recv_ids;      // int32 [R, M, K]: physical experts, with recv_x
  int64_t recv_weights;  // float [R, M, K]: with recv_x; on the CPU combine send reads them too
  int64_t combine_rows;  // partial rows [R, M, D]: combine send -> combine receive
  // float [R, M, combine_scale_blocks]: with combine_rows, in formats with scales.
  int64_t combine_scales;
  int64_t
      combine_values;  // a value of each pair [R, M, K], CPU: float, CUDA: words; with combine_rows
  // CUDA only.
  int64_t recv_flags;  // uint32 [R, M]: the epoch whose row is in the slot, Simple protocol
  // int32 [R, M, K]: ordinal of the pair in (source, expert), or its final row with bit 31 set.
  int64_t recv_ordinals;
  // 8-byte words [R, 2 + R * most_local_experts]: rows sent, shape of the call, pairs by expert.
  int64_t recv_counts;
  int64_t
      combine_flags;  // uint32 [R, M]: the epoch whose partial row is in the slot, Simple protocol
  // LL lines [R, ll_max_tokens]: dispatch send -> dispatch receive, which re-arms them.
  int64_t ll_rows;
  // LL lines [R, ll_max_tokens, K]: id, ordinal, weight, epoch of each pair; with ll_rows.
  int64_t ll_pairs;
  int64_t
      ll_sums;  // LL lines [R, ll_max_tokens]: combine send -> combine receive, which re-arms them
  // In the window on CUDA, where senders write final rows; in scratch on the CPU.
  int64_t rows;        // expert-major rows [N, D]: dispatch -> the experts
  int64_t row_scales;  // float [N, scale_blocks]: with rows, in formats with scales

  // Offsets in bytes from the start of this rank's scratch, which no other rank sees.
  int64_t state;  // RoundState
  // int32 [R]: rows received from each source; dispatch -> the caller, on the CPU combine send.
  int64_t counts;
  int64_t slots_used;  // int32 [R]: slots of each source that combine visits; CUDA only
  // int32 [M, R]: slot of token t on each rank, -1 if not sent; dispatch -> combine receive.
  int64_t slots;
  int64_t expert_offsets;  // int32 [e + 1]: first row of each expert; dispatch -> the experts
  int64_t
      tokens_per_expert;  // int32 [e]: rows of each expert without the gap; dispatch -> the experts
  // int32 [R, M, K]: row of each received pair, negative for none; dispatch -> combine send.
  int64_t row_of_pair;
  // Tables: the host writes them once, dispatch reads them.
  // int32 [P]: local index of a physical expert, -1 if another rank owns it; CPU only.
  int64_t table_expert_map;
  int64_t table_owners;  // int32 [P]: rank of a physical expert
  // int32 [E, copies]: physical experts of a logical expert; or `Quotas` [layers, 2, E, copies].
  int64_t table_copies;
  int64_t table_num_copies;  // int32 [E]: number of physical experts of a logical expert
  // int32 [R]: for each rank a valid id that another rank owns, P if there is none.
  int64_t table_sentinels;
  int64_t table_local_index;  // int32 [P]: local index of a physical expert on its owner; CUDA only
  // float [R, M, K]: weights of received pairs; dispatch -> combine send; CUDA only.
  int64_t pair_weights;
  // Lines [kMaxParts, (P + R) / kPartCounts, rounded up]: what a block has counted of a part of the
  // tokens, pairs by expert, then rows by rank; dispatch; CUDA only.
  int64_t part_counts;
  // Totals: kernels add to them, the host reads them (epmoe/exchange/health.py).
  int64_t health_counters;           // int64 [kNumCounters]
  int64_t health_tokens_per_expert;  // int64 [e]: rows that this rank's experts have received
  int64_t health_rows_sent;          // int64 [R]: rows sent to each rank
  int64_t health_waited_ns;  // int64 [R]: nanoseconds that this rank has waited for each rank
  int64_t
      health_aborted_rounds;  // int64 [R]: rounds that each rank has aborted, as this rank has seen
};

// What a source signals to each receiver, in a cache line of its own. The source writes `epoch`,
// the flag, last. CUDA uses it in combine only, and there one 8-byte word of it: `epoch` and
// `sends`.
struct alignas(64) RoundHeader {
  // CPU: the round whose payload is complete; CUDA: the round that the source has opened.
  uint32_t epoch;
  int32_t sends;        // CUDA only: 1, or 0 if the source aborts the round
  int32_t D, K, dtype;  // of the source's call; CPU only
  int32_t counts[2];  // CPU only: rows sent to this receiver in round n, at n % 2; see cpu/signal.h
  int32_t needed_rows;  // CPU only: the source's Status::needed_rows
  // CPU only: 1 if the source needs a round after round n, at n % 2; see Progress.
  int32_t more_rounds[2];
  int32_t aborted[2];  // CPU only: 1 if the source has aborted round n, at n % 2; see cpu/signal.h
  int32_t tag;         // CPU only: of the source's call
  int32_t mode;        // CPU only: of the source's call, as in RoundState
  int32_t empty;       // CPU only: 1 where nobody sits in the seat; the receiver's host writes it
};

// How far this rank's calls have come. The operators write it, on the CPU in the caller's thread.
// CUDA's kernels write `has_more_rounds` alone. The host looks at it after each call: a signal
// handler of Python may raise right behind a call, so that its caller never learns that it
// returned. On the CPU it lies in RoundState, on CUDA in host memory behind the Status.
struct Progress {
  // Phases that have ended, four a round; in the order of the states of
  // epmoe/exchange/round_state.py.
  int64_t phases;
  // CPU only: of the wait that a call has left so that Python can handle signals; 0: it left none.
  int64_t deadline_ns;
  int64_t missing;      // CPU only: mask of the ranks that this wait still missed
  int64_t counted_ns;   // CPU only: the time up to which health_waited_ns has this wait
  int64_t last_stream;  // CUDA only: handle + 1 of the stream of the last launch; 0: there was none
  // The host writes it before dispatch: the round << 1 | whether this rank has more; 0: no matter.
  int64_t more_rounds;
  int64_t
      has_more_rounds;  // unless `more_rounds` was 0: the round << 1 | whether any rank has more
  int64_t tag;          // of the open round: the host writes it before dispatch
};

// A tag has 15 bits. Ranks that open a round with other tags are in other layers.
constexpr int32_t kMaxTag = (1 << 15) - 1;
// The second of the words in which dispatch on CUDA says what the call is, for kernels to compare
// and for the host to explain (cuda/dispatch/block.cuh).
struct CallShape {
  uint32_t D4_less_1 : 14;  // D / 4 - 1, since D is whole lines of 16 bytes
  uint32_t aligned : 1;     // whether segments are
  uint32_t K_less_1 : 5;
  uint32_t dtype : 2;         // DType of x
  uint32_t expert_major : 1;  // in training, which has one layout: whether values do not return
  uint32_t weight_rows : 1;   // in training: where weights apply
  uint32_t trains : 1;
  uint32_t more_rounds : 1;  // the source needs a round after this one
  uint32_t tag_high : 6;     // bits of the tag that the first word has no room for
};
// On CUDA, in the words that a rank finds of a seat in which nobody sits, and which its host writes
// once: the epoch, which every round takes for its own.
constexpr uint32_t kEmptySeat = 0xfffffffe;
// The same: the shape of a call that agrees with every other.
constexpr uint32_t kEmptySeatShape = 0xfdffffff;
// The words of a source in dispatch on CUDA before its counts (cuda/dispatch/block.cuh).
constexpr int kCountColumns = 3;

// What went wrong, for the host. It lies in host memory (pinned on CUDA). Kernels write it, and the
// host does for a kernel of its own that does not begin. The host looks at it without
// synchronising. It clears `code` on the CPU, and on CUDA once it has raised kOutdated.
struct Status {
  int64_t code;   // StatusCode; written last
  int64_t stage;  // Stage
  int64_t epoch;  // of the failed round
  // Mask of ranks: on a timeout the missing ones, on a mismatch the ranks whose call differs.
  int64_t missing;
  int64_t originator;  // the rank that saw the failure first
  // The most expert-major rows that a round needed if that is more than max_rows, else 0.
  int64_t needed_rows;
  int64_t phases;  // RoundState::phases, as a stage out of turn has found them; CUDA only
  int64_t tag;     // on a mismatch: of this rank's call
  // On a mismatch: 1 + (rank << 16 | tag) of the lowest rank with another tag, 0 if there is none.
  int64_t other;
  // Not a failure of this rank, so no `code` goes with it. The host clears `aborted` when it has
  // told its caller.
  int64_t aborted;        // mask of the other ranks that have aborted a round
  int64_t aborted_epoch;  // the last such round
};

// The host alone reports kUnscheduled. It also latches the state that kernels of an earlier group
// find, by kOutdated.
enum StatusCode : int64_t {
  kOk = 0,
  kTimeout = 1,
  kMismatch = 2,
  kOutOfTurn = 3,
  kUnscheduled = 4,
  kOutdated = 5
};
enum Stage : int64_t { kDispatch = 0, kCombine = 1 };

// State of the round, in scratch, zero at first. dispatch writes what it leaves for combine. Epochs
// count rounds and only grow: the CPU compares them as signed differences, CUDA for equality
// (cuda/exchange/signal.cuh).
struct RoundState {
  uint32_t dispatch_epoch;  // of the last round that dispatch sent (CPU) or received (CUDA)
  // Of the last round that combine sent (CPU) or received (CUDA); CUDA: dispatch takes it + 1.
  uint32_t combine_epoch;
  int32_t
      latched;  // 1 after a wait, on CUDA a round, has failed: this rank sends no payload any more
  // CUDA only: of the open round, the send phases begun and receive phases ended: 0 to 3.
  int32_t phases;
  int32_t T;           // real tokens of this rank's dispatch
  int32_t D;           // of the call; CPU only
  int32_t K;           // of the call
  int16_t dtype;       // DType of the call's x; CPU only
  int16_t originator;  // CUDA only: the rank that saw the failure first
  // CUDA only: sources of up to ll_max_tokens tokens; their sums return by the LL protocol.
  uint32_t ll_mask;
  int32_t
      mode;  // of the call, for training: bits `to_caller`, `adds_only`, `returns_values`; CPU only
  uint64_t
      missing;  // CUDA only: ranks that a wait has missed; not 0 ends all other waits of this rank
  // CUDA only, from here on. `[2]` is indexed by Stage. Each kernel clears what belongs to the
  // other stage.
  int32_t done[2];   // blocks that have finished
  int32_t notified;  // notify blocks of dispatch whose pairs are sent; combine clears it
  // Real tokens + 1, as the first block has read them; 0: none has. Combine clears it.
  int32_t num_tokens;
  // Heads of the work queues: the next item that no warp has claimed, counted from the items that
  // warps start with. They lie on separate cache lines, because many warps claim from different
  // queues at once.
  alignas(64) int32_t send_queue[2];  // items to send
  alignas(64) int32_t recv_queue[2];  // items to receive
  alignas(64) int32_t
      ll_queue[2];  // LL items besides the Simple ones: dispatch receives them, combine sends them
  Progress progress;               // CPU only
  alignas(64) int32_t started[2];  // blocks that send, and have started
  int32_t receiving[2];            // blocks that may write outputs: they have begun to receive
  Status failure;                  // as reported to the host; every later kernel repeats it
};

}  // namespace epmoe
