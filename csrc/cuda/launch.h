// The CUDA kernels, as ops.cpp launches them: on a stream, without synchronising, capturable in a graph. Arguments have
// been checked there; ids, counts and row indices inside tensors have not, and are checked before they become
// addresses.
#pragma once
#include <cuda_runtime_api.h>

#include "args.h"

namespace epmoe::cuda {

constexpr int32_t kMaxTopK = 32;  // of route: one lane keeps each choice

cudaError_t route(const RouteArgs& args, cudaStream_t stream);

int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts);
cudaError_t permute(const PermuteArgs& args, cudaStream_t stream);

cudaError_t finalize(const FinalizeArgs& args, cudaStream_t stream);

cudaError_t zero_padding_rows(const PaddingArgs& args, cudaStream_t stream);
cudaError_t quantize(const QuantizeArgs& args, cudaStream_t stream);

}  // namespace epmoe::cuda
