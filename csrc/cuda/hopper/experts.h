#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "args.h"

namespace epmoe::cuda {
struct ExpertsArgs {
  const void* rows_ND;
  const float* row_scales_NB;
  int64_t row_scales_stride;
  const void* gate_up_e2FD;
  const float* gate_up_scales;
  const __nv_bfloat16* gate_up_bias;
  const void* down_eDF;
  const float* down_scales;
  const __nv_bfloat16* down_bias;
  Segments segments;
  int64_t N, D, F;
  bool interleaved;
  Gating gating;
  uint8_t* h_NF;
  float* h_scales;
  int32_t* counters;
  __nv_bfloat16* out_ND;
  int cluster;
  long long* clocks;
};
struct RowMaps {
  CUtensorMap maps[4];
};
int64_t token_tiles(int64_t N, int64_t e);
int64_t h_scales_size(int64_t N, int64_t F, int64_t e);
cudaError_t experts(const ExpertsArgs& args, cudaStream_t stream);
}  // namespace epmoe::cuda
