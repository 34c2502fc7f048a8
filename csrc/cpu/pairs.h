// The pairs of one token as their source checks them: what is wrong is counted here, and nowhere
// else.
#pragma once
#include <utility>
#include <vector>

#include "convert.h"
#include "copies.h"
#include "scoring.h"

namespace epmoe::cpu {

// What turns logical experts into physical ones.
struct PairTables {
  int64_t E, copies, rank;   // as in ExchangePlan; rank is the source
  const int32_t* copies_EC;  // physical experts of each logical expert
  const int32_t* copies_E;   // how many it has
  int64_t* counters;         // kNumCounters, added to
  bool keeps_zeros;          // whether pairs of weight 0 have something to compute
  Quotas quotas;             // in place of copies, where experts move
};

// The checked pairs of one token: physical ids, -1 where there is nothing to compute, and finite
// weights.
struct Pairs {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<int64_t> last_token;  // of each logical expert: the last token that chose it
  Pairs(int64_t K, int64_t E) : ids(K), weights(K), last_token(E, -1) {}
};

// Reads the pairs of token t. Calls visit(k) for each pair that has an expert. Args: DispatchArgs
// or RailPackArgs.
template <typename Args, typename Visit>
void read_pairs(const PairTables& tables, const Args& args, int64_t t, Pairs& pairs,
                Visit&& visit) {
  for (int32_t k = 0; k < args.K; ++k) {
    int64_t id = load_id(args.ids_TK, args.wide_ids, t * args.ids_stride + k);
    float weight = load_float(args.weights_TK, args.weights_dtype, t * args.weights_stride + k);
    pairs.ids[k] = -1;
    pairs.weights[k] = 0.0f;
    bool live = is_finite(weight) && (weight != 0.0f || tables.keeps_zeros);
    tables.counters[kNonfiniteWeights] += !is_finite(weight);
    if (id < 0 || id >= tables.E) {
      tables.counters[kOutOfRangeIds] += id != -1 && id != tables.E;  // -1 and E mean "no expert"
      continue;
    }
    tables.counters[kDuplicateIds] += pairs.last_token[id] == t;
    pairs.last_token[id] = t;
    if (!live) continue;
    auto expert = static_cast<int32_t>(id);
    pairs.ids[k] = tables.quotas.lines ? copy_by_quota(tables.quotas, t, expert)
                                       : copy_in_turn(tables.copies_EC, tables.copies_E,
                                                      tables.copies, tables.rank, t, expert);
    pairs.weights[k] = weight;
    visit(k);
  }
}

// The rows of a call as they travel, until the next one is: as they come or quantized, with zeros
// behind them where rows of x have fewer than D elements. Args: DispatchArgs or RailPackArgs.
template <typename Args>
class WireRows {
 public:
  WireRows(const Args& args, WireFormat format, int64_t x_row_bytes)
      : args_(args),
        format_(format),
        x_row_bytes_(x_row_bytes),
        quantizes_(wire(format).quantizes(args.dtype)),
        copies_(x_row_bytes < args.D * itemsize(args.dtype)) {
    if (quantizes_ || copies_) row_.resize(args.D);
    if (quantizes_) scales_.resize(wire(format).num_scales(args.D));
  }

  // Row t, and its scales: null where rows have none.
  std::pair<const void*, const float*> at(int64_t t) {
    const void* row = static_cast<const char*>(args_.x_TD) + t * args_.x_stride_bytes;
    if (!quantizes_) {
      if (copies_) row = std::memcpy(row_.data(), row, x_row_bytes_);
      return {row, args_.scales_TB + t * args_.scales_stride};  // null, plus 0
    }
    visit(args_.dtype, [&](auto type) {
      quantize_row(static_cast<const decltype(type)*>(row), x_row_bytes_ / itemsize(args_.dtype),
                   row_.data(), scales_.data(), wire(format_).block);
    });
    return {row_.data(), scales_.data()};
  }

 private:
  const Args& args_;
  WireFormat format_;
  int64_t x_row_bytes_;
  bool quantizes_;
  bool copies_;
  std::vector<Float8> row_;
  std::vector<float> scales_;
};

}  // namespace epmoe::cpu
