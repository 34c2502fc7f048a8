// The CUDA kernels, as the table in cuda_api.cu offers them to the operators.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda_api.h"

namespace epmoe::cuda {

#define EPMOE_DECLARATION(name, ...) cudaError_t name(__VA_ARGS__, cudaStream_t stream);
EPMOE_LAUNCHES(EPMOE_DECLARATION)
#undef EPMOE_DECLARATION
int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts);
int64_t invariant_linear_parts(const InvariantLinearArgs& args);

// Loads all kernels of combine. The first dispatch on a device calls it before any kernel waits.
cudaError_t load_combine();

}  // namespace epmoe::cuda
