// Moves from one placement to a better one. Each takes load from ranks above the goal by another copy of one of their
// experts. Candidates are chosen by an estimate, and the best of them by what `level` makes of it. Where no single move
// helps, a rank with little load first hands its lightest expert to a free slot elsewhere. Where that does not help
// either, moves lead towards a fresh placement.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "balance.h"

namespace epmoe::cpu {
namespace {

constexpr size_t kTried = 3;  // candidates that are carried out on trial
constexpr size_t kTriedWhenStuck = 24;
constexpr size_t kCleared = 6;        // ranks of which an expert is moved away on trial
constexpr double kWorthwhile = 1e-3;  // of the cost of a placement; a move that saves less is not made
constexpr double kNearer = 0.05;      // how much better than what is reached a fresh placement must be, in max / mean

struct Candidate {
  double gain;
  int32_t expert;
  int32_t slot;
};

Move carry_out(Layer& layer, const Candidate& c) {
  Move move{c.expert, c.slot, layer.slots[c.slot]};
  layer.put(c.expert, c.slot);
  layer.level();
  return move;
}

class Planner {
 public:
  Planner(Layer& layer, double goal, int32_t most_copies)
      : layer_(layer), trial_(layer), limit_(goal * layer.mean()), most_copies_(most_copies) {}

  // The next moves that lower the cost, at most `most`; none where none does.
  std::vector<Move> improve(int32_t most) {
    double enough = (1 - kWorthwhile) * cost_of(layer_);
    auto [cost, move] = best_move(layer_, kTried);
    if (cost >= enough) std::tie(cost, move) = best_move(layer_, kTriedWhenStuck);
    if (cost < enough) return {carry_out(layer_, move)};
    return most >= 2 && most_copies_ >= 2 ? make_way(enough) : std::vector<Move>{};
  }

  bool is_reached() const { return *std::max_element(layer_.rank_load.begin(), layer_.rank_load.end()) <= limit_; }

 private:
  // What lies above the goal, squared, since the busiest rank counts most; and a little of the rest, as room for more.
  double cost_of(const Layer& layer) const {
    double above = 0, spread = 0;
    for (double load : layer.rank_load) {
      double d = std::max(0.0, load - limit_), s = load - layer.mean();
      above += d * d, spread += s * s;
    }
    return above + 1e-4 * spread;
  }

  // How much load a slot's rank can take up to the goal if the slot is given up, less what then finds no room
  // elsewhere.
  std::pair<double, double> room_and_loss(const Layer& layer, int32_t p) const {
    double room = limit_ - layer.rank_load[layer.rank_of(p)] + layer.taken[p], loss = 0;
    if (layer.slots[p] != kEmpty) {
      loss = layer.taken[p];
      for (int32_t q = layer.next[p]; q != p; q = layer.next[q])
        loss -= std::max(0.0, limit_ - layer.rank_load[layer.rank_of(q)]);
    }
    return {room, std::max(0.0, loss)};
  }

  std::pair<double, Candidate> best_move(const Layer& layer, size_t most_tried) {
    struct Target {
      double room, loss;
      int32_t slot;
    };
    std::vector<Target> targets;
    for (int32_t p = 0; p < layer.R * layer.S; ++p) {
      if (!layer.is_free(p)) continue;
      auto [room, loss] = room_and_loss(layer, p);
      if (room > loss) targets.push_back({room, loss, p});
    }
    std::sort(targets.begin(), targets.end(), [](const Target& a, const Target& b) {
      return std::make_tuple(b.room - b.loss, a.slot) < std::make_tuple(a.room - a.loss, b.slot);
    });
    std::vector<double> hot(layer.E), above(layer.E);  // load of each expert on ranks above the goal, and how far above
    for (int32_t p = 0; p < layer.R * layer.S; ++p) {
      double excess = layer.rank_load[layer.rank_of(p)] - limit_;
      if (int32_t x = layer.slots[p]; x != kEmpty && excess > 0)
        hot[x] += layer.taken[p], above[x] = std::max(above[x], excess);
    }
    std::vector<Candidate> found;
    for (int32_t x = 0; x < layer.E; ++x) {
      if (hot[x] <= 0) continue;
      Candidate best{0, kEmpty, kEmpty};
      for (const Target& t : targets) {
        if (t.room - t.loss <= best.gain) break;  // they are in descending order
        double gain = std::min(t.room, hot[x]) - t.loss;
        bool grows = layer.slots[t.slot] != x;
        if (gain > best.gain && grows && layer.copies[x] < most_copies_ && !layer.holds(layer.rank_of(t.slot), x))
          best = {gain, x, t.slot};
      }
      best.gain *= above[x];
      if (best.slot != kEmpty) found.push_back(best);
    }
    size_t kept = std::min(most_tried, found.size());
    std::partial_sort(found.begin(), found.begin() + static_cast<int64_t>(kept), found.end(),
                      [](const Candidate& a, const Candidate& b) {
                        return std::make_tuple(-a.gain, a.expert) < std::make_tuple(-b.gain, b.expert);
                      });
    std::pair<double, Candidate> best{INFINITY, {}};
    for (size_t i = 0; i < kept; ++i) {
      trial_ = layer;
      carry_out(trial_, found[i]);
      if (double cost = cost_of(trial_); cost < best.first) best = {cost, found[i]};
    }
    return best;
  }

