// combine on the CPU: a rank sums each received slot and writes the sum into the window of the
// slot's source. The source then adds up what comes back for its tokens.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "finalize.h"
#include "signal.h"

namespace epmoe::cpu {
namespace {

// Writes one partial row into its slot of the source's window, in the format of combine. `packed_D`
// is workspace for the dtype of x.
template <typename T>
void send_row(const Exchange& ex, int64_t source, int64_t slot, const float* sum_D, int64_t D,
              T* packed_D, bool stream) {
  const ExchangePlan& plan = ex.plan;
  int64_t index = plan.rank * plan.M + slot;
  char* out = in_window<char>(ex, source, plan.combine_rows) + index * plan.combine_stride_bytes;
  if (wire(plan.combine_format).has_scales()) {
    float* scales =
        in_window<float>(ex, source, plan.combine_scales) + index * plan.combine_scale_blocks;
    quantize_row(sum_D, D, out, scales, wire(plan.combine_format).block);
  } else {
    for (int64_t d = 0; d < D; ++d) packed_D[d] = from_float<T>(sum_D[d]);
    copy_row(out, packed_D, D * sizeof(T), stream);
  }
}

// Writes a value of each pair of a slot into the window of the slot's source.
void send_values(const Exchange& ex, const CombineArgs& args, int32_t K, int64_t source,
                 int64_t slot) {
  const ExchangePlan& plan = ex.plan;
  auto* row_of_pair = in_scratch<int32_t>(ex, plan.row_of_pair) + (source * plan.M + slot) * plan.K;
  auto* out =
      in_window<float>(ex, source, plan.combine_values) + (plan.rank * plan.M + slot) * plan.K;
  for (int32_t k = 0; k < K; ++k) {
    int32_t row = row_of_pair[k];
    out[k] = row >= 0 && row < args.num_rows ? args.row_values_N[row] : 0.0f;
  }
}

// Sends the partial rows of all received slots: their weighted sums over experts, or with
// rank-major rows the rows.
template <typename T>
void send_rows(const Exchange& ex, const CombineArgs& args, const RoundState& round,
               const int32_t* counts_R) {
  const ExchangePlan& plan = ex.plan;
  FinalizeArgs finalize_args{
      .rows_ND = args.rows,  // of T
      .rows_stride_bytes = args.rows_stride_bytes,
      .num_rows = args.num_rows,
      .row_of_pair_SK = in_scratch<int32_t>(ex, plan.row_of_pair),
      .row_of_pair_stride = plan.K,
      .weights_SK = in_window<float>(ex, plan.rank, plan.recv_weights),
      .weights_dtype = DType::kFloat32,
      .weights_stride = plan.K,
      .S = plan.R * plan.M,
      .D = args.D,
      .K = round.K,
      .R = static_cast<int32_t>(plan.R),
  };
  std::vector<float> sum_D(args.D);
  std::vector<T> packed_D(args.D);
  int64_t rows = std::accumulate(counts_R, counts_R + plan.R, int64_t{0});
  bool stream = streams(rows * plan.combine_stride_bytes);
  for (int64_t i = 0; i < plan.R; ++i) {
    int64_t source = (plan.rank + i) % plan.R;  // rotated: ranks start with different windows
    for (int64_t slot = 0; slot < counts_R[source]; ++slot) {
      int64_t row = source * plan.M + slot;
      if (args.expert_major) {
        finalize_slot<T>(finalize_args, row, sum_D.data());
      } else {
        auto* partial = reinterpret_cast<const T*>(static_cast<const char*>(args.rows) +
                                                   row * args.rows_stride_bytes);
        for (int64_t d = 0; d < args.D; ++d) sum_D[d] = to_float(partial[d]);
      }
      send_row<T>(ex, source, slot, sum_D.data(), args.D, packed_D.data(), stream);
      if (args.row_values_N) send_values(ex, args, round.K, source, slot);
    }
  }
}

// Adds the partial row that rank `r` has returned in `slot`.
template <typename T>
void add_returned(const Exchange& ex, int64_t r, int64_t slot, int64_t D, float* sum_D) {
  const ExchangePlan& plan = ex.plan;
  int64_t index = r * plan.M + slot;
  const char* row =
      in_window<char>(ex, plan.rank, plan.combine_rows) + index * plan.combine_stride_bytes;
  WireTraits traits = wire(plan.combine_format);
  if (!traits.has_scales()) return add_row(sum_D, reinterpret_cast<const T*>(row), 1.0f, D);
  const float* scales =
      in_window<float>(ex, plan.rank, plan.combine_scales) + index * plan.combine_scale_blocks;
  for (int64_t begin = 0; begin < D; begin += traits.block) {
    add_row(sum_D + begin, reinterpret_cast<const Float8*>(row) + begin,
            scales[begin / traits.block], std::min(traits.block, D - begin));
  }
}

// Adds the values that rank `r` has returned for the pairs in `slot`, of which it has set those of
// other ranks to 0.
void add_values(const Exchange& ex, int64_t r, int64_t slot, int32_t K, float* values_K) {
  const ExchangePlan& plan = ex.plan;
  auto* returned =
      in_window<float>(ex, plan.rank, plan.combine_values) + (r * plan.M + slot) * plan.K;
  for (int32_t k = 0; k < K; ++k) values_K[k] += returned[k];
}

// y = the sum over ranks in fp32, always in rank order; padded rows become zeros.
template <typename T>
void sum_returned(const Exchange& ex, const CombineArgs& args, const RoundState& round) {
  const ExchangePlan& plan = ex.plan;
  auto* slots = in_scratch<int32_t>(ex, plan.slots);
  auto* headers = in_window<RoundHeader>(ex, plan.rank, plan.signal_combine);
  uint32_t parity = round.combine_epoch % 2;
  std::vector<float> sum_D(args.D);
  int64_t tokens = std::min<int64_t>(round.T, args.T);
  T* y = static_cast<T*>(args.y_TD);
  if (args.pair_values_TK) std::fill_n(args.pair_values_TK, args.T * round.K, 0.0f);
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(sum_D.begin(), sum_D.end(), 0.0f);
    for (int64_t r = 0; r < plan.R; ++r) {
      int32_t slot = slots[t * plan.R + r];
      // A rank that aborts the round has sent no rows: its count is 0.
      if (slot < 0 || slot >= headers[r].counts[parity]) continue;
      add_returned<T>(ex, r, slot, args.D, sum_D.data());
      if (args.pair_values_TK) add_values(ex, r, slot, round.K, args.pair_values_TK + t * round.K);
    }
    for (int64_t d = 0; d < args.D; ++d) y[t * args.D + d] = from_float<T>(sum_D[d]);
  }
  std::memset(y + tokens * args.D, 0, (args.T - tokens) * args.D * sizeof(T));
}

// The send phase. It waits for nobody: dispatch has seen the flag of every rank in this round.
template <typename T>
void send(const Exchange& ex, const CombineArgs& args, RoundState& round) {
  auto* counts = in_scratch<int32_t>(ex, ex.plan.counts);
  if (!round.latched) send_rows<T>(ex, args, round, counts);
  round.combine_epoch = round.dispatch_epoch;
  ++round.progress.phases;
  if (!round.latched) signal_all(ex, ex.plan.signal_combine, round.combine_epoch, round, counts);
}

// A rank without room for its rows learns how many rows the fullest rank needed, since the config
// is the same on all.
void widen_needed_rows(const Exchange& ex) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, ex.plan.signal_combine);
  int64_t& needed = ex.status->needed_rows;
  for (int64_t r = 0; needed && r < ex.plan.R; ++r)
    needed = std::max<int64_t>(needed, headers[r].needed_rows);
}

