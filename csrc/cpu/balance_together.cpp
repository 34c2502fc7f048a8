// Experts that tokens choose together come to the same rank, so that a token goes to fewer ranks: pairwise exchanges as
// in the partitioning of graphs by Kernighan and Lin (1970), but only those that gain by themselves. A copy is
// exchanged for the one with the largest gain, copy after copy, until none gains. The gain is what a rank's copies have
// in common with each other: of a pair of experts the tokens that choose both, times the smaller share. Sources choose
// copies by one hash and their own rank first, so that two copies on a rank tend to serve the same tokens.
#include <algorithm>

#include "balance.h"

namespace epmoe::cpu {
namespace {

constexpr double kBalance = 1.01;  // what exchanges may bring the busiest rank to, over the mean
constexpr double kLeast = 1e-9;    // a gain below this part of all pairs is rounding

struct Copy {
  int32_t expert, slot;
  double load, share;
};

}  // namespace

std::vector<int32_t> bring_together(const std::vector<int32_t>& slots_P, const double* loads_E,
                                    const double* together_EE, int32_t E, int32_t R, int32_t S,
                                    int32_t ranks_per_node) {
  Layer layer(loads_E, E, slots_P.data(), R, S);
  layer.level();
  std::vector<double> rank_load = layer.rank_load;
  double limit = std::max(kBalance * layer.mean(), *std::max_element(rank_load.begin(), rank_load.end()));
  std::vector<Copy> copies;
  std::vector<char> holds(R * E);
  for (int32_t p = 0; p < R * S; ++p) {
    if (slots_P[p] == kEmpty) continue;
    copies.push_back({slots_P[p], p, layer.taken[p], layer.share(p)});
    holds[p / S * E + slots_P[p]] = true;
  }
  auto common = [&](const Copy& a, const Copy& b) {
    if (a.expert == b.expert) return 0.0;
    return (together_EE[int64_t{a.expert} * E + b.expert] + together_EE[int64_t{b.expert} * E + a.expert]) *
           std::min(a.share, b.share);
  };
  std::vector<double> with(copies.size() * R);  // [copy, rank] what the copy has in common with those of the rank
  double all = 0;
  for (size_t c = 0; c < copies.size(); ++c)
    for (const Copy& other : copies) {
      double pair = common(copies[c], other);
      with[c * R + other.slot / S] += pair, all += pair;
    }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t c = 0; c < copies.size(); ++c) {
      int32_t here = copies[c].slot / S;
      size_t best = c;
      double most = kLeast * all;
      for (size_t d = 0; d < copies.size(); ++d) {
        int32_t there = copies[d].slot / S;
        double gain = with[c * R + there] - with[c * R + here] + with[d * R + here] - with[d * R + there];
        double shift = copies[c].load - copies[d].load;
        if (gain <= most || here == there || here / ranks_per_node != there / ranks_per_node ||
            rank_load[here] - shift > limit || rank_load[there] + shift > limit || holds[here * E + copies[d].expert] ||
            holds[there * E + copies[c].expert])
          continue;
        gain -= 2 * common(copies[c], copies[d]);
        if (gain > most) best = d, most = gain;
      }
      if (best == c) continue;
      changed = true;
      Copy &one = copies[c], &two = copies[best];
      int32_t there = two.slot / S;
      holds[here * E + one.expert] = holds[there * E + two.expert] = false;
      holds[there * E + one.expert] = holds[here * E + two.expert] = true;
      rank_load[here] += two.load - one.load, rank_load[there] += one.load - two.load;
      std::swap(one.slot, two.slot);
      for (size_t k = 0; k < copies.size(); ++k) {
        double more = common(copies[k], two) - common(copies[k], one);
        with[k * R + here] += more, with[k * R + there] -= more;
      }
    }
  }
  std::vector<int32_t> slots(R * S, kEmpty);
  for (const Copy& copy : copies) slots[copy.slot] = copy.expert;
  return slots;
}

}  // namespace epmoe::cpu
