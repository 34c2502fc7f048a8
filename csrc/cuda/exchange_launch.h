// The kernels of the exchange, as ops_exchange.cpp launches them; see launch.h.
#pragma once
#include <cuda_runtime_api.h>

#include "exchange.h"

namespace epmoe::cuda {

cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream);
cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype, cudaStream_t stream);

// Loads all kernels of combine, which the first dispatch on a device does before anything waits.
cudaError_t load_combine();

}  // namespace epmoe::cuda