// Tells the host which other ranks have aborted the round: y lacks their experts.
void report_aborted(const Exchange& ex, uint32_t epoch) {
  auto* headers = in_window<RoundHeader>(ex, ex.plan.rank, ex.plan.signal_combine);
  auto* totals = in_scratch<int64_t>(ex, ex.plan.health_aborted_rounds);
  for (int64_t r = 0; r < ex.plan.R; ++r) {
    if (!headers[r].aborted[epoch % 2]) continue;
    ++totals[r];
    ex.status->aborted |= int64_t{1} << r;
    ex.status->aborted_epoch = epoch;
  }
}

// The receive phase. After a failed wait y is all zeros.
template <typename T>
void receive(const Exchange& ex, const CombineArgs& args, RoundState& round) {
  Wait waited = Wait::kFailed;
  if (!round.latched)
    waited = wait_for_all(ex, kCombine, ex.plan.signal_combine, round.combine_epoch);
  if (waited == Wait::kInterrupted) return;
  if (waited == Wait::kArrived) {
    sum_returned<T>(ex, args, round);
    widen_needed_rows(ex);
    report_aborted(ex, round.combine_epoch);
  } else {
    std::memset(args.y_TD, 0, args.T * args.D * sizeof(T));
    if (args.pair_values_TK) std::fill_n(args.pair_values_TK, args.T * round.K, 0.0f);
  }
  ++round.progress.phases;
}

// Closes the round from any state without rows; does nothing if none is open. It allocates nothing
// and waits for no rank: if others have not ended the round when this rank opens the next one,
// dispatch waits for them.
void abort_round(const Exchange& ex, RoundState& round) {
  round.progress.phases += -round.progress.phases & 3;
  round.progress.deadline_ns = 0;
  if (round.combine_epoch == round.dispatch_epoch) return;
  round.combine_epoch = round.dispatch_epoch;
  ++in_scratch<int64_t>(ex, ex.plan.health_aborted_rounds)[ex.plan.rank];
  if (!round.latched) signal_all(ex, ex.plan.signal_combine, round.combine_epoch, round, nullptr);
}

// After a round that was aborted before this rank had seen all others: whether a rank has more
// rounds. Ranks close a round after they have sent their dispatch header.
void note_more_rounds_once_closed(const Exchange& ex, RoundState& round) {
  if (round.latched) return;
  if (wait_for_all(ex, kCombine, ex.plan.signal_combine, round.combine_epoch) == Wait::kArrived)
    note_more_rounds(ex, round.combine_epoch, round.progress);
}

}  // namespace

void combine(const Exchange& ex, const CombineArgs& args, DType dtype) {
  auto* round = in_scratch<RoundState>(ex, ex.plan.state);
  if (args.send && !args.rows) return abort_round(ex, *round);
  if (round->progress.phases % 4 == 0) return note_more_rounds_once_closed(ex, *round);
  visit(dtype, [&](auto type) {
    if (args.send) send<decltype(type)>(ex, args, *round);
    if (args.receive) receive<decltype(type)>(ex, args, *round);
  });
}

}  // namespace epmoe::cpu
