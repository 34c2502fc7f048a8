// The pairs of one token as their source checks them: what is wrong is counted here, and nowhere else.
#pragma once
#include <vector>

#include "convert.h"
#include "scoring.h"

namespace epmoe::cpu {

// What turns logical experts into physical ones.
struct PairTables {
  int64_t E, copies, rank;   // as in ExchangePlan; rank is the source
  const int32_t* copies_EC;  // physical experts of each logical expert
  const int32_t* copies_E;   // how many it has
  int64_t* counters;         // kNumCounters, added to
};

// Where a call's pairs lie.
struct PairInputs {
  const void* ids_TK;
  bool wide_ids;       // ids are int64, else int32
  int64_t ids_stride;  // between rows
  const void* weights_TK;
  DType weights_dtype;
  int64_t weights_stride;  // between rows
  int32_t K;
};

// The checked pairs of one token: physical ids, -1 where there is nothing to compute, and finite weights.
struct Pairs {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<int64_t> last_token;  // of each logical expert: the last token that chose it
  Pairs(int64_t K, int64_t E) : ids(K), weights(K), last_token(E, -1) {}
};

// Reads the pairs of token t. Calls visit(k) for each pair that has an expert.
template <typename Visit>
void read_pairs(const PairTables& tables, const PairInputs& in, int64_t t, Pairs& pairs, Visit&& visit) {
  for (int32_t k = 0; k < in.K; ++k) {
    int64_t id = load_id(in.ids_TK, in.wide_ids, t * in.ids_stride + k);
    float weight = load_float(in.weights_TK, in.weights_dtype, t * in.weights_stride + k);
    pairs.ids[k] = -1;
    pairs.weights[k] = 0.0f;
    if (!is_finite(weight)) {
      ++tables.counters[kNonfiniteWeights];
      weight = 0.0f;
    }
    if (id < 0 || id >= tables.E) {
      tables.counters[kOutOfRangeIds] += id != -1 && id != tables.E;  // -1 and E mean "no expert"
      continue;
    }
    tables.counters[kDuplicateIds] += pairs.last_token[id] == t;
    pairs.last_token[id] = t;
    if (weight == 0.0f) continue;
    pairs.ids[k] = tables.copies_EC[id * tables.copies + (t + tables.rank) % tables.copies_E[id]];
    pairs.weights[k] = weight;
    visit(k);
  }
}

}  // namespace epmoe::cpu
