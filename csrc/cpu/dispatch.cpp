// dispatch on the CPU: a rank writes each of its tokens once into the window of each rank that
// needs it. The receiver then permutes the rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "pairs.h"
#include "signal.h"

namespace epmoe::cpu {
namespace {

// Reads the pairs of token t and counts what is wrong with them. Returns the ranks that need the
// token, as a mask.
uint64_t read_ranks(const Exchange& ex, const DispatchArgs& args, int64_t t, Pairs& pairs) {
  const ExchangePlan& plan = ex.plan;
  PairTables tables{
      .E = plan.E,
      .copies = plan.copies,
      .rank = plan.rank,
      .copies_EC = in_scratch<int32_t>(ex, plan.table_copies),
      .copies_E = in_scratch<int32_t>(ex, plan.table_num_copies),
      .counters = in_scratch<int64_t>(ex, plan.health_counters),
      .keeps_zeros = args.keeps_zeros,
      .quotas = quotas_of(ex),
  };
  auto* owners = in_scratch<int32_t>(ex, plan.table_owners);
  uint64_t ranks = 0;
  read_pairs(tables, args, t, pairs,
             [&](int32_t k) { ranks |= uint64_t{1} << owners[pairs.ids[k]]; });
  return ranks;
}

// Writes one token into its slot of `rank`'s window: the row, its scales if there are any, and its
// pairs.
void send_token(const Exchange& ex, const DispatchArgs& args, const Pairs& pairs, int64_t rank,
                int32_t slot, const void* row, int64_t row_bytes, const float* scales,
                bool stream) {
  const ExchangePlan& plan = ex.plan;
  int64_t index = plan.rank * plan.M + slot;
  copy_row(in_window<char>(ex, rank, plan.recv_x) + index * plan.x_stride_bytes, row, row_bytes,
           stream);
  if (scales) {
    std::copy_n(scales, wire(plan.payload_format).num_scales(args.D),
                in_window<float>(ex, rank, plan.recv_scales) + index * plan.scale_blocks);
  }
  int32_t* ids = in_window<int32_t>(ex, rank, plan.recv_ids) + index * plan.K;
  float* weights = in_window<float>(ex, rank, plan.recv_weights) + index * plan.K;
  int32_t sentinel = in_scratch<int32_t>(ex, plan.table_sentinels)[rank];
  for (int32_t k = 0; k < args.K; ++k) {
    ids[k] = pairs.ids[k] < 0 ? sentinel : pairs.ids[k];
    weights[k] = pairs.weights[k];
  }
}

// Sends all tokens. Adds to counts_R[r] the number of rows sent to rank r.
void send_tokens(const Exchange& ex, const DispatchArgs& args, int64_t tokens,
                 std::vector<int32_t>& counts_R) {
  const ExchangePlan& plan = ex.plan;
  auto* slots = in_scratch<int32_t>(ex, plan.slots);
  Pairs pairs(plan.K, plan.E);
  WireRows rows(args, plan.payload_format, args.x_row_bytes);
  int64_t row_bytes = wire_row_bytes(plan.payload_format, args.D, args.dtype);
  bool stream = streams(tokens * plan.x_stride_bytes * std::min<int64_t>(args.K, plan.R));
  for (int64_t t = 0; t < tokens; ++t) {
    uint64_t ranks = read_ranks(ex, args, t, pairs);
    std::fill_n(slots + t * plan.R, plan.R, -1);
    if (!ranks) continue;
    auto [row, scales] = rows.at(t);
    for (int64_t r = 0; r < plan.R; ++r) {
      if (!(ranks >> r & 1)) continue;
      int32_t slot = slots[t * plan.R + r] = counts_R[r]++;
      send_token(ex, args, pairs, r, slot, row, row_bytes, scales, stream);
    }
  }
  auto* rows_sent = in_scratch<int64_t>(ex, plan.health_rows_sent);
  for (int64_t r = 0; r < plan.R; ++r) rows_sent[r] += counts_R[r];
}

// Reads every source's header into counts_R. Returns the ranks whose call differs from this rank's,
// as a mask; `other` becomes that of Status.
uint64_t read_headers(const Exchange& ex, const RoundState& round, int32_t* counts_R,
                      int64_t& other) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, ex.plan.signal_dispatch);
  uint64_t mismatched = 0;
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    counts_R[r] = 0;
    if (headers[r].empty) continue;
    bool other_tag = headers[r].tag != round.progress.tag;
    if (other_tag || headers[r].K != round.K || headers[r].D != round.D ||
        headers[r].dtype != round.dtype || headers[r].mode != round.mode)
      mismatched |= uint64_t{1} << r;
    if (other_tag && !other) other = 1 + (r << 16 | (headers[r].tag & kMaxTag));
    counts_R[r] = static_cast<int32_t>(
        std::clamp<int64_t>(headers[r].counts[round.dispatch_epoch % 2], 0, ex.plan.M));
  }
  return mismatched;
}

