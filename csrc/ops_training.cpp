// The operators of training: they check and unwrap tensors, and launch. Schemas and fakes are in
// epmoe/native/ops.py.
#include "cpu/stages.h"
#include "ops.h"

namespace epmoe {
namespace {

Tensor route_backward(const Tensor& grad_weights, const Tensor& logits, const Tensor& ids,
                      const Tensor& weights, bool sigmoid, bool renormalize, double epsilon,
                      double scale) {
  check_rows(logits, "logits");
  int64_t T = logits.size(0), E = logits.size(1), K = ids.size(1);
  STD_TORCH_CHECK(
      dtype_of(logits) != DType::kFloat8E4M3 && is_whole(ids, ids.scalar_type(), {T, K}),
      "logits must be float32, float16 or bfloat16, and ids contiguous [T, K]");
  STD_TORCH_CHECK(!logits.is_cuda() || K <= cuda::kMaxTopK, "a warp has at most 32 choices");
  Tensor grad_logits = empty_like_device(logits, {T, E}, logits.scalar_type());
  RouteBackwardArgs args{
      .grad_weights_TK = pointer<float>(grad_weights, T * K, "grad_weights"),
      .logits_TE = logits.data_ptr(),
      .dtype = dtype_of(logits),
      .logits_stride = logits.stride(0),
      .ids_TK = ids.data_ptr(),
      .weights_TK = pointer<float>(weights, T * K, "weights"),
      .T = T,
      .E = static_cast<int32_t>(E),
      .K = static_cast<int32_t>(K),
      .sigmoid = sigmoid,
      .renormalize = renormalize,
      .wide_ids = is_wide(ids),
      .epsilon = epsilon,
      .scale = scale,
      .grad_logits_TE = grad_logits.data_ptr(),
  };
  if (T) launch(logits, args, cpu::route_backward, &cuda::Api::route_backward);
  return grad_logits;
}

Tensor reached_rows(const Tensor& x, const Tensor& grad) {
  check_rows(x, "x");
  int64_t T = x.size(0), D = x.size(1), E = grad.size(1);
  STD_TORCH_CHECK(dtype_of(x) != DType::kFloat8E4M3 && dtype_of(grad) != DType::kFloat8E4M3 &&
                      is_whole(grad, grad.scalar_type(), {T, E}),
                  "x and grad must be float32, float16 or bfloat16, and grad contiguous [T, E]");
  Tensor out = empty_like_device(x, {T, D}, grad.scalar_type());
  ReachedRowsArgs args{
      .x_TD = x.data_ptr(),
      .x_dtype = dtype_of(x),
      .x_stride = x.stride(0),
      .grad_TE = grad.data_ptr(),
      .dtype = dtype_of(grad),
      .T = T,
      .E = E,
      .D = D,
      .out_TD = out.data_ptr(),
  };
  if (T) launch(x, args, cpu::reached_rows, &cuda::Api::reached_rows);
  return out;
}

WeightedGatesArgs weighted_gates_args(const Tensor& gate_up, const MaybeTensor& row_weights,
                                      const Tensor& expert_offsets,
                                      const MaybeTensor& tokens_per_expert, bool interleaved,
                                      double limit, double alpha, double up_offset) {
  check_rows(gate_up, "gate_up");
  Segments segments = segments_of(expert_offsets, std::nullopt);
  int64_t N = gate_up.size(0), F = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) == 2 * F && dtype_of(gate_up) != DType::kFloat8E4M3,
                  "gate_up must have as many gates as ups, in float32, float16 or bfloat16");
  STD_TORCH_CHECK(N <= INT32_MAX, "gate_up has too many rows");
  return {
      .gate_up_N2F = gate_up.data_ptr(),
      .dtype = dtype_of(gate_up),
      .gate_up_stride = gate_up.stride(0),
      .row_weights_N = pointer<float>(row_weights, N, "row_weights"),
      .segments = segments,
      .tokens_per_expert =
          pointer<int32_t>(tokens_per_expert, segments.num_local_experts, "tokens_per_expert"),
      .N = N,
      .F = F,
      .interleaved = interleaved,
      .gating = gating_of(limit, alpha, up_offset),
  };
}

