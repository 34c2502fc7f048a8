// Moves from one placement to a better one, step by step. A step takes load from a rank that is
// near the busiest: it copies one of the rank's experts to another rank, or exchanges it for a
// lighter one there. Where both are the only copies of their experts, the exchange goes through a
// free slot. Steps are ranked by an estimate, and the best of them are carried out on trial. No
// step raises the load of the busiest rank.
#include <cmath>
#include <numeric>
#include <tuple>

#include "balance.h"

namespace epmoe::cpu {
namespace {

constexpr size_t kTried = 4;  // steps that are carried out on trial
constexpr size_t kTriedWhenStuck = 64;
constexpr int32_t kSweeps = 10;       // that divide the loads of a trial
constexpr double kNearBusiest = 0.9;  // of the load of the busiest rank
constexpr double kRounding = 1e-9;
constexpr double kWorthwhile =
    3e-4;  // of the cost of a placement; a move that saves less is not made

double square(double v) { return v * v; }

class Planner {
 public:
  Planner(Layer& layer, double goal, int32_t most_copies)
      : layer_(layer), trial_(layer), limit_(goal * layer.mean()), most_copies_(most_copies) {}

  // The moves of the next step, at most `most`; none where no step is worthwhile.
  std::vector<Move> step(size_t most) {
    std::vector<int32_t> ranks(layer_.R);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) {
      return layer_.rank_load[a] > layer_.rank_load[b];
    });
    find_holes();
    for (size_t tried : {kTried, kTriedWhenStuck})
      for (int32_t rank : ranks) {
        if (layer_.rank_load[rank] <= std::max(limit_, kNearBusiest * layer_.busiest())) break;
        if (auto moves = relieve(rank, most, tried); !moves.empty()) return moves;
      }
    return {};
  }

 private:
  // The expert of `from` is copied into `to`, or the two slots exchange their experts.
  struct Candidate {
    double
        gain;  // what a move of it takes off the sum of the squares of rank loads, as an estimate
    int32_t from, to;
    bool exchanges;
  };
  struct Put {
    int32_t expert, slot;
  };

  // What lies above the goal, squared, since the busiest rank counts most; and a little of the
  // rest, as room for more.
  double cost_of(const Layer& layer) const {
    double above = 0;
    double spread = 0;
    for (double load : layer.rank_load)
      above += square(std::max(0.0, load - limit_)), spread += square(load - layer.mean());
    return above + 1e-4 * spread;
  }

  // The free slot of each rank that takes least, and that of all ranks.
  void find_holes() {
    holes_.assign(layer_.R, kEmpty), hole_ = kEmpty;
    for (int32_t p = 0; p < layer_.R * layer_.S; ++p) {
      if (!layer_.is_free(p)) continue;
      for (int32_t* best : {&holes_[layer_.rank_of(p)], &hole_})
        if (*best == kEmpty || layer_.taken[p] < layer_.taken[*best]) *best = p;
    }
  }

  bool can_come(int32_t expert, int32_t rank) const {
    return static_cast<int32_t>(layer_.copies[expert].size()) < most_copies_ &&
           !layer_.holds(rank, expert);
  }

  std::vector<Move> relieve(int32_t rank, size_t most, size_t tried) {
    std::vector<Candidate> found;
    for (int32_t from = rank * layer_.S; from < (rank + 1) * layer_.S; ++from) {
      if (layer_.slots[from] == kEmpty) continue;
      add_copies(from, found);
      add_exchanges(from, most, found);
    }
    tried = std::min(tried, found.size());
    std::partial_sort(found.begin(), found.begin() + static_cast<int64_t>(tried), found.end(),
                      [](const Candidate& a, const Candidate& b) {
                        return std::make_tuple(-a.gain, a.from, a.to) <
                               std::make_tuple(-b.gain, b.from, b.to);
                      });
    double cost = cost_of(layer_);
    double saved = kWorthwhile * cost;
    std::vector<Put> best;
    for (size_t i = 0; i < tried; ++i) {
      trial_ = layer_;
      std::vector<Put> puts = puts_of(found[i]);
      for (const Put& put : puts) trial_.put(put.expert, put.slot);
      trial_.level(kSweeps);
      double saves = (cost - cost_of(trial_)) / static_cast<double>(puts.size());
      if (saves > saved && trial_.busiest() <= layer_.busiest() * (1 + kRounding))
        saved = saves, best = puts;
    }
    std::vector<Move> moves;
    for (const Put& put : best) moves.push_back(layer_.put(put.expert, put.slot));
    if (!moves.empty()) layer_.level();
    return moves;
  }

