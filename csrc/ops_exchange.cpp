// The operators of the exchange: they check and unwrap tensors, and launch. Schemas and fakes are
// in epmoe/native/ops.py.
#include <cstring>
#include <tuple>
#include <utility>

#include "cpu/stages.h"
#include "cpu/words.h"
#include "unwrap.h"

namespace epmoe {
namespace {

// The phases of a stage that one operator runs.
enum class Phase { kSendRecv, kSend, kRecv };

const ExchangeDescriptor& parsed(const Tensor& descriptor) {
  constexpr int64_t kFields = sizeof(ExchangeDescriptor) / sizeof(int64_t);
  STD_TORCH_CHECK(!descriptor.is_cuda(), "`descriptor` must be on the host");
  const auto& d = *reinterpret_cast<const ExchangeDescriptor*>(
      pointer<int64_t>(descriptor, kFields, "descriptor"));
  int64_t R = d.plan.R;
  STD_TORCH_CHECK(R >= 1 && R <= kMaxRanks, "ranks must be from 1 to ", kMaxRanks);
  STD_TORCH_CHECK(descriptor.numel() == kFields + R, "`descriptor` must hold ", kFields,
                  " fields and ", R, " addresses");
  return d;
}

Progress& progress_of(const Exchange& exchange, const Tensor& like) {
  return like.is_cuda()
             ? *reinterpret_cast<Progress*>(exchange.status + 1)
             : reinterpret_cast<RoundState*>(exchange.scratch + exchange.plan.state)->progress;
}

// `like` is a tensor of the call, and `opens` whether the call opens a round.
Exchange exchange_of(const ExchangeDescriptor& d, const Tensor& window, const Tensor& scratch,
                     const Tensor& like, bool opens) {
  int64_t R = d.plan.R;
  pointer<uint8_t>(window, d.plan.combine_values, "window");
  Exchange exchange{
      .plan = d.plan,
      .peers_R = {},
      .scratch = reinterpret_cast<char*>(
          pointer<uint8_t>(scratch, d.plan.health_aborted_rounds + R * 8, "scratch")),
      .status = reinterpret_cast<Status*>(d.status),
      .timeout_ns = d.timeout_ns,
  };
  if (progress_of(exchange, like).phases + opens <= 4)
    exchange.timeout_ns = d.first_timeout_ns;  // four a round
  std::memcpy(exchange.peers_R, &d + 1, R * sizeof(char*));
  return exchange;
}

// Where experts move, each layer has tables and totals of its own.
void choose_layer(ExchangePlan& plan, int64_t tag, int64_t T) {
  if (!plan.layers) return;
  STD_TORCH_CHECK(tag >= 1 && tag <= plan.layers, "the tag must be from 1 to ", plan.layers,
                  ", got ", tag);
  int64_t table = 2 * (tag - 1) + (T > plan.few_tokens);
  plan.table_copies += table * plan.E * plan.copies * static_cast<int64_t>(sizeof(int32_t));
  plan.health_tokens_per_expert +=
      (tag - 1) * plan.num_local_experts * static_cast<int64_t>(sizeof(int64_t));
}

// Launches one or both phases of a stage, in the order of the calls, whichever streams these are
// made on. Notes for the host what was launched; the CPU kernels note their phases themselves.
template <typename Args, typename Launch>
void launch_in_order(const Exchange& exchange, const Args& args, const Tensor& like,
                     Launch&& launch) {
  Progress& progress = progress_of(exchange, like);
  launch_on_device_of(like, [&](const cuda::Api& api, cuda::Stream stream) {
    int64_t this_stream = reinterpret_cast<int64_t>(stream) + 1;
    int64_t last = std::exchange(progress.last_stream, this_stream);
    if (last && last != this_stream)
      if (int error = api.order_after(stream, reinterpret_cast<cuda::Stream>(last - 1)))
        return error;
    return launch(api, stream);
  });
  progress.phases += args.send + args.receive;
}

void launch_dispatch(Exchange exchange, const DispatchArgs& args, const Tensor& x) {
  choose_layer(exchange.plan, progress_of(exchange, x).tag, args.T);
  if (x.is_cuda())
    return launch_in_order(exchange, args, x, [&](const cuda::Api& api, cuda::Stream stream) {
      return api.dispatch(exchange, args, stream);
    });
  cpu::dispatch(exchange, args);
}

void launch_combine(const Exchange& exchange, const CombineArgs& args, const Tensor& y) {
  if (y.is_cuda())
    return launch_in_order(exchange, args, y, [&](const cuda::Api& api, cuda::Stream stream) {
      return api.combine(exchange, args, dtype_of(y), stream);
    });
  auto* offsets = reinterpret_cast<const int32_t*>(exchange.scratch + exchange.plan.expert_offsets);
  int64_t needed = args.rows && args.expert_major ? offsets[exchange.plan.num_local_experts] : 0;
  STD_TORCH_CHECK(args.num_rows >= needed, "`expert_rows` must hold at least ", needed,
                  " rows, got ", args.num_rows);
  cpu::combine(exchange, args, dtype_of(y));
}

template <Phase kPhase>
void dispatch(const Tensor& x, const Tensor& ids, const Tensor& weights, const MaybeTensor& scales,
              const MaybeTensor& num_tokens, int64_t num_rows, const Tensor& window,
              const Tensor& scratch, const Tensor& descriptor) {
  const ExchangeDescriptor& d = parsed(descriptor);
  const ExchangePlan& plan = d.plan;
  DispatchArgs args{};
  take_tokens(args, x, ids, weights, scales, num_tokens, num_rows, plan.payload_format);
  STD_TORCH_CHECK(args.T <= plan.M && args.K <= plan.K, "x, ids and weights must fit the plan");
  WireTraits traits = wire(plan.payload_format);
  args.x_row_bytes = args.D * itemsize(args.dtype);
  const int64_t line = traits.has_scales() ? 16 * itemsize(args.dtype) : 16;  // bytes of x
  args.D = traits.width(args.D);
  STD_TORCH_CHECK(args.D >= 1 &&
                      traits.row_bytes(args.D, itemsize(args.dtype)) <= plan.x_stride_bytes &&
                      traits.num_scales(args.D) <= plan.scale_blocks,
                  "a row of x must fit the plan");
  STD_TORCH_CHECK(d.to_caller || args.dtype != wire(WireFormat::kPackedFp8).element || scales,
                  "packed rows are for training");
  STD_TORCH_CHECK(is_aligned(x) && args.x_stride_bytes % 16 == 0 && args.x_row_bytes % line == 0,
                  "rows of x must start at multiples of 16 bytes, and be whole lines");
  args.expert_major = d.expert_major;
  args.weight_rows = d.weight_rows;
  args.zero_gaps = d.zero_gaps;
  args.to_caller = d.to_caller;
  args.keeps_zeros = d.keeps_zeros;
  args.adds_only = d.adds_only;
  args.returns_values = d.returns_values;
  args.zero_tail = d.zero_tail;
  args.row_weights_N = reinterpret_cast<float*>(d.row_weights);
  args.outputs_ND = reinterpret_cast<const void*>(d.outputs);
  args.outputs_stride_bytes = d.outputs_stride_bytes;
  args.products_NC = reinterpret_cast<float*>(d.products);
  STD_TORCH_CHECK(
      !args.outputs_ND || (args.to_caller && args.products_NC && args.T > plan.ll_max_tokens &&
                           traits.row_bytes(args.D, itemsize(args.dtype)) <= kMostProductBytes &&
                           d.outputs % 16 == 0 && d.outputs_stride_bytes % 16 == 0),
      "rows cannot be multiplied in this call");
  STD_TORCH_CHECK(!args.to_caller || !traits.has_scales(), "training needs rows without scales");
  args.send = kPhase != Phase::kRecv, args.receive = kPhase != Phase::kSend;
  launch_dispatch(exchange_of(d, window, scratch, x, args.send), args, x);
}

template <Phase kPhase>
void combine(const Tensor& y, const MaybeTensor& rows, const Tensor& window, const Tensor& scratch,
             const Tensor& descriptor) {
  const ExchangeDescriptor& d = parsed(descriptor);
  const ExchangePlan& plan = d.plan;
  STD_TORCH_CHECK(y.dim() == 2 && y.is_contiguous() && y.size(0) <= plan.M && y.size(1) <= plan.D,
                  "y must be contiguous [T, D] and fit the plan");
  STD_TORCH_CHECK(
      wire_row_bytes(plan.combine_format, y.size(1), dtype_of(y)) <= plan.combine_stride_bytes,
      "a row of y must fit the plan");
  STD_TORCH_CHECK(
      !d.row_values == !d.pair_values && (!d.row_values || !wire(plan.combine_format).has_scales()),
      "values return with sums without scales");
  CombineArgs args{
      .expert_major = d.expert_major != 0,
      .y_TD = y.data_ptr(),
      .T = y.size(0),
      .D = y.size(1),
      .send = kPhase != Phase::kRecv,
      .receive = kPhase != Phase::kSend,
      .row_values_N = reinterpret_cast<const float*>(d.row_values),
      .pair_values_TK = reinterpret_cast<float*>(d.pair_values),
  };
  if (rows) {
    check_rows(*rows, "rows");
    int64_t stride_bytes = rows->stride(0) * itemsize(dtype_of(y));
    STD_TORCH_CHECK(rows->size(1) == y.size(1) && dtype_of(*rows) == dtype_of(y),
                    "rows must be like y");
    STD_TORCH_CHECK(args.expert_major || rows->size(0) == plan.R * plan.M,
                    "partial rows must be [R * M, D]");
    STD_TORCH_CHECK(is_aligned(*rows) && stride_bytes % 16 == 0,
                    "rows must start at multiples of 16 bytes");
    static const char kNoRow[16] =
        {};  // an empty tensor has no address, but null would abort the round
    args.rows = rows->size(0) ? rows->data_ptr() : kNoRow;
    args.rows_stride_bytes = stride_bytes;
    args.num_rows = rows->size(0);
  }
  launch_combine(exchange_of(d, window, scratch, y, false), args, y);
}

// A round of training: dispatch into memory of the caller's, which this operator makes. `prepared`
// is the descriptor of all such rounds (epmoe/exchange/descriptors.py). With `num_rows` < 0 rows
// stay in the exchange's buffer, and the first output is empty. `outputs` and `products` are those
// of DispatchArgs. The last output is the descriptor of this round, for its other operators.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dispatch_to_caller(
    const Tensor& x, const Tensor& ids, const Tensor& weights, const MaybeTensor& num_tokens,
    int64_t num_real, const Tensor& window, const Tensor& scratch, const Tensor& prepared,
    const MaybeTensor& outputs, const MaybeTensor& products, int64_t num_rows) {
  parsed(prepared);
  STD_TORCH_CHECK(x.dim() == 2, "x must be [T, D]");
  Tensor descriptor = empty_like_device(prepared, {prepared.numel()}, ScalarType::Long);
  std::memcpy(descriptor.data_ptr(), prepared.data_ptr(), prepared.numel() * sizeof(int64_t));
  auto& d = *static_cast<ExchangeDescriptor*>(descriptor.data_ptr());
  ExchangePlan& plan = d.plan;
  const bool keeps_rows = num_rows < 0;
  const int64_t N = keeps_rows ? plan.max_rows : num_rows;

  // Memory for what arrives.
  Tensor rows = torch::stable::new_empty(x, {keeps_rows ? 0 : N, x.size(1)});
  Tensor offsets = empty_like_device(x, {plan.num_local_experts + 1}, ScalarType::Int);
  Tensor tokens = empty_like_device(x, {plan.num_local_experts}, ScalarType::Int);
  Tensor row_weights = empty_like_device(x, {d.returns_values ? 0 : N}, ScalarType::Float);

  // The plan has offsets from the start of a region.
  auto* own_scratch = static_cast<char*>(scratch.data_ptr());
  auto* windows = reinterpret_cast<char* const*>(&d + 1);
  if (!keeps_rows) {
    // Rows are in the window on CUDA, and in scratch on the CPU.
    char* region = x.is_cuda() ? windows[plan.rank] : own_scratch;
    plan.rows = static_cast<char*>(rows.data_ptr()) - region;
    plan.max_rows = N;
  }
  plan.expert_offsets = static_cast<char*>(offsets.data_ptr()) - own_scratch;
  plan.tokens_per_expert = static_cast<char*>(tokens.data_ptr()) - own_scratch;
  d.zero_tail = !keeps_rows;
  if (!d.returns_values) d.row_weights = reinterpret_cast<int64_t>(row_weights.data_ptr());
  if (outputs) {
    check_rows(*outputs, "outputs");
    d.outputs = reinterpret_cast<int64_t>(outputs->data_ptr());
    d.outputs_stride_bytes = outputs->stride(0) * static_cast<int64_t>(outputs->element_size());
    d.products = reinterpret_cast<int64_t>(products.value().data_ptr());
  }
  dispatch<Phase::kSendRecv>(x, ids, weights, std::nullopt, num_tokens, num_real, window, scratch,
                             descriptor);
  return {rows, offsets, tokens, row_weights, descriptor};
}

// Words in windows of shared memory (cpu/words.h).
void post_word(const Tensor& window, int64_t offset, int64_t value) {
  STD_TORCH_CHECK(offset >= 0 && offset % 8 == 0, "a word must start at a multiple of 8 bytes");
  cpu::post_word(
      reinterpret_cast<int64_t*>(pointer<uint8_t>(window, offset + 8, "window") + offset), value);
}

Tensor read_words(const Tensor& words) {
  int64_t count = words.numel();
  auto* from = pointer<int64_t>(words, count, "words");
  Tensor values = empty_like_device(words, {count}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(values.data_ptr());
  for (int64_t i = 0; i < count; ++i) to[i] = cpu::read_word(from + i);
  return values;
}

// The words of a lobby, one for each seat behind the first.
std::pair<cpu::LobbyWord*, int64_t> lobby_of(const Tensor& lobby) {
  constexpr int64_t kBytes = sizeof(cpu::LobbyWord);
  int64_t seats = lobby.numel() / kBytes - 1;
  auto* words = reinterpret_cast<cpu::LobbyWord*>(pointer<uint8_t>(lobby, kBytes, "lobby"));
  return {words, seats};
}

void come(const Tensor& lobby, int64_t seat, int64_t value) {
  auto [words, seats] = lobby_of(lobby);
  STD_TORCH_CHECK(seat >= 0 && seat < seats, "a seat must be from 0 to ", seats - 1, ", got ",
                  seat);
  cpu::come(words, seat, value);
}

bool await_round(const Tensor& lobby, int64_t round, int64_t longest_ns) {
  auto [words, seats] = lobby_of(lobby);
  return cpu::await_round(words, seats, round, longest_ns);
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("dispatch", TORCH_BOX(&dispatch<Phase::kSendRecv>));
  library.impl("dispatch_send", TORCH_BOX(&dispatch<Phase::kSend>));
  library.impl("dispatch_recv", TORCH_BOX(&dispatch<Phase::kRecv>));
  library.impl("dispatch_to_caller", TORCH_BOX(&dispatch_to_caller));
  library.impl("combine", TORCH_BOX(&combine<Phase::kSendRecv>));
  library.impl("combine_send", TORCH_BOX(&combine<Phase::kSend>));
  library.impl("combine_recv", TORCH_BOX(&combine<Phase::kRecv>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  implement(library);
  library.impl("post_word", TORCH_BOX(&post_word));
  library.impl("read_words", TORCH_BOX(&read_words));
  library.impl("come", TORCH_BOX(&come));
  library.impl("await_round", TORCH_BOX(&await_round));
}
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) { implement(library); }

}  // namespace epmoe
