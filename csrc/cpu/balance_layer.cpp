// The shares of copies. One expert after another divides its load among the ranks of its copies as
// water fills vessels: the emptiest first. Sweeps over all experts lower the sum of the squares of
// rank loads. It is least exactly where ranks are as equal as they can be (Fujishige 1980), and a
// sweep that changes nothing has found that.
#include <cmath>
#include <numeric>
#include <tuple>

#include "balance.h"

namespace epmoe::cpu {

constexpr double kUnchanged = 1e-9;  // of the mean load of a rank

Layer::Layer(const double* loads_E, int32_t E, const int32_t* slots_P, int32_t R, int32_t S)
    : E(E),
      R(R),
      S(S),
      loads(loads_E, loads_E + E),
      slots(slots_P, slots_P + R * S),
      copies(E),
      taken(R * S),
      rank_load(R) {
  total = std::accumulate(loads.begin(), loads.end(), 0.0);
  for (int32_t p = 0; p < R * S; ++p)
    if (slots[p] != kEmpty) copies[slots[p]].push_back(p);
  for (int32_t x = 0; x < E; ++x) divide(x);
}

bool Layer::holds(int32_t rank, int32_t expert) const {
  const std::vector<int32_t>& of = copies[expert];
  return std::any_of(of.begin(), of.end(), [&](int32_t p) { return rank_of(p) == rank; });
}

double Layer::share(int32_t slot) const {
  int32_t x = slots[slot];
  if (x == kEmpty) return 0;
  double sum = 0;  // the expert's load, but for rounding where it is tiny
  for (int32_t p : copies[x]) sum += taken[p];
  return sum > 0 ? taken[slot] / sum : 1.0 / static_cast<double>(copies[x].size());
}

// Returns the largest change of what a copy takes.
double Layer::divide(int32_t expert) {
  std::vector<int32_t>& of = copies[expert];
  auto load = [&](int32_t p) -> double& { return rank_load[rank_of(p)]; };
  for (int32_t p : of) load(p) -= taken[p];
  std::sort(of.begin(), of.end(),
            [&](int32_t a, int32_t b) { return std::tie(load(a), a) < std::tie(load(b), b); });
  double level = 0;
  double sum = loads[expert];
  double change = 0;
  for (size_t n = 0; n < of.size() && (n == 0 || load(of[n]) < level); ++n)
    sum += load(of[n]), level = sum / static_cast<double>(n + 1);
  for (int32_t p : of) {
    double takes = std::max(0.0, level - load(p));
    change = std::max(change, std::abs(takes - taken[p]));
    load(p) += taken[p] = takes;
  }
  return change;
}

void Layer::level(int32_t sweeps) {
  for (bool changes = true; changes && sweeps > 0; --sweeps) {
    changes = false;
    for (int32_t x = 0; x < E; ++x)
      if (copies[x].size() > 1 && divide(x) > kUnchanged * mean()) changes = true;
  }
}

Move Layer::put(int32_t expert, int32_t slot) {
  int32_t old = slots[slot];
  if (old != kEmpty) {
    copies[old].erase(std::find(copies[old].begin(), copies[old].end(), slot));
    rank_load[rank_of(slot)] -= taken[slot];
    divide(old);
  }
  slots[slot] = expert, taken[slot] = 0;
  copies[expert].push_back(slot);
  divide(expert);
  return {expert, slot, old};
}

}  // namespace epmoe::cpu
