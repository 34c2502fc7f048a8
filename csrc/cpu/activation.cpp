// The gated activation and the scales block by block on the CPU. Only rows of pairs are read and
// written.
#include <vector>

#include "convert.h"
#include "real_rows.h"
#include "stages.h"

namespace epmoe::cpu {

void gated_activation(const GatedActivationArgs& args) {
  int64_t step = args.interleaved ? 2 : 1;
  int64_t to_up = args.interleaved ? 1 : args.F;
  int64_t blocks = ceil_div(args.F, kScaleBlock);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    std::vector<float> value_F(args.F), up_F(args.F), scale_B(blocks);
    for_each_real_row(args.segments, args.N, [&](int32_t expert, int64_t t) {
      auto* row = static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride;
      auto* bias =
          args.bias_e2F ? static_cast<const T*>(args.bias_e2F) + expert * 2 * args.F : nullptr;
      for (int64_t i = 0; i < args.F; ++i) {
        value_F[i] = to_float(row[step * i]);
        up_F[i] = to_float(row[step * i + to_up]);
      }
      auto* scales = args.tensor_scales ? args.tensor_scales + expert * kTensorScales : nullptr;
      for (int64_t i = 0; scales && i < args.F; ++i) {
        value_F[i] *= scales[0];
        up_F[i] *= scales[1];
      }
      for (int64_t i = 0; bias && i < args.F; ++i) {
        value_F[i] += to_float(bias[step * i]);
        up_F[i] += to_float(bias[step * i + to_up]);
      }
      for (int64_t i = 0; i < args.F; ++i) value_F[i] = gated(value_F[i], up_F[i], args.gating);
      for (int64_t i = 0; scales && i < args.F; ++i) value_F[i] *= scales[2];
      if (args.scales_BN) {
        auto* out = static_cast<Float8*>(args.out_NF) + t * args.F;
        quantize_row(value_F.data(), args.F, out, scale_B.data(), kScaleBlock);
        for (int64_t b = 0; b < blocks; ++b)
          args.scales_BN[b * args.scales_stride + t] = scale_B[b];
      } else {
        T* out = static_cast<T*>(args.out_NF) + t * args.F;
        for (int64_t i = 0; i < args.F; ++i) out[i] = from_float<T>(value_F[i]);
      }
    });
  });
}

void weighted_gates(const WeightedGatesArgs& args) {
  int64_t step = args.interleaved ? 2 : 1;
  int64_t to_up = args.interleaved ? 1 : args.F;
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_each_real_row(args.segments, args.N, [&](int32_t expert, int64_t t) {
      auto* row = static_cast<const T*>(args.gate_up_N2F) + t * args.gate_up_stride;
      if (args.tokens_per_expert &&
          t - args.segments.expert_offsets[expert] >= args.tokens_per_expert[expert]) {
        if (args.grad_NF) {
          std::fill_n(static_cast<T*>(args.grad_gate_up_N2F) + t * 2 * args.F, 2 * args.F, T{});
          args.grad_weights_N[t] = 0.0f;
        }
        if (args.out_NF) std::fill_n(static_cast<T*>(args.out_NF) + t * args.F, args.F, T{});
        return;
      }
      float weight = args.row_weights_N ? args.row_weights_N[t] : 1.0f;
      float grad_weight = 0.0f;
      if (!args.grad_NF) {
        T* out = static_cast<T*>(args.out_NF) + t * args.F;
        for (int64_t i = 0; i < args.F; ++i)
          out[i] = from_float<T>(weight * gated(to_float(row[step * i]),
                                                to_float(row[step * i + to_up]), args.gating));
        return;
      }
      auto* grad = static_cast<const T*>(args.grad_NF) + t * args.F;
      T* out = static_cast<T*>(args.grad_gate_up_N2F) + t * 2 * args.F;
      T* values = args.out_NF ? static_cast<T*>(args.out_NF) + t * args.F : nullptr;
      for (int64_t i = 0; i < args.F; ++i) {
        auto at = gated_with_gradients(to_float(row[step * i]), to_float(row[step * i + to_up]),
                                       args.gating);
        float by = to_float(grad[i]);
        grad_weight += by * at.value;
        out[step * i] = from_float<T>(by * weight * at.gate);
        out[step * i + to_up] = from_float<T>(by * weight * at.up);
        if (values) values[i] = from_float<T>(weight * at.value);
      }
      args.grad_weights_N[t] = grad_weight;
    });
  });
}

void scales_by_block(const ScalesByBlockArgs& args) {
  for_each_real_row(args.segments, args.N, [&](int32_t, int64_t t) {
    for (int64_t b = 0; b < args.B; ++b)
      args.out_BN[b * args.out_stride + t] = args.scales_NB[t * args.scales_stride + b];
  });
}

}  // namespace epmoe::cpu