// Calls f(pair) for each pair of each used slot, in order. `pair` is an index into [R, M, K].
template <typename F>
void for_each_pair(const Exchange& ex, const DispatchArgs& args, const int32_t* counts_R, F&& f) {
  const ExchangePlan& plan = ex.plan;
  for (int64_t r = 0; r < plan.R; ++r)
    for (int64_t slot = r * plan.M; slot < r * plan.M + counts_R[r]; ++slot)
      for (int32_t k = 0; k < args.K; ++k) f(slot * plan.K + k);
}

template <typename T>
void scale_row(T* row, float factor, int64_t n) {
  for (int64_t d = 0; d < n; ++d) row[d] = from_float<T>(to_float(row[d]) * factor);
}

void permute_received(const Exchange& ex, const DispatchArgs& args, const int32_t* counts_R) {
  const ExchangePlan& plan = ex.plan;
  int64_t needed = 0;
  PermuteArgs permute_args{
      .x_SD = in_window<char>(ex, plan.rank, plan.recv_x),
      .dtype = wire(plan.payload_format).dtype_of(args.dtype),
      .B = static_cast<int32_t>(wire(plan.payload_format).num_scales(args.D)),
      .x_stride_bytes = plan.x_stride_bytes,
      .scales_SB = wire(plan.payload_format).has_scales()
                       ? in_window<float>(ex, plan.rank, plan.recv_scales)
                       : nullptr,
      .scales_stride = plan.scale_blocks,
      .ids_SK = in_window<int32_t>(ex, plan.rank, plan.recv_ids),
      .ids_stride = plan.K,
      .expert_map_P = in_scratch<int32_t>(ex, plan.table_expert_map),
      .counts_R = counts_R,
      .S = plan.R * plan.M,
      .D = args.D,
      .K = args.K,
      .P = static_cast<int32_t>(plan.P),
      .num_local_experts = static_cast<int32_t>(plan.num_local_experts),
      .R = static_cast<int32_t>(plan.R),
      .alignment = plan.alignment,
      .max_rows = plan.max_rows,
      .rows_ND = in_scratch<char>(ex, plan.rows),
      .row_scales_NB = in_scratch<float>(ex, plan.row_scales),
      .expert_offsets = in_scratch<int32_t>(ex, plan.expert_offsets),
      .tokens_per_expert = in_scratch<int32_t>(ex, plan.tokens_per_expert),
      .row_of_pair_SK = in_scratch<int32_t>(ex, plan.row_of_pair),
      .row_of_pair_stride = plan.K,
      .counters = in_scratch<int64_t>(ex, plan.health_counters),
      .needed = &needed,
  };
  permute(permute_args);
  if (needed > plan.max_rows) ex.status->needed_rows = std::max(ex.status->needed_rows, needed);
  auto* total = in_scratch<int64_t>(ex, plan.health_tokens_per_expert);
  for (int64_t i = 0; i < plan.num_local_experts; ++i)
    total[i] += permute_args.tokens_per_expert[i];
}

// Multiplies each expert-major row, or its scales, by the weight of its pair, and sets the weight
// to 1.
void weight_rows(const Exchange& ex, const DispatchArgs& args, const int32_t* counts_R) {
  const ExchangePlan& plan = ex.plan;
  auto* weights = in_window<float>(ex, plan.rank, plan.recv_weights);
  auto* row_of_pair = in_scratch<int32_t>(ex, plan.row_of_pair);
  int64_t blocks = wire(plan.payload_format).num_scales(args.D);
  for_each_pair(ex, args, counts_R, [&](int64_t pair) {
    int64_t row = row_of_pair[pair];
    if (row < 0) return;
    if (blocks) {
      scale_row(in_scratch<float>(ex, plan.row_scales) + row * blocks, weights[pair], blocks);
    } else {
      visit(args.dtype, [&](auto type) {
        scale_row(in_scratch<decltype(type)>(ex, plan.rows) + row * args.D, weights[pair], args.D);
      });
    }
    weights[pair] = 1.0f;
  });
}

// For training: hands out the weight of each pair's row, and sets it to 1 where combine only adds.
// Rows past the last segment become zeros where a caller reads them.
void keep_weights(const Exchange& ex, const DispatchArgs& args, const int32_t* counts_R) {
  if (args.row_weights_N) std::fill_n(args.row_weights_N, ex.plan.max_rows, 0.0f);
  if (args.zero_tail) {
    int64_t bytes = wire_row_bytes(ex.plan.payload_format, args.D, args.dtype);
    int64_t used = in_scratch<int32_t>(ex, ex.plan.expert_offsets)[ex.plan.num_local_experts];
    std::memset(in_scratch<char>(ex, ex.plan.rows) + used * bytes, 0,
                (ex.plan.max_rows - used) * bytes);
  }
  auto* weights = in_window<float>(ex, ex.plan.rank, ex.plan.recv_weights);
  auto* row_of_pair = in_scratch<int32_t>(ex, ex.plan.row_of_pair);
  for_each_pair(ex, args, counts_R, [&](int64_t pair) {
    if (row_of_pair[pair] < 0) return;
    if (args.row_weights_N) args.row_weights_N[row_of_pair[pair]] = weights[pair];
    if (args.adds_only) weights[pair] = 1.0f;
  });
}

