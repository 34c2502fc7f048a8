// Arguments of the local stages: one POD per kernel, the same for CPU and CUDA.
// Letters: T tokens, E experts, K experts a token, S slots, D hidden size, P physical experts, e
// local experts, R source ranks, N expert-major rows, B fp8 scales of a row (D / kScaleBlock,
// rounded up). Strides count elements unless their name says bytes. Outputs are contiguous unless
// they have a stride.
#pragma once
#include "gating.h"
#include "types.h"

namespace epmoe {

struct RouteArgs {
  const void* logits_TE;
  DType dtype;                // of the logits
  int64_t logits_stride;      // between rows
  const float* bias_E;        // or null
  const int32_t* num_tokens;  // real tokens, a scalar where the kernel runs; null: num_rows holds
  int64_t T;                  // rows; rows at and past the number of tokens are padding
  int64_t num_rows;           // real tokens, as the host knows them
  int32_t E, K, num_groups, top_groups;
  // A group is rated by the sum of this many best scores, at most E / num_groups.
  int32_t scores_per_group;
  bool sigmoid;       // scoring: sigmoid, else softmax
  bool renormalize;   // weights of a token sum to 1 before they are scaled
  bool wide_ids;      // ids are int64, else int32
  float epsilon;      // is added to the sum by which renormalize divides
  float scale;        // factor of all weights
  void* ids_TK;       // out
  float* weights_TK;  // out
  int64_t* counters;  // kNumCounters, added to; or null
};

// The operator route_backward (CPU and CUDA): gradients of the weights [T, K] that route has given,
// to gradients of its logits. A pair of weight 0 has no gradient: it is padding, or its score is
// not finite.
struct RouteBackwardArgs {
  const float* grad_weights_TK;
  const void* logits_TE;
  DType dtype;            // of the logits, and of their gradients
  int64_t logits_stride;  // between rows
  const void* ids_TK;     // may hold any number where the weight is 0
  const float* weights_TK;
  int64_t T;
  int32_t E, K;
  bool sigmoid;          // scoring: sigmoid, else softmax
  bool renormalize;      // weights were divided by their sum
  bool wide_ids;         // ids are int64, else int32
  double epsilon;        // was added to that sum
  double scale;          // factor of all weights
  void* grad_logits_TE;  // out, contiguous
};

// The operator reached_rows (CPU and CUDA): rows of x whose gradient row [E] is not all zeros, and
// zeros in place of the others, which may hold anything.
struct ReachedRowsArgs {
  const void* x_TD;
  DType x_dtype;
  int64_t x_stride;     // between rows
  const void* grad_TE;  // contiguous
  DType dtype;          // of grad_TE, and of out_TD
  int64_t T, E, D;
  void* out_TD;  // out, contiguous
};

// The operator permute (CPU and CUDA), and the receive phase of dispatch on the CPU.
struct PermuteArgs {
  const void* x_SD;
  DType dtype;             // of x
  int32_t B;               // of scales_SB
  int64_t x_stride_bytes;  // between slots
  const float* scales_SB;  // fp8 in dispatch only, else null
  int64_t scales_stride;   // between slots
  const void* ids_SK;
  bool wide_ids;                // ids are int64, else int32
  int64_t ids_stride;           // between slots
  const int32_t* expert_map_P;  // local index of each physical expert, -1 if another rank owns it
  const int32_t* counts_R;      // real slots of each source; null: all slots are real
  int64_t S, D;                 // S = R slabs of S / R slots
  int32_t K, P, num_local_experts, R;
  int64_t alignment;           // rows: an expert's segment starts at a multiple of it
  int64_t max_rows;            // N: pairs whose row would lie past it are dropped
  void* rows_ND;               // out
  float* row_scales_NB;        // out, if scales_SB is given
  int32_t* expert_offsets;     // out [e + 1]
  int32_t* tokens_per_expert;  // out [e]
  int32_t* row_of_pair_SK;     // out: written in full, -1 where a pair has no row
  int64_t row_of_pair_stride;  // between slots
  void* workspace;             // CUDA only: permute_workspace_bytes()
  int64_t* counters;           // kNumCounters, added to; or null
  int64_t* needed;             // out: rows that an unlimited N would hold; or null
};

// The operator finalize (CPU and CUDA), and the send phase of combine on the CPU.
struct FinalizeArgs {
  const void* rows_ND;
  DType dtype;                // of the rows
  int64_t rows_stride_bytes;  // between rows
  int64_t num_rows;           // N: a row index outside [0, N) is skipped
  const int32_t* row_of_pair_SK;
  int64_t row_of_pair_stride;  // between slots
  const void* weights_SK;
  DType weights_dtype;
  int64_t weights_stride;   // between slots
  const int32_t* counts_R;  // real slots of each source; null: all slots are real
  int64_t S, D;             // S = R slabs of S / R slots
  int32_t K, R;
  void* partial_SD;  // out, in dtype; null in combine, which sends each sum
};

struct PaddingArgs {
  void* x_TD;                 // in and out: rows at and past the number of tokens become zeros
  int64_t T;                  // rows
  int64_t row_bytes;          // of a row's elements
  int64_t stride_bytes;       // between rows
  const int32_t* num_tokens;  // as in RouteArgs
  int64_t num_rows;
};

struct QuantizeArgs {
  const void* x_TD;
  DType dtype;                // of x
  int64_t x_stride;           // between rows
  const int32_t* num_tokens;  // as in RouteArgs
  int64_t T, num_rows, D;
  int64_t block;      // elements of a row that share a scale; 0: all real rows share one
  void* q_TD;         // out: fp8 e4m3; padded rows are zeros
  float* scales_TB;   // out: [1] or [T, B]; 1 in padded rows. Null: rows are in kPackedFp8
  uint32_t* largest;  // CUDA only, if `block` is 0: 4 bytes of workspace
};

// Which of the N expert-major rows are rows of pairs. All others are neither read nor written.
struct Segments {
  const int32_t* expert_offsets;     // [e + 1]
  const int32_t* tokens_per_expert;  // [e], or null: segments have no gaps
  int32_t num_local_experts;
};

// The operator unpack_fp8, for training: rows of segments, gaps included, as pack_fp8 has made
// them, as values again.
struct UnpackArgs {
  const void* packed_N;
  Segments segments;
  int64_t N, D;
  void* rows_ND;  // out
  DType dtype;    // of rows_ND
};

// The operator gated_activation. F: width of an expert. B: F / kScaleBlock, rounded up.
struct GatedActivationArgs {
  const void* gate_up_N2F;  // F gates, then F ups; or by turns
  DType dtype;              // of gate_up, bias and, if they are not fp8, outputs
  int64_t gate_up_stride;   // between rows
  Segments segments;
  const void* bias_e2F;  // in the order of gate_up, or null
  int64_t N, F;
  bool interleaved;  // gates and ups by turns
  Gating gating;
  void* out_NF;           // out
  float* scales_BN;       // out: then the outputs are fp8 e4m3; or null
  int64_t scales_stride;  // between blocks of scales_BN, at least N
  // Of gate, up and down in NVFP4, or null: they multiply gate and up before the bias is added, and
  // the output.
  const float* tensor_scales;  // [e, kTensorScales]
};

// Weights of experts: bf16; fp8 with scales for blocks of kScaleBlock; MXFP4; NVFP4.
enum class WeightFormat : uint8_t { kBf16, kFp8, kMxfp4, kNvfp4 };
// Whether a byte has two weights.
constexpr EPMOE_HD bool is_packed(WeightFormat format) {
  return format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4;
}
// Codes of a row that share a scale, in a format that is packed.
constexpr EPMOE_HD int64_t group_of(WeightFormat format) {
  return format == WeightFormat::kNvfp4 ? kNvfp4Group : kMxfp4Group;
}

// The operator dequantize_mxfp4.
struct DequantizeArgs {
  const void* codes;  // pairs of e2m1 in bytes, contiguous
  const uint8_t* scales;
  int64_t num_groups;  // of codes that share a scale
  void* out;           // bf16
  WeightFormat format;
};

// The operator few_rows: the experts stage. Rows are fp8 with scales for kScaleBlock where weights
// are fp8, and in fused_experts where they are MXFP4; else bf16.
struct FewRowsArgs {
  WeightFormat format;
  uint8_t token_tiles;  // of 8 rows of an expert, which share a reading of its weights
  const void* rows_ND;
  int64_t rows_stride;  // between rows: D, or more with weights in MXFP4 and rows in fp8
  const float* row_scales_NB;
  int64_t row_scales_stride;  // between rows
  const void* gate_up_e2FD;   // F gates, then F ups; or by turns
  const void* gate_up_scales;
  const void* gate_up_bias;  // bf16 [e, 2F], in the order of gate_up, or null
  const void* down_eDF;
  const void* down_scales;
  const void* down_bias;  // bf16 [e, D], or null
  Segments segments;
  int64_t N, D, F;
  bool interleaved;
  Gating gating;
  void* h_NF;            // workspace: the activations, fp8 or bf16
  uint8_t* exponents_N;  // fp8: workspace [N, F / 16], powers of two of h
  // fp8 in one order of sums: workspace instead, scales of h in blocks of kScaleBlock.
  float* h_scales_BN;
  int64_t h_scales_stride;
  // The operator fused_experts: workspace, at least fused_counters() of them.
  int32_t* counters;
  int64_t num_counters;
  void* out_ND;                // out: bf16
  void* gate_up_N2F;           // fused_experts in bf16: out, products of gate and up, or null
  const float* tensor_scales;  // few_rows in NVFP4: [e, kTensorScales], else null
};

// The operator fused_experts: the same stage in fp8 or bf16, in one kernel. Rows of an expert in a
// tile, at most, and experts of a rank, whose table lies in shared memory.
constexpr int64_t kFusedTokens = 128;
constexpr int64_t kFusedFp8Tokens = 144;
constexpr int64_t kFusedFewTokens = 80;  // in fp8, where few experts have more
constexpr int64_t kFusedMxfp4Tokens = 64;
constexpr int64_t kFusedManyMxfp4Tokens = 144;
constexpr int64_t kFusedExperts = 1024;
constexpr int64_t kFusedFp8Experts = 512;
constexpr int64_t kFusedManyMxfp4Experts = 512;
constexpr int64_t kFusedExpertsBf16 = 224;

// The most experts of a rank, of a format.
constexpr EPMOE_HD int64_t fused_most_experts(WeightFormat format) {
  if (format == WeightFormat::kFp8) return kFusedFp8Experts;
  return is_packed(format) ? kFusedExperts : kFusedExpertsBf16;
}

// Rows of the smallest full tiles of a format.
constexpr EPMOE_HD int64_t fused_tile_rows(WeightFormat format) {
  if (format == WeightFormat::kFp8) return kFusedFewTokens;
  return is_packed(format) ? kFusedMxfp4Tokens : kFusedTokens;
}

// A counter for claims, and one for each tile of rows: an expert's last tile may be smaller.
constexpr EPMOE_HD int64_t fused_counters(int64_t N, int64_t num_local_experts, int64_t tile_rows) {
  return 1 + N / tile_rows + num_local_experts;
}

// The operators hopper_gemm and hopper_gemm_weights: products of the rows of each expert, in bf16,
// on GPUs of compute capability 9.0. Rows past the last segment have no effect and no products. k,
// n: multiples of 8.
struct GroupedGemmArgs {
  const void* rows_Nk;      // contiguous, like all matrices
  const void* weights_enk;  // by rows: [e, n, k], or transposed, [e, k, n]; or null: for weights
  bool transposed;
  WeightFormat format;  // of weight_scales
  const void* grad_Nn;  // for weights
  const int32_t* ends;  // [e], the row behind each segment, gaps included; the first starts at 0
  int32_t e;
  int64_t N, n, k;
  void* out;  // out: by rows [N, n], for weights [e, n, k]
  // Of the operator hopper_gemm_mxfp4, [e, n, k / 32] of weights [e, n, k / 2]; in NVFP4 [e, n, k /
  // 16].
  const uint8_t* weight_scales;
};

// The operator invariant_linear: x [T, k] · weight [n, k]ᵀ, on GPUs, in one order of sums for any
// T.
struct InvariantLinearArgs {
  const void* x_Tk;  // contiguous, like all matrices
  const void* weight_nk;
  DType dtype;  // of all matrices
  int64_t T, n, k;
  float* parts;  // workspace [invariant_linear_parts, T, n], or null if there are 0
  void* out_Tn;  // out
};

// The operators weighted_gates and weighted_gates_backward, for training: the gated activation
// times the weight of its row. Letters as above. Gradients of weights read gaps, so gaps are not
// read here, and all outputs are 0 there.
struct WeightedGatesArgs {
  const void* gate_up_N2F;
  DType dtype;                 // of gate_up and of all gradients but those of the weights
  int64_t gate_up_stride;      // between rows
  const float* row_weights_N;  // or null: 1
  Segments segments;           // gaps included
  const int32_t*
      tokens_per_expert;  // [e], the rows of a segment before its gap; or null: there are no gaps
  int64_t N, F;
  bool interleaved;
  Gating gating;
  void* out_NF;            // out: the products, forward; backward where they are asked for, or null
  const void* grad_NF;     // backward: the gradient of the outputs, contiguous; else null
  void* grad_gate_up_N2F;  // out, backward, contiguous
  float* grad_weights_N;   // out, backward
};

// The operator weighted_rows_backward_ (CUDA), for training: gradients of rows times their weights.
// Gaps are neither read nor written, and the gradients of their weights are 0.
struct WeightedRowsArgs {
  void* grad_ND;        // in: the gradient of the products; out: that of the rows. Contiguous
  DType dtype;          // of both matrices
  const void* rows_ND;  // the factors of the weights
  int64_t rows_stride;  // between rows
  const float* row_weights_N;        // or null: 1
  Segments segments;                 // gaps included
  const int32_t* tokens_per_expert;  // as in WeightedGatesArgs
  int64_t N, D;
  float* grad_weights_N;  // out
};

// The operator scales_by_block: the scales of rows, block by block.
struct ScalesByBlockArgs {
  const float* scales_NB;
  int64_t scales_stride;  // between rows
  Segments segments;
  int64_t N, B;
  float* out_BN;       // out
  int64_t out_stride;  // between blocks, at least N
};

}  // namespace epmoe
