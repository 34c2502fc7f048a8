// route on the CPU: scores are sanitised, then K experts are chosen one by one, each time the best
// key not yet taken.
#include <algorithm>
#include <numeric>
#include <vector>

#include "convert.h"
#include "scoring.h"
#include "stages.h"

namespace epmoe::cpu {
namespace {

// The guard that the whole project hangs on: a score that is not finite is worth nothing.
float sanitize(float score) {
#if defined(EPMOE_MUTATE_ROUTE_CLAMP)
  return score;
#else
  return is_finite(score) ? score : 0.0f;
#endif
}

// One row while it is routed.
struct Row {
  std::vector<float> logits, scores;
  std::vector<uint32_t> keys;
  explicit Row(int64_t experts) : logits(experts), scores(experts), keys(experts) {}
};

// Fills row.scores with sanitised scores, and returns whether one of them was not finite.
bool score_row(const RouteArgs& args, Row& row) {
  bool sanitised = false;
  if (args.sigmoid) {
    for (int32_t i = 0; i < args.E; ++i) row.scores[i] = sigmoid(row.logits[i]);
  } else {
    float largest = -INFINITY;
    double sum = 0.0;  // fp32 would be too coarse for up to 4096 terms
    bool has_nan = false;
    for (float logit : row.logits) {
      largest = logit > largest ? logit : largest;
      has_nan |= is_nan(logit);
    }
    bool undefined = has_nan || !is_finite(largest);
    for (int32_t i = 0; i < args.E; ++i)
      sum += row.scores[i] = undefined ? NAN : exp_nonpositive(row.logits[i] - largest);
    for (float& score : row.scores) score /= static_cast<float>(sum);
  }
  for (float& score : row.scores) {
    sanitised |= !is_finite(score);
    score = sanitize(score);
  }
  return sanitised;
}

// Fills row.keys, by which experts are chosen. Both scorings are monotonic, so without a bias the
// logits decide: scores that rounding makes equal stay apart. In a row whose softmax is undefined
// all keys are equal.
void key_row(const RouteArgs& args, bool sanitised, Row& row) {
  for (int32_t i = 0; i < args.E; ++i) {
    float value = args.bias_E ? row.scores[i] + args.bias_E[i] : row.logits[i];
    row.keys[i] = order_key(!args.bias_E && !args.sigmoid && sanitised ? 0.0f : value);
  }
}

// Group-limited choice (DeepSeek-V3): experts of groups outside the best `top_groups` get key 0.
// The value of a group is the sum of its best biased scores, or its best key where one score
// counts.
void drop_groups(const RouteArgs& args, Row& row, std::vector<uint32_t>& group_keys) {
  int32_t size = args.E / args.num_groups;
  int32_t count = args.scores_per_group;
  std::vector<int32_t> order(size);
  auto value = [&](int32_t i) {
    return args.bias_E ? row.scores[i] + args.bias_E[i] : row.scores[i];
  };
  group_keys.resize(args.num_groups);
  for (int32_t g = 0; g < args.num_groups; ++g) {
    std::iota(order.begin(), order.end(), g * size);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](int32_t a, int32_t b) { return row.keys[a] > row.keys[b]; });
    float sum = value(order[0]);
    for (int32_t i = 1; i < count; ++i) sum += value(order[i]);
    group_keys[g] = count > 1 ? order_key(sum) : row.keys[order[0]];
  }
  std::vector<bool> kept(args.num_groups, false);
  for (int32_t n = 0; n < args.top_groups; ++n) {
    auto best = std::max_element(group_keys.begin(), group_keys.end());  // ties: the first
    kept[best - group_keys.begin()] = true;
    *best = 0;
  }
  for (int32_t i = 0; i < args.E; ++i)
    if (!kept[i / size]) row.keys[i] = 0;
}

template <typename Id>
void select(const RouteArgs& args, int64_t t, Row& row) {
  Id* ids = static_cast<Id*>(args.ids_TK) + t * args.K;
  float* weights = args.weights_TK + t * args.K;
  std::vector<bool> taken(args.E, false);
  double sum = 0.0;
  for (int32_t k = 0; k < args.K; ++k) {
    int32_t best = -1;
    for (int32_t i = 0; i < args.E; ++i) {
#if defined(EPMOE_MUTATE_ROUTE_CLAMP)
      // The known bug of the field: it compares floats, and "removes" the chosen expert with a
      // value against which NaN does not lose.
      auto rated = [&](int32_t e) {
        return args.bias_E ? row.scores[e] + args.bias_E[e] : row.scores[e];
      };
      if (best < 0 || rated(i) > rated(best)) best = i;
#else
      if (!taken[i] && (best < 0 || row.keys[i] > row.keys[best])) best = i;
#endif
    }
    taken[best] = true;
    ids[k] = static_cast<Id>(best);
    weights[k] = row.scores[best];
#if defined(EPMOE_MUTATE_ROUTE_CLAMP)
    if (!is_nan(row.scores[best])) row.scores[best] = -10000.0f;
#endif
    sum += weights[k];
  }
  sum += args.epsilon;
  float divisor = !args.renormalize || sum == 0.0 ? 1.0f : static_cast<float>(sum);
  for (int32_t k = 0; k < args.K; ++k) weights[k] = weights[k] / divisor * args.scale;
}

template <typename Id>
void pad(const RouteArgs& args, int64_t t) {
  Id* ids = static_cast<Id*>(args.ids_TK) + t * args.K;
  std::fill(ids, ids + args.K, static_cast<Id>(args.E));
  std::fill(args.weights_TK + t * args.K, args.weights_TK + (t + 1) * args.K, 0.0f);
}

}  // namespace

void route(const RouteArgs& args) {
  int64_t real = real_tokens(args);
  int64_t sanitised_rows = 0;
  bool clamped = real != wanted_tokens(args);
  Row row(args.E);
  std::vector<uint32_t> group_keys;
  for (int64_t t = 0; t < real; ++t) {
    visit(args.dtype, [&](auto type) {
      auto* logits = static_cast<const decltype(type)*>(args.logits_TE) + t * args.logits_stride;
      for (int32_t i = 0; i < args.E; ++i) row.logits[i] = to_float(logits[i]);
    });
    bool sanitised = score_row(args, row);
    sanitised_rows += sanitised;
    key_row(args, sanitised, row);
    if (args.num_groups > 1) drop_groups(args, row, group_keys);
    args.wide_ids ? select<int64_t>(args, t, row) : select<int32_t>(args, t, row);
  }
  for (int64_t t = real; t < args.T; ++t)
    args.wide_ids ? pad<int64_t>(args, t) : pad<int32_t>(args, t);
  if (args.counters) {
    args.counters[kSanitisedRows] += sanitised_rows;
    args.counters[kPaddedRows] += args.T - real;
    args.counters[kClampedNumTokens] += clamped;
  }
}

}  // namespace epmoe::cpu
