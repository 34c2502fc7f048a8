// Which rows a stage visits, on the CPU: those of segments, and those of used slots.
#pragma once
#include <algorithm>

#include "args.h"

namespace epmoe::cpu {

// Calls f(expert, t) for each row of a segment.
template <typename F>
void for_each_real_row(const Segments& segments, int64_t N, F&& f) {
  for (int32_t i = 0; i < segments.num_local_experts; ++i) {
    int64_t begin = std::clamp<int64_t>(segments.expert_offsets[i], 0, N);
    int64_t end = std::clamp<int64_t>(segments.expert_offsets[i + 1], begin, N);
    if (segments.tokens_per_expert)
      end = begin + std::clamp<int64_t>(segments.tokens_per_expert[i], 0, end - begin);
    for (int64_t t = begin; t < end; ++t) f(i, t);
  }
}

// Calls f(slot) for each real slot, in order. Args: PermuteArgs or FinalizeArgs.
template <typename Args, typename F>
void for_each_slot(const Args& args, F&& f) {
  int64_t slab = args.R > 0 ? args.S / args.R : 0;
  for (int64_t r = 0; r < args.R; ++r) {
    int64_t count = args.counts_R ? std::clamp<int64_t>(args.counts_R[r], 0, slab) : slab;
    for (int64_t slot = r * slab; slot < r * slab + count; ++slot) f(slot);
  }
}

}  // namespace epmoe::cpu
