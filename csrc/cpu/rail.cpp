// The rail on the CPU: pack copies each token once into the slab of each node that needs it, and
// sum adds up what the nodes send back. Between the two, slabs travel over the network, and each
// node runs its own exchange.
#include <algorithm>
#include <cstring>
#include <vector>

#include "pairs.h"
#include "stages.h"
#include "stream.h"

namespace epmoe::cpu {
namespace {

// The first slot of node m's slab, counted from `sent`; of the own node, from `own`.
int64_t first_slot(int64_t slab_rows, int64_t node, int64_t m) {
  return m == node ? 0 : (m - (m > node)) * slab_rows;
}

PairTables tables_of(const RailPackArgs& args, int64_t* counters) {
  return {args.E, args.copies, args.rank, args.copies_EC, args.copies_E, counters, false, {}};
}

// Gives each token its slots, in token order, and counts the rows of each node.
void assign_slots(const RailPackArgs& args, int64_t tokens) {
  Pairs pairs(args.K, args.E);
  std::vector<int64_t> wanted(args.num_nodes, 0);
  std::vector<int32_t> pairs_of(args.num_nodes);  // of this token, by node
  for (int64_t t = 0; t < args.T; ++t) {
    int32_t* slots = args.slots_by_node + t * args.num_nodes;
    std::fill_n(slots, args.num_nodes, -1);
    if (t >= tokens) continue;
    std::fill(pairs_of.begin(), pairs_of.end(), 0);
    read_pairs(tables_of(args, args.counters), args, t, pairs,
               [&](int32_t k) { ++pairs_of[args.node_of_P[pairs.ids[k]]]; });
    for (int64_t m = 0; m < args.num_nodes; ++m) {
      if (!pairs_of[m]) continue;
      if (wanted[m] < args.slab_rows)
        slots[m] = static_cast<int32_t>(wanted[m]);
      else
        args.counters[kDroppedPairs] += pairs_of[m];
      ++wanted[m];
    }
  }
  for (int64_t m = 0; m < args.num_nodes; ++m) {
    args.rows_by_node[m] = static_cast<int32_t>(std::min(wanted[m], args.slab_rows));
    args.rows_sent_by_node[m] += args.rows_by_node[m];
    if (wanted[m] > args.slab_rows)
      *args.needed = std::max(*args.needed, static_cast<int32_t>(wanted[m]));
  }
}

// Writes the ids and weights of one slot. Pairs of other nodes, and of a null `pairs`, are no pairs
// here.
void write_pairs(const RailPackArgs& args, char* slot, int64_t node, const Pairs* pairs) {
  auto* ids = reinterpret_cast<int32_t*>(slot + args.slot.ids);
  auto* weights = reinterpret_cast<float*>(slot + args.slot.weights);
  for (int32_t k = 0; k < args.K; ++k) {
    bool here = pairs && pairs->ids[k] >= 0 && args.node_of_P[pairs->ids[k]] == node;
    ids[k] = here ? args.node_local_P[pairs->ids[k]] : -1;
    weights[k] = here ? pairs->weights[k] : 0.0f;
  }
}

// Copies all tokens into their slots.
void copy_tokens(const RailPackArgs& args, const std::vector<char*>& slabs, int64_t tokens) {
  Pairs pairs(args.K, args.E);
  int64_t uncounted[kNumCounters] = {};  // `assign_slots` has counted
  WireRows rows(args, args.format, args.D * itemsize(args.dtype));
  int64_t row_bytes = wire_row_bytes(args.format, args.D, args.dtype);
  int64_t blocks = wire(args.format).num_scales(args.D);
  bool stream = streams(tokens * args.slot.bytes);
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* slots = args.slots_by_node + t * args.num_nodes;
    if (std::all_of(slots, slots + args.num_nodes, [](int32_t slot) { return slot < 0; })) continue;
    read_pairs(tables_of(args, uncounted), args, t, pairs, [](int32_t) {});
    auto [row, scales] = rows.at(t);
    for (int64_t m = 0; m < args.num_nodes; ++m) {
      if (slots[m] < 0) continue;
      char* slot = slabs[m] + slots[m] * args.slot.bytes;
      copy_row(slot, row, row_bytes, stream);
      if (blocks) std::copy_n(scales, blocks, reinterpret_cast<float*>(slot + args.slot.scales));
      write_pairs(args, slot, m, &pairs);
    }
  }
  finish_streaming();
}

}  // namespace

void rail_pack(const RailPackArgs& args) {
  int64_t tokens = real_tokens(args);
  args.counters[kClampedNumTokens] += tokens != wanted_tokens(args);
  assign_slots(args, tokens);
  std::vector<char*> slabs(args.num_nodes);
  for (int64_t m = 0; m < args.num_nodes; ++m) {
    slabs[m] = (m == args.node ? args.own : args.sent) +
               first_slot(args.slab_rows, args.node, m) * args.slot.bytes;
    for (int64_t i = args.rows_by_node[m]; i < args.slab_rows; ++i)
      write_pairs(args, slabs[m] + i * args.slot.bytes, m, nullptr);
    RailTag tag{static_cast<int32_t>(args.D), args.K,
                static_cast<int32_t>(args.dtype) | args.tag << 8, args.epoch};
    std::memcpy(slabs[m] + args.slot.tag, &tag, sizeof(tag));
  }
  copy_tokens(args, slabs, tokens);
}

void rail_sum(const RailSumArgs& args) {
  std::vector<float> sum_D(args.D);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t t = 0; t < args.T; ++t) {
      std::fill(sum_D.begin(), sum_D.end(), 0.0f);
      for (int64_t m = 0; m < args.num_nodes; ++m) {  // in the order of the nodes
        int32_t slot = args.slots_by_node[t * args.num_nodes + m];
        if (slot < 0) continue;
        auto* rows = static_cast<const T*>(m == args.node ? args.own : args.returned);
        const T* row = rows + (first_slot(args.slab_rows, args.node, m) + slot) * args.D;
        for (int64_t d = 0; d < args.D; ++d) sum_D[d] += to_float(row[d]);
      }
      T* y = static_cast<T*>(args.y_TD) + t * args.D;
      for (int64_t d = 0; d < args.D; ++d) y[d] = from_float<T>(sum_D[d]);
    }
  });
}

}  // namespace epmoe::cpu
