// The expert-major rows of segments, on the CPU.
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
    if (segments.tokens_per_expert) end = begin + std::clamp<int64_t>(segments.tokens_per_expert[i], 0, end - begin);
    for (int64_t t = begin; t < end; ++t) f(i, t);
  }
}

}  // namespace epmoe::cpu
