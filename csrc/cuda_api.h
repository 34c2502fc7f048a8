// The CUDA kernels are a library of their own, libepmoe_cuda.so, which nvcc builds without torch. This table is all
// that the operators see of it. No CUDA header and no torch header: libepmoe.so is compiled once, with or without a
// CUDA toolkit, and works with every build of torch. Errors are cudaError_t as int, 0 for success.
#pragma once
#include "args.h"
#include "exchange.h"
#include "rail.h"

struct CUstream_st;  // of CUDA

namespace epmoe::cuda {

constexpr int32_t kMaxTopK = 32;  // of route and rail_pack: one lane keeps each choice

using Stream = CUstream_st*;  // cudaStream_t

struct Api {
  const char* (*error_string)(int error);
  int (*current_device)(int* index);
  int (*order_after)(Stream stream, Stream earlier);  // what is launched on `stream` starts after `earlier`'s work
  int64_t (*permute_workspace_bytes)(int64_t S, int32_t K, int32_t num_local_experts);
  int (*route)(const RouteArgs& args, Stream stream);
  int (*permute)(const PermuteArgs& args, Stream stream);
  int (*finalize)(const FinalizeArgs& args, Stream stream);
  int (*zero_padding_rows)(const PaddingArgs& args, Stream stream);
  int (*quantize)(const QuantizeArgs& args, Stream stream);
  int (*gated_activation)(const GatedActivationArgs& args, Stream stream);
  int (*scales_by_block)(const ScalesByBlockArgs& args, Stream stream);
  int (*dequantize_mxfp4)(const DequantizeArgs& args, Stream stream);
  int (*few_rows)(const FewRowsArgs& args, Stream stream);
  int (*grouped_gemm)(const GroupedGemmArgs& args, Stream stream);
  int64_t (*invariant_linear_parts)(int64_t T, int64_t n, int64_t k);
  int (*invariant_linear)(const InvariantLinearArgs& args, Stream stream);
  int (*weighted_gates)(const WeightedGatesArgs& args, Stream stream);
  int (*unpack)(const UnpackArgs& args, Stream stream);
  int (*weighted_rows_backward)(const WeightedRowsArgs& args, Stream stream);
  int (*dispatch)(const Exchange& exchange, const DispatchArgs& args, Stream stream);
  int (*combine)(const Exchange& exchange, const CombineArgs& args, DType dtype, Stream stream);
  int (*rail_pack)(const RailPackArgs& args, Stream stream);
  int (*rail_sum)(const RailSumArgs& args, Stream stream);
  int (*rail_mark)(const RailMarkArgs& args, Stream stream);
  int (*rail_tags)(const RailTagsArgs& args, Stream stream);
};

// The one symbol of libepmoe_cuda.so that libepmoe.so looks up: `const Api* epmoe_cuda_api()`.
constexpr const char* kApiSymbol = "epmoe_cuda_api";

// What the operators call for tensors on a GPU.
struct Library {
  const Api* api;
  int32_t (*current_stream)(int32_t device, Stream* stream);  // of torch; not 0: failed
};

// Loads libepmoe_cuda.so from the folder of libepmoe.so at the first call. Throws std::runtime_error, with a sentence
// for users, if the kernels are missing or torch has no CUDA.
const Library& library();

}  // namespace epmoe::cuda
