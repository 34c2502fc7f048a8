// The gradient of route on the GPU, in fp64: scores may vanish, and differences of gradients, too.
// A warp has a row. Its sums have an order that does not change.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/stages.h"
#include "scoring.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ double sum_of_warp(double value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
  return value;
}

// What the scores of a row are made from.
struct Scoring {
  bool sigmoid;
  bool defined;  // otherwise all scores of the row are 0
  float largest;
  double sum;

  template <typename Logit>
  __device__ __forceinline__ double score(Logit logit) const {
    float value = to_float(logit);
    if (sigmoid) return is_nan(value) ? 0.0 : 1.0 / (1.0 + exp(-static_cast<double>(value)));
    return defined ? exp(static_cast<double>(value) - largest) / sum : 0.0;
  }
};

template <typename Logit>
__device__ __forceinline__ Scoring scoring_of(const RouteBackwardArgs& args, const Logit* logits,
                                              int lane) {
  Scoring scoring{args.sigmoid, true, 0.0f, 1.0};
  if (args.sigmoid) return scoring;
  float largest = -INFINITY;
  bool has_nan = false;
  for (int i = lane; i < args.E; i += 32) {
    float logit = to_float(logits[i]);
    has_nan |= is_nan(logit);
    largest = fmaxf(largest, logit);
  }
  for (int offset = 16; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, offset));
  scoring.largest = largest;
  scoring.defined = !__any_sync(kAll, has_nan) && is_finite(largest);
  if (!scoring.defined) return scoring;
  double sum = 0.0;
  for (int i = lane; i < args.E; i += 32)
    sum += exp(static_cast<double>(to_float(logits[i])) - largest);
  scoring.sum = sum_of_warp(sum);
  return scoring;
}

template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    route_backward_rows(const __grid_constant__ RouteBackwardArgs args) {
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32;
  int64_t t = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  if (t >= args.T) return;
  auto* logits = static_cast<const Logit*>(args.logits_TE) + t * args.logits_stride;
  auto* out = static_cast<Logit*>(args.grad_logits_TE) + t * args.E;
  Scoring scoring = scoring_of(args, logits, lane);

  // Lane k has the k-th choice; K is at most 32.
  int64_t pair = t * args.K + lane;
  int32_t id = -1;
  double score = 0.0;
  double grad = 0.0;
  if (lane < args.K && args.weights_TK[pair] != 0.0f) {
    int64_t given = args.wide_ids ? static_cast<const int64_t*>(args.ids_TK)[pair]
                                  : static_cast<const int32_t*>(args.ids_TK)[pair];
    if (given >= 0 && given < args.E) {
      id = static_cast<int32_t>(given);
      score = scoring.score(logits[id]);
      grad = args.grad_weights_TK[pair] * args.scale;
    }
  }
  if (args.renormalize) {
    double total = sum_of_warp(score) + args.epsilon;
    if (total == 0.0) total = 1.0;
    grad = (grad - sum_of_warp(grad * score) / total) / total;
    if (id < 0) grad = 0.0;
  }
  double sum = args.sigmoid ? 0.0 : sum_of_warp(grad * score);

  // Each logit as if nobody had chosen it, then those of the chosen.
  for (int i = lane; i < args.E; i += 32) {
    double of_other = args.sigmoid ? 0.0 : -sum * scoring.score(logits[i]);
    out[i] = from_float<Logit>(static_cast<float>(of_other));
  }
  __syncwarp();
  double of_expert = 0.0;  // ids that were given may name an expert twice
  for (int k = 0; k < args.K; ++k) {
    int32_t other = __shfl_sync(kAll, id, k);
    double by_other = __shfl_sync(kAll, grad, k);
    if (other == id) of_expert += by_other;
  }
  if (id < 0) return;
  double factor = of_expert - sum;
  if (args.sigmoid) factor *= 1.0 / (1.0 + exp(static_cast<double>(to_float(logits[id]))));
  out[id] = from_float<Logit>(static_cast<float>(factor * score));
}

}  // namespace

cudaError_t route_backward(const RouteBackwardArgs& args, cudaStream_t stream) {
  return visit(args.dtype, [&](auto type) {
    return launch(route_backward_rows<decltype(type)>, ceil_div(args.T, kWarps), kThreads, 0,
                  stream, args);
  });
}

}  // namespace epmoe::cuda
