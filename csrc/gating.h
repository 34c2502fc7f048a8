// The gated activation of an expert, one text for CPU and CUDA.
#pragma once
#include "scoring.h"

namespace epmoe {

struct Gating {
  float limit;  // gate is at most this and up lies within +-limit; Inf: no limit
  float alpha;  // gate * sigmoid(alpha * gate); 1 is silu
  float up_offset;
};

// Comparisons with NaN are false, so that it stays. Where x is NaN, its sigmoid is anything, but
// gate is NaN, too. No fminf: compilers for CPUs cannot vectorise it.
EPMOE_HD float gated(float gate, float up, const Gating& gating) {
  gate = gate > gating.limit ? gating.limit : gate;
  up = up > gating.limit ? gating.limit : up < -gating.limit ? -gating.limit : up;
  float x = gating.alpha * gate;
  x = x < kLeastSigmoid ? kLeastSigmoid : x > kFullSigmoid ? kFullSigmoid : x;
  return gate * (scaled_sigmoid(x) * kSigmoidScale) * (up + gating.up_offset);
}

// `gated`, and its derivatives by gate and up. What a limit holds fast has none.
struct GatedWithGradients {
  float value, gate, up;
};
EPMOE_HD GatedWithGradients gated_with_gradients(float gate, float up, const Gating& gating) {
  bool gate_is_fast = gate > gating.limit;
  bool up_is_fast = up > gating.limit || up < -gating.limit;
  gate = gate_is_fast ? gating.limit : gate;
  up = up > gating.limit ? gating.limit : up < -gating.limit ? -gating.limit : up;
  float x = gating.alpha * gate;
  float factor = up + gating.up_offset;
  float clamped = x < kLeastSigmoid ? kLeastSigmoid : x > kFullSigmoid ? kFullSigmoid : x;
  float sigmoid = scaled_sigmoid(clamped) * kSigmoidScale;
  return {gate * sigmoid * factor,
          gate_is_fast ? 0.0f : (sigmoid + x * sigmoid * (1.0f - sigmoid)) * factor,
          up_is_fast ? 0.0f : gate * sigmoid};
}

}  // namespace epmoe
