// What Python must know of these headers, as an operator: names, types and offsets of fields, and values of constants.
// epmoe/native/layouts.py reads them, so that no struct is declared twice.
#include <cstddef>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "exchange.h"
#include "rail.h"
#include "unwrap.h"

namespace epmoe {
namespace {

struct Field {
  const char* name;
  size_t offset, bytes, element_bytes;
  bool is_unsigned;
};

template <typename T>
constexpr Field field_of(const char* name, size_t offset) {
  using Element = std::remove_all_extents_t<T>;
  return {name, offset, sizeof(T), sizeof(Element), std::is_unsigned_v<Element>};
}

// A line: the name of a struct, its bytes, and of each field the name, the type of an element, how many elements it
// has, and the offset. Or the name of a constant and its value.
std::string line(const std::string& name, int64_t number, std::initializer_list<Field> fields = {}) {
  std::string text = name + " " + std::to_string(number);
  for (const Field& f : fields)
    text += std::string(" ") + f.name + (f.is_unsigned ? ":uint" : ":int") + std::to_string(8 * f.element_bytes) + ":" +
            std::to_string(f.bytes / f.element_bytes) + ":" + std::to_string(f.offset);
  return text + "\n";
}

// STRUCT(S, a, b) is the line of S with the fields a and b. The preprocessor expands EACH once more in each round, of
// which EXPAND has 81.
#define FIELD(S, field) field_of<decltype(S::field)>(#field, offsetof(S, field))
#define PARENS ()
#define EACH_AGAIN() EACH
#define EACH(S, field, ...) FIELD(S, field) __VA_OPT__(, EACH_AGAIN PARENS(S, __VA_ARGS__))
#define EXPAND1(...) __VA_ARGS__
#define EXPAND3(...) EXPAND1(EXPAND1(EXPAND1(__VA_ARGS__)))
#define EXPAND9(...) EXPAND3(EXPAND3(EXPAND3(__VA_ARGS__)))
#define EXPAND27(...) EXPAND9(EXPAND9(EXPAND9(__VA_ARGS__)))
#define EXPAND(...) EXPAND27(EXPAND27(EXPAND27(__VA_ARGS__)))
#define STRUCT(S, ...) line(#S, sizeof(S), {EXPAND(EACH(S, __VA_ARGS__))})
#define CONSTANT(name) line(#name, static_cast<int64_t>(name))

// Of each format: the DType of an element, its bits, bytes of a scale, elements that share one (zeros: no scales), and
// whether it is packed.
std::string formats() {
  std::string text;
  for (WireFormat format : {WireFormat::kAuto, WireFormat::kFp8, WireFormat::kPackedFp8}) {
    WireTraits traits = wire(format);
    std::string name = "WireFormat" + std::to_string(static_cast<int64_t>(format));
    text += line(name + ".element", static_cast<int64_t>(traits.element));
    text += line(name + ".element_bits", traits.element_bits) + line(name + ".scale_bytes", traits.scale_bytes);
    text += line(name + ".block", traits.block) + line(name + ".packed", traits.packed);
  }
  return text;
}

std::string layouts() {
  using enum DType;
  return STRUCT(ExchangePlan, R, rank, M, K, D, E, P, num_local_experts, copies, max_rows, alignment, small_alignment,
                small_alignment_tokens, payload_format, combine_format, x_stride_bytes, combine_stride_bytes,
                scale_blocks, combine_scale_blocks, most_local_experts, layers, few_tokens, num_sms, ll_max_tokens,
                ll_row_stride_bytes, ll_sum_stride_bytes, dispatch_senders, combine_senders, combine_team,
                signal_dispatch, signal_combine, signal_error, signal_dead, doorbell, recv_x, recv_scales, recv_ids,
                recv_weights, combine_rows, combine_scales, combine_values, recv_flags, recv_ordinals, recv_counts,
                combine_flags, ll_rows, ll_pairs, ll_sums, rows, row_scales, state, counts, slots_used, slots,
                expert_offsets, tokens_per_expert, row_of_pair, table_expert_map, table_owners, table_copies,
                table_num_copies, table_sentinels, table_local_index, pair_weights, health_counters,
                health_tokens_per_expert, health_rows_sent, health_waited_ns, health_aborted_rounds) +
         STRUCT(ExchangeDescriptor, expert_major, weight_rows, zero_gaps, to_caller, adds_only, returns_values,
                zero_tail, row_weights, row_values, pair_values, outputs, outputs_stride_bytes, products,
                first_timeout_ns, timeout_ns, status) +
         STRUCT(RailSlot, bytes, scales, ids, weights, tag) + STRUCT(RailStop, wanted, done, missed) +
         STRUCT(RailDescriptor, E, copies, rank, node, num_nodes, format) +
         STRUCT(Progress, phases, deadline_ns, missing, counted_ns, last_stream, more_rounds, has_more_rounds, tag) +
         STRUCT(Status, code, stage, epoch, missing, originator, needed_rows, phases, tag, other, aborted,
                aborted_epoch) +
         STRUCT(RoundState, dispatch_epoch, combine_epoch, latched, phases, done, progress, receiving, failure) +
         STRUCT(RoundHeader, D, K, dtype, mode) + STRUCT(RailTag, D, K, dtype, epoch) + formats() + CONSTANT(kFloat32) +
         CONSTANT(kFloat16) + CONSTANT(kBFloat16) + CONSTANT(kFloat8E4M3) + CONSTANT(kNumWireFormats) +
         CONSTANT(kScaleBlock) + CONSTANT(kMaxTag) + CONSTANT(kProductParts) + CONSTANT(kMostProductBytes) +
         CONSTANT(kLLTokenBits) + CONSTANT(kSanitisedRows) + CONSTANT(kPaddedRows) + CONSTANT(kOutOfRangeIds) +
         CONSTANT(kDuplicateIds) + CONSTANT(kNonfiniteWeights) + CONSTANT(kDroppedPairs) + CONSTANT(kClampedNumTokens) +
         CONSTANT(kTimeouts) + CONSTANT(kNumCounters);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CompositeExplicitAutograd, library) { library.impl("layouts", TORCH_BOX(&layouts)); }

}  // namespace epmoe
