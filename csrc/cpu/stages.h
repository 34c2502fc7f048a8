// The CPU kernels. Arguments have been checked by ops.cpp; ids, counts and offsets inside tensors have not,
// and are checked here before they become addresses.
#pragma once
#include "args.h"
#include "exchange.h"

namespace epmoe::cpu {

void route(const RouteArgs& args);
void permute(const PermuteArgs& args);
void finalize(const FinalizeArgs& args);
void zero_padding_rows(const PaddingArgs& args);
void quantize(const QuantizeArgs& args);

void dispatch(const Exchange& exchange, const DispatchArgs& args);
void combine(const Exchange& exchange, const CombineArgs& args);

}  // namespace epmoe::cpu
