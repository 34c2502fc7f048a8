// Weights in MXFP4 on their way into a product by rows. A warpgroup reads codes and scales, and writes them as bf16
// into the boxes that TMA fills for weights in bf16. A thread has one weight row of the tile.
#pragma once
#include "cuda/hopper/boxes.cuh"
#include "cuda/hopper/tiles.cuh"
#include "cuda/local/mxfp4.cuh"

namespace epmoe::cuda {

constexpr int kStepGroups = 64 / kMxfp4Group;  // of a row, in one step along k
constexpr int kGroupBytes = kMxfp4Group / 2, kEightsOfGroup = kMxfp4Group / 8;

// The codes and scales of a step.
struct Mxfp4Step {
  uint4 codes[kStepGroups];
  uint32_t scales[kStepGroups];  // apart: to join them would wait for the loads
};

struct Mxfp4Row {
  const uint8_t *codes, *scales;
  int32_t groups;

  // Row `line` of the tile. Rows past the last are the last one again; nobody stores their products.
  __device__ __forceinline__ Mxfp4Row(const GroupedGemmArgs& args, const Tile& tile, int32_t line)
      : groups(static_cast<int32_t>(args.k / kMxfp4Group)) {
    int64_t row = tile.expert * args.n + min(tile.m + line, static_cast<int32_t>(args.n) - 1);
    codes = static_cast<const uint8_t*>(args.weights_enk) + row * groups * kGroupBytes;
    scales = args.weight_scales + row * groups;
  }
  // Zeros past the end of the row.
  __device__ __forceinline__ Mxfp4Step operator[](int32_t step) const {
    Mxfp4Step here = {};
#pragma unroll
    for (int i = 0; i < kStepGroups; ++i) {
      const int32_t group = step * kStepGroups + i;
      if (group >= groups) continue;
      here.codes[i] = __ldg(reinterpret_cast<const uint4*>(codes) + group);
      here.scales[i] = __ldg(scales + group);
    }
    return here;
  }
};

// A step becomes a line of a box.
__device__ __forceinline__ void store_line(const Mxfp4Step& step, uint32_t box, int32_t line) {
#pragma unroll
  for (int i = 0; i < kStepGroups; ++i) {
    const Mxfp4Scale scale{step.scales[i]};
    const uint32_t eights[] = {step.codes[i].x, step.codes[i].y, step.codes[i].z, step.codes[i].w};
#pragma unroll
    for (int j = 0; j < kEightsOfGroup; ++j) {
      const uint4 values = bf16_of_eight(eights[j], scale);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(box + in_box(line, i * kEightsOfGroup + j)),
                   "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                   : "memory");
    }
  }
}

}  // namespace epmoe::cuda
