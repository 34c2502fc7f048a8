// The planner of placements as operators of the CPU: layers are independent. epmoe/live/balance.py
// checks all values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "cpu/balance.h"
#include "unwrap.h"

namespace epmoe {
namespace {

struct Sizes {
  int32_t L, E, R, S, P;
};

Sizes sizes_of(const Tensor& loads, const Tensor& slots, int64_t ep_size) {
  STD_TORCH_CHECK(loads.dim() == 2 && slots.dim() == 2 && loads.size(0) == slots.size(0) &&
                      ep_size >= 1 && slots.size(1) % ep_size == 0 && slots.size(1) <= INT32_MAX,
                  "loads must be [L, E] and slots [L, P], with as many slots on each rank");
  auto number = [](int64_t size) { return static_cast<int32_t>(size); };
  return {number(loads.size(0)), number(loads.size(1)), number(ep_size),
          number(slots.size(1) / ep_size), number(slots.size(1))};
}

Tensor balance_shares(const Tensor& loads, const Tensor& slots, int64_t ep_size) {
  Sizes n = sizes_of(loads, slots, ep_size);
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  const auto* loads_LE = pointer<double>(loads, 1, "loads");
  Tensor shares = empty_like_device(slots, {n.L, n.P}, ScalarType::Double);
  auto* out = static_cast<double*>(shares.data_ptr());
  for (int64_t i = 0; i < n.L; ++i) {
    cpu::Layer layer(loads_LE + i * n.E, n.E, slots_LP + i * n.P, n.R, n.S);
    layer.level();
    for (int32_t p = 0; p < n.P; ++p) out[i * n.P + p] = layer.share(p);
  }
  return shares;
}

// Slots after all moves, the moves as (layer, expert, slot, dropped), and the balance before and
// after.
std::tuple<Tensor, Tensor, Tensor> balance_plan(const Tensor& loads, const Tensor& slots,
                                                int64_t ep_size, int64_t max_moves, double goal,
                                                int64_t most_copies) {
  Sizes n = sizes_of(loads, slots, ep_size);
  STD_TORCH_CHECK(
      0 <= max_moves && max_moves <= INT32_MAX && 1 <= most_copies && most_copies <= INT32_MAX,
      "max_moves or most_copies is out of range");
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  const auto* loads_LE = pointer<double>(loads, 1, "loads");
  Tensor after = empty_like_device(slots, {n.L, n.P}, ScalarType::Int);
  Tensor balance = empty_like_device(slots, {n.L, 2}, ScalarType::Double);
  std::vector<int32_t> rows;
  for (int32_t i = 0; i < n.L; ++i) {
    cpu::Layer layer(loads_LE + int64_t{i} * n.E, n.E, slots_LP + int64_t{i} * n.P, n.R, n.S);
    auto* balances = static_cast<double*>(balance.data_ptr()) + 2 * i;
    layer.level();
    balances[0] = layer.balance();
    for (const cpu::Move& m : cpu::plan_moves(layer, static_cast<int32_t>(max_moves), goal,
                                              static_cast<int32_t>(most_copies)))
      rows.insert(rows.end(), {i, m.expert, m.slot, m.dropped});
    balances[1] = layer.balance();
    std::copy(layer.slots.begin(), layer.slots.end(),
              static_cast<int32_t*>(after.data_ptr()) + int64_t{i} * n.P);
  }
  Tensor moves =
      empty_like_device(slots, {static_cast<int64_t>(rows.size()) / 4, 4}, ScalarType::Int);
  std::copy(rows.begin(), rows.end(), static_cast<int32_t*>(moves.data_ptr()));
  return {after, moves, balance};
}

Tensor balance_fresh(const Tensor& loads, int64_t ep_size, int64_t slots_per_rank,
                     int64_t most_copies, int64_t ranks_per_node) {
  STD_TORCH_CHECK(loads.dim() == 2 && loads.size(1) <= ep_size * slots_per_rank &&
                      most_copies >= 1 && ranks_per_node >= 1 && ep_size % ranks_per_node == 0 &&
                      ep_size * slots_per_rank <= INT32_MAX,
                  "loads must be [L, E] with a slot for every expert");
  const auto* loads_LE = pointer<double>(loads, 1, "loads");
  int64_t L = loads.size(0);
  int64_t E = loads.size(1);
  int64_t P = ep_size * slots_per_rank;
  Tensor slots = empty_like_device(loads, {L, P}, ScalarType::Int);
  for (int64_t i = 0; i < L; ++i) {
    auto layer =
        cpu::fresh_slots(loads_LE + i * E, static_cast<int32_t>(E), static_cast<int32_t>(ep_size),
                         static_cast<int32_t>(slots_per_rank), static_cast<int32_t>(most_copies),
                         static_cast<int32_t>(ranks_per_node));
    std::copy(layer.begin(), layer.end(), static_cast<int32_t*>(slots.data_ptr()) + i * P);
  }
  return slots;
}

// The quotas of one source [L, 2, E, width]: in calls of few tokens, and of many.
Tensor balance_quotas(const Tensor& loads, const Tensor& slots, int64_t ep_size, int64_t source,
                      int64_t width) {
  Sizes n = sizes_of(loads, slots, ep_size);
  STD_TORCH_CHECK(0 <= source && source < ep_size && width >= 1, "source must be a rank");
  const auto* loads_LE = pointer<double>(loads, 1, "loads");
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  Tensor quotas = empty_like_device(slots, {n.L, 2, n.E, width}, ScalarType::Int);
  auto* table = static_cast<int32_t*>(quotas.data_ptr());
  for (int64_t i = 0; i < n.L; ++i) {
    cpu::Layer layer(loads_LE + i * n.E, n.E, slots_LP + i * n.P, n.R, n.S);
    layer.level();
    cpu::choose_one_copy(layer, {table + 2 * i * n.E * width, width});
    cpu::choose_by_shares(layer, static_cast<int32_t>(source),
                          {table + (2 * i + 1) * n.E * width, width});
  }
  return quotas;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("balance_shares", TORCH_BOX(&balance_shares));
  library.impl("balance_plan", TORCH_BOX(&balance_plan));
  library.impl("balance_fresh", TORCH_BOX(&balance_fresh));
  library.impl("balance_quotas", TORCH_BOX(&balance_quotas));
}

}  // namespace epmoe
