// The local operators: they check and unwrap tensors, and launch. Schemas and fakes are in
// epmoe/native/ops.py.
#include "ops.h"

#include "args.h"
#include "cpu/stages.h"

namespace epmoe {
namespace {

std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k, const MaybeTensor& bias,
                                 const MaybeTensor& num_tokens, int64_t num_rows, bool sigmoid,
                                 bool renormalize, double epsilon, int64_t num_groups,
                                 int64_t top_groups, int64_t scores_per_group, double scale,
                                 bool wide_ids, const MaybeTensor& counters) {
  check_rows(logits, "logits");
  int64_t T = logits.size(0);
  int64_t E = logits.size(1);
  Tensor ids = empty_like_device(logits, {T, top_k}, wide_ids ? ScalarType::Long : ScalarType::Int);
  Tensor weights = empty_like_device(logits, {T, top_k}, ScalarType::Float);
  RouteArgs args{
      .logits_TE = logits.data_ptr(),
      .dtype = dtype_of(logits),
      .logits_stride = logits.stride(0),
      .bias_E = pointer<float>(bias, E, "bias"),
      .num_tokens = pointer<int32_t>(num_tokens, 1, "num_tokens"),
      .T = T,
      .num_rows = num_rows,
      .E = static_cast<int32_t>(E),
      .K = static_cast<int32_t>(top_k),
      .num_groups = static_cast<int32_t>(num_groups),
      .top_groups = static_cast<int32_t>(top_groups),
      .scores_per_group = static_cast<int32_t>(scores_per_group),
      .sigmoid = sigmoid,
      .renormalize = renormalize,
      .wide_ids = wide_ids,
      .epsilon = static_cast<float>(epsilon),
      .scale = static_cast<float>(scale),
      .ids_TK = ids.data_ptr(),
      .weights_TK = static_cast<float*>(weights.data_ptr()),
      .counters = pointer<int64_t>(counters, kNumCounters, "counters"),
  };
  launch(logits, args, cpu::route, &cuda::Api::route);
  return {ids, weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> permute(const Tensor& x, const Tensor& ids,
                                                   const Tensor& expert_map,
                                                   int64_t num_local_experts,
                                                   const MaybeTensor& counts, int64_t alignment,
                                                   int64_t max_rows, const MaybeTensor& counters) {
  check_rows(x, "x");
  check_rows(ids, "ids");
  int64_t S = x.size(0);
  int64_t D = x.size(1);
  int64_t K = ids.size(1);
  int64_t R = counts ? counts->numel() : 1;
  STD_TORCH_CHECK(ids.size(0) == S, "x and ids must have the same number of rows");
  STD_TORCH_CHECK(R >= 1 && S % R == 0, "the slots must divide into the sources of counts");
  Tensor rows = torch::stable::new_empty(x, {max_rows, D});
  Tensor expert_offsets = empty_like_device(ids, {num_local_experts + 1}, ScalarType::Int);
  Tensor tokens_per_expert = empty_like_device(ids, {num_local_experts}, ScalarType::Int);
  Tensor row_of_pair = empty_like_device(ids, {S, K}, ScalarType::Int);
  int64_t workspace_bytes = 0;
  if (x.is_cuda())
    workspace_bytes = cuda::library().api->permute_workspace_bytes(
        S, static_cast<int32_t>(K), static_cast<int32_t>(num_local_experts));
  Tensor workspace = empty_like_device(ids, {workspace_bytes}, ScalarType::Byte);
  PermuteArgs args{
      .x_SD = x.data_ptr(),
      .dtype = dtype_of(x),
      .x_stride_bytes = x.stride(0) * itemsize(dtype_of(x)),
      .ids_SK = ids.data_ptr(),
      .wide_ids = is_wide(ids),
      .ids_stride = ids.stride(0),
      .expert_map_P = pointer<int32_t>(expert_map, 0, "expert_map"),
      .counts_R = pointer<int32_t>(counts, R, "counts"),
      .S = S,
      .D = D,
      .K = static_cast<int32_t>(K),
      .P = static_cast<int32_t>(expert_map.numel()),
      .num_local_experts = static_cast<int32_t>(num_local_experts),
      .R = static_cast<int32_t>(R),
      .alignment = alignment,
      .max_rows = max_rows,
      .rows_ND = rows.data_ptr(),
      .expert_offsets = static_cast<int32_t*>(expert_offsets.data_ptr()),
      .tokens_per_expert = static_cast<int32_t*>(tokens_per_expert.data_ptr()),
      .row_of_pair_SK = static_cast<int32_t*>(row_of_pair.data_ptr()),
      .row_of_pair_stride = K,
      .workspace = workspace.data_ptr(),
      .counters = pointer<int64_t>(counters, kNumCounters, "counters"),
  };
  launch(x, args, cpu::permute, &cuda::Api::permute);
  return {rows, expert_offsets, tokens_per_expert, row_of_pair};
}

Tensor finalize(const Tensor& rows, const Tensor& row_of_pair, const Tensor& weights,
                const MaybeTensor& counts) {
  check_rows(rows, "rows");
  check_rows(row_of_pair, "row_of_pair");
  check_rows(weights, "weights");
  int64_t S = row_of_pair.size(0);
  int64_t K = row_of_pair.size(1);
  int64_t D = rows.size(1);
  int64_t R = counts ? counts->numel() : 1;
  STD_TORCH_CHECK(row_of_pair.scalar_type() == ScalarType::Int, "row_of_pair must be int32");
  STD_TORCH_CHECK(weights.size(0) == S && weights.size(1) == K,
                  "weights must have the shape of row_of_pair");
  STD_TORCH_CHECK(R >= 1 && S % R == 0, "the slots must divide into the sources of counts");
  Tensor partial = torch::stable::new_empty(rows, {S, D});
  FinalizeArgs args{
      .rows_ND = rows.data_ptr(),
      .dtype = dtype_of(rows),
      .rows_stride_bytes = rows.stride(0) * itemsize(dtype_of(rows)),
      .num_rows = rows.size(0),
      .row_of_pair_SK = static_cast<const int32_t*>(row_of_pair.data_ptr()),
      .row_of_pair_stride = row_of_pair.stride(0),
      .weights_SK = weights.data_ptr(),
      .weights_dtype = dtype_of(weights),
      .weights_stride = weights.stride(0),
      .counts_R = pointer<int32_t>(counts, R, "counts"),
      .S = S,
      .D = D,
      .K = static_cast<int32_t>(K),
      .R = static_cast<int32_t>(R),
      .partial_SD = partial.data_ptr(),
  };
  launch(rows, args, cpu::finalize, &cuda::Api::finalize);
  return partial;
}

void zero_padding_rows(const Tensor& x, const MaybeTensor& num_tokens, int64_t num_rows) {
  check_rows(x, "x");
  PaddingArgs args{
      .x_TD = x.data_ptr(),
      .T = x.size(0),
      .row_bytes = x.size(1) * static_cast<int64_t>(x.element_size()),
      .stride_bytes = x.stride(0) * static_cast<int64_t>(x.element_size()),
      .num_tokens = pointer<int32_t>(num_tokens, 1, "num_tokens"),
      .num_rows = num_rows,
  };
  launch(x, args, cpu::zero_padding_rows, &cuda::Api::zero_padding_rows);
}

std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& x, const MaybeTensor& num_tokens,
                                        int64_t num_rows, int64_t block) {
  check_rows(x, "x");
  STD_TORCH_CHECK(block >= 0 && (!block || block == kScaleBlock || !x.is_cuda()),
                  "block must be 0, or 128 on CUDA");
  int64_t T = x.size(0);
  int64_t D = x.size(1);
  Tensor q = empty_like_device(x, {T, D}, ScalarType::Float8_e4m3fn);
  Tensor scales = block ? empty_like_device(x, {T, ceil_div(D, block)}, ScalarType::Float)
                        : empty_like_device(x, {1}, ScalarType::Float);
  Tensor largest = empty_like_device(x, {1}, ScalarType::Int);
  QuantizeArgs args = quantize_args(x, num_tokens, num_rows, block, q);
  args.scales_TB = static_cast<float*>(scales.data_ptr());
  args.largest = static_cast<uint32_t*>(largest.data_ptr());
  launch(x, args, cpu::quantize, &cuda::Api::quantize);
  return {q, scales};
}

// Columns of a matrix of scales for N rows, so that each of its rows starts at a multiple of 16
// bytes.
int64_t padded_columns(int64_t N) { return ceil_div(N, 4) * 4; }

}  // namespace

std::tuple<Tensor, Tensor> gated_activation(const Tensor& gate_up, const Tensor& expert_offsets,
                                            const MaybeTensor& tokens_per_expert,
                                            const MaybeTensor& bias, bool interleaved, double limit,
                                            double alpha, double up_offset, bool quantize,
                                            const MaybeTensor& tensor_scales) {
  check_rows(gate_up, "gate_up");
  Segments segments = segments_of(expert_offsets, tokens_per_expert);
  int64_t N = gate_up.size(0);
  int64_t F = gate_up.size(1) / 2;
  int64_t e = segments.num_local_experts;
  int64_t blocks = ceil_div(F, kScaleBlock);
  int64_t columns = quantize ? padded_columns(N) : 0;
  STD_TORCH_CHECK(gate_up.size(1) == 2 * F && dtype_of(gate_up) != DType::kFloat8E4M3,
                  "gate_up must have as many gates as ups, in float32, float16 or bfloat16");
  STD_TORCH_CHECK(N * blocks <= INT32_MAX, "gate_up has too many rows");
  STD_TORCH_CHECK(!bias || is_whole(*bias, gate_up.scalar_type(), {e, 2 * F}),
                  "bias must be contiguous [e, 2F] in the dtype of gate_up");
  Tensor out = empty_like_device(gate_up, {N, F},
                                 quantize ? ScalarType::Float8_e4m3fn : gate_up.scalar_type());
  Tensor scales = empty_like_device(gate_up, {blocks, columns}, ScalarType::Float);
  GatedActivationArgs args{
      .gate_up_N2F = gate_up.data_ptr(),
      .dtype = dtype_of(gate_up),
      .gate_up_stride = gate_up.stride(0),
      .segments = segments,
      .bias_e2F = bias ? bias->data_ptr() : nullptr,
      .N = N,
      .F = F,
      .interleaved = interleaved,
      .gating = gating_of(limit, alpha, up_offset),
      .out_NF = out.data_ptr(),
      .scales_BN = quantize ? static_cast<float*>(scales.data_ptr()) : nullptr,
      .scales_stride = columns,
      .tensor_scales = pointer<float>(tensor_scales, kTensorScales * e, "tensor_scales"),
  };
  launch(gate_up, args, cpu::gated_activation, &cuda::Api::gated_activation);
  return {out, scales};
}

namespace {

Tensor scales_by_block(const Tensor& scales, const Tensor& expert_offsets,
                       const MaybeTensor& tokens_per_expert) {
  check_rows(scales, "scales");
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Float, "scales must be float32");
  int64_t N = scales.size(0);
  int64_t B = scales.size(1);
  STD_TORCH_CHECK(N * B <= INT32_MAX, "scales has too many rows");
  Tensor out = empty_like_device(scales, {B, padded_columns(N)}, ScalarType::Float);
  ScalesByBlockArgs args{
      .scales_NB = static_cast<const float*>(scales.data_ptr()),
      .scales_stride = scales.stride(0),
      .segments = segments_of(expert_offsets, tokens_per_expert),
      .N = N,
      .B = B,
      .out_BN = static_cast<float*>(out.data_ptr()),
      .out_stride = out.size(1),
  };
  launch(scales, args, cpu::scales_by_block, &cuda::Api::scales_by_block);
  return out;
}

Tensor dequantize_mxfp4(const Tensor& codes, const Tensor& scales) {
  int64_t e = codes.size(0);
  int64_t n = codes.size(1);
  int64_t k = 2 * codes.size(2);
  Tensor out = empty_like_device(codes, {e, n, k}, ScalarType::BFloat16);
  const WeightFormat format = packed_format(scales);
  DequantizeArgs args{
      .codes = codes.data_ptr(),
      .scales = mxfp4_scales(codes, scales),
      .num_groups = e * n * k / group_of(format),
      .out = out.data_ptr(),
      .format = format,
  };
  launch(codes, args, &cuda::Api::dequantize_mxfp4);
  return out;
}

// Checks weights [e, n, k] of few_rows, and returns their scales, or null. Kernels read weights,
// packed scales and biases 16 bytes at a time.
const void* few_rows_scales(const Tensor& weights, const MaybeTensor& scales, int64_t e, int64_t n,
                            int64_t k, WeightFormat format) {
  constexpr ScalarType kTypes[] = {ScalarType::BFloat16, ScalarType::Float8_e4m3fn,
                                   ScalarType::Float4_e2m1fn_x2, ScalarType::Float4_e2m1fn_x2};
  const bool packed = is_packed(format);
  STD_TORCH_CHECK(is_whole(weights, kTypes[static_cast<int>(format)], {e, n, packed ? k / 2 : k}) &&
                      is_aligned(weights),
                  "weights must be contiguous [e, n, k], aligned to 16 bytes, in one dtype");
  STD_TORCH_CHECK(scales.has_value() == (format != WeightFormat::kBf16),
                  "weights must have scales, but bfloat16 none");
  if (!packed) return pointer<float>(scales, e * (n / kScaleBlock) * (k / kScaleBlock), "scales");
  STD_TORCH_CHECK(scales->element_size() == 1 && packed_format(*scales) == format &&
                      is_whole(*scales, scales->scalar_type(), {e, n, k / group_of(format)}) &&
                      is_aligned(*scales),
                  "scales must be contiguous [e, n, k / 32] of MXFP4, or [e, n, k / 16] of NVFP4, "
                  "aligned to 16 bytes");
  return scales->data_ptr();
}

const void* few_rows_bias(const MaybeTensor& bias, int64_t e, int64_t n) {
  STD_TORCH_CHECK(!bias || (is_whole(*bias, ScalarType::BFloat16, {e, n}) && is_aligned(*bias)),
                  "a bias must be contiguous bfloat16 [e, n], aligned to 16 bytes");
  return bias ? bias->data_ptr() : nullptr;
}

// Arguments of few_rows and fused_experts, and the tensors that the operator makes for them.
struct ExpertsCall {
  FewRowsArgs args;
  Tensor h, h_scales, out;
};

// Checks all tensors of a call. Rows are fp8 with fp8 weights, and with MXFP4 where they have
// scales. `by_blocks`: h in fp8 has a scale for each block of kScaleBlock, else powers of two, or
// with packed weights h is bf16.
ExpertsCall experts_call(const Tensor& rows, const MaybeTensor& row_scales, const Tensor& gate_up,
                         const MaybeTensor& gate_up_scales, const MaybeTensor& gate_up_bias,
                         const Tensor& down, const MaybeTensor& down_scales,
                         const MaybeTensor& down_bias, const Tensor& expert_offsets,
                         const MaybeTensor& tokens_per_expert, bool interleaved, double limit,
                         double alpha, double up_offset, bool by_blocks) {
  Segments segments = segments_of(expert_offsets, tokens_per_expert);
  const bool packed = down.scalar_type() == ScalarType::Float4_e2m1fn_x2;
  const bool of_fp8 = !packed && dtype_of(down) == DType::kFloat8E4M3;
  const bool fp8 = of_fp8 || (packed && row_scales.has_value());
  WeightFormat format = WeightFormat::kBf16;
  if (packed) format = down_scales ? packed_format(*down_scales) : WeightFormat::kMxfp4;
  if (of_fp8) format = WeightFormat::kFp8;
  int64_t N = rows.size(0);
  int64_t D = rows.size(1);
  int64_t F = down.size(2) * (packed ? 2 : 1);
  int64_t e = segments.num_local_experts;
  int64_t step = kScaleBlock / 2;
  if (of_fp8) step = kScaleBlock;
  if (packed) step = kMxfp4Group;  // 16 bytes, also of NVFP4
  // TMA reads the rows of MXFP4, which may have a stride.
  const bool whole_rows =
      packed && fp8 ? rows.stride(1) == 1 && rows.stride(0) % 16 == 0 : rows.is_contiguous();
  STD_TORCH_CHECK(whole_rows && is_aligned(rows) &&
                      dtype_of(rows) == (fp8 ? DType::kFloat8E4M3 : DType::kBFloat16),
                  "rows must be contiguous, aligned to 16 bytes, in float8_e4m3fn with such "
                  "weights, else bfloat16");
  STD_TORCH_CHECK(D > 0 && F > 0 && D % step == 0 && F % step == 0,
                  "D and F must be multiples of 128 in fp8, 32 in MXFP4 and NVFP4, else 64");
  STD_TORCH_CHECK(fp8 == row_scales.has_value(), "rows in fp8, and no others, come with scales");
  STD_TORCH_CHECK(N <= INT32_MAX, "there are too many rows");
  if (fp8) {
    check_rows(*row_scales, "row_scales");
    STD_TORCH_CHECK(row_scales->scalar_type() == ScalarType::Float && row_scales->size(0) == N &&
                        row_scales->size(1) == ceil_div(D, kScaleBlock),
                    "row_scales must be float32 [N, D / 128]");
  }
  const bool fp8_h = of_fp8 || (fp8 && by_blocks);
  Tensor h = empty_like_device(rows, {N, F}, fp8_h ? rows.scalar_type() : ScalarType::BFloat16);
  int64_t columns = padded_columns(fp8_h && by_blocks ? N : 0);
  Tensor h_scales =
      columns ? empty_like_device(rows, {ceil_div(F, kScaleBlock), columns}, ScalarType::Float)
              : empty_like_device(rows, {fp8_h ? N : 0, F / 16}, ScalarType::Byte);
  Tensor out = empty_like_device(rows, {N, D}, ScalarType::BFloat16);
  FewRowsArgs args{
      .format = format,
      .token_tiles = 0,
      .rows_ND = rows.data_ptr(),
      .rows_stride = rows.stride(0),
      .row_scales_NB = fp8 ? static_cast<const float*>(row_scales->data_ptr()) : nullptr,
      .row_scales_stride = fp8 ? row_scales->stride(0) : 0,
      .gate_up_e2FD = gate_up.data_ptr(),
      .gate_up_scales = few_rows_scales(gate_up, gate_up_scales, e, 2 * F, D, format),
      .gate_up_bias = few_rows_bias(gate_up_bias, e, 2 * F),
      .down_eDF = down.data_ptr(),
      .down_scales = few_rows_scales(down, down_scales, e, D, F, format),
      .down_bias = few_rows_bias(down_bias, e, D),
      .segments = segments,
      .N = N,
      .D = D,
      .F = F,
      .interleaved = interleaved,
      .gating = gating_of(limit, alpha, up_offset),
      .h_NF = h.data_ptr(),
      .exponents_N = static_cast<uint8_t*>(h_scales.data_ptr()),
      .h_scales_BN = static_cast<float*>(h_scales.data_ptr()),
      .h_scales_stride = columns,
      .counters = nullptr,
      .num_counters = 0,
      .out_ND = out.data_ptr(),
      .gate_up_N2F = nullptr,
      .tensor_scales = nullptr,
  };
  return {args, h, h_scales, out};
}

Tensor few_rows(const Tensor& rows, const MaybeTensor& row_scales, const Tensor& gate_up,
                const MaybeTensor& gate_up_scales, const MaybeTensor& gate_up_bias,
                const Tensor& down, const MaybeTensor& down_scales, const MaybeTensor& down_bias,
                const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert,
                bool interleaved, double limit, double alpha, double up_offset, int64_t token_tiles,
                const MaybeTensor& tensor_scales) {
  const bool packed = down.scalar_type() == ScalarType::Float4_e2m1fn_x2;
  ExpertsCall call = experts_call(rows, row_scales, gate_up, gate_up_scales, gate_up_bias, down,
                                  down_scales, down_bias, expert_offsets, tokens_per_expert,
                                  interleaved, limit, alpha, up_offset, !packed && token_tiles > 1);
  STD_TORCH_CHECK(token_tiles == 1 || token_tiles == 4 || token_tiles == (packed ? 2 : 8),
                  "token_tiles must be 1 or 4, or 2 with MXFP4 and NVFP4, else 8");
  STD_TORCH_CHECK((call.args.format == WeightFormat::kNvfp4) == tensor_scales.has_value(),
                  "weights in NVFP4, and no others, have tensor scales");
  call.args.tensor_scales = pointer<float>(
      tensor_scales, kTensorScales * call.args.segments.num_local_experts, "tensor_scales");
  call.args.token_tiles = static_cast<uint8_t>(token_tiles);
  launch(rows, call.args, &cuda::Api::few_rows);
  return call.out;
}

// Launches the experts in one kernel. `many_rows` chooses between two of MXFP4, which take as many
// counters.
void launch_fused(const Tensor& rows, FewRowsArgs& args, bool many_rows = false) {
  const int64_t e = args.segments.num_local_experts;
  STD_TORCH_CHECK(args.format != WeightFormat::kNvfp4, "weights must not be NVFP4");
  const bool packed = args.format == WeightFormat::kMxfp4;
  STD_TORCH_CHECK(!packed || args.row_scales_NB, "rows must be float8_e4m3fn with MXFP4");
  STD_TORCH_CHECK(!packed || (args.D | args.F) % (kScaleBlock / 2) == 0,
                  "D and F must be multiples of 64 in MXFP4");
  STD_TORCH_CHECK(e <= fused_most_experts(args.format), "there are too many experts");
  args.num_counters = fused_counters(args.N, e, fused_tile_rows(args.format));
  // A tile's number is an int32.
  const int64_t tiles_of_rows = ceil_div(args.F, kScaleBlock) + ceil_div(args.D, kScaleBlock);
  STD_TORCH_CHECK(args.num_counters <= INT32_MAX / tiles_of_rows, "there are too many rows");
  Tensor counters = empty_like_device(rows, {args.num_counters}, ScalarType::Int);
  args.counters = static_cast<int32_t*>(counters.data_ptr());
  const bool many = many_rows && e <= kFusedManyMxfp4Experts;
  const auto of_mxfp4 =
      many ? &cuda::Api::fused_experts_many_mxfp4 : &cuda::Api::fused_experts_mxfp4;
  launch(rows, args, packed ? of_mxfp4 : &cuda::Api::fused_experts);
}

Tensor fused_experts(const Tensor& rows, const MaybeTensor& row_scales, const Tensor& gate_up,
                     const MaybeTensor& gate_up_scales, const MaybeTensor& gate_up_bias,
                     const Tensor& down, const MaybeTensor& down_scales,
                     const MaybeTensor& down_bias, const Tensor& expert_offsets,
                     const MaybeTensor& tokens_per_expert, bool interleaved, double limit,
                     double alpha, double up_offset, bool many_rows) {
  ExpertsCall call = experts_call(rows, row_scales, gate_up, gate_up_scales, gate_up_bias, down,
                                  down_scales, down_bias, expert_offsets, tokens_per_expert,
                                  interleaved, limit, alpha, up_offset, /*by_blocks=*/true);
  launch_fused(rows, call.args, many_rows);
  return call.out;
}

// The same for training, in bf16: also the products of gate and up, which its backward needs.
std::tuple<Tensor, Tensor> fused_experts_of_training(const Tensor& rows, const Tensor& w_gate_up,
                                                     const Tensor& w_down, const MaybeTensor& bias,
                                                     const Tensor& expert_offsets,
                                                     const MaybeTensor& tokens_per_expert,
                                                     bool interleaved, double limit, double alpha,
                                                     double up_offset) {
  ExpertsCall call = experts_call(rows, {}, w_gate_up, {}, bias, w_down, {}, {}, expert_offsets,
                                  tokens_per_expert, interleaved, limit, alpha, up_offset,
                                  /*by_blocks=*/true);
  STD_TORCH_CHECK(call.args.format == WeightFormat::kBf16, "weights must be bfloat16");
  Tensor gate_up = empty_like_device(rows, {call.args.N, 2 * call.args.F}, ScalarType::BFloat16);
  call.args.gate_up_N2F = gate_up.data_ptr();
  launch_fused(rows, call.args);
  return {call.out, gate_up};
}

Tensor invariant_linear(const Tensor& x, const Tensor& weight) {
  int64_t T = x.size(0);
  int64_t n = weight.size(0);
  int64_t k = x.size(1);
  STD_TORCH_CHECK(is_whole(x, x.scalar_type(), {T, k}) &&
                      is_whole(weight, x.scalar_type(), {n, k}) &&
                      dtype_of(x) != DType::kFloat8E4M3,
                  "x must be contiguous [T, k] and weight [n, k], in one dtype");
  Tensor out = torch::stable::new_empty(x, {T, n});
  launch_on_device_of(x, [&](const cuda::Api& api, cuda::Stream stream) {
    InvariantLinearArgs args{
        .x_Tk = x.data_ptr(),
        .weight_nk = weight.data_ptr(),
        .dtype = dtype_of(x),
        .T = T,
        .n = n,
        .k = k,
        .out_Tn = out.data_ptr(),
    };
    int64_t parts = api.invariant_linear_parts(args);  // by the multiprocessors of this device
    Tensor workspace = empty_like_device(x, {parts, T, n}, ScalarType::Float);
    if (parts) args.parts = static_cast<float*>(workspace.data_ptr());
    return api.invariant_linear(args, stream);
  });
  return out;
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("route", TORCH_BOX(&route));
  library.impl("permute", TORCH_BOX(&permute));
  library.impl("finalize", TORCH_BOX(&finalize));
  library.impl("zero_padding_rows_", TORCH_BOX(&zero_padding_rows));
  library.impl("quantize_fp8", TORCH_BOX(&quantize_fp8));
  library.impl("gated_activation", TORCH_BOX(&gated_activation));
  library.impl("scales_by_block", TORCH_BOX(&scales_by_block));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) {
  implement(library);
  library.impl("dequantize_mxfp4", TORCH_BOX(&dequantize_mxfp4));
  library.impl("few_rows", TORCH_BOX(&few_rows));
  library.impl("fused_experts", TORCH_BOX(&fused_experts));
  library.impl("fused_experts_of_training", TORCH_BOX(&fused_experts_of_training));
  library.impl("invariant_linear", TORCH_BOX(&invariant_linear));
}

}  // namespace epmoe