  // A copy takes half of the difference between two ranks, or all that `from` takes. What its slot
  // took falls to the rank with least load that has that expert, too.
  void add_copies(int32_t from, std::vector<Candidate>& found) const {
    double here = layer_.rank_load[layer_.rank_of(from)];
    for (int32_t to = 0; to < layer_.R * layer_.S; ++to) {
      int32_t rank = layer_.rank_of(to);
      if (!layer_.is_free(to) || !can_come(layer_.slots[from], rank)) continue;
      double there = layer_.rank_load[rank];
      double left = there - layer_.taken[to];
      double part = std::min(layer_.taken[from], (here - left) / 2);
      double gain = square(here) + square(there) - square(here - part) - square(left + part);
      if (layer_.taken[to] > 0) {
        double heir = INFINITY;
        for (int32_t p : layer_.copies[layer_.slots[to]])
          if (p != to) heir = std::min(heir, layer_.rank_load[layer_.rank_of(p)]);
        gain -= square(heir + layer_.taken[to]) - square(heir);
      }
      if (part > 0 && gain > 0) found.push_back({gain, from, to, false});
    }
  }

  void add_exchanges(int32_t from, size_t most, std::vector<Candidate>& found) const {
    int32_t rank = layer_.rank_of(from);
    for (int32_t to = 0; to < layer_.R * layer_.S; ++to) {
      double less = layer_.taken[from] - layer_.taken[to];
      double gain =
          2 * less * (layer_.rank_load[rank] - layer_.rank_load[layer_.rank_of(to)] - less);
      if (less <= 0 || gain <= 0 || layer_.slots[to] == kEmpty ||
          !can_come(layer_.slots[to], rank) || !can_come(layer_.slots[from], layer_.rank_of(to)))
        continue;
      bool is_direct = layer_.is_free(from) || layer_.is_free(to) || holes_[rank] != kEmpty ||
                       holes_[layer_.rank_of(to)] != kEmpty;
      size_t moves = is_direct ? 2 : 3;
      if (moves <= most && hole_ != kEmpty)
        found.push_back({gain / static_cast<double>(moves), from, to, true});
    }
  }

  // In this order every expert keeps a copy. A hole on one of the two ranks takes the expert that
  // comes there for good.
  std::vector<Put> puts_of(const Candidate& c) const {
    int32_t x = layer_.slots[c.from];
    int32_t y = layer_.slots[c.to];
    if (!c.exchanges) return {{x, c.to}};
    if (layer_.is_free(c.from)) return {{y, c.from}, {x, c.to}};
    if (layer_.is_free(c.to)) return {{x, c.to}, {y, c.from}};
    int32_t here = holes_[layer_.rank_of(c.from)];
    int32_t there = holes_[layer_.rank_of(c.to)];
    if (here == kEmpty && there == kEmpty) return {{x, hole_}, {y, c.from}, {x, c.to}};
    if (here == kEmpty || (there != kEmpty && layer_.taken[there] <= layer_.taken[here]))
      return {{x, there}, {y, c.from}};
    return {{y, here}, {x, c.to}};
  }

  Layer& layer_;
  Layer trial_;
  double limit_;
  int32_t most_copies_;
  std::vector<int32_t> holes_;  // [R]
  int32_t hole_ = kEmpty;
};

}  // namespace

std::vector<Move> plan_moves(Layer& layer, int32_t max_moves, double goal, int32_t most_copies) {
  Planner planner(layer, goal, most_copies);
  std::vector<Move> moves;
  while (static_cast<int32_t>(moves.size()) < max_moves && layer.busiest() > goal * layer.mean()) {
    std::vector<Move> more = planner.step(max_moves - moves.size());
    if (more.empty()) break;
    moves.insert(moves.end(), more.begin(), more.end());
  }
  return moves;
}

}  // namespace epmoe::cpu