Tensor weighted_gates(const Tensor& gate_up, const MaybeTensor& row_weights,
                      const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert,
                      bool interleaved, double limit, double alpha, double up_offset) {
  auto args = weighted_gates_args(gate_up, row_weights, expert_offsets, tokens_per_expert,
                                  interleaved, limit, alpha, up_offset);
  Tensor out = empty_like_device(gate_up, {args.N, args.F}, gate_up.scalar_type());
  args.out_NF = out.data_ptr();
  launch(gate_up, args, cpu::weighted_gates, &cuda::Api::weighted_gates);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> weighted_gates_backward(
    const Tensor& grad, const Tensor& gate_up, const MaybeTensor& row_weights,
    const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert, bool interleaved,
    double limit, double alpha, double up_offset, bool outputs) {
  auto args = weighted_gates_args(gate_up, row_weights, expert_offsets, tokens_per_expert,
                                  interleaved, limit, alpha, up_offset);
  STD_TORCH_CHECK(is_whole(grad, gate_up.scalar_type(), {args.N, args.F}),
                  "grad must be contiguous [N, F] in the dtype of gate_up");
  Tensor grad_gate_up = empty_like_device(gate_up, {args.N, 2 * args.F}, gate_up.scalar_type());
  Tensor grad_weights = empty_like_device(gate_up, {args.N}, ScalarType::Float);
  Tensor out = empty_like_device(gate_up, {outputs ? args.N : 0, args.F}, gate_up.scalar_type());
  args.grad_NF = grad.data_ptr();
  args.grad_gate_up_N2F = grad_gate_up.data_ptr();
  args.grad_weights_N = static_cast<float*>(grad_weights.data_ptr());
  if (outputs) args.out_NF = out.data_ptr();
  if (args.N * args.F) launch(gate_up, args, cpu::weighted_gates, &cuda::Api::weighted_gates);
  return {grad_gate_up, grad_weights, out};
}

constexpr WireTraits kPacked = wire(WireFormat::kPackedFp8);

Tensor pack_fp8(const Tensor& x, const MaybeTensor& num_tokens, int64_t num_rows) {
  check_rows(x, "x");
  int64_t T = x.size(0), D = x.size(1);
  STD_TORCH_CHECK(dtype_of(x) != kPacked.element && D % kPacked.block == 0,
                  "x must be no fp8, in whole blocks of 128");
  Tensor packed = empty_like_device(x, {T, kPacked.packed_row_bytes(D)}, ScalarType::Float8_e4m3fn);
  launch(x, quantize_args(x, num_tokens, num_rows, kPacked.block, packed), cpu::quantize,
         &cuda::Api::quantize);
  return packed;
}

Tensor unpack_fp8(const Tensor& packed, const Tensor& like, const Tensor& expert_offsets) {
  STD_TORCH_CHECK(like.dim() == 2 && dtype_of(like) != DType::kFloat8E4M3,
                  "like must be 2-D and no fp8");
  int64_t N = packed.size(0), D = like.size(1);
  STD_TORCH_CHECK(is_whole(packed, ScalarType::Float8_e4m3fn, {N, kPacked.packed_row_bytes(D)}) &&
                      is_aligned(packed) && D % kPacked.block == 0 && N <= INT32_MAX,
                  "packed must hold rows as pack_fp8 makes them, aligned to 16 bytes");
  Tensor rows = empty_like_device(like, {N, D}, like.scalar_type());
  UnpackArgs args{
      .packed_N = packed.data_ptr(),
      .segments = segments_of(expert_offsets, std::nullopt),
      .N = N,
      .D = D,
      .rows_ND = rows.data_ptr(),
      .dtype = dtype_of(like),
  };
  launch(packed, args, cpu::unpack, &cuda::Api::unpack);
  return rows;
}

Tensor weighted_rows_backward(Tensor grad, const Tensor& rows, const MaybeTensor& row_weights,
                              const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert) {
  check_rows(rows, "rows");
  Segments segments = segments_of(expert_offsets, std::nullopt);
  int64_t N = rows.size(0), D = rows.size(1);
  STD_TORCH_CHECK(dtype_of(rows) != DType::kFloat8E4M3 && N <= INT32_MAX,
                  "rows must be float32, float16 or bfloat16, and fewer than 2^31");
  STD_TORCH_CHECK(is_whole(grad, rows.scalar_type(), {N, D}),
                  "grad must be contiguous [N, D] in the dtype of rows");
  Tensor grad_weights = empty_like_device(rows, {N}, ScalarType::Float);
  WeightedRowsArgs args{
      .grad_ND = grad.data_ptr(),
      .dtype = dtype_of(rows),
      .rows_ND = rows.data_ptr(),
      .rows_stride = rows.stride(0),
      .row_weights_N = pointer<float>(row_weights, N, "row_weights"),
      .segments = segments,
      .tokens_per_expert =
          pointer<int32_t>(tokens_per_expert, segments.num_local_experts, "tokens_per_expert"),
      .N = N,
      .D = D,
      .grad_weights_N = static_cast<float*>(grad_weights.data_ptr()),
  };
  launch(rows, args, &cuda::Api::weighted_rows_backward);
  return grad_weights;
}

// Whether TMA can read the matrix: bf16, in lines of multiples of 16 bytes.
void check_for_tma(const Tensor& matrix, const char* name) {
  STD_TORCH_CHECK(matrix.scalar_type() == ScalarType::BFloat16 && matrix.size(-1) % 8 == 0 &&
                      is_aligned(matrix),
                  name, " must be bfloat16 of multiples of 8, aligned to 16 bytes");
}

GroupedGemmArgs grouped_gemm_args(const Tensor& rows, const Tensor& ends) {
  check_for_tma(rows, "rows");
  STD_TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.size(0) <= INT32_MAX,
                  "rows must be contiguous [N, k]");
  return {
      .rows_Nk = rows.data_ptr(),
      .ends = pointer<int32_t>(ends, 0, "ends"),
      .e = static_cast<int32_t>(ends.numel()),
      .N = rows.size(0),
      .k = rows.size(1),
  };
}

