// The CPU kernels. Arguments have been checked by ops.cpp; ids, counts and offsets inside tensors have not,
// and are checked here before they become addresses.
#pragma once
#include "args.h"
#include "plan.h"

namespace epmoe::cpu {

void route(const RouteArgs& args);
void permute(const PermuteArgs& args);
void finalize(const FinalizeArgs& args);

// This rank's side of the exchange: its own memory, and every rank's window as mapped here.
struct Exchange {
  const ExchangePlan& plan;
  char* const* peers_R;
  char* scratch;
  Status* status;
  double timeout_s;
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
  int64_t T, num_tokens, D;  // T rows, of which num_tokens (clamped here) are real
  int32_t K;
  bool expert_major;
};

struct CombineArgs {
  const void* rows;  // expert-major [N, D], rank-major [R, M, D], or null: no rows, the round is given up
  bool expert_major;
  int64_t rows_stride_bytes, num_rows;
  void* y_TD;  // contiguous, in the round's dtype
  int64_t T;   // rows of y
};

void dispatch(const Exchange& exchange, const DispatchArgs& args);
void combine(const Exchange& exchange, const CombineArgs& args);

}  // namespace epmoe::cpu
