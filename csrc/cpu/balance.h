// The placement of one MoE layer's experts in slots, and how its load falls on ranks. R ranks have
// S slots each; slot p lies on rank p / S and holds a logical expert, or −1. The parts are
// independent of tensors and of other layers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace epmoe::cpu {

constexpr int32_t kEmpty = -1;

struct Move {
  int32_t expert;
  int32_t slot;
  int32_t dropped;  // what the slot held, or kEmpty
};

// Slots, and the load that each of them takes. Loads must be finite and at least 0. Slots must be
// valid: at least one copy of every expert, and no two of an expert on a rank.
class Layer {
 public:
  Layer(const double* loads_E, int32_t E, const int32_t* slots_P, int32_t R, int32_t S);

  // Divides each expert's load among its copies so that rank loads are as equal as they can be: the
  // busiest rank has the least load possible, then the next one, and so on. Fewer sweeps come near
  // it.
  void level(int32_t sweeps = 10000);
  // Puts `expert` into `slot`, in place of what is there, and divides the loads of these two
  // experts anew.
  Move put(int32_t expert, int32_t slot);

  int32_t rank_of(int32_t slot) const { return slot / S; }
  bool holds(int32_t rank, int32_t expert) const;
  // Whether the slot may take another expert: it is empty, or its expert has another copy.
  bool is_free(int32_t slot) const {
    return slots[slot] == kEmpty || copies[slots[slot]].size() > 1;
  }
  double mean() const { return total / R; }
  double busiest() const { return *std::max_element(rank_load.begin(), rank_load.end()); }
  // The load of the busiest rank over the mean; 1 without load.
  double balance() const { return total > 0 ? busiest() / mean() : 1.0; }
  // The part of its expert's load that a slot takes; 0 for an empty one.
  double share(int32_t slot) const;

  int32_t E, R, S;
  double total = 0;
  std::vector<double> loads;                 // [E]
  std::vector<int32_t> slots;                // [P]
  std::vector<std::vector<int32_t>> copies;  // [E] the slots of an expert
  std::vector<double> taken;                 // [P] load
  std::vector<double> rank_load;             // [R]

 private:
  double divide(int32_t expert);
};

// At most `max_moves` moves, which bring the balance to `goal` or nearer to it. `layer` is level,
// before and after it has carried them out. No expert gets more than `most_copies` copies.
std::vector<Move> plan_moves(Layer& layer, int32_t max_moves, double goal, int32_t most_copies);

// The slots [R · S] of a placement from nothing but loads. With fewer ranks per node than R, all
// copies of an expert are on one node.
std::vector<int32_t> fresh_slots(const double* loads_E, int32_t E, int32_t R, int32_t S,
                                 int32_t most_copies, int32_t ranks_per_node);

// Which copies of each expert a source sends to, as copies.h reads it.
struct QuotaTable {
  int32_t* entries;  // [E, width]
  int64_t width;     // at least the copies of an expert
};

// The copies that one source rank sends to, so that all sources together keep to the shares of a
// level layer.
void choose_by_shares(const Layer& layer, int32_t source, QuotaTable out);

// The same for all sources: one copy of each expert, so that the rank with most chosen copies has
// as few as possible.
void choose_one_copy(const Layer& layer, QuotaTable out);

}  // namespace epmoe::cpu