Tensor grouped_gemm(GroupedGemmArgs& args, const Tensor& rows,
                    std::initializer_list<int64_t> shape) {
  Tensor out = empty_like_device(rows, shape, ScalarType::BFloat16);
  args.out = out.data_ptr();
  launch(rows, args, args.weight_scales ? &cuda::Api::mxfp4_gemm : &cuda::Api::grouped_gemm);
  return out;
}

Tensor hopper_gemm(const Tensor& rows, const Tensor& weights, const Tensor& ends) {
  GroupedGemmArgs args = grouped_gemm_args(rows, ends);
  check_for_tma(weights, "weights");
  STD_TORCH_CHECK(weights.dim() == 3 && weights.size(0) == args.e && weights.size(2) == args.k &&
                      weights.size(1) % 8 == 0,
                  "weights must be [e, multiple of 8, k]");
  args.weights_enk = weights.data_ptr(), args.n = weights.size(1),
  args.transposed = !weights.is_contiguous();
  STD_TORCH_CHECK(!args.transposed || (weights.stride(1) == 1 && weights.stride(2) == args.n &&
                                       (weights.stride(0) == args.n * args.k || args.e == 1)),
                  "weights must be contiguous, or transposed so");
  return grouped_gemm(args, rows, {args.N, args.n});
}

Tensor hopper_gemm_mxfp4(const Tensor& rows, const Tensor& codes, const Tensor& scales,
                         const Tensor& ends) {
  GroupedGemmArgs args = grouped_gemm_args(rows, ends);
  args.weights_enk = codes.data_ptr(), args.n = codes.size(1),
  args.weight_scales = mxfp4_scales(codes, scales), args.format = packed_format(scales);
  STD_TORCH_CHECK(codes.size(0) == args.e && 2 * codes.size(2) == args.k && args.n % 32 == 0 &&
                      args.k % 64 == 0 && is_aligned(scales),
                  "weights must be [e, multiple of 32, k], k a multiple of 64, and their scales "
                  "aligned to 16 bytes");
  return grouped_gemm(args, rows, {args.N, args.n});
}