  // Two moves at once: the lightest expert of a rank with little load goes elsewhere as well, and its slot is then
  // free.
  std::vector<Move> make_way(double enough) {
    std::vector<int32_t> ranks(layer_.R);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](int32_t a, int32_t b) { return layer_.rank_load[a] < layer_.rank_load[b]; });
    ranks.resize(std::min(ranks.size(), kCleared));
    Candidate way{0, kEmpty, kEmpty}, move{};
    for (int32_t rank : ranks) {
      int32_t p = lightest_sole(rank);
      if (p == kEmpty) continue;
      int32_t x = layer_.slots[p], slot = roomiest(x);
      if (slot == kEmpty) continue;
      Layer cleared = layer_;
      carry_out(cleared, {0, x, slot});
      if (auto [cost, next] = best_move(cleared, kTriedWhenStuck); cost < enough)
        enough = cost, way = {0, x, slot}, move = next;
    }
    if (way.slot == kEmpty) return {};
    Move first = carry_out(layer_, way);
    return {first, carry_out(layer_, move)};
  }

  int32_t lightest_sole(int32_t rank) const {
    int32_t best = kEmpty;
    for (int32_t p = rank * layer_.S; p < (rank + 1) * layer_.S; ++p)
      if (!layer_.is_free(p) && (best == kEmpty || layer_.taken[p] < layer_.taken[best])) best = p;
    return best;
  }

  // The free slot that costs least to give to `expert`.
  int32_t roomiest(int32_t expert) const {
    int32_t best = kEmpty;
    double most = -INFINITY;
    for (int32_t p = 0; p < layer_.R * layer_.S; ++p) {
      if (!layer_.is_free(p) || layer_.holds(layer_.rank_of(p), expert)) continue;
      if (auto [room, loss] = room_and_loss(layer_, p); room - loss > most) most = room - loss, best = p;
    }
    return best;
  }

  Layer& layer_;
  Layer trial_;
  double limit_;
  int32_t most_copies_;
};

// For each of n parts of a target, the part of what is there that it replaces: the pairs with most in common come
// first.
std::vector<int32_t> match(const std::vector<int32_t>& common, int32_t n) {
  std::vector<int32_t> pairs(n * n), of(n, -1);
  std::vector<bool> is_taken(n);
  std::iota(pairs.begin(), pairs.end(), 0);
  std::stable_sort(pairs.begin(), pairs.end(), [&](int32_t a, int32_t b) { return common[a] > common[b]; });
  for (int32_t pair : pairs)
    if (int32_t part = pair / n, there = pair % n; of[part] < 0 && !is_taken[there])
      of[part] = there, is_taken[there] = true;
  return of;
}

// Which experts each rank holds in the target, [R][…], whose ranks and nodes are renumbered so that most experts stay.
std::vector<std::vector<int32_t>> near(const Layer& layer, const std::vector<int32_t>& target, int32_t G) {
  int32_t R = layer.R, N = R / G;
  std::vector<int32_t> common(R * R), common_nodes(N * N);
  for (int32_t p = 0; p < R * layer.S; ++p) {
    if (target[p] == kEmpty) continue;
    int32_t rank = layer.rank_of(p), x = target[p], q = layer.first[x];
    for (int32_t i = 0; i < layer.copies[x]; ++i, q = layer.next[q]) {
      ++common[rank * R + layer.rank_of(q)];
      ++common_nodes[rank / G * N + layer.rank_of(q) / G];
    }
  }
  std::vector<int32_t> nodes = match(common_nodes, N);
  std::vector<std::vector<int32_t>> wanted(R);
  for (int32_t node = 0; node < N; ++node) {
    std::vector<int32_t> inside(G * G);
    for (int32_t i = 0; i < G * G; ++i) inside[i] = common[(node * G + i / G) * R + nodes[node] * G + i % G];
    std::vector<int32_t> ranks = match(inside, G);
    for (int32_t g = 0; g < G; ++g)
      for (int32_t p = (node * G + g) * layer.S; p < (node * G + g + 1) * layer.S; ++p)
        if (target[p] != kEmpty) wanted[nodes[node] * G + ranks[g]].push_back(target[p]);
  }
  return wanted;
}

