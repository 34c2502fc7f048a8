// The CPU kernels. ops.cpp and ops_exchange.cpp have checked the arguments. Ids, counts and row
// indices inside tensors are unchecked, and the kernels check them before they become addresses.
#pragma once
#include "args.h"
#include "exchange.h"
#include "rail.h"

namespace epmoe::cpu {

void route(const RouteArgs& args);
void route_backward(const RouteBackwardArgs& args);
void reached_rows(const ReachedRowsArgs& args);
void permute(const PermuteArgs& args);
void finalize(const FinalizeArgs& args);
void zero_padding_rows(const PaddingArgs& args);
void quantize(const QuantizeArgs& args);
void gated_activation(const GatedActivationArgs& args);
void scales_by_block(const ScalesByBlockArgs& args);
void weighted_gates(const WeightedGatesArgs& args);
void unpack(const UnpackArgs& args);

void dispatch(const Exchange& exchange, const DispatchArgs& args);
void combine(const Exchange& exchange, const CombineArgs& args, DType dtype);  // of y, as on CUDA

void rail_pack(const RailPackArgs& args);
void rail_sum(const RailSumArgs& args);

}  // namespace epmoe::cpu
