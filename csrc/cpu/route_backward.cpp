// The gradient of route on the CPU, in fp64: scores may vanish, and differences of gradients, too.
// And the rows that a router's gradient reaches.
#include <algorithm>
#include <cmath>
#include <vector>

#include "convert.h"
#include "scoring.h"
#include "stages.h"

namespace epmoe::cpu {
namespace {

// One row while its gradient is made.
struct Row {
  std::vector<double> scores;       // [E], 0 where one is not finite
  std::vector<double> complements;  // [E], 1 - score without cancellation; of sigmoid alone
  std::vector<double> grads;        // [K], of the scores of the chosen
  std::vector<int64_t> ids;         // [K], -1 where a pair has no gradient
  Row(int64_t E, int64_t K) : scores(E), complements(E), grads(K), ids(K) {}
};

template <typename Logit>
void score_row(const RouteBackwardArgs& args, const Logit* logits, Row& row) {
  if (args.sigmoid) {
    for (int32_t i = 0; i < args.E; ++i) {
      float logit = to_float(logits[i]);
      bool undefined = is_nan(logit);
      row.scores[i] = undefined ? 0.0 : 1.0 / (1.0 + std::exp(-static_cast<double>(logit)));
      row.complements[i] = undefined ? 0.0 : 1.0 / (1.0 + std::exp(static_cast<double>(logit)));
    }
    return;
  }
  float largest = -INFINITY;
  bool has_nan = false;
  for (int32_t i = 0; i < args.E; ++i) {
    float logit = to_float(logits[i]);
    has_nan |= is_nan(logit);
    largest = logit > largest ? logit : largest;
  }
  bool undefined = has_nan || !is_finite(largest);
  double sum = 0.0;
  for (int32_t i = 0; i < args.E; ++i) {
    row.scores[i] = undefined ? 0.0 : std::exp(static_cast<double>(to_float(logits[i])) - largest);
    sum += row.scores[i];
  }
  if (undefined) return;
  for (double& score : row.scores) score /= sum;
}

// Fills row.ids and row.grads. Returns the sum of the chosen scores times their gradients.
double grads_of_scores(const RouteBackwardArgs& args, int64_t t, Row& row) {
  double total = args.epsilon;
  double weighted = 0.0;
  for (int32_t k = 0; k < args.K; ++k) {
    int64_t pair = t * args.K + k;
    int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.ids_TK)[pair]
                               : static_cast<const int32_t*>(args.ids_TK)[pair];
    bool has_grad = args.weights_TK[pair] != 0.0f && id >= 0 && id < args.E;
    row.ids[k] = has_grad ? id : -1;
    row.grads[k] = has_grad ? args.grad_weights_TK[pair] * args.scale : 0.0;
    if (!has_grad) continue;
    total += row.scores[id];
    weighted += row.grads[k] * row.scores[id];
  }
  if (!args.renormalize || total == 0.0) total = 1.0;
  double mean = args.renormalize ? weighted / total : 0.0;
  double sum = 0.0;
  for (int32_t k = 0; k < args.K; ++k) {
    if (row.ids[k] < 0) continue;
    row.grads[k] = (row.grads[k] - mean) / total;
    sum += row.grads[k] * row.scores[row.ids[k]];
  }
  return sum;
}

// Softmax ties all scores of a row together; with sigmoid only the chosen logits have gradients.
template <typename Logit>
void write_row(const RouteBackwardArgs& args, double sum, Logit* out, Row& row) {
  double of_others = args.sigmoid ? 0.0 : -sum;
  std::vector<double>& factors = row.complements;
  if (!args.sigmoid) std::fill(factors.begin(), factors.end(), of_others);
  if (args.sigmoid) {
    for (int32_t i = 0; i < args.E; ++i) out[i] = from_float<Logit>(0.0f);
    for (int32_t k = 0; k < args.K; ++k) {
      int64_t id = row.ids[k];
      if (id < 0) continue;
      double grad = 0.0;  // ids that were given may name an expert twice
      for (int32_t other = 0; other < args.K; ++other)
        if (row.ids[other] == id) grad += row.grads[other];
      out[id] = from_float<Logit>(static_cast<float>(grad * factors[id] * row.scores[id]));
    }
    return;
  }
  for (int32_t k = 0; k < args.K; ++k)
    if (row.ids[k] >= 0) factors[row.ids[k]] += row.grads[k];
  for (int32_t i = 0; i < args.E; ++i)
    out[i] = from_float<Logit>(static_cast<float>(factors[i] * row.scores[i]));
}

}  // namespace

void route_backward(const RouteBackwardArgs& args) {
  Row row(args.E, args.K);
  visit(args.dtype, [&](auto type) {
    using Logit = decltype(type);
    for (int64_t t = 0; t < args.T; ++t) {
      score_row(args, static_cast<const Logit*>(args.logits_TE) + t * args.logits_stride, row);
      double sum = grads_of_scores(args, t, row);
      write_row(args, sum, static_cast<Logit*>(args.grad_logits_TE) + t * args.E, row);
    }
  });
}

void reached_rows(const ReachedRowsArgs& args) {
  visit(args.x_dtype, [&](auto x_type) {
    visit(args.dtype, [&](auto grad_type) {
      using X = decltype(x_type);
      using Grad = decltype(grad_type);
      for (int64_t t = 0; t < args.T; ++t) {
        auto* x = static_cast<const X*>(args.x_TD) + t * args.x_stride;
        auto* grad = static_cast<const Grad*>(args.grad_TE) + t * args.E;
        auto* out = static_cast<Grad*>(args.out_TD) + t * args.D;
        bool reached =
            std::any_of(grad, grad + args.E, [](Grad value) { return to_float(value) != 0.0f; });
        for (int64_t i = 0; i < args.D; ++i)
          out[i] = from_float<Grad>(reached ? to_float(x[i]) : 0.0f);
      }
    });
  });
}

}  // namespace epmoe::cpu
