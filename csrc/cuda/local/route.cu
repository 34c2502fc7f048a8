// route on the GPU: one kernel takes each row from logits to K experts, with one warp a row. This
// is the warp path, for E up to 1024 that is a power of two or a multiple of 64; route_general.cu
// has every other E.
//
// Each lane sorts its N consecutive experts once, in registers. Then each choice is one reduction
// over the heads of the lanes, and the lane that wins removes its head. Keys order as integers
// whatever the bits of the logits, and a chosen expert is removed, so that none is chosen twice.
// Weights are computed for the K chosen experts only; the sum of a softmax needs all experts.
#include "cuda/device/launch.cuh"
#include "cuda/local/candidate.cuh"
#include "cuda/local/route.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

#if defined(EPMOE_MUTATE_WARP_CLAMP)
constexpr bool kClamp = false;
#else
constexpr bool kClamp = true;
#endif

template <typename Logit, int N>
__device__ __forceinline__ bool any_nan(const Logit (&raw)[N]) {
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < N; ++i) has_nan |= is_nan(to_float(raw[i]));
  return __any_sync(kAllLanes, has_nan);
}

// The smaller of two values; NaN if one of them is NaN.
__device__ __forceinline__ float lesser(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Group-limited choice: returns whether this lane's experts belong to one of the best groups.
// 2^lane_bits neighbouring lanes hold a group. The value of a group is the sum of its two best
// values (floats, with a bias), or its best key. The lanes of a group share the comparisons with
// other groups.
template <int N, typename Value>
__device__ __forceinline__ bool in_top_groups(const RouteArgs& args, const Value (&v)[N], int lane,
                                              int lane_bits) {
  constexpr bool kSum = std::is_same_v<Value, float>;
  Value first = v[0], second = kSum ? -INFINITY : 0;
#pragma unroll
  for (int i = 1; i < N; ++i) {
    if constexpr (kSum) second = i == 1 ? lesser(first, v[i]) : max(second, lesser(first, v[i]));
    first = max(first, v[i]);
  }
  int lanes = 1 << lane_bits;
  for (int offset = 1; offset < lanes; offset *= 2) {
    Value other = __shfl_xor_sync(kAllLanes, first, offset);
    if constexpr (kSum)
      second = max(lesser(first, other), max(second, __shfl_xor_sync(kAllLanes, second, offset)));
    first = max(first, other);
  }
  uint32_t value;
  if constexpr (kSum)
    value = order_key(N << lane_bits > 1 ? first + second : first);
  else
    value = first;
  int mine = lane >> lane_bits, better = 0;
  for (int base = 0; base < args.num_groups; base += lanes) {
    int g = base + (lane & (lanes - 1));
    uint32_t other = __shfl_sync(kAllLanes, value, g << lane_bits);
    bool is_better = g < args.num_groups && (other > value || (other == value && g < mine));
    better +=
        __popc(__ballot_sync(kAllLanes, is_better) >> (mine << lane_bits) & ((1u << lanes) - 1));
  }
  return better < args.top_groups;
}

// Shared memory of a warp: the choice, and where values with a bias are spread over the lanes.
struct SharedChoice {
  uint32_t chosen[32];
};
template <int N>
struct alignas(16) SharedSpread : SharedChoice {
  uint32_t firsts[16];  // first expert of each lane that is kept
  float values[16 * N];
};

// The choice by values with a bias. `spread` holds if at most 16 lanes can be kept: their values
// then first spread over all 32 lanes, in order.
template <int N>
__device__ __forceinline__ uint32_t choose_value(const float (&value)[N], uint32_t first, bool kept,
                                                 bool spread, int K, SharedSpread<N>& shared) {
  if (!spread) {
    Wide candidate[N];
    make_candidates(value, first, candidate);
    return choose(candidate, kept, K, shared.chosen);
  }
  int lane = threadIdx.x % 32;
  unsigned keepers = __ballot_sync(kAllLanes, kept);
  int index = __popc(keepers & ((1u << lane) - 1));
  if (kept) {
    store_vectors(value, shared.values + index * N);
    shared.firsts[index] = first;
  }
  __syncwarp();
  float mine[N / 2];
  load_vectors(shared.values + lane * (N / 2), mine);
  first = shared.firsts[lane / 2] + lane % 2 * (N / 2);
  kept = lane / 2 < __popc(keepers);
  if constexpr (N <= 8) {
    return choose_small(mine, first, kept, K, shared.chosen);
  } else {
    Wide candidate[N / 2];
    make_candidates(mine, first, candidate);
    return choose(candidate, kept, K, shared.chosen);
  }
}
__device__ __forceinline__ uint32_t choose_value(const float (&value)[1], uint32_t first, bool kept,
                                                 bool, int K, SharedChoice& shared) {
  return choose_small(value, first, kept, K, shared.chosen);
}

// Blocks that must fit on a multiprocessor: 16 blocks of 4 warps where the registers suffice. Then
// the kernel can start while the last rows of its predecessor are in flight.
template <typename Logit, bool kBias, int N>
constexpr int kBlocks = N < 8 || (N == 8 && (kBias || sizeof(Logit) == 2)) ? 64 / kRouteWarps : 1;

// kSigmoid matters with a bias only: it saves registers there. Without a bias the logits decide for
// either scoring.
template <typename Logit, typename Candidate, bool kBias, bool kSigmoid, int N>
__global__ void __launch_bounds__(kRouteWarps * 32, kBlocks<Logit, kBias, N>)
    route_rows(const __grid_constant__ RouteArgs args, int32_t num_rows, int lane_bits) {
  __shared__ std::conditional_t<kBias && (N > 1), SharedSpread<N>, SharedChoice>
      shared[kRouteWarps];
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = lane * N,
      t = blockIdx.x * kRouteWarps + warp;
  auto* logits = static_cast<const Logit*>(args.logits_TE) +
                 min(t, static_cast<int>(args.T) - 1) * args.logits_stride;
  bool active = first < args.E,
       sanitised = false;  // an inactive lane reads the first experts and takes no part
  Logit raw[N];
  float bias[N], logit[N];
  load_vectors(logits + (active ? first : 0),
               raw);  // also in a padded row: the loads do not wait for num_tokens
  if constexpr (kBias) load_vectors(args.bias_E + (active ? first : 0), bias);
  int32_t real = real_rows(args, num_rows);
  if (t < real) {
    Row row = {0.0f, 0.0f, true};
    float value[N];  // with a bias: what the choice compares
    if constexpr (kBias) __builtin_assume(args.sigmoid == kSigmoid);
    if constexpr (kBias && kSigmoid) {
      if (args.counters) sanitised = any_nan(raw);
      clamp_logits(raw, kLeastSigmoid, kFullSigmoid, logit);
#pragma unroll  // one rounding less than score + bias, where the score is denormal
      for (int i = 0; i < N; ++i) value[i] = fmaf(scaled_sigmoid(logit[i]), kSigmoidScale, bias[i]);
    } else {
      float largest = -INFINITY;
      bool has_nan = false;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        logit[i] = to_float(raw[i]);
        has_nan |= is_nan(logit[i]);
        largest = fmaxf(largest, logit[i]);
      }
      if (!args.sigmoid) {
        row.largest = warp_max(largest);
#pragma unroll
        for (int i = 0; i < N; ++i)
          row.sum +=
              kBias ? exp_of_number(logit[i] - row.largest) : fast_exp(logit[i] - row.largest);
        row.sum = warp_sum(active ? row.sum : 0.0f);
        // Without a bias the sum is NaN where any logit is NaN or +Inf, or all are -Inf.
        row.defined =
            kBias ? is_finite(row.largest) && !__any_sync(kAllLanes, has_nan) : is_finite(row.sum);
        sanitised = !row.defined;
#pragma unroll
        for (int i = 0; i < N; ++i)
          if constexpr (kBias) value[i] = softmax_score<kClamp>(row, logit[i]) + bias[i];
      } else if (args.counters) {
        sanitised = __any_sync(kAllLanes, has_nan);
      }
    }
    bool kept = active;
    uint32_t id;
    if constexpr (kBias) {
      if (args.num_groups > 1) kept = in_top_groups(args, value, lane, lane_bits) && active;
      id = choose_value(value, first, kept, 2 * args.top_groups <= args.num_groups, args.K,
                        shared[warp]);
    } else {
      Candidate candidate[N];
      make_candidates(raw, first, candidate);
      if (args.num_groups > 1) {
        uint32_t order[N];
#pragma unroll
        for (int i = 0; i < N; ++i) order[i] = candidate[i].order();
        kept = in_top_groups(args, order, lane, lane_bits) && active;
      }
      id = choose(candidate, kept, args.K, shared[warp].chosen);
    }
    if (!kBias && kClamp && !row.defined) id = lane;  // all scores are 0: the first K experts
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
  if (args.bias_E && args.sigmoid) return run(route_rows<Logit, Wide, true, true, N>);
  if (args.bias_E) return run(route_rows<Logit, Wide, true, false, N>);
  if constexpr (sizeof(Logit) == 2)
    return run(route_rows<Logit, Packed, false, false, N>);
  else
    return run(route_rows<Logit, Wide, false, false, N>);
}

// Whether the warp path takes this call: it reads whole vectors, a group must be a power of two of
// lanes, and other numbers of scores per group are left to route_general.cu.
template <typename Logit>
bool suits_warp(const RouteArgs& args, int N) {
  int64_t vector = std::min<int64_t>(N, kPerVector<Logit>) * sizeof(Logit),
          bias = std::min(N, 4) * sizeof(float);
  bool aligned = reinterpret_cast<uintptr_t>(args.logits_TE) % vector == 0 &&
                 reinterpret_cast<uintptr_t>(args.bias_E) % bias == 0 &&
                 args.logits_stride * static_cast<int64_t>(sizeof(Logit)) % vector == 0;
  int32_t group = args.E / args.num_groups, lanes = group / N;
  int32_t count =
      args.bias_E && group > 1 ? 2 : 1;  // scores by which in_top_groups() rates a group
  bool grouped = args.num_groups == 1 ||
                 (group % N == 0 && (lanes & (lanes - 1)) == 0 && args.scores_per_group == count);
  bool regular = (args.E & (args.E - 1)) == 0 || args.E % 64 == 0;
  return regular && aligned && grouped;
}

// The warp path with N experts a lane, as many as it takes; or the general one.
template <typename Logit, int N>
cudaError_t launch_lanes(const RouteArgs& args, cudaStream_t stream) {
  if constexpr (N <= 32) {
    if (N * 32 < args.E) return launch_lanes<Logit, 2 * N>(args, stream);
    if (suits_warp<Logit>(args, N)) return launch_warp<Logit, N>(args, stream);
  }
  return route_general(args, stream);
}

}  // namespace

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
  if (args.T == 0) return cudaSuccess;
  if (args.T > INT32_MAX || args.K > kMaxTopK) return cudaErrorInvalidValue;
  return visit(args.dtype,
               [&](auto type) { return launch_lanes<decltype(type), 1>(args, stream); });
}

}  // namespace epmoe::cuda
