// route on the GPU: one warp a row, from the scores to K experts in one kernel. Here the warp path, for E up to 1024, a
// power of two or a multiple of 64; route_general.cu has every other E.
//
// Each lane sorts its N consecutive experts once, in registers; then a pick is one reduction over the lanes' heads, and
// the winner pops its head. Keys order as integers whatever the bits of the logits, and a picked expert is removed, so
// that none is chosen twice. Weights are computed for the K chosen only; the sum of a softmax needs all.
#include "candidate.cuh"
#include "launch.h"
#include "route.cuh"

namespace epmoe::cuda {
namespace {

#if defined(EPMOE_MUTATE_WARP_CLAMP)
constexpr bool kClamp = false;
#else
constexpr bool kClamp = true;
#endif

// Group-limited choice: whether this lane's experts belong to one of the best groups, each of which is held by
// 2^lane_bits neighbours. A group is worth the sum of its two best values (with a bias) or its best. The neighbours
// share the comparisons with the other groups.
template <bool kSum, int N, typename Candidate>
__device__ __forceinline__ bool in_top_groups(const RouteArgs& args, const Candidate (&c)[N], int lane, int lane_bits) {
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (kSum) second = max(second, min(first, c[i].order()));
    first = max(first, c[i].order());
  }
  int lanes = 1 << lane_bits;
  for (int offset = 1; offset < lanes; offset *= 2) {
    uint32_t other = __shfl_xor_sync(kAllLanes, first, offset);
    if constexpr (kSum) second = max(min(first, other), max(second, __shfl_xor_sync(kAllLanes, second, offset)));
    first = max(first, other);
  }
  uint32_t value = first;
  if (kSum && N << lane_bits > 1) value = order_key(float_of_key(first) + float_of_key(second));
  int mine = lane >> lane_bits, better = 0;
  for (int base = 0; base < args.num_groups; base += lanes) {
    int g = base + (lane & (lanes - 1));
    uint32_t other = __shfl_sync(kAllLanes, value, g << lane_bits);
    better += g < args.num_groups && (other > value || (other == value && g < mine));
  }
  for (int offset = 1; offset < lanes; offset *= 2) better += __shfl_xor_sync(kAllLanes, better, offset);
  return better < args.top_groups;
}

template <typename Logit, typename Candidate, bool kBias, int N>
__global__ void __launch_bounds__(kRouteWarps * 32)
    route_rows(const __grid_constant__ RouteArgs args, int32_t num_rows, int lane_bits) {
  __shared__ uint32_t chosen[kRouteWarps][kMaxTopK];
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = lane * N, t = blockIdx.x * kRouteWarps + warp;
  auto* logits = static_cast<const Logit*>(args.logits_TE) + min(t, static_cast<int>(args.T) - 1) * args.logits_stride;
  bool active = first < args.E, sanitised = false;  // an inactive lane reads the first experts, and takes no part
  Logit raw[N];
  float bias[N], logit[N];
  load_vectors(logits + (active ? first : 0), raw);  // a padded row's too: the loads do not wait for num_tokens
  if constexpr (kBias) load_vectors(args.bias_E + (active ? first : 0), bias);
  int32_t real = real_rows(args, num_rows);
  if (t < real) {
    float largest = -INFINITY;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      logit[i] = to_float(raw[i]);
      has_nan |= is_nan(logit[i]);
      largest = fmaxf(largest, logit[i]);
    }
    Row row = {0.0f, 0.0f, true};
    if (!args.sigmoid) {
      row.largest = warp_max(largest);
#pragma unroll
      for (int i = 0; i < N; ++i)
        row.sum += kBias ? exp_of_number(logit[i] - row.largest) : fast_exp(logit[i] - row.largest);
      row.sum = warp_sum(active ? row.sum : 0.0f);
      // Without a bias the sum is NaN where any logit is NaN or +Inf, or all are -Inf.
      row.defined = kBias ? is_finite(row.largest) && !__any_sync(kAllLanes, has_nan) : is_finite(row.sum);
      sanitised = !row.defined;
    } else if (args.counters) {
      sanitised = __any_sync(kAllLanes, has_nan);
    }
    Candidate candidate[N];
    if constexpr (kBias) {
      if (args.sigmoid)
#pragma unroll
        for (int i = 0; i < N; ++i) logit[i] = sigmoid_score<kClamp>(logit[i]) + bias[i];
      else
#pragma unroll
        for (int i = 0; i < N; ++i) logit[i] = softmax_score<kClamp>(row, logit[i]) + bias[i];
      make_candidates(logit, first, candidate);
    } else {
      make_candidates(raw, first, candidate);
    }
    bool kept = active;
    if (args.num_groups > 1) kept = in_top_groups<kBias>(args, candidate, lane, lane_bits) && active;
    if constexpr (kBias && N > 1) {
      __shared__ __align__(16) char kept_ones[kRouteWarps][16 * N * sizeof(Candidate)];
      if (2 * args.top_groups <= args.num_groups) {
        choose_of_half(candidate, kept, args.K, chosen[warp], reinterpret_cast<Candidate*>(kept_ones[warp]));
      } else {
        choose(candidate, kept, args.K, chosen[warp]);
      }
    } else {
      choose(candidate, kept, args.K, chosen[warp]);
    }
    __syncwarp();
    uint32_t id = chosen[warp][lane];
    if (!kBias && kClamp && !row.defined) id = lane;  // all scores are 0: the first K
    finish_row<kClamp>(args, row, logits, t, lane, id);
  } else if (t < args.T) {
    write_choice(args, t, lane, args.E, 0.0f);
  }
  count_rows(args, real, sanitised);
}

