// The operators of the exchange: checks, unwraps, launches. Schemas and fakes: epmoe/ops.py.
#include <cstring>

#include "cpu/stages.h"
#include "unwrap.h"
#if defined(EPMOE_CUDA)
#include "cuda/exchange_launch.h"
#endif

namespace epmoe {
namespace {

constexpr int64_t kPlanFields = sizeof(ExchangePlan) / sizeof(int64_t);

// Words on the host: the plan's fields, in their order, and the addresses of the status and of each rank's window.
Exchange exchange_of(const Tensor& words, const Tensor& window, const Tensor& scratch, double timeout_s) {
  STD_TORCH_CHECK(!words.is_cuda(), "the exchange's words must be on the host");
  const int64_t* plan = pointer<int64_t>(words, kPlanFields + 1, "exchange");
  const int64_t* addresses = plan + kPlanFields;
  Exchange exchange{};
  std::memcpy(&exchange.plan, plan, sizeof(exchange.plan));
  int64_t R = exchange.plan.R;
  STD_TORCH_CHECK(R >= 1 && R <= kMaxRanks, "ranks must be from 1 to ", kMaxRanks);
  STD_TORCH_CHECK(words.numel() == kPlanFields + 1 + R, "the exchange's words must be ", kPlanFields, ", and ", 1 + R,
                  " addresses");
  pointer<uint8_t>(window, exchange.plan.combine_scales, "window");
  exchange.scratch = reinterpret_cast<char*>(pointer<uint8_t>(scratch, exchange.plan.rows_sent + R * 8, "scratch"));
  exchange.status = reinterpret_cast<Status*>(addresses[0]);
  exchange.timeout_s = timeout_s;
  std::memcpy(exchange.peers_R, addresses + 1, R * sizeof(char*));
  return exchange;
}

void launch_dispatch(const Exchange& exchange, const DispatchArgs& args, const Tensor& x) {
#if defined(EPMOE_CUDA)
  if (x.is_cuda()) return check_cuda(cuda::dispatch(exchange, args, current_stream(x)));
#endif
  cpu::dispatch(exchange, args);
}

void launch_combine(const Exchange& exchange, const CombineArgs& args, const Tensor& y) {
#if defined(EPMOE_CUDA)
  if (y.is_cuda()) return check_cuda(cuda::combine(exchange, args, dtype_of(y), current_stream(y)));
#endif
  auto* offsets = reinterpret_cast<const int32_t*>(exchange.scratch + exchange.plan.expert_offsets);
  int64_t needed = args.rows && args.expert_major ? offsets[exchange.plan.num_local_experts] : 0;
  STD_TORCH_CHECK(args.num_rows >= needed, "`expert_rows` must hold at least ", needed, " rows, got ", args.num_rows);
  cpu::combine(exchange, args);
}

void dispatch(const Tensor& x, const Tensor& ids, const Tensor& weights, const std::optional<Tensor>& num_tokens,
              int64_t num_rows, const Tensor& window, const Tensor& scratch, const Tensor& words, bool expert_major,
              bool weight_rows, bool send, bool receive, double timeout_s) {
  Exchange exchange = exchange_of(words, window, scratch, timeout_s);
  const ExchangePlan& plan = exchange.plan;
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
      .expert_major = expert_major,
      .weight_rows = weight_rows,
      .send = send,
      .receive = receive,
  };
  launch_dispatch(exchange, args, x);
}

void combine(const Tensor& y, const std::optional<Tensor>& rows, bool expert_major, const Tensor& window,
             const Tensor& scratch, const Tensor& words, bool send, bool receive, double timeout_s) {
  Exchange exchange = exchange_of(words, window, scratch, timeout_s);
  const ExchangePlan& plan = exchange.plan;
  STD_TORCH_CHECK(y.dim() == 2 && y.is_contiguous() && y.size(0) <= plan.M && y.size(1) <= plan.D,
                  "y must be contiguous [T, D] and fit the plan");
  CombineArgs args{
      .rows = nullptr,
      .expert_major = expert_major,
      .rows_stride_bytes = 0,
      .num_rows = 0,
      .y_TD = y.data_ptr(),
      .T = y.size(0),
      .D = y.size(1),
      .send = send,
      .receive = receive,
  };
  if (rows) {
    check_rows(*rows, "rows");
    int64_t stride_bytes = rows->stride(0) * itemsize(dtype_of(y));
    STD_TORCH_CHECK(rows->size(1) == y.size(1) && dtype_of(*rows) == dtype_of(y), "rows must be like y");
    STD_TORCH_CHECK(expert_major || rows->size(0) == plan.R * plan.M, "partial rows must be [R * M, D]");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(rows->data_ptr()) % 16 == 0 && stride_bytes % 16 == 0,
                    "rows must start at multiples of 16 bytes");
    args.rows = rows->data_ptr();
    args.rows_stride_bytes = stride_bytes;
    args.num_rows = rows->size(0);
  }
  launch_combine(exchange, args, y);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("dispatch", TORCH_BOX(&dispatch));
  library.impl("combine", TORCH_BOX(&combine));
}

#if defined(EPMOE_CUDA)
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) {
  library.impl("dispatch", TORCH_BOX(&dispatch));
  library.impl("combine", TORCH_BOX(&combine));
}
#endif

}  // namespace epmoe
