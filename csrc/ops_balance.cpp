// The planner of placements as operators of the CPU: layers are independent. Python checks what users pass; a slot that
// is out of range or an expert without a copy is caught here once more, before it becomes an address.
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

void check_slots(const int32_t* slots_LP, const Sizes& n) {
  std::vector<int32_t> rank_of(n.E);  // the last rank that holds an expert, from 1
  for (int32_t layer = 0; layer < n.L; ++layer) {
    std::fill(rank_of.begin(), rank_of.end(), 0);
    for (int32_t p = 0; p < n.P; ++p) {
      int32_t x = slots_LP[int64_t{layer} * n.P + p];
      STD_TORCH_CHECK(cpu::kEmpty <= x && x < n.E, "slots must hold experts or −1");
      if (x == cpu::kEmpty) continue;
      STD_TORCH_CHECK(rank_of[x] != p / n.S + 1, "a rank must not hold two copies of an expert");
      rank_of[x] = p / n.S + 1;
    }
    STD_TORCH_CHECK(std::find(rank_of.begin(), rank_of.end(), 0) == rank_of.end(), "every expert must have a slot");
  }
}

Sizes sizes_of(const Tensor& loads, const Tensor& slots, int64_t ep_size) {
  STD_TORCH_CHECK(loads.dim() == 2 && slots.dim() == 2 && loads.size(0) == slots.size(0) && ep_size >= 1 &&
                      slots.size(1) % ep_size == 0 && slots.size(1) <= INT32_MAX,
                  "loads must be [L, E] and slots [L, P], with as many slots on each rank");
  auto number = [](int64_t size) { return static_cast<int32_t>(size); };
  return {number(loads.size(0)), number(loads.size(1)), number(ep_size), number(slots.size(1) / ep_size),
          number(slots.size(1))};
}

const double* checked_loads(const Tensor& loads) {
  const double* values = pointer<double>(loads, 1, "loads");
  bool valid = std::all_of(values, values + loads.numel(), [](double v) { return v >= 0 && std::isfinite(v); });
  STD_TORCH_CHECK(valid, "loads must be finite and at least 0");
  return values;
}

Tensor balance_shares(const Tensor& loads, const Tensor& slots, int64_t ep_size) {
  Sizes n = sizes_of(loads, slots, ep_size);
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  const double* loads_LE = checked_loads(loads);
  check_slots(slots_LP, n);
  Tensor shares = empty_like_device(slots, {n.L, n.P}, ScalarType::Double);
  auto* out = static_cast<double*>(shares.data_ptr());
  for (int64_t i = 0; i < n.L; ++i) {
    cpu::Layer layer(loads_LE + i * n.E, n.E, slots_LP + i * n.P, n.R, n.S);
    layer.level();
    for (int32_t p = 0; p < n.P; ++p) out[i * n.P + p] = layer.share(p);
  }
  return shares;
}

// Slots after all moves, their shares, the moves as (layer, expert, slot, dropped), and the balance before and after.
std::tuple<Tensor, Tensor, Tensor, Tensor> balance_plan(const Tensor& loads, const Tensor& slots, int64_t ep_size,
                                                        int64_t max_moves, double goal, int64_t most_copies) {
  Sizes n = sizes_of(loads, slots, ep_size);
  STD_TORCH_CHECK(0 <= max_moves && max_moves <= INT32_MAX && 1 <= most_copies && most_copies <= INT32_MAX,
                  "max_moves or most_copies is out of range");
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  const double* loads_LE = checked_loads(loads);
  check_slots(slots_LP, n);
  Tensor after = empty_like_device(slots, {n.L, n.P}, ScalarType::Int);
  Tensor balance = empty_like_device(slots, {n.L, 2}, ScalarType::Double);
  std::vector<int32_t> rows;
  for (int32_t i = 0; i < n.L; ++i) {
    cpu::Layer layer(loads_LE + int64_t{i} * n.E, n.E, slots_LP + int64_t{i} * n.P, n.R, n.S);
    auto* balances = static_cast<double*>(balance.data_ptr()) + 2 * i;
    layer.level();
    balances[0] = layer.balance();
    for (const cpu::Move& m :
         cpu::plan_moves(layer, static_cast<int32_t>(max_moves), goal, static_cast<int32_t>(most_copies)))
      rows.insert(rows.end(), {i, m.expert, m.slot, m.dropped});
    balances[1] = layer.balance();
    std::copy(layer.slots.begin(), layer.slots.end(), static_cast<int32_t*>(after.data_ptr()) + int64_t{i} * n.P);
  }
  Tensor moves = empty_like_device(slots, {static_cast<int64_t>(rows.size()) / 4, 4}, ScalarType::Int);
  std::copy(rows.begin(), rows.end(), static_cast<int32_t*>(moves.data_ptr()));
  return {after, balance_shares(loads, after, ep_size), moves, balance};  // those that anyone computes from `after`
}

