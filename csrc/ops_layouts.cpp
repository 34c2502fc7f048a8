// What Python must know of these headers, as an operator: names, types and offsets of fields, and
// values of constants. epmoe/native/layouts.py reads them, so that no struct is declared twice.
#include <bit>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "exchange.h"
#include "launch_policy.h"
#include "rail.h"
#include "unwrap.h"

namespace epmoe {
namespace {

// A line: a name, a number and, of each field of a struct, the name, the type of an element, how
// many elements it has, and the offset; of each field of bits the name, how many it has, and the
// first; of a constant the name and the value.
std::string line(const std::string& name, int64_t number,
                 std::initializer_list<std::string> parts) {
  std::string text = name + " " + std::to_string(number);
  for (const std::string& part : parts) text += " " + part;
  return text + "\n";
}

std::string joined(const char* name, std::initializer_list<int64_t> numbers) {
  std::string text = name;
  for (int64_t number : numbers) text += ":" + std::to_string(number);
  return text;
}

template <typename T>
std::string field(const std::string& name, size_t offset) {
  using Element = std::remove_all_extents_t<T>;
  return joined((name + (std::is_unsigned_v<Element> ? ":uint" : ":int") +
                 std::to_string(8 * sizeof(Element)))
                    .c_str(),
                {static_cast<int64_t>(sizeof(T) / sizeof(Element)), static_cast<int64_t>(offset)});
}

template <typename S>
std::string bits(const char* name, void (*set)(S&, uint32_t)) {
  S word{};
  set(word, ~0u);
  auto value = std::bit_cast<uint32_t>(word);
  return joined(name, {std::popcount(value), std::countr_zero(value)});
}

// STRUCT(S, a, b) is the line of S with the fields a and b. The preprocessor expands EACH once more
// in each round, of which EXPAND has 81.
#define FIELD(S, name) field<decltype(S::name)>(#name, offsetof(S, name))
#define BIT_FIELD(S, name) bits<S>(#name, [](S& word, uint32_t value) { word.name = value; })
#define NUMBER(of, name) joined(#name, {static_cast<int64_t>(name)})
#define TRAIT(traits, name) joined(#name, {static_cast<int64_t>(traits.name)})
#define PARENS ()
#define EACH_AGAIN() EACH
#define EACH(PART, of, name, ...) \
  PART(of, name) __VA_OPT__(, EACH_AGAIN PARENS(PART, of, __VA_ARGS__))
#define EXPAND1(...) __VA_ARGS__
#define EXPAND3(...) EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__)))
#define EXPAND9(...) EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__)))
#define EXPAND27(...) EXPAND9(EXPAND9(EXPAND9(__VA_ARGS__)))
#define EXPAND(...) EXPAND27(EXPAND27(EXPAND27(__VA_ARGS__)))
#define STRUCT(S, ...) line(#S, sizeof(S), {EXPAND(EACH(FIELD, S, __VA_ARGS__))})
#define BITS(S, ...) line(#S, sizeof(S), {EXPAND(EACH(BIT_FIELD, S, __VA_ARGS__))})
#define NUMBERS(name, ...) line(#name, 0, {EXPAND(EACH(NUMBER, name, __VA_ARGS__))})

std::string formats() {
  std::string text;
  for (int64_t i = 0; i <= static_cast<int64_t>(WireFormat::kPackedFp8); ++i) {
    WireTraits traits = wire(static_cast<WireFormat>(i));
    text += line("WireFormat" + std::to_string(i), 0,
                 {EXPAND(EACH(TRAIT, traits, element, element_bits, scale_bytes, block, packed))});
  }
  return text;
}

std::string layouts() {
  using enum DType;
  return STRUCT(ExchangePlan, R, rank, M, K, D, E, P, num_local_experts, copies, max_rows,
                alignment, small_alignment, small_alignment_tokens, payload_format, combine_format,
                x_stride_bytes, combine_stride_bytes, scale_blocks, combine_scale_blocks,
                most_local_experts, layers, few_tokens, num_sms, ll_max_tokens, ll_row_stride_bytes,
                ll_sum_stride_bytes, dispatch_senders, combine_senders, combine_team,
                signal_dispatch, signal_combine, signal_error, signal_dead, doorbell, recv_x,
                recv_scales, recv_ids, recv_weights, combine_rows, combine_scales, combine_values,
                recv_flags, recv_ordinals, recv_counts, combine_flags, ll_rows, ll_pairs, ll_sums,
                rows, row_scales, state, counts, slots_used, slots, expert_offsets,
                tokens_per_expert, row_of_pair, table_expert_map, table_owners, table_copies,
                table_num_copies, table_sentinels, table_local_index, pair_weights, part_counts,
                health_counters, health_tokens_per_expert, health_rows_sent, health_waited_ns,
                health_aborted_rounds) +
         STRUCT(ExchangeDescriptor, expert_major, weight_rows, zero_gaps, to_caller, keeps_zeros,
                adds_only, returns_values, zero_tail, row_weights, row_values, pair_values, outputs,
                outputs_stride_bytes, products, first_timeout_ns, timeout_ns, status) +
         STRUCT(RailSlot, bytes, scales, ids, weights, tag) + STRUCT(RailStop, wanted, done, cut) +
         STRUCT(RailDescriptor, E, copies, rank, node, num_nodes, format) +
         STRUCT(Progress, phases, deadline_ns, missing, counted_ns, last_stream, more_rounds,
                has_more_rounds, tag) +
         STRUCT(Status, code, stage, epoch, missing, originator, needed_rows, phases, tag, other,
                aborted, aborted_epoch) +
         STRUCT(RoundState, dispatch_epoch, combine_epoch, latched, phases, done, progress,
                receiving, failure) +
         STRUCT(RoundHeader, D, K, dtype, mode, empty) + STRUCT(RailTag, D, K, dtype, epoch) +
         STRUCT(DispatchLaunch, recv_lines, coarse, exclusive, blocks, threads, send_blocks,
                notify_blocks, send_offset_entries, source_offset_entries, row_chunks, chunk_bytes,
                batch_tokens, shared_bytes) +
         STRUCT(CombineLaunch, send_lines, coarse, own, blocks, threads, send_blocks, team,
                rows_per_release, shared_bytes) +
         BITS(CallShape, D4_less_1, aligned, K_less_1, dtype, expert_major, weight_rows, trains) +
         formats() +
         NUMBERS(Counter, kSanitisedRows, kPaddedRows, kOutOfRangeIds, kDuplicateIds,
                 kNonfiniteWeights, kDroppedPairs, kClampedNumTokens, kTimeouts) +
         NUMBERS(constants, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kNumWireFormats,
                 kScaleBlock, kMaxTag, kMaxParts, kPartCounts, kProductParts, kMostProductBytes,
                 kCountColumns, kNumCounters, kTimeout, kMismatch, kOutOfTurn, kUnscheduled,
                 kOutdated, kEmptySeat, kEmptySeatShape);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CompositeExplicitAutograd, library) {
  library.impl("layouts", TORCH_BOX(&layouts));
}

}  // namespace epmoe
