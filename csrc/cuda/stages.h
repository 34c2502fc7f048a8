// The CUDA kernels, as the table in cuda_api.cu offers them to the operators: launched on a stream, without
// synchronising, capturable in a graph. The operators have checked the arguments. Ids, counts and row indices inside
// tensors are unchecked, and the kernels check them before they become addresses.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda_api.h"

namespace epmoe::cuda {

cudaError_t route(const RouteArgs& args, cudaStream_t stream);
int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts);
cudaError_t permute(const PermuteArgs& args, cudaStream_t stream);
cudaError_t finalize(const FinalizeArgs& args, cudaStream_t stream);
cudaError_t zero_padding_rows(const PaddingArgs& args, cudaStream_t stream);
cudaError_t quantize(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t gated_activation(const GatedActivationArgs& args, cudaStream_t stream);
cudaError_t scales_by_block(const ScalesByBlockArgs& args, cudaStream_t stream);
cudaError_t dequantize_mxfp4(const DequantizeArgs& args, cudaStream_t stream);
cudaError_t few_rows(const FewRowsArgs& args, cudaStream_t stream);
cudaError_t grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream);
int64_t invariant_linear_parts(int64_t T, int64_t n, int64_t k);
cudaError_t invariant_linear(const InvariantLinearArgs& args, cudaStream_t stream);
cudaError_t weighted_gates(const WeightedGatesArgs& args, cudaStream_t stream);
cudaError_t unpack(const UnpackArgs& args, cudaStream_t stream);
cudaError_t weighted_rows_backward(const WeightedRowsArgs& args, cudaStream_t stream);
cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream);
cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype, cudaStream_t stream);
cudaError_t rail_pack(const RailPackArgs& args, cudaStream_t stream);
cudaError_t rail_sum(const RailSumArgs& args, cudaStream_t stream);
cudaError_t rail_mark(const RailMarkArgs& args, cudaStream_t stream);
cudaError_t rail_tags(const RailTagsArgs& args, cudaStream_t stream);

// Loads all kernels of combine. The first dispatch on a device calls it before any kernel waits.
cudaError_t load_combine();

}  // namespace epmoe::cuda