Tensor balance_fresh(const Tensor& loads, int64_t ep_size, int64_t slots_per_rank, int64_t most_copies,
                     int64_t ranks_per_node) {
  STD_TORCH_CHECK(loads.dim() == 2 && loads.size(1) <= ep_size * slots_per_rank && most_copies >= 1 &&
                      ranks_per_node >= 1 && ep_size % ranks_per_node == 0 && ep_size * slots_per_rank <= INT32_MAX,
                  "loads must be [L, E] with a slot for every expert");
  const double* loads_LE = checked_loads(loads);
  int64_t L = loads.size(0), E = loads.size(1), P = ep_size * slots_per_rank;
  Tensor slots = empty_like_device(loads, {L, P}, ScalarType::Int);
  for (int64_t i = 0; i < L; ++i) {
    auto layer = cpu::fresh_slots(loads_LE + i * E, static_cast<int32_t>(E), static_cast<int32_t>(ep_size),
                                  static_cast<int32_t>(slots_per_rank), static_cast<int32_t>(most_copies),
                                  static_cast<int32_t>(ranks_per_node));
    std::copy(layer.begin(), layer.end(), static_cast<int32_t*>(slots.data_ptr()) + i * P);
  }
  return slots;
}

// Slots and thresholds [L, E, C] of one source, or with source −1 one copy of each expert, for all sources.
std::tuple<Tensor, Tensor> balance_choices(const Tensor& slots, const Tensor& shares, int64_t num_experts,
                                           int64_t ep_size, int64_t source, int64_t most_copies) {
  STD_TORCH_CHECK(
      slots.dim() == 2 && ep_size >= 1 && slots.size(1) % ep_size == 0 && source < ep_size && most_copies >= 1,
      "slots must be [L, P], and source a rank");
  int64_t L = slots.size(0), P = slots.size(1), C = most_copies;
  Sizes n{static_cast<int32_t>(L), static_cast<int32_t>(num_experts), static_cast<int32_t>(ep_size),
          static_cast<int32_t>(P / ep_size), static_cast<int32_t>(P)};
  const auto* slots_LP = pointer<int32_t>(slots, 1, "slots");
  const auto* shares_LP = pointer<double>(shares, L * P, "shares");
  check_slots(slots_LP, n);
  Tensor chosen = empty_like_device(slots, {L, num_experts, C}, ScalarType::Int);
  Tensor thresholds = empty_like_device(slots, {L, num_experts, C}, ScalarType::Long);
  for (int64_t i = 0; i < L; ++i) {
    cpu::Choices out{static_cast<int32_t*>(chosen.data_ptr()) + i * num_experts * C,
                     static_cast<int64_t*>(thresholds.data_ptr()) + i * num_experts * C, static_cast<int32_t>(C)};
    if (source < 0)
      cpu::choose_one_copy(slots_LP + i * P, n.E, n.R, n.S, out);
    else
      cpu::choose_by_shares(slots_LP + i * P, shares_LP + i * P, n.E, n.R, n.S, static_cast<int32_t>(source), out);
  }
  return {chosen, thresholds};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("balance_shares", TORCH_BOX(&balance_shares));
  library.impl("balance_plan", TORCH_BOX(&balance_plan));
  library.impl("balance_fresh", TORCH_BOX(&balance_fresh));
  library.impl("balance_choices", TORCH_BOX(&balance_choices));
}

}  // namespace epmoe
