// Which copy of an expert a source rank sends a token to. Each source brings 1/R of an expert's load, and a copy takes
// its share of it. Sources fill the copy of their own rank first; what sources and copies have left is matched in
// proportion.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "balance.h"

namespace epmoe::cpu {
namespace {

std::vector<std::vector<int32_t>> slots_of_experts(const int32_t* slots_P, int32_t E, int32_t P) {
  std::vector<std::vector<int32_t>> of(E);
  for (int32_t p = 0; p < P; ++p)
    if (slots_P[p] != kEmpty) of[slots_P[p]].push_back(p);
  return of;
}

// Writes the row of an expert, where `parts` says how much of the source's tokens each copy gets.
void write_row(int32_t expert, const std::vector<int32_t>& slots, const std::vector<double>& parts,
               const Choices& out) {
  constexpr int64_t kAll = int64_t{1} << 32;
  size_t n = slots.size(), last = 0;
  double sum = 0, before = 0;
  for (size_t i = 0; i < n; ++i) {
    sum += parts[i];
    if (parts[i] > 0) last = i;
  }
  for (int32_t c = 0; c < out.C; ++c) {
    size_t i = std::min<size_t>(c, n - 1);
    if (c < static_cast<int32_t>(n)) before += parts[i];
    out.slots_EC[int64_t{expert} * out.C + c] = slots[i];
    out.thresholds_EC[int64_t{expert} * out.C + c] =
        i >= last ? kAll : std::llround(before / sum * static_cast<double>(kAll));
  }
}

}  // namespace

void choose_by_shares(const int32_t* slots_P, const double* shares_P, int32_t E, int32_t R, int32_t S, int32_t source,
                      const Choices& out) {
  auto experts = slots_of_experts(slots_P, E, R * S);
  std::vector<double> bring(R);
  for (int32_t x = 0; x < E; ++x) {
    std::vector<int32_t>& slots = experts[x];
    std::stable_partition(slots.begin(), slots.end(), [&](int32_t p) { return p / S == source; });
    size_t n = slots.size();
    std::vector<double> left(n), parts(n);  // what a copy can still take, and what it takes from this source
    std::fill(bring.begin(), bring.end(), 1.0 / R);
    double takes = 0;
    for (size_t i = 0; i < n; ++i) {
      int32_t rank = slots[i] / S;
      double own = std::min(bring[rank], shares_P[slots[i]]);
      left[i] = shares_P[slots[i]] - own, bring[rank] -= own;
      takes += left[i];
      if (rank == source) parts[i] = own;
    }
    double brings = std::accumulate(bring.begin(), bring.end(), 0.0), mine = bring[source];
    double matched = brings > 0 ? mine - mine * (1 - std::min(brings, takes) / brings) : 0;
    for (size_t i = 0; i < n; ++i)
      if (left[i] > 0) parts[i] += matched * left[i] / takes;
    for (double& part : parts)
      if (part * R < 1e-9) part = 0;  // rounding, and less than a hash resolves
    write_row(x, slots, parts, out);
  }
}

void choose_one_copy(const int32_t* slots_P, int32_t E, int32_t R, int32_t S, const Choices& out) {
  auto experts = slots_of_experts(slots_P, E, R * S);
  std::vector<int32_t> chosen(E);
  std::vector<std::vector<int32_t>> active(R);  // the experts whose chosen copy is on a rank
  std::vector<bool> seen;
  size_t most = 1;
  // An augmenting path of a matching: a rank that is full hands one of its experts to another rank.
  std::function<bool(int32_t)> place = [&](int32_t x) {
    for (int32_t p : experts[x]) {
      std::vector<int32_t>& here = active[p / S];
      if (seen[p / S]) continue;
      seen[p / S] = true;
      auto freed = here.size() < most ? here.insert(here.end(), x) : std::find_if(here.begin(), here.end(), place);
      if (freed == here.end()) continue;
      *freed = x, chosen[x] = p;
      return true;
    }
    return false;
  };
  for (int32_t x = 0; x < E; ++x)
    for (seen.assign(R, false); !place(x); seen.assign(R, false)) ++most;
  for (int32_t x = 0; x < E; ++x) write_row(x, {chosen[x]}, {1.0}, out);
}

}  // namespace epmoe::cpu