// layout="rank": counts the received pairs, and writes the sentinel and weight 0 into all unused
// slots.
void fill_unused_slots(const Exchange& ex, const DispatchArgs& args, const int32_t* counts_R) {
  const ExchangePlan& plan = ex.plan;
  auto* ids = in_window<int32_t>(ex, plan.rank, plan.recv_ids);
  auto* weights = in_window<float>(ex, plan.rank, plan.recv_weights);
  auto* expert_map = in_scratch<int32_t>(ex, plan.table_expert_map);
  auto* total = in_scratch<int64_t>(ex, plan.health_tokens_per_expert);
  int32_t sentinel = in_scratch<int32_t>(ex, plan.table_sentinels)[plan.rank];
  for_each_pair(ex, args, counts_R, [&](int64_t pair) {
    int32_t id = ids[pair];
    if (id >= 0 && id < plan.P && expert_map[id] >= 0) ++total[expert_map[id]];
  });
  for (int64_t r = 0; r < plan.R; ++r) {
    std::fill(ids + (r * plan.M + counts_R[r]) * plan.K, ids + (r + 1) * plan.M * plan.K, sentinel);
    std::fill(weights + (r * plan.M + counts_R[r]) * plan.K, weights + (r + 1) * plan.M * plan.K,
              0.0f);
  }
}

// The send phase opens a round. Normally it waits for nobody, because combine has waited for every
// rank to end the last round. A rank that aborted the last round has not, and waits now; returns
// false if that wait did not succeed. State changes right before the signal, so the call may be
// repeated after an exception.
bool send(const Exchange& ex, const DispatchArgs& args) {
  const ExchangePlan& plan = ex.plan;
  auto* round = in_scratch<RoundState>(ex, plan.state);
  if (missing_ranks(ex, plan.signal_combine, round->dispatch_epoch) && !round->latched &&
      wait_for_all(ex, kCombine, plan.signal_combine, round->dispatch_epoch) != Wait::kArrived)
    return false;
  int64_t tokens = real_tokens(args);
  bool clamped = tokens != wanted_tokens(args);
  auto* counters = in_scratch<int64_t>(ex, plan.health_counters);
  std::vector<int32_t> counts(plan.R, 0);
  if (!round->latched) send_tokens(ex, args, tokens, counts);
  counters[kClampedNumTokens] += clamped;
  ++round->dispatch_epoch;
  round->T = static_cast<int32_t>(tokens);
  round->D = static_cast<int32_t>(args.D);
  round->K = args.K;
  round->dtype = static_cast<int16_t>(args.dtype);
  round->mode = args.to_caller | args.adds_only << 1 | args.returns_values << 2;
  ++round->progress.phases;
  if (!round->latched)
    signal_all(ex, plan.signal_dispatch, round->dispatch_epoch, *round, counts.data());
  return true;
}

// The receive phase. After a failed wait or a mismatch of the calls the round is empty: all counts
// are 0.
void receive(const Exchange& ex, const DispatchArgs& args) {
  const ExchangePlan& plan = ex.plan;
  auto* round = in_scratch<RoundState>(ex, plan.state);
  auto* counts = in_scratch<int32_t>(ex, plan.counts);
  bool arrived = false;
  if (!round->latched) {
    Wait waited = wait_for_all(ex, kDispatch, plan.signal_dispatch, round->dispatch_epoch);
    if (waited == Wait::kInterrupted) return;
    arrived = waited == Wait::kArrived;
  }
  uint64_t mismatched = 0;
  int64_t other = 0;
  if (arrived) mismatched = read_headers(ex, *round, counts, other);
  if (arrived && round->progress.more_rounds)
    note_more_rounds(ex, round->dispatch_epoch, round->progress);
  if (mismatched)
    *ex.status = {.code = kMismatch,
                  .stage = kDispatch,
                  .epoch = round->dispatch_epoch,
                  .missing = static_cast<int64_t>(mismatched),
                  .originator = plan.rank,
                  .needed_rows = ex.status->needed_rows,
                  .tag = round->progress.tag,
                  .other = other};
  if (!arrived || mismatched) std::fill_n(counts, plan.R, 0);
  if (args.expert_major) {
    permute_received(ex, args, counts);
    if (args.weight_rows) weight_rows(ex, args, counts);
    if (args.to_caller) keep_weights(ex, args, counts);
  } else {
    fill_unused_slots(ex, args, counts);
  }
  ++round->progress.phases;
}

}  // namespace

void dispatch(const Exchange& ex, const DispatchArgs& args) {
  if (args.send && !send(ex, args)) return;
  if (args.receive) receive(ex, args);
}

}  // namespace epmoe::cpu