Tensor hopper_gemm_weights(const Tensor& grad, const Tensor& rows, const Tensor& ends) {
  GroupedGemmArgs args = grouped_gemm_args(rows, ends);
  check_for_tma(grad, "grad");
  STD_TORCH_CHECK(grad.dim() == 2 && grad.is_contiguous() && grad.size(0) == args.N,
                  "grad must be contiguous [N, n]");
  args.grad_Nn = grad.data_ptr(), args.n = grad.size(1);
  return grouped_gemm(args, rows, {args.e, args.n, args.k});
}

// The ends of segments, of their offsets [e + 1].
Tensor ends_of(Tensor expert_offsets) {
  return torch::stable::narrow(expert_offsets, 0, 1, expert_offsets.size(0) - 1);
}

// The next two are the experts of training, several launches in one call of the host.
std::tuple<Tensor, Tensor> hopper_experts(const Tensor& rows, const Tensor& w_gate_up,
                                          const Tensor& w_down, const MaybeTensor& bias,
                                          const Tensor& expert_offsets,
                                          const MaybeTensor& tokens_per_expert, bool interleaved,
                                          double limit, double alpha, double up_offset) {
  Tensor ends = ends_of(expert_offsets);
  Tensor gate_up = hopper_gemm(rows, w_gate_up, ends);
  auto [activated, _] =
      gated_activation(gate_up, expert_offsets, tokens_per_expert, bias, interleaved, limit, alpha,
                       up_offset, false, MaybeTensor{});
  return {hopper_gemm(activated, w_down, ends), gate_up};
}

// Without rows w_gate_up has no gradient, and without w_gate_up rows have none: these outputs are
// empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hopper_experts_backward(
    const Tensor& grad, const MaybeTensor& rows, const Tensor& gate_up,
    const MaybeTensor& row_weights, const MaybeTensor& w_gate_up, const Tensor& w_down,
    const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert, bool interleaved,
    double limit, double alpha, double up_offset, bool needs_down) {
  Tensor ends = ends_of(expert_offsets);
  Tensor none = torch::stable::new_empty(grad, {0});
  Tensor grad_activated = hopper_gemm(grad, torch::stable::transpose(w_down, 1, 2), ends);
  auto [grad_gate_up, grad_weights, weighted] =
      weighted_gates_backward(grad_activated, gate_up, row_weights, expert_offsets,
                              tokens_per_expert, interleaved, limit, alpha, up_offset, needs_down);
  Tensor grad_down = needs_down ? hopper_gemm_weights(grad, weighted, ends) : none;
  Tensor grad_rows = none;
  if (w_gate_up)
    grad_rows = hopper_gemm(grad_gate_up, torch::stable::transpose(*w_gate_up, 1, 2), ends);
  Tensor of_gate_up = rows ? hopper_gemm_weights(grad_gate_up, *rows, ends) : none;
  return {grad_gate_up, grad_weights, grad_rows, of_gate_up, grad_down};
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("route_backward", TORCH_BOX(&route_backward));
  library.impl("reached_rows", TORCH_BOX(&reached_rows));
  library.impl("weighted_gates", TORCH_BOX(&weighted_gates));
  library.impl("weighted_gates_backward", TORCH_BOX(&weighted_gates_backward));
  library.impl("pack_fp8", TORCH_BOX(&pack_fp8));
  library.impl("unpack_fp8", TORCH_BOX(&unpack_fp8));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) {
  implement(library);
  library.impl("hopper_gemm", TORCH_BOX(&hopper_gemm));
  library.impl("hopper_gemm_mxfp4", TORCH_BOX(&hopper_gemm_mxfp4));
  library.impl("hopper_gemm_weights", TORCH_BOX(&hopper_gemm_weights));
  library.impl("hopper_experts", TORCH_BOX(&hopper_experts));
  library.impl("hopper_experts_backward", TORCH_BOX(&hopper_experts_backward));
  library.impl("weighted_rows_backward_",
               TORCH_BOX(&weighted_rows_backward));  // CPU: epmoe/native/ops.py
}

}  // namespace epmoe
