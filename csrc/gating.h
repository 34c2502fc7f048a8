// The gated activation of an expert, one text for CPU and CUDA.
#pragma once
#include "scoring.h"

namespace epmoe {

struct Gating {
  float limit;  // gate is at most this and up lies within +-limit; Inf: no limit
  float alpha;  // gate * sigmoid(alpha * gate); 1 is silu
  float up_offset;
};

// Comparisons with NaN are false, so that it stays.
EPMOE_HD float gated(float gate, float up, const Gating& gating) {
  gate = gate > gating.limit ? gating.limit : gate;
  up = up > gating.limit ? gating.limit : up < -gating.limit ? -gating.limit : up;
  return gate * sigmoid(gating.alpha * gate) * (up + gating.up_offset);
}

}  // namespace epmoe
