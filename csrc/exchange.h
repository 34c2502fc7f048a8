// Arguments of dispatch and combine, the same for CPU and CUDA.
#pragma once
#include "plan.h"

namespace epmoe {

// This rank's side of the exchange: its own memory, and every rank's window as mapped here.
struct Exchange {
  ExchangePlan plan;
  char* peers_R[kMaxRanks];
  char* scratch;
  Status* status;
  int64_t timeout_ns;
};

struct DispatchArgs {
  const void* x_TD;
  DType dtype;
  int64_t x_stride_bytes;
  const void* ids_TK;
  bool wide_ids;
  int64_t ids_stride;
  const void* weights_TK;
  DType weights_dtype;
  int64_t weights_stride;
  const int32_t* num_tokens;  // scalar where the kernel runs, or null: then num_rows holds
  int64_t T, num_rows, D;     // T rows, of which the first are real
  int32_t K;
  bool expert_major;
  bool weight_rows;    // each pair's row is multiplied by its weight, and combine only adds
  bool send, receive;  // either half of the stage, or both
};

struct CombineArgs {
  const void* rows;  // expert-major [N, D], rank-major [R, M, D], or null: no rows, the round is given up
  bool expert_major;
  int64_t rows_stride_bytes, num_rows;
  void* y_TD;          // contiguous, in the round's dtype
  int64_t T, D;        // of y
  bool send, receive;  // as in DispatchArgs
};

}  // namespace epmoe