template <typename Logit, int N>
cudaError_t launch_warp(const RouteArgs& args, cudaStream_t stream) {
  int lane_bits = 0;
  while (args.num_groups > 1 && (N << lane_bits) < args.E / args.num_groups) ++lane_bits;
  int64_t blocks = ceil_div(args.T, kRouteWarps);
  auto run = [&](auto kernel) {
    return launch(kernel, blocks, kRouteWarps * 32, 0, stream, args, clamped_rows(args), lane_bits);
  };
  if (args.bias_E) return run(route_rows<Logit, Wide, true, N>);
  if constexpr (sizeof(Logit) == 2)
    return run(route_rows<Logit, Packed, false, N>);
  else
    return run(route_rows<Logit, Wide, false, N>);
}

// The warp path's share of the cases: it reads whole vectors, and a group is a power of two of lanes.
template <typename Logit>
bool suits_warp(const RouteArgs& args, int N) {
  int64_t vector = std::min<int64_t>(N, kPerVector<Logit>) * sizeof(Logit), bias = std::min(N, 4) * sizeof(float);
  bool aligned = reinterpret_cast<uintptr_t>(args.logits_TE) % vector == 0 &&
                 reinterpret_cast<uintptr_t>(args.bias_E) % bias == 0 &&
                 args.logits_stride * static_cast<int64_t>(sizeof(Logit)) % vector == 0;
  int32_t group = args.E / args.num_groups, lanes = group / N;
  bool grouped = args.num_groups == 1 || (group % N == 0 && (lanes & (lanes - 1)) == 0);
  bool regular = (args.E & (args.E - 1)) == 0 || args.E % 64 == 0;
  return regular && aligned && grouped;
}

}  // namespace

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
  if (args.T == 0) return cudaSuccess;
  if (args.T > INT32_MAX || args.K > kMaxTopK) return cudaErrorInvalidValue;
  int N = 1;
  while (N * 32 < args.E) N *= 2;
  return visit(args.dtype, [&](auto type) {
    using Logit = decltype(type);
    if (N > 32 || !suits_warp<Logit>(args, N)) return route_general(args, stream);
    switch (N) {
      case 1:
        return launch_warp<Logit, 1>(args, stream);
      case 2:
        return launch_warp<Logit, 2>(args, stream);
      case 4:
        return launch_warp<Logit, 4>(args, stream);
      case 8:
        return launch_warp<Logit, 8>(args, stream);
      case 16:
        return launch_warp<Logit, 16>(args, stream);
      default:
        return launch_warp<Logit, 32>(args, stream);
    }
  });
}

}  // namespace epmoe::cuda
