// The shares of copies. Load is shifted along paths of ranks, from those above the mean of their group to those below
// it: each step of a path moves load of one expert to another of its copies. What is still above the mean when no path
// is left can only be shared by the ranks that it reaches; these and the other ranks become two groups, each with a
// mean of its own. That is the decomposition of Fujishige for the lexicographically optimal base of a polymatroid, with
// augmenting paths of Edmonds and Karp.
#include <algorithm>
#include <numeric>

#include "balance.h"

namespace epmoe::cpu {

Layer::Layer(const double* loads_E, int32_t E, const int32_t* slots_P, int32_t R, int32_t S)
    : E(E),
      R(R),
      S(S),
      loads(loads_E, loads_E + E),
      slots(slots_P, slots_P + R * S),
      copies(E),
      first(E, kEmpty),
      next(R * S),
      taken(R * S),
      rank_load(R),
      group_of_rank(R),
      queue(R),
      from(R),
      to(R),
      rank_seen(R),
      expert_seen(E) {
  total = std::accumulate(loads.begin(), loads.end(), 0.0);
  least = 1e-12 * total;
  for (int32_t p = 0; p < R * S; ++p)
    if (slots[p] != kEmpty) link(p, slots[p]);
  for (int32_t p = 0; p < R * S; ++p) {
    if (slots[p] == kEmpty) continue;
    taken[p] = loads[slots[p]] / copies[slots[p]];
    rank_load[rank_of(p)] += taken[p];
  }
}

bool Layer::holds(int32_t rank, int32_t expert) const {
  for (int32_t i = copies[expert], p = first[expert]; i > 0; --i, p = next[p])
    if (rank_of(p) == rank) return true;
  return false;
}

double Layer::balance() const {
  return total > 0 ? *std::max_element(rank_load.begin(), rank_load.end()) / mean() : 1.0;
}

double Layer::share(int32_t slot) const {
  int32_t x = slots[slot];
  if (x == kEmpty) return 0;
  return loads[x] > 0 ? taken[slot] / loads[x] : 1.0 / copies[x];
}

void Layer::link(int32_t slot, int32_t expert) {
  slots[slot] = expert;
  next[slot] = copies[expert]++ ? next[first[expert]] : slot;
  if (next[slot] == slot)
    first[expert] = slot;
  else
    next[first[expert]] = slot;
}

void Layer::unlink(int32_t slot) {
  int32_t x = slots[slot], before = slot;
  while (next[before] != slot) before = next[before];
  next[before] = next[slot];
  first[x] = next[slot];
  --copies[x];
}

void Layer::put(int32_t expert, int32_t slot) {
  if (int32_t old = slots[slot]; old != kEmpty) {
    unlink(slot);
    int32_t heir = first[old];
    taken[heir] += taken[slot], rank_load[rank_of(heir)] += taken[slot];
    rank_load[rank_of(slot)] -= taken[slot];
  }
  link(slot, expert);
  taken[slot] = 0;
}

void Layer::level() {
  std::vector<std::vector<int32_t>> waiting(1, std::vector<int32_t>(R));
  std::iota(waiting[0].begin(), waiting[0].end(), 0);
  std::fill(group_of_rank.begin(), group_of_rank.end(), 0);
  int32_t groups = 1;
  while (!waiting.empty()) {
    std::vector<int32_t> group = std::move(waiting.back());
    waiting.pop_back();
    if (group.size() == 1) continue;
    double mean = 0;
    for (int32_t rank : group) mean += rank_load[rank] / static_cast<double>(group.size());
    int32_t number = group_of_rank[group[0]];
    while (shift(group, number, mean)) {
    }
    std::vector<int32_t> above, below;
    for (int32_t rank : group) (rank_seen[rank] == search ? above : below).push_back(rank);
    if (above.empty() || below.empty()) continue;
    for (int32_t rank : above) group_of_rank[rank] = groups;
    ++groups;
    waiting.push_back(std::move(above));
    waiting.push_back(std::move(below));
  }
}

// Shifts load from a rank above `level` to one below it. If there is no path, the ranks with `rank_seen` == `search`
// are those that a rank above the level reaches.
bool Layer::shift(const std::vector<int32_t>& group, int32_t number, double level) {
  ++search;
  size_t size = 0;
  for (int32_t rank : group)
    if (rank_load[rank] > level + least) {
      rank_seen[rank] = search, from[rank] = kEmpty;
      queue[size++] = rank;
    }
  for (size_t head = 0; head < size; ++head) {
    int32_t rank = queue[head];
    for (int32_t p = rank * S; p < (rank + 1) * S; ++p) {
      int32_t x = slots[p];
      if (x == kEmpty || copies[x] == 1 || taken[p] <= least || expert_seen[x] == search) continue;
      expert_seen[x] = search;
      for (int32_t q = next[p]; q != p; q = next[q]) {
        int32_t other = rank_of(q);
        if (group_of_rank[other] != number || rank_seen[other] == search) continue;
        rank_seen[other] = search, from[other] = p, to[other] = q;
        if (rank_load[other] >= level - least) {
          queue[size++] = other;
          continue;
        }
        double amount = level - rank_load[other];
        int32_t start = other;
        for (; from[start] != kEmpty; start = rank_of(from[start])) amount = std::min(amount, taken[from[start]]);
        amount = std::min(amount, rank_load[start] - level);
        for (int32_t at = other; from[at] != kEmpty; at = rank_of(from[at]))
          taken[from[at]] -= amount, taken[to[at]] += amount;
        rank_load[start] -= amount, rank_load[other] += amount;
        return true;
      }
    }
  }
  return false;
}

}  // namespace epmoe::cpu
