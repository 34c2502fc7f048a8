// Arguments of dispatch and combine, the same for CPU and CUDA. Letters and strides as in args.h.
#pragma once
#include "copies.h"
#include "plan.h"

namespace epmoe {

// This rank's side of the exchange: its own memory, and every rank's window.
struct Exchange {
  ExchangePlan plan;
  // Start of each rank's window, as this process (CPU) or device (CUDA) addresses it.
  char* peers_R[kMaxRanks];
  char* scratch;       // start of this rank's scratch
  Status* status;      // in host memory; on CUDA, Progress follows it
  int64_t timeout_ns;  // of each wait
};

// The table of the round's layer, for its number of tokens.
EPMOE_HD Quotas quotas_of(const Exchange& ex) {
  const ExchangePlan& plan = ex.plan;
  if (!plan.layers) return {};
  return {reinterpret_cast<const QuotaLine*>(ex.scratch + plan.table_copies),
          static_cast<uint32_t>(plan.copies / 4), static_cast<uint32_t>(plan.rank) << 20};
}

constexpr int kProductParts = 16;                 // of the product of a row
constexpr int64_t kMostProductBytes = 32 * 1024;  // of a row that is multiplied

struct DispatchArgs {
  const void* x_TD;
  // Of x; fp8: the rows are quantized already, and in plan.payload_format, or in training as packed
  // rows.
  DType dtype;
  int64_t x_stride_bytes;  // between rows
  int64_t x_row_bytes;     // of a row of x
  const void* ids_TK;      // logical experts
  bool wide_ids;           // ids are int64, else int32
  // Whether the rows that the alignment leaves between segments become zeros; CUDA only.
  bool zero_gaps;
  int64_t ids_stride;  // between rows
  const void* weights_TK;
  DType weights_dtype;
  int64_t weights_stride;     // between rows
  const int32_t* num_tokens;  // real tokens, a scalar where the kernel runs; null: num_rows holds
  int64_t T;                  // rows of x; rows at and past the number of tokens are padding
  int64_t num_rows;           // real tokens, as the host knows them
  // Elements of a row as it travels: in formats with scales whole blocks, of which x may have fewer
  // elements. The others are zeros.
  int64_t D;
  int32_t K;
  bool
      expert_major;  // layout="expert": permute the rows on arrival, else leave them in their slots
  bool weight_rows;  // multiply each pair's row by its weight on arrival; combine then only adds
  bool send, receive;      // the phases of this call: either or both
  const float* scales_TB;  // of rows that are quantized already, else null
  int64_t scales_stride;   // between rows
  // For training:
  // `plan.rows` is memory that no other rank writes.
  bool to_caller;
  bool keeps_zeros;     // with to_caller: pairs of weight 0 travel, too, for the weight's gradient
  bool adds_only;       // combine adds without weights
  bool returns_values;  // combine brings back a value of each pair
  bool
      zero_tail;  // rows past the last segment, up to plan.max_rows, and their weights become zeros
  float* row_weights_N;  // out, with to_caller: the weight of each pair's row; or null
  // CUDA only, for a call of more than ll_max_tokens tokens whose rows are gradients of weighted
  // outputs: each row is multiplied by its weight, and its product with the output is the sum of
  // its parts.
  const void* outputs_ND;        // in x's dtype; or null
  int64_t outputs_stride_bytes;  // between rows
  // Out, with outputs: the parts [plan.max_rows, kProductParts]. Parts not written are 0.
  float* products_NC;
};

struct CombineArgs {
  const void*
      rows;  // expert-major [N, D] or rank-major [R, M, D]; null aborts the round: no rows are sent
  bool expert_major;          // which of the two layouts
  int64_t rows_stride_bytes;  // between rows
  int64_t num_rows;           // rows that exist; pairs with a larger row index add nothing
  void* y_TD;                 // out: contiguous, in the dtype of dispatch's x
  int64_t T, D;               // of y
  bool send, receive;         // as in DispatchArgs
  const float*
      row_values_N;  // of a round that returns values: what each pair's row has for it; else null
  float* pair_values_TK;  // out, with row_values_N: the value of each pair, 0 where it had no row
};

// What the operators of a round need besides its memory, in a host tensor of int64 that
// `Descriptors` in epmoe/exchange/descriptors.py writes. The addresses of all R windows follow the
// struct. One tensor costs the host less than scalar arguments of the operator.
struct ExchangeDescriptor {
  ExchangePlan plan;
  int64_t expert_major, weight_rows, zero_gaps;                          // as in DispatchArgs
  int64_t to_caller, keeps_zeros, adds_only, returns_values, zero_tail;  // the same
  int64_t row_weights, row_values, pair_values;     // addresses, as in DispatchArgs and CombineArgs
  int64_t outputs, outputs_stride_bytes, products;  // the same, of DispatchArgs
  int64_t first_timeout_ns, timeout_ns;  // of each wait of the first round, and of later rounds
  int64_t status;  // address of the Status, and on CUDA of the Progress behind it
};

}  // namespace epmoe
