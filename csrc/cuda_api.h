// The CUDA kernels are a library of their own, libepmoe_cuda.so, which nvcc builds without torch.
// This table is all that the operators see of it. No CUDA header and no torch header: libepmoe.so
// is compiled once, with or without a CUDA toolkit, and works with every build of torch. Errors are
// cudaError_t as int, 0 for success.
#pragma once
#include "args.h"
#include "exchange.h"
#include "rail.h"

struct CUstream_st;  // of CUDA

namespace epmoe::cuda {

constexpr int32_t kMaxTopK = 32;  // of route and rail_pack: one lane keeps each choice

using Stream = CUstream_st*;  // cudaStream_t

// The functions that launch kernels: the name, and the types of the arguments in front of the
// stream. A function does not synchronise, and a graph can capture it. The operators have checked
// the arguments. Ids, counts and row indices inside tensors are unchecked, and the kernels check
// them before they become addresses.
#define EPMOE_LAUNCHES(F)                                \
  F(route, const RouteArgs&)                             \
  F(route_backward, const RouteBackwardArgs&)            \
  F(reached_rows, const ReachedRowsArgs&)                \
  F(permute, const PermuteArgs&)                         \
  F(finalize, const FinalizeArgs&)                       \
  F(zero_padding_rows, const PaddingArgs&)               \
  F(quantize, const QuantizeArgs&)                       \
  F(gated_activation, const GatedActivationArgs&)        \
  F(scales_by_block, const ScalesByBlockArgs&)           \
  F(dequantize_mxfp4, const DequantizeArgs&)             \
  F(few_rows, const FewRowsArgs&)                        \
  F(fused_experts, const FewRowsArgs&)                   \
  F(fused_experts_mxfp4, const FewRowsArgs&)             \
  F(fused_experts_many_mxfp4, const FewRowsArgs&)        \
  F(grouped_gemm, const GroupedGemmArgs&)                \
  F(mxfp4_gemm, const GroupedGemmArgs&)                  \
  F(invariant_linear, const InvariantLinearArgs&)        \
  F(weighted_gates, const WeightedGatesArgs&)            \
  F(unpack, const UnpackArgs&)                           \
  F(weighted_rows_backward, const WeightedRowsArgs&)     \
  F(dispatch, const Exchange&, const DispatchArgs&)      \
  F(combine, const Exchange&, const CombineArgs&, DType) \
  F(rail_pack, const RailPackArgs&)                      \
  F(rail_sum, const RailSumArgs&)                        \
  F(rail_mark, const RailMarkArgs&)                      \
  F(rail_tags, const RailTagsArgs&)

struct Api {
  const char* (*error_string)(int error);
  int (*current_device)(int* index);
  int (*order_after)(Stream stream,
                     Stream earlier);  // what is launched on `stream` starts after `earlier`'s work
  int (*make_stream)(int device, int priority, Stream* stream);
  bool (*end_stream)(Stream stream);  // false, and nothing happens, while it has work
  int64_t (*permute_workspace_bytes)(int64_t S, int32_t K, int32_t num_local_experts);
  int64_t (*invariant_linear_parts)(const InvariantLinearArgs& args);
#define EPMOE_POINTER(name, ...) int (*name)(__VA_ARGS__, Stream stream);
  EPMOE_LAUNCHES(EPMOE_POINTER)
#undef EPMOE_POINTER
};

// The one symbol of libepmoe_cuda.so that libepmoe.so looks up: `const Api* epmoe_cuda_api()`.
constexpr const char* kApiSymbol = "epmoe_cuda_api";

// What the operators call for tensors on a GPU.
struct Library {
  const Api* api;
  int32_t (*current_stream)(int32_t device, Stream* stream);  // of torch; not 0: failed
};

// Loads libepmoe_cuda.so from the folder of libepmoe.so at the first call. Throws
// std::runtime_error, with a sentence for users, if the kernels are missing or torch has no CUDA.
const Library& library();

}  // namespace epmoe::cuda
