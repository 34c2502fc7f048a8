// Arguments of the local stages: one POD per kernel, the same for CPU and CUDA.
// Letters as in the package docstring: T tokens, E experts, K experts a token, S slots, D hidden size, P
// physical experts, e local experts, R source ranks, N expert-major rows. Strides count elements unless they
// say bytes.
#pragma once
#include "types.h"

namespace epmoe {

struct RouteArgs {
  const void* logits_TE;
  DType dtype;
  int64_t logits_stride;      // between rows
  const float* bias_E;        // or null
  const int32_t* num_tokens;  // scalar where the kernel runs, or null: then num_rows holds
  int64_t T, num_rows;        // rows at and past the number of tokens are padding
  int32_t E, K, num_groups, top_groups;
  bool sigmoid, renormalize, wide_ids;  // wide_ids: ids are int64
  float scale;
  void* ids_TK;
  float* weights_TK;
  int64_t* counters;  // kNumCounters, or null
};

struct PermuteArgs {
  const void* x_SD;
  DType dtype;
  int64_t x_stride_bytes;  // between slots
  const float* scales_SB;  // fp8 only: one scale a block of kScaleBlock elements, or null
  int64_t scales_stride;
  const void* ids_SK;
  bool wide_ids;
  int64_t ids_stride;
  const int32_t* expert_map_P;  // physical id -> local index, -1 elsewhere
  const int32_t* counts_R;      // real slots of each source, or null: all are
  int64_t S, D;                 // S = R slabs of S / R slots
  int32_t K, P, num_local_experts, R;
  int64_t alignment, max_rows;
  void* rows_ND;  // rows follow one another
  float* row_scales_NB;
  int32_t* expert_offsets;     // [e + 1]
  int32_t* tokens_per_expert;  // [e]
  int32_t* row_of_pair_SK;     // written in full, -1 where a pair has no row; stride row_of_pair_stride
  int64_t row_of_pair_stride;
  void* workspace;    // CUDA only: permute_workspace_bytes()
  int64_t* counters;  // kNumCounters, or null
  int64_t* needed;    // rows that would have been needed, or null
};

struct FinalizeArgs {
  const void* rows_ND;
  DType dtype;
  int64_t rows_stride_bytes, num_rows;  // a row index outside [0, num_rows) is skipped
  const int32_t* row_of_pair_SK;
  int64_t row_of_pair_stride;
  const void* weights_SK;
  DType weights_dtype;
  int64_t weights_stride;
  const int32_t* counts_R;  // or null
  int64_t S, D;
  int32_t K, R;
  void* partial_SD;  // in dtype, rows follow one another
};

struct PaddingArgs {
  void* x_TD;
  int64_t T, row_bytes, stride_bytes;  // rows at and past the number of tokens become zeros
  const int32_t* num_tokens;           // scalar where the kernel runs, or null: then num_rows holds
  int64_t num_rows;
};

struct QuantizeArgs {
  const void* x_TD;
  DType dtype;
  int64_t x_stride;           // between rows
  const int32_t* num_tokens;  // as in RouteArgs
  int64_t T, num_rows, D;
  bool per_tensor;    // one scale for all real rows, else one a row and block of kScaleBlock
  void* q_TD;         // fp8 e4m3, rows follow one another; padded rows are zeros
  float* scales_TB;   // [1] or [T, blocks]; 1 in padded rows
  uint32_t* largest;  // CUDA only, per_tensor: one word of scratch
};

}  // namespace epmoe
