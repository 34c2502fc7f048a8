// Element types, real tokens and health counters of the CPU and the CUDA kernels. No torch header.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define EPMOE_HD __host__ __device__ __forceinline__
#else
#define EPMOE_HD inline
#endif

namespace epmoe {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8E4M3 = 3 };

EPMOE_HD int64_t itemsize(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kFloat8E4M3 ? 1 : 2;
}

constexpr EPMOE_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements that share one fp8 scale.
constexpr int64_t kScaleBlock = 128;
// Codes of a row that share a scale in MXFP4, and in NVFP4.
constexpr int64_t kMxfp4Group = 32;
constexpr int64_t kNvfp4Group = 16;
// Scales in NVFP4 of the matrices of an expert: of gate, up and down.
constexpr int64_t kTensorScales = 3;
constexpr float kFloat8Max = 448.0f;

// The scale of a block whose largest finite magnitude is `largest`: largest / 448, and 1 if all
// values are 0. It is at least 2^-126, so that dividing by it does not overflow.
EPMOE_HD float scale_for(float largest) {
  float scale = largest / kFloat8Max;
  return largest > 0.0f ? (scale > 0x1p-126f ? scale : 0x1p-126f) : 1.0f;
}

// The tokens that a call says it has, and those among its T rows.
template <typename Args>
EPMOE_HD int64_t wanted_tokens(const Args& args) {
  return args.num_tokens ? *args.num_tokens : args.num_rows;
}
template <typename Args>
EPMOE_HD int64_t real_tokens(const Args& args) {
  int64_t wanted = wanted_tokens(args);
  if (wanted < 0) return 0;
  return wanted < args.T ? wanted : args.T;
}

// One int64 each; `epmoe.exchange.health.Health` has their names.
enum Counter : int32_t {
  kSanitisedRows,
  kPaddedRows,
  kOutOfRangeIds,
  kDuplicateIds,
  kNonfiniteWeights,
  kDroppedPairs,
  kClampedNumTokens,
  kTimeouts,
  kNumCounters,
};

}  // namespace epmoe
