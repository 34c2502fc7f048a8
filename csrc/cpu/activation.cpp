// The gated activation on the CPU. Rows past the last segment are neither read nor written.
#include <algorithm>
#include <vector>

#include "convert.h"
#include "stages.h"

namespace epmoe::cpu {

void gated_activation(const GatedActivationArgs& args) {
  int64_t real = std::clamp<int64_t>(args.expert_offsets[args.num_local_experts], 0, args.N);
  int64_t step = args.interleaved ? 2 : 1, to_up = args.interleaved ? 1 : args.F;
  int64_t scales = ceil_div(args.F, kScaleBlock);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<float> value_F(args.F), up_F(args.F);
    int32_t expert = 0;
    for (int64_t t = 0; t < real; ++t) {
      auto* row = static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride;
      while (expert + 1 < args.num_local_experts && t >= args.expert_offsets[expert + 1]) ++expert;
      auto* bias = args.bias_e2F ? static_cast<const T*>(args.bias_e2F) + expert * 2 * args.F : nullptr;
      for (int64_t i = 0; i < args.F; ++i) {
        value_F[i] = to_float(row[step * i]);
        up_F[i] = to_float(row[step * i + to_up]);
      }
      for (int64_t i = 0; bias && i < args.F; ++i) {
        value_F[i] += to_float(bias[step * i]);
        up_F[i] += to_float(bias[step * i + to_up]);
      }
      for (int64_t i = 0; i < args.F; ++i) value_F[i] = gated(value_F[i], up_F[i], args.gating);
      if (args.scales_NB) {
        quantize_row(value_F.data(), args.F, static_cast<Float8*>(args.out_NF) + t * args.F,
                     args.scales_NB + t * scales);
      } else {
        T* out = static_cast<T*>(args.out_NF) + t * args.F;
        for (int64_t i = 0; i < args.F; ++i) out[i] = from_float<T>(value_F[i]);
      }
    }
  });
}

}  // namespace epmoe::cpu
