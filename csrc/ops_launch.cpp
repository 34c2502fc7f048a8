// What the host asks of the library of CUDA kernels ahead of a round. The launch policy is an
// operator, since `epmoe plan` prints it, and its table is tested, on machines without a GPU. The
// GPU's operators call the policy directly (cuda/dispatch/dispatch.cu, cuda/combine/combine.cu).
#include <cstring>

#include "launch_policy.h"
#include "unwrap.h"

namespace epmoe {
namespace {

const ExchangePlan& plan_of(const Tensor& plan) {
  return *reinterpret_cast<const ExchangePlan*>(
      pointer<int64_t>(plan, sizeof(ExchangePlan) / sizeof(int64_t), "plan"));
}

// The bytes of `LaunchPolicy`, on the CPU.
Tensor launch_policy(const Tensor& plan, int64_t T, int64_t D, int64_t K, int64_t dtype,
                     bool expert_major, bool send, bool receive, int64_t multiprocessors,
                     int64_t major, int64_t shared_bytes) {
  DispatchArgs out{};
  out.dtype = static_cast<DType>(dtype);
  out.T = out.num_rows = T, out.K = static_cast<int32_t>(K);
  out.D = wire(plan_of(plan).payload_format).width(D);
  out.expert_major = expert_major, out.send = send, out.receive = receive;
  CombineArgs back{};
  back.rows = &back;  // not null: the round is not aborted
  back.T = T, back.D = D, back.expert_major = expert_major, back.send = send,
  back.receive = receive;
  Gpu gpu{multiprocessors, static_cast<int>(major), shared_bytes};
  LaunchPolicy policy{dispatch_launch(plan_of(plan), out, gpu),
                      combine_launch(plan_of(plan), back, out.dtype, gpu)};
  Tensor bytes = empty_like_device(plan, {sizeof policy}, ScalarType::Byte);
  std::memcpy(bytes.data_ptr(), &policy, sizeof policy);
  return bytes;
}

int64_t shared_bytes_needed(const Tensor& plan) { return shared_bytes_per_block(plan_of(plan)); }

// Raises what a first tensor on a GPU would. `ExpertParallel` calls it ahead of its first round.
void load_cuda() { cuda::library(); }

// A stream that only the caller has, by its handle, until `end_stream` is true.
int64_t make_stream(int64_t device, int64_t priority) {
  const cuda::Api& api = *cuda::library().api;
  cuda::Stream stream = nullptr;
  int error = api.make_stream(static_cast<int>(device), static_cast<int>(priority), &stream);
  STD_TORCH_CHECK(error == 0, "CUDA: ", api.error_string(error));
  return reinterpret_cast<int64_t>(stream);
}

// Whether the stream has gone; one with work stays.
bool end_stream(int64_t stream) {
  return cuda::library().api->end_stream(reinterpret_cast<cuda::Stream>(stream));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CompositeExplicitAutograd, library) {
  library.impl("load_cuda", TORCH_BOX(&load_cuda));
  library.impl("make_stream", TORCH_BOX(&make_stream));
  library.impl("end_stream", TORCH_BOX(&end_stream));
}
STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("launch_policy", TORCH_BOX(&launch_policy));
  library.impl("shared_bytes_needed", TORCH_BOX(&shared_bytes_needed));
}

}  // namespace epmoe
