// A placement from nothing but loads, by the greedy method that DeepSeek published as EPLB: the
// next copy is one of the expert with most load per copy; then the heaviest copies go first, each
// to the rank with the least load that has room. Two copies of an expert never go to one rank here.
#include <algorithm>

#include "balance.h"

namespace epmoe::cpu {
namespace {

struct Copy {
  int32_t expert;
  double load;
};

// How many copies each of `experts` has when they fill `room` slots.
std::vector<Copy> replicate(const double* loads_E, const std::vector<int32_t>& experts,
                            int32_t room, int32_t most_copies) {
  auto n = static_cast<int32_t>(experts.size());
  std::vector<int32_t> copies(n, 1);
  auto load = [&](int32_t i) { return loads_E[experts[i]] / copies[i]; };
  for (int32_t spare = room - n; spare > 0; --spare) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; ++i)
      if (copies[i] < most_copies && (best < 0 || load(i) > load(best))) best = i;
    if (best < 0) break;
    ++copies[best];
  }
  std::vector<Copy> result;
  for (int32_t i = 0; i < n; ++i) result.insert(result.end(), copies[i], {experts[i], load(i)});
  return result;
}

// Puts copies into bins of `room` slots, never two of an expert into one bin. A copy that fits
// nowhere is left out; the first one of an expert always fits.
std::vector<std::vector<Copy>> pack(std::vector<Copy> copies, int32_t num_bins, int32_t room) {
  std::vector<std::vector<Copy>> bins(num_bins);
  std::vector<double> load(num_bins);
  auto holds = [&](int32_t bin, int32_t expert) {
    return std::any_of(bins[bin].begin(), bins[bin].end(),
                       [&](const Copy& c) { return c.expert == expert; });
  };
  auto is_full = [&](int32_t bin) { return static_cast<int32_t>(bins[bin].size()) == room; };
  std::stable_sort(copies.begin(), copies.end(),
                   [](const Copy& a, const Copy& b) { return a.load > b.load; });
  for (const Copy& copy : copies) {
    int32_t best = -1;
    for (int32_t bin = 0; bin < num_bins; ++bin)
      if (!is_full(bin) && (best < 0 || load[bin] < load[best]) && !holds(bin, copy.expert))
        best = bin;
    if (best < 0) {  // every bin with room has this expert: another copy makes way into one of them
      int32_t open = 0;
      while (open < num_bins && is_full(open)) ++open;
      if (open == num_bins) continue;
      Copy* swapped = nullptr;
      for (int32_t bin = 0; bin < num_bins; ++bin) {
        if (holds(bin, copy.expert)) continue;
        for (Copy& other : bins[bin])
          if (!holds(open, other.expert) && (!swapped || other.load < swapped->load))
            swapped = &other, best = bin;
      }
      if (!swapped) continue;
      load[open] += swapped->load, load[best] -= swapped->load;
      bins[open].push_back(*swapped);
      *swapped = copy;
    } else {
      bins[best].push_back(copy);
    }
    load[best] += copy.load;
  }
  return bins;
}

}  // namespace

std::vector<int32_t> fresh_slots(const double* loads_E, int32_t E, int32_t R, int32_t S,
                                 int32_t most_copies, int32_t ranks_per_node) {
  int32_t N = R / ranks_per_node;
  int32_t G = ranks_per_node;
  std::vector<std::vector<Copy>> nodes(1);
  for (int32_t x = 0; x < E; ++x) nodes[0].push_back({x, loads_E[x]});
  if (N > 1) nodes = pack(nodes[0], N, (E + N - 1) / N);
  std::vector<int32_t> slots(R * S, kEmpty);
  for (int32_t node = 0; node < N; ++node) {
    std::vector<int32_t> experts;
    for (const Copy& copy : nodes[node]) experts.push_back(copy.expert);
    auto ranks = pack(replicate(loads_E, experts, G * S, std::min(most_copies, G)), G, S);
    for (int32_t g = 0; g < G; ++g)
      for (size_t i = 0; i < ranks[g].size(); ++i)
        slots[(node * G + g) * S + i] = ranks[g][i].expert;
  }
  return slots;
}

}  // namespace epmoe::cpu
