// The launch policy as an operator: `epmoe plan` prints it, and its table is tested, on machines without a GPU. The
// GPU's operators call the policy directly (cuda/dispatch/dispatch.cu, cuda/combine/combine.cu).
#include <algorithm>
#include <iterator>

#include "launch_policy.h"
#include "unwrap.h"

namespace epmoe {
namespace {

const ExchangePlan& plan_of(const Tensor& plan) {
  return *reinterpret_cast<const ExchangePlan*>(pointer<int64_t>(plan, sizeof(ExchangePlan) / sizeof(int64_t), "plan"));
}

// The fields of DispatchLaunch, then those of CombineLaunch, in their order.
Tensor launch_policy(const Tensor& plan, int64_t T, int64_t D, int64_t K, int64_t dtype, bool expert_major, bool send,
                     bool receive, int64_t multiprocessors, int64_t major) {
  DispatchArgs out{};
  out.dtype = static_cast<DType>(dtype);
  out.T = out.num_rows = T, out.D = D, out.K = static_cast<int32_t>(K);
  out.expert_major = expert_major, out.send = send, out.receive = receive;
  CombineArgs back{};
  back.rows = &back;  // not null: the round is not aborted
  back.T = T, back.D = D, back.expert_major = expert_major, back.send = send, back.receive = receive;
  Gpu gpu{multiprocessors, static_cast<int>(major)};
  DispatchLaunch d = dispatch_launch(plan_of(plan), out, gpu);
  CombineLaunch c = combine_launch(plan_of(plan), back, out.dtype, gpu);
  const int64_t fields[] = {d.recv_lines,
                            d.coarse,
                            d.exclusive,
                            d.blocks,
                            d.threads,
                            d.send_blocks,
                            d.notify_blocks,
                            d.send_offset_entries,
                            d.source_offset_entries,
                            d.row_chunks,
                            d.chunk_bytes,
                            d.tokens_per_release,
                            d.shared_bytes,
                            c.send_lines,
                            c.coarse,
                            c.own,
                            c.forwards,
                            c.blocks,
                            c.threads,
                            c.send_blocks,
                            c.team,
                            c.shared_bytes};
  Tensor launches = empty_like_device(plan, {static_cast<int64_t>(std::size(fields))}, ScalarType::Long);
  std::copy(std::begin(fields), std::end(fields), static_cast<int64_t*>(launches.data_ptr()));
  return launches;
}

int64_t shared_bytes_needed(const Tensor& plan) { return shared_bytes_per_block(plan_of(plan)); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("launch_policy", TORCH_BOX(&launch_policy));
  library.impl("shared_bytes_needed", TORCH_BOX(&shared_bytes_needed));
}

}  // namespace epmoe
