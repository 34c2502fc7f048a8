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
// `lanes` neighbours. A group is worth its two best values' sum (with a bias) or its best.
template <bool kSum, int N, typename Candidate>
__device__ __forceinline__ bool in_top_groups(const RouteArgs& args, const Candidate (&sorted)[N], int lane) {
  int lanes = args.E / args.num_groups / N;
  Candidate first = sorted[0], second;
  if constexpr (N > 1) second = sorted[1];
  for (int offset = 1; offset < lanes; offset *= 2) {
    Candidate other = first.from_lane(lane ^ offset), next = second.from_lane(lane ^ offset);
    Candidate loser = other > first ? first : other;
    first = other > first ? other : first;
    second = next > second ? next : second;
    second = loser > second ? loser : second;
  }
  Candidate value = first;
  if constexpr (kSum)
    if (lanes * N > 1) value.key = order_key(float_of_key(first.key) + float_of_key(second.key));
  int mine = lane / lanes, better = 0;
  for (int g = 0; g < args.num_groups; ++g) {
    Candidate other = value.from_lane(g * lanes);
    better += other > value || (g < mine && !(value > other));
  }
  return better < args.top_groups;
}

template <typename Logit, int N>
__device__ __forceinline__ void load_row(const Logit* logits, Logit (&raw)[N]) {
  constexpr int kWidth = N < kPerVector<Logit> ? N : kPerVector<Logit>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    auto vector = *reinterpret_cast<const Vector<Logit, kWidth>*>(logits + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) raw[i + j] = vector.at[j];
  }
}

// This lane's scores, biased; `row` is complete where they are softmax's.
template <int N>
__device__ __forceinline__ void bias_scores(const RouteArgs& args, const Row& row, int first, bool active,
                                            float (&value)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (args.sigmoid) value[i] = score_of<kClamp>(args, row, value[i]);
    else value[i] = row.defined || !kClamp ? exp_nonpositive(value[i] - row.largest) / row.sum : 0.0f;
    value[i] = active ? value[i] + args.bias_E[first + i] : -INFINITY;
  }
}

template <typename Logit, typename Candidate, bool kBias, int N>
__global__ void __launch_bounds__(kRouteWarps * 32) route_rows(const __grid_constant__ RouteArgs args) {
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32, first = lane * N;
  int64_t t = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  auto* logits = static_cast<const Logit*>(args.logits_TE) + min(t, args.T - 1) * args.logits_stride;
  bool active = first < args.E, sanitised = false;
  Logit raw[N];
  load_row(logits + (active ? first : 0), raw);  // a padded row's too: the loads do not wait for num_tokens
  int64_t real = real_rows(args);
  if (t < real) {
    float logit[N], largest = -INFINITY;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!active) raw[i] = from_float<Logit>(-INFINITY);  // with an id past every real one's: never chosen
      logit[i] = to_float(raw[i]);
      has_nan |= is_nan(logit[i]);
      largest = fmaxf(largest, logit[i]);
    }
    Row row = {0.0f, 0.0f, true};
    if (!args.sigmoid) {
      row.largest = warp_max(largest);
#pragma unroll
      for (int i = 0; i < N; ++i)
        row.sum += kBias ? exp_nonpositive(logit[i] - row.largest) : fast_exp(logit[i] - row.largest);
      row.sum = warp_sum(row.sum);  // NaN where any logit is NaN or +Inf, or all are -Inf
      row.defined = is_finite(row.sum);
      sanitised = !row.defined;
    } else if (args.counters) {
      sanitised = __any_sync(kAllLanes, has_nan);
    }
    Candidate candidate[N];
    if constexpr (kBias) {
      bias_scores(args, row, first, active, logit);
      make_candidates(logit, first, candidate);
    } else {
      make_candidates(raw, first, candidate);
    }
    sort(candidate);
    if (args.num_groups > 1 && !in_top_groups<kBias>(args, candidate, lane)) candidate[0] = Candidate();
    uint32_t id = 0;
    for (int k = 0; k < args.K; ++k) {
      Candidate best = candidate[0].best_of_warp();
      if (lane == k) id = best.id();
      if (candidate[0] == best) {
#pragma unroll
        for (int i = 0; i + 1 < N; ++i) candidate[i] = candidate[i + 1];
        candidate[N - 1] = Candidate();
      }
    }
    if (!kBias && kClamp && !row.defined) id = lane;  // all scores are 0: the first K
    finish_row<kClamp>(args, row, logits, t, lane, id);
  } else if (t < args.T) {
    write_choice(args, t, lane, args.E, 0.0f);
  }
  count_rows(args, real, sanitised);
}

template <typename Logit, int N>
cudaError_t launch_warp(const RouteArgs& args, cudaStream_t stream) {
  int64_t blocks = ceil_div(args.T, kRouteWarps);
  auto run = [&](auto kernel) { return launch(kernel, blocks, kRouteWarps * 32, 0, stream, args); };
  if (args.bias_E) return run(route_rows<Logit, Wide, true, N>);
  if constexpr (sizeof(Logit) == 2) return run(route_rows<Logit, Packed, false, N>);
  else return run(route_rows<Logit, Wide, false, N>);
}

// The warp path's share of the cases: it reads whole vectors, and a group is a power of two of lanes.
template <typename Logit>
bool suits_warp(const RouteArgs& args, int N) {
  int64_t vector = std::min<int64_t>(N, kPerVector<Logit>) * sizeof(Logit);
  bool aligned = reinterpret_cast<uintptr_t>(args.logits_TE) % vector == 0 &&
                 args.logits_stride * static_cast<int64_t>(sizeof(Logit)) % vector == 0;
  int32_t lanes = args.E / args.num_groups / N;
  bool grouped = args.num_groups == 1 || (args.E / args.num_groups % N == 0 && (lanes & (lanes - 1)) == 0);
  bool regular = (args.E & (args.E - 1)) == 0 || args.E % 64 == 0;
  return regular && aligned && grouped;
}

}  // namespace

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
  if (args.T == 0) return cudaSuccess;
  if (args.K > kMaxTopK) return cudaErrorInvalidValue;
  int N = 1;
  while (N * 32 < args.E) N *= 2;
  return visit(args.dtype, [&](auto type) {
    using Logit = decltype(type);
    if (N <= 32 && suits_warp<Logit>(args, N)) {
      if (N == 1) return launch_warp<Logit, 1>(args, stream);
      if (N == 2) return launch_warp<Logit, 2>(args, stream);
      if (N == 4) return launch_warp<Logit, 4>(args, stream);
      if (N == 8) return launch_warp<Logit, 8>(args, stream);
      if (N == 16) return launch_warp<Logit, 16>(args, stream);
      return launch_warp<Logit, 32>(args, stream);
    }
    return route_general(args, stream);
  });
}

}  // namespace epmoe::cuda
