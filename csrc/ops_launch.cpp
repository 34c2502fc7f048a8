// What the host asks of the CUDA kernels ahead of a round. The launch policy is an operator, since `epmoe plan` prints
// it, and its table is tested, on machines without a GPU. The GPU's operators call the policy directly
// (cuda/dispatch/dispatch.cu, cuda/combine/combine.cu).
#include <string>

#include "launch_policy.h"
#include "unwrap.h"

namespace epmoe {
namespace {

const ExchangePlan& plan_of(const Tensor& plan) {
  return *reinterpret_cast<const ExchangePlan*>(pointer<int64_t>(plan, sizeof(ExchangePlan) / sizeof(int64_t), "plan"));
}

// A line for each field of DispatchLaunch and of CombineLaunch: the stage, the field and its value.
std::string launch_policy(const Tensor& plan, int64_t T, int64_t D, int64_t K, int64_t dtype, bool expert_major,
                          bool send, bool receive, int64_t multiprocessors) {
  DispatchArgs out{};
  out.dtype = static_cast<DType>(dtype);
  out.T = out.num_rows = T, out.D = D, out.K = static_cast<int32_t>(K);
  out.expert_major = expert_major, out.send = send, out.receive = receive;
  CombineArgs back{};
  back.rows = &back;  // not null: the round is not aborted
  back.T = T, back.D = D, back.expert_major = expert_major, back.send = send, back.receive = receive;
  Gpu gpu{multiprocessors};
  DispatchLaunch dispatch = dispatch_launch(plan_of(plan), out, gpu);
  CombineLaunch combine = combine_launch(plan_of(plan), back, out.dtype, gpu);
  std::string lines;
#define FIELD(stage, field) lines += #stage " " #field " " + std::to_string(stage.field) + "\n";
  FIELD(dispatch, recv_lines)
  FIELD(dispatch, coarse)
  FIELD(dispatch, exclusive)
  FIELD(dispatch, blocks)
  FIELD(dispatch, threads)
  FIELD(dispatch, send_blocks)
  FIELD(dispatch, notify_blocks)
  FIELD(dispatch, send_offset_entries)
  FIELD(dispatch, source_offset_entries)
  FIELD(dispatch, row_chunks)
  FIELD(dispatch, chunk_bytes)
  FIELD(dispatch, tokens_per_release)
  FIELD(dispatch, shared_bytes)
  FIELD(combine, send_lines)
  FIELD(combine, coarse)
  FIELD(combine, own)
  FIELD(combine, blocks)
  FIELD(combine, threads)
  FIELD(combine, send_blocks)
  FIELD(combine, team)
  FIELD(combine, shared_bytes)
#undef FIELD
  return lines;
}

int64_t shared_bytes_needed(const Tensor& plan) { return shared_bytes_per_block(plan_of(plan)); }

// Raises what a first tensor on a GPU would. `ExpertParallel` calls it ahead of its first round.
void load_cuda() { cuda::library(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CompositeExplicitAutograd, library) {
  library.impl("load_cuda", TORCH_BOX(&load_cuda));
}
STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("launch_policy", TORCH_BOX(&launch_policy));
  library.impl("shared_bytes_needed", TORCH_BOX(&shared_bytes_needed));
}

}  // namespace epmoe
