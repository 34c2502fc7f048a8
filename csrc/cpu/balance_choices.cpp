// Which copy of an expert a source rank sends a token to. Each source brings 1/R of an expert's
// load, and a copy takes its share of it. Sources fill the copy of their own rank first; what
// sources and copies have left is matched in proportion.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "balance.h"

namespace epmoe::cpu {
namespace {

constexpr double kNumbers =
    65536;  // that the copies of an expert share: `copy_by_quota` in copies.h

// In ascending order, whatever the loads are.
std::vector<int32_t> slots_of(const Layer& layer, int32_t expert) {
  std::vector<int32_t> slots = layer.copies[expert];
  std::sort(slots.begin(), slots.end());
  return slots;
}

// The entries of an expert, where `parts` says how much of the source's tokens each copy gets. A
// copy without a number has no entry.
void write_entries(int32_t expert, const std::vector<int32_t>& slots,
                   const std::vector<double>& parts, QuotaTable out) {
  int32_t* entry = out.entries + expert * out.width;
  int32_t* end = entry + out.width;
  double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  double before = 0;
  int64_t taken = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    before += parts[i];
    int64_t takes = std::llround(before / sum * kNumbers);
    if (takes > taken) *entry++ = static_cast<int32_t>((takes - 1) << 16 | slots[i]), taken = takes;
  }
  std::fill(entry, end, -1);
}

}  // namespace

void choose_by_shares(const Layer& layer, int32_t source, QuotaTable out) {
  int32_t R = layer.R;
  std::vector<double> bring(R);
  for (int32_t x = 0; x < layer.E; ++x) {
    std::vector<int32_t> slots = slots_of(layer, x);
    std::stable_partition(slots.begin(), slots.end(),
                          [&](int32_t p) { return layer.rank_of(p) == source; });
    size_t n = slots.size();
    std::vector<double> left(n),
        parts(n);  // what a copy can still take, and what it takes from this source
    std::fill(bring.begin(), bring.end(), 1.0 / R);
    double takes = 0;
    for (size_t i = 0; i < n; ++i) {
      int32_t rank = layer.rank_of(slots[i]);
      double share = layer.share(slots[i]);
      double own = std::min(bring[rank], share);
      left[i] = share - own, bring[rank] -= own;
      takes += left[i];
      if (rank == source) parts[i] = own;
    }
    double brings = std::accumulate(bring.begin(), bring.end(), 0.0);
    double mine = bring[source];
    double matched = brings > 0 ? mine - mine * (1 - std::min(brings, takes) / brings) : 0;
    for (size_t i = 0; i < n; ++i)
      if (left[i] > 0) parts[i] += matched * left[i] / takes;
    for (double& part : parts)
      if (part * R < 1e-9) part = 0;  // rounding, and less than a hash resolves
    write_entries(x, slots, parts, out);
  }
}

void choose_one_copy(const Layer& layer, QuotaTable out) {
  std::vector<std::vector<int32_t>> slots(layer.E);
  for (int32_t x = 0; x < layer.E; ++x) slots[x] = slots_of(layer, x);
  std::vector<int32_t> chosen(layer.E);
  std::vector<std::vector<int32_t>> active(layer.R);  // the experts whose chosen copy is on a rank
  std::vector<bool> seen;
  size_t most = 1;
  // An augmenting path of a matching: a rank that is full hands one of its experts to another rank.
  std::function<bool(int32_t)> place = [&](int32_t x) {
    for (int32_t p : slots[x]) {
      std::vector<int32_t>& here = active[layer.rank_of(p)];
      if (seen[layer.rank_of(p)]) continue;
      seen[layer.rank_of(p)] = true;
      auto freed = here.size() < most ? here.insert(here.end(), x)
                                      : std::find_if(here.begin(), here.end(), place);
      if (freed == here.end()) continue;
      *freed = x, chosen[x] = p;
      return true;
    }
    return false;
  };
  for (int32_t x = 0; x < layer.E; ++x)
    for (seen.assign(layer.R, false); !place(x); seen.assign(layer.R, false)) ++most;
  for (int32_t x = 0; x < layer.E; ++x) write_entries(x, {chosen[x]}, {1.0}, out);
}

}  // namespace epmoe::cpu
