// The operators of the exchange: checks, unwraps, launches. Schemas and fakes: epmoe/ops.py.
#include <cstring>

#include "cpu/stages.h"
#include "unwrap.h"
#if defined(EPMOE_CUDA)
#include "cuda/exchange_launch.h"
#endif

namespace epmoe {
namespace {

enum class Half { kBoth, kSend, kReceive };

// What the calls of a round have in common, on the host, as `Exchange.words_for` in epmoe/exchange.py writes it: int64
// each, and after them the address of each rank's window. Scalars of an operator cost the host more than tensors do.
struct Words {
  ExchangePlan plan;
  int64_t expert_major, weight_rows;  // as in DispatchArgs
  int64_t timeout_ns;
  int64_t status;  // its address
};

const Words& words_of(const Tensor& exchange) {
  constexpr int64_t kFields = sizeof(Words) / sizeof(int64_t);
  STD_TORCH_CHECK(!exchange.is_cuda(), "the exchange's words must be on the host");
  const auto& words = *reinterpret_cast<const Words*>(pointer<int64_t>(exchange, kFields, "exchange"));
  int64_t R = words.plan.R;
  STD_TORCH_CHECK(R >= 1 && R <= kMaxRanks, "ranks must be from 1 to ", kMaxRanks);
  STD_TORCH_CHECK(exchange.numel() == kFields + R, "the exchange's words must be ", kFields, ", and ", R, " addresses");
  return words;
}

Exchange exchange_of(const Words& words, const Tensor& window, const Tensor& scratch) {
  int64_t R = words.plan.R;
  pointer<uint8_t>(window, words.plan.combine_scales, "window");
  Exchange exchange{
      .plan = words.plan,
      .peers_R = {},
      .scratch = reinterpret_cast<char*>(pointer<uint8_t>(scratch, words.plan.rows_sent + R * 8, "scratch")),
      .status = reinterpret_cast<Status*>(words.status),
      .timeout_ns = words.timeout_ns,
  };
  std::memcpy(exchange.peers_R, &words + 1, R * sizeof(char*));
  return exchange;
}

void launch_dispatch(const Exchange& exchange, const DispatchArgs& args, const Tensor& x) {
#if defined(EPMOE_CUDA)
  if (x.is_cuda()) return launch_beside(x, [&](cudaStream_t stream) { return cuda::dispatch(exchange, args, stream); });
#endif
  cpu::dispatch(exchange, args);
}

void launch_combine(const Exchange& exchange, const CombineArgs& args, const Tensor& y) {
#if defined(EPMOE_CUDA)
  if (y.is_cuda())
    return launch_beside(y, [&](cudaStream_t stream) { return cuda::combine(exchange, args, dtype_of(y), stream); });
#endif
  auto* offsets = reinterpret_cast<const int32_t*>(exchange.scratch + exchange.plan.expert_offsets);
  int64_t needed = args.rows && args.expert_major ? offsets[exchange.plan.num_local_experts] : 0;
  STD_TORCH_CHECK(args.num_rows >= needed, "`expert_rows` must hold at least ", needed, " rows, got ", args.num_rows);
  cpu::combine(exchange, args);
}

template <Half kHalf>
void dispatch(const Tensor& x, const Tensor& ids, const Tensor& weights, const std::optional<Tensor>& num_tokens,
              int64_t num_rows, const Tensor& window, const Tensor& scratch, const Tensor& exchange) {
  const Words& words = words_of(exchange);
  const ExchangePlan& plan = words.plan;
  check_rows(x, "x");
  check_rows(ids, "ids");
  check_rows(weights, "weights");
  int64_t T = x.size(0), D = x.size(1), K = ids.size(1), bytes = itemsize(dtype_of(x));
  STD_TORCH_CHECK(
      T <= plan.M && K >= 1 && K <= plan.K && ids.size(0) == T && weights.size(0) == T && weights.size(1) == K,
      "x, ids and weights must fit one another and the plan");
  STD_TORCH_CHECK(D >= 1 && D <= plan.D && (plan.payload_fp8 || D * bytes <= plan.x_stride_bytes),
                  "a row of x must fit the plan");
  STD_TORCH_CHECK(plan.combine_fp8 || D * bytes <= plan.combine_stride_bytes, "a row of y must fit the plan");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(0) * bytes % 16 == 0,
                  "rows of x must start at multiples of 16 bytes");
  DispatchArgs args{
      .x_TD = x.data_ptr(),
      .dtype = dtype_of(x),
      .x_stride_bytes = x.stride(0) * bytes,
      .ids_TK = ids.data_ptr(),
      .wide_ids = is_wide(ids),
      .ids_stride = ids.stride(0),
      .weights_TK = weights.data_ptr(),
      .weights_dtype = dtype_of(weights),
      .weights_stride = weights.stride(0),
      .num_tokens = pointer<int32_t>(num_tokens, 1, "num_tokens"),
      .T = T,
      .num_rows = num_rows,
      .D = D,
      .K = static_cast<int32_t>(K),
      .expert_major = words.expert_major != 0,
      .weight_rows = words.weight_rows != 0,
      .send = kHalf != Half::kReceive,
      .receive = kHalf != Half::kSend,
  };
  launch_dispatch(exchange_of(words, window, scratch), args, x);
}

template <Half kHalf>
void combine(const Tensor& y, const std::optional<Tensor>& rows, const Tensor& window, const Tensor& scratch,
             const Tensor& exchange) {
  const Words& words = words_of(exchange);
  const ExchangePlan& plan = words.plan;
  STD_TORCH_CHECK(y.dim() == 2 && y.is_contiguous() && y.size(0) <= plan.M && y.size(1) <= plan.D,
                  "y must be contiguous [T, D] and fit the plan");
  CombineArgs args{
      .rows = nullptr,
      .expert_major = words.expert_major != 0,
      .rows_stride_bytes = 0,
      .num_rows = 0,
      .y_TD = y.data_ptr(),
      .T = y.size(0),
      .D = y.size(1),
      .send = kHalf != Half::kReceive,
      .receive = kHalf != Half::kSend,
  };
  if (rows) {
    check_rows(*rows, "rows");
    int64_t stride_bytes = rows->stride(0) * itemsize(dtype_of(y));
    STD_TORCH_CHECK(rows->size(1) == y.size(1) && dtype_of(*rows) == dtype_of(y), "rows must be like y");
    STD_TORCH_CHECK(args.expert_major || rows->size(0) == plan.R * plan.M, "partial rows must be [R * M, D]");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(rows->data_ptr()) % 16 == 0 && stride_bytes % 16 == 0,
                    "rows must start at multiples of 16 bytes");
    args.rows = rows->data_ptr();
    args.rows_stride_bytes = stride_bytes;
    args.num_rows = rows->size(0);
  }
  launch_combine(exchange_of(words, window, scratch), args, y);
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("dispatch", TORCH_BOX(&dispatch<Half::kBoth>));
  library.impl("dispatch_send", TORCH_BOX(&dispatch<Half::kSend>));
  library.impl("dispatch_recv", TORCH_BOX(&dispatch<Half::kReceive>));
  library.impl("combine", TORCH_BOX(&combine<Half::kBoth>));
  library.impl("combine_send", TORCH_BOX(&combine<Half::kSend>));
  library.impl("combine_recv", TORCH_BOX(&combine<Half::kReceive>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) { implement(library); }
#if defined(EPMOE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) { implement(library); }
#endif

}  // namespace epmoe
