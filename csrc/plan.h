// The exchange's memory as the kernels see it: offsets computed once, in epmoe/memory.py, and handed over as
// a list of integers in the order of the fields below (`SIZES` and `OFFSETS` there).
#pragma once
#include "types.h"

namespace epmoe {

constexpr int kMaxRanks = 64;  // a set of ranks is one 64-bit mask

struct ExchangePlan {
  int64_t R, rank, M, K, D, E, P, num_local_experts,
      copies;  // letters as in args.h; K, D: a call may use less
  int64_t max_rows, alignment;
  int64_t payload_fp8, combine_fp8;              // wire formats: 0 is the dtype of x
  int64_t x_stride_bytes, combine_stride_bytes;  // between slots, on the wire
  int64_t scale_blocks, combine_scale_blocks;    // scales between slots; of combine a multiple of 4
  int64_t most_local_experts;                    // of any rank
  int64_t num_sms;                               // multiprocessors a kernel may use
  int64_t few_tokens;  // up to which a source's rows travel without flags; CUDA only, as the next five
  int64_t few_stride_bytes, few_sum_stride_bytes;           // between those, with their scales
  int64_t dispatch_senders, combine_senders, combine_team;  // blocks, warps a row; 0: the kernel chooses
  // in every rank's window
  int64_t dispatch_mail, combine_mail, error_mail, doorbell;
  int64_t recv_x, recv_scales, recv_ids, recv_weights, combine_rows, combine_scales;
  int64_t recv_flags, recv_ordinals, recv_counts, combine_flags, few_rows, few_pairs, few_sums;  // CUDA only
  int64_t rows, row_scales;  // in the window on CUDA, in scratch on the CPU
  // in this rank's scratch; slots_used: CUDA only
  int64_t state, counts, slots_used, slots, expert_offsets, tokens_per_expert, row_of_pair;
  int64_t expert_map, owners, copies_table, num_copies, sentinels;
  int64_t local_index, pair_weights;  // CUDA only
  int64_t counters, total_tokens_per_expert, rows_sent;
};

// What a source tells each receiver with its flag, a cache line each. `epoch` is the flag, written last.
struct alignas(64) Mail {
  uint32_t epoch;
  int32_t count;  // rows sent
  int32_t D, K, dtype;
  int32_t unused[11];
};

// What dispatch leaves for combine, and the epochs, which only grow. The CPU compares them as signed differences, CUDA
// for equality (cuda/mail.cuh).
struct RoundState {
  uint32_t dispatch_epoch, combine_epoch;
  int32_t latched;  // a wait has failed: no payload may be sent any more
  int32_t T, D, K;  // D: CPU only, as the next
  int16_t dtype;
  int16_t originator;  // CUDA only: who saw the failure first
  uint32_t few;        // CUDA only: sources whose rows travel without flags, a mask
  uint64_t missing;    // CUDA only: ranks that were waited for in vain, a mask
  // CUDA only, as what follows; [Stage]: blocks done. Each kernel clears the other's counters.
  int32_t done[2];
  int32_t told;  // blocks of dispatch that have sent what is said of pairs
  // [Stage]: handed out to be sent and to be received; then what of rows without flags may be handed out beside others,
  // received by dispatch, sent by combine. On lines of their own: many draw from one while others draw from the next.
  alignas(64) int32_t sent[2];
  alignas(64) int32_t ticket[2];
  alignas(64) int32_t few_ticket[2];
};
static_assert(sizeof(RoundState) == 256);

// What the host looks at; int64 each, in the order of `epmoe.health.STATUS`.
struct Status {
  int64_t code;         // StatusCode
  int64_t stage;        // Stage
  int64_t epoch;        // of the failed round
  int64_t missing;      // ranks that were waited for, a mask
  int64_t originator;   // the rank that saw the failure first
  int64_t needed_rows;  // the most expert-major rows a round needed beyond max_rows, or 0
  int64_t unused[2];
};

enum StatusCode : int64_t { kOk = 0, kTimeout = 1, kMismatch = 2 };
enum Stage : int64_t { kDispatch = 0, kCombine = 1 };

}  // namespace epmoe
