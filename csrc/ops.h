// Operators that other operators call, with the arguments of their schemas (epmoe/native/ops.py).
#pragma once
#include <tuple>

#include "unwrap.h"

namespace epmoe {

std::tuple<Tensor, Tensor> gated_activation(const Tensor& gate_up, const Tensor& expert_offsets,
                                            const MaybeTensor& tokens_per_expert,
                                            const MaybeTensor& bias, bool interleaved, double limit,
                                            double alpha, double up_offset, bool quantize,
                                            const MaybeTensor& tensor_scales);

}  // namespace epmoe