// The next moves towards a target, where `wanted` has the experts of each rank. A slot that does not need its expert
// takes one that its rank wants. If only sole copies are in the way, one of them goes to a free slot for a time.
std::vector<Candidate> towards(const Layer& layer, const std::vector<std::vector<int32_t>>& wanted,
                               int32_t most_copies) {
  std::optional<Candidate> best, blocked;  // the heaviest expert for a free slot, and for one with a sole copy
  for (int32_t p = 0; p < layer.R * layer.S; ++p) {
    const auto& here = wanted[layer.rank_of(p)];
    if (std::find(here.begin(), here.end(), layer.slots[p]) != here.end()) continue;
    auto& found = layer.is_free(p) ? best : blocked;
    for (int32_t x : here)
      if (layer.copies[x] < most_copies && !layer.holds(layer.rank_of(p), x) &&
          (!found || layer.loads[x] > found->gain))
        found = {layer.loads[x], x, p};
  }
  if (best) return {*best};
  if (!blocked || most_copies == 1) return {};
  int32_t sole = layer.slots[blocked->slot];
  for (int32_t p = 0; p < layer.R * layer.S; ++p)
    if (layer.is_free(p) && layer.slots[p] != blocked->expert && !layer.holds(layer.rank_of(p), sole))
      return {{0, sole, p}, *blocked};
  return {};
}

// Moves towards a fresh placement, as many as leave the balance no worse than it is.
std::vector<Move> approach(Layer& layer, size_t max_moves, double goal, int32_t most_copies, int32_t ranks_per_node) {
  std::vector<int32_t> target = fresh_slots(layer.loads.data(), layer.E, layer.R, layer.S, most_copies, ranks_per_node);
  Layer there(layer.loads.data(), layer.E, target.data(), layer.R, layer.S);
  there.level();
  if (there.balance() > layer.balance() - kNearer) return {};
  auto wanted = near(layer, target, ranks_per_node);
  std::vector<Move> moves;
  size_t kept = 0;
  auto missing = [&](const Layer& at) {
    int32_t count = 0;
    for (int32_t rank = 0; rank < at.R; ++rank)
      for (int32_t x : wanted[rank]) count += !at.holds(rank, x);
    return count;
  };
  Layer now = layer;
  double limit = layer.balance() + 1e-9;
  // Detours through free slots may be in vain, so what counts is a placement that misses less than all before.
  for (int32_t fewest = missing(layer), patience = layer.R; patience > 0 && now.balance() > goal; --patience) {
    auto next = towards(now, wanted, most_copies);
    if (next.empty() || moves.size() + next.size() > max_moves) break;
    for (const Candidate& one : next) moves.push_back(carry_out(now, one));
    if (int32_t count = missing(now); count < fewest) {
      fewest = count, patience = layer.R;
      if (now.balance() <= limit) kept = moves.size(), layer = now;
    }
  }
  moves.resize(kept);
  return moves;
}

}  // namespace

std::vector<Move> plan_moves(Layer& layer, int32_t max_moves, double goal, int32_t most_copies,
                             int32_t ranks_per_node) {
  std::vector<Move> moves;
  Planner planner(layer, goal, most_copies);
  auto left = [&] { return max_moves - static_cast<int32_t>(moves.size()); };
  auto append = [&](const std::vector<Move>& more) {
    moves.insert(moves.end(), more.begin(), more.end());
    return !more.empty();
  };
  while (left() > 0 && !planner.is_reached() && append(planner.improve(left()))) {
  }
  if (left() > 0 && !planner.is_reached()) append(approach(layer, left(), goal, most_copies, ranks_per_node));
  return moves;
}

}  // namespace epmoe::cpu
