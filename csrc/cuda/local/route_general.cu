// route for any number of experts. The keys of a row lie in shared memory. Each choice is a
// reduction over the lanes' best keys; the lane that wins removes the expert and searches its keys
// again.
#include "cuda/device/launch.cuh"
#include "cuda/local/route.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

#if defined(EPMOE_MUTATE_GENERAL_CLAMP)
constexpr bool kClamp = false;
#else
constexpr bool kClamp = true;
#endif

struct Best {
  uint32_t key, id;
};

// The best of this lane's keys, which are keys[lane], keys[lane + 32] and so on.
__device__ __forceinline__ Best best_of_lane(const uint32_t* keys, int n, int lane) {
  Best best = {0, 0xffffffffu};
  for (int i = lane; i < n; i += 32)
    if (keys[i] > best.key) best = {keys[i], static_cast<uint32_t>(i)};
  return best;
}

// Removes the best key of the warp and returns its id. Ties go to the lower id.
__device__ __forceinline__ uint32_t take_best(uint32_t* keys, int n, int lane, Best& mine) {
  uint32_t key = __reduce_max_sync(kAllLanes, mine.key);
  uint32_t id = __reduce_min_sync(kAllLanes, mine.key == key ? mine.id : 0xffffffffu);
  if (mine.id == id) {
    keys[id] = 0;
    mine = best_of_lane(keys, n, lane);
  }
  return id;
}

// The sum of the `count` best of these scores, best first. `score` makes a score of a key; equal
// keys have equal scores.
template <typename Score>
__device__ float sum_of_best(const uint32_t* keys, int size, int count, Score score) {
  float sum = 0.0f;
#pragma unroll 1
  for (uint32_t above = 0xffffffffu; count > 0;) {
    uint32_t best = 0;
    int copies = 0;
#pragma unroll 1
    for (int i = 0; i < size; ++i) {
      if (keys[i] >= above || keys[i] < best) continue;
      copies = keys[i] == best ? copies + 1 : 1;
      best = keys[i];
    }
#pragma unroll 1
    for (; copies > 0 && count > 0; --copies, --count) sum += score(best);
    above = best;
  }
  return sum;
}

// Sets the keys of all experts outside the best groups to 0. `score` is that of sum_of_best().
template <typename Score>
__device__ void drop_groups(const RouteArgs& args, uint32_t* keys, uint32_t* group_keys, int lane,
                            Score score) {
  int size = args.E / args.num_groups;
  for (int g = lane; g < args.num_groups; g += 32) {
    uint32_t first = 0, second = 0;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      second = max(second, min(first, keys[i]));
      first = max(first, keys[i]);
    }
    int count = args.scores_per_group;
    if (count > 2)
      first = order_key(sum_of_best(keys + g * size, size, count, score));
    else if (count == 2)
      first = order_key(score(first) + score(second));
    group_keys[g] = first;
  }
  Best mine = best_of_lane(group_keys, args.num_groups, lane);
  for (int n = 0; n < args.top_groups; ++n) take_best(group_keys, args.num_groups, lane, mine);
  __syncwarp();
  for (int i = lane; i < args.E; i += 32)
    if (group_keys[i / size]) keys[i] = 0;  // take_best() has set the keys of the best groups to 0
}

template <typename Logit>
__global__ void route_rows(const __grid_constant__ RouteArgs args, int32_t num_rows) {
  extern __shared__ uint32_t
      shared[];  // a warp's part: the keys of the experts, then of the groups
  wait_for_predecessor();
  let_successor_start();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t* keys = shared + warp * (args.E + args.num_groups);
  int t = blockIdx.x * (blockDim.x / 32) + warp;
  int32_t real = real_rows(args, num_rows);
  auto* logits = static_cast<const Logit*>(args.logits_TE) + t * args.logits_stride;
  bool sanitised = false;
  if (t >= real) {
    if (t < args.T) write_choice(args, t, lane, args.E, 0.0f);
  } else {
    Row row = {0.0f, 0.0f, true};
    float largest = -INFINITY;
    bool has_nan = false;
    for (int i = lane; i < args.E; i += 32) {
      float logit = to_float(logits[i]);
      has_nan |= is_nan(logit);
      largest = fmaxf(largest, logit);
    }
    sanitised = __any_sync(kAllLanes, has_nan);
    if (!args.sigmoid) {
      row.largest = warp_max(largest);
      double sum = 0.0;  // a lane adds up to 128 terms
      for (int i = lane; i < args.E; i += 32)
        sum += exp_of_number(to_float(logits[i]) - row.largest);
      row.sum = warp_sum(static_cast<float>(sum));
      row.defined = !sanitised && is_finite(row.largest);
      sanitised = !row.defined;
    }
    for (int i = lane; i < args.E; i += 32) {
      float logit = to_float(logits[i]);
      float score = args.sigmoid ? sigmoid_score<kClamp>(logit) : softmax_score<kClamp>(row, logit);
      float value = args.bias_E ? score + args.bias_E[i] : logit;
      keys[i] = order_key(!args.bias_E && !row.defined ? 0.0f : value);
    }
    __syncwarp();
    if (args.num_groups > 1)
      drop_groups(args, keys, keys + args.E, lane, [&](uint32_t key) {
        float value = float_of_key(key);  // of a NaN, -Inf
        if (args.bias_E) return value;
        return args.sigmoid ? sigmoid_score<kClamp>(value) : softmax_score<kClamp>(row, value);
      });
    __syncwarp();
    Best mine = best_of_lane(keys, args.E, lane);
    uint32_t id = 0;
    for (int k = 0; k < args.K; ++k) {
      uint32_t best = take_best(keys, args.E, lane, mine);
      if (lane == k) id = best;
    }
    finish_row<kClamp>(args, row, logits, t, lane, id);
  }
  count_rows(args, real, sanitised);
}

}  // namespace

cudaError_t route_general(const RouteArgs& args, cudaStream_t stream) {
  int64_t row_bytes = (static_cast<int64_t>(args.E) + args.num_groups) * sizeof(uint32_t);
  int64_t warps = std::clamp<int64_t>((48 << 10) / row_bytes, 1, kRouteWarps);
  return visit(args.dtype, [&](auto type) {
    return launch(route_rows<decltype(type)>, ceil_div(args.T, warps), static_cast<int>(warps * 32),
                  warps * row_bytes, stream, args, clamped_rows(args));
  });
}

}  // namespace epmoe::cuda
