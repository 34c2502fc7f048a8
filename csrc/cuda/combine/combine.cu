// combine over NVLink, one kernel, two roles of blocks. Send blocks sum the rows of each slot's
// pairs and write the sum straight into the window of the slot's source. All other blocks, and send
// blocks once they are done, add what comes back for this rank's tokens, in rank order, as it
// arrives. docs/protocol.md has the round's timeline, docs/kernels.md the roles and the variants.
#include <cstddef>

#include "cuda/combine/block.cuh"
#include "cuda/combine/ll.cuh"
#include "cuda/combine/simple.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

__device__ __forceinline__ uint32_t all_ranks(const ExchangePlan& plan) {
  return plan.R == 32 ? kAllLanes : (1u << plan.R) - 1;
}

// One thread counts the `ranks` that have aborted the round, a mask, and tells the host of them
// unless this rank has aborted it, too. Out of line, so that the usual case stays short.
__device__ __noinline__ void report_aborted(const CombineKernel& kernel, uint32_t epoch,
                                            uint32_t ranks) {
  auto* total = in_scratch<int64_t>(kernel.ex, kernel.ex.plan.health_aborted_rounds);
  for (uint32_t left = ranks; left; left &= left - 1) ++total[__ffs(left) - 1];
  if (!kernel.args.rows) return;
  volatile Status& status = *kernel.ex.status;
  status.aborted_epoch = epoch;
  __threadfence_system();
  status.aborted = status.aborted | ranks;
}

// The whole block learns which ranks send rows, as a mask; a rank that aborts the round does not. A
// block that `sent` learns whether it is to receive (Wait::say_started). Returns false if a rank
// did not open combine.
__device__ __forceinline__ bool receive_signals(const CombineBlock& b, bool sent,
                                                uint32_t& sending_ranks, bool& receives) {
  const ExchangePlan& plan = b.plan;
  __shared__ uint32_t mask;
  __shared__ bool late;
  if (threadIdx.x == 0) mask = 0, late = false;
  __syncthreads();
  bool arrived = true;
  if (sent && threadIdx.x == block_threads() - 32)
    late = !b.wait.have_started(kCombine, b.kernel.send_blocks);
  if (threadIdx.x < plan.R) {
    int32_t sends[1] = {};
    auto* header = in_window<RoundHeader>(b.ex, plan.rank, plan.signal_combine) + threadIdx.x;
    arrived = b.wait.await_counted(reinterpret_cast<const Word*>(header), threadIdx.x, sends);
    if (sends[0]) atomicOr(&mask, 1u << threadIdx.x);
  }
  arrived = __syncthreads_and(arrived);
  sending_ranks = mask, receives = arrived && !late;
  return arrived;
}

// A kernel meets the other protocol only where ranks bring different numbers of tokens. Out of
// line, so that the usual case stays short.
template <WireFormat kFormat, typename T, bool kValues>
__device__ __noinline__ void send_to_simple_sources_too(CombineBlock b, char* shared,
                                                        int32_t* head) {
  OutgoingSum outgoing = first_slot<false>(b);
  outgoing.read(b);
  send_slots<false, kFormat, T, kValues>(b, outgoing, shared, head);
}
template <WireFormat kFormat, typename T, bool kValues>
__device__ __noinline__ void send_to_ll_sources_too(CombineBlock b, int32_t* head) {
  auto outgoing = first_sum<1, false, kFormat, T>(b);
  outgoing.read(b);
  send_chunks<1, false, false, kFormat, T, kValues>(b, outgoing, head);
}

// What a kernel is compiled for.
struct Variant {
  // Lines of a row that a sending lane moves at once with the LL protocol; 0: Simple protocol.
  int send_lines;
  // Receivers also sum send_lines lines at once, otherwise one; senders have more pairs in flight.
  bool coarse;
  bool own;  // receivers make the sums for tokens of this rank, so that these do not travel
  WireFormat format;  // of the sums
  bool values;        // a value of each pair returns, too
};

// A variant as a type. nvcc has no name for a value of a class among the template arguments of a
// kernel.
template <Variant kVariant>
struct Compiled {
  static constexpr Variant value = kVariant;
};

template <typename Of, typename T>
__device__ __forceinline__ void combine_in_block(const CombineKernel& kernel) {
  constexpr Variant kVariant = Of::value;
  constexpr int kSendLines = kVariant.send_lines;
  constexpr bool kLL = kSendLines > 0;
  constexpr bool kCoarse = kVariant.coarse;
  constexpr bool kOwn = kVariant.own;
  constexpr bool kValues = kVariant.values;
  constexpr WireFormat kFormat = kVariant.format;
  __shared__ RoundState now;
  __shared__ int32_t count_R[kMaxExchangeRanks], max_slots[2];
  __shared__ int32_t sink;
  extern __shared__ __align__(128) char buffers[];
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  const CombineArgs& args = kernel.args;
  fetch_arguments(kernel, &sink);
  auto* round = in_scratch<RoundState>(ex, plan.state);
  CombineBlock b{kernel, ex, plan, args, Wait(ex, round, 0), now, count_R, max_slots};
  bool sends = static_cast<int32_t>(blockIdx.x) < kernel.send_blocks && args.rows;
  OutgoingSum outgoing = [&]() -> OutgoingSum {
    if constexpr (kLL) return first_sum<kSendLines, kOwn, kFormat, T>(b);
    return first_slot<kOwn>(b);
  }();
  compute_now(&sink, outgoing.index, outgoing.slot.source, outgoing.slot.s, outgoing.pair_at);
  wait_for_predecessor();
  if (args.send && args.receive) let_successor_start();
  if (sends) outgoing.read(b);  // load at once what does not depend on the round's state
  if (sends && threadIdx.x == 0) b.wait.say_started(kCombine);
  // One warp loads the state: the threads of a grid that load the same line delay one another.
  if (threadIdx.x < 32) {
    constexpr int kStateInts = offsetof(RoundState, send_queue) / 4;
    constexpr int kMaskAt = offsetof(RoundState, ll_mask) / 4;
    uint32_t word =
        threadIdx.x < kStateInts ? reinterpret_cast<const uint32_t*>(round)[threadIdx.x] : 0;
    int32_t count =
        threadIdx.x < plan.R ? in_scratch<int32_t>(ex, plan.slots_used)[threadIdx.x] : 0;
    if (threadIdx.x < kStateInts) reinterpret_cast<uint32_t*>(&now)[threadIdx.x] = word;
    uint32_t ll_mask = __shfl_sync(kAllLanes, word, kMaskAt);
    bool is_ll = ll_mask >> threadIdx.x & 1u;
    count = max(min(count, static_cast<int32_t>(is_ll ? plan.ll_max_tokens : plan.M)), 0);
    count_R[threadIdx.x] = count;
    max_slots[0] = __reduce_max_sync(kAllLanes, is_ll ? 0 : count);
    max_slots[1] = __reduce_max_sync(kAllLanes, is_ll ? count : 0);
  }
  __syncthreads();
  b.wait.epoch = now.dispatch_epoch;
  bool leader = blockIdx.x == 0;
  bool ok = !(now.latched | (leader ? Wait::out_of_turn(kCombine, args.send, now.phases) : 0));
  // The block that starts first opens combine, with its last warp, which has the least to send.
  if (int32_t rank = block_threads() - 1 - threadIdx.x;
      leader && rank < plan.R && ok && args.send) {
    RoundHeader* header = in_window<RoundHeader>(ex, rank, plan.signal_combine) + plan.rank;
    Word::publish(reinterpret_cast<Word*>(header), b.wait.epoch, args.rows ? 1 : 0);
  }
  if (sends && ok) {
    uint32_t all = all_ranks(plan);
    if constexpr (kLL) {
      send_chunks<kSendLines, kCoarse, kOwn, kFormat, T, kValues>(b, outgoing,
                                                                  &round->ll_queue[kCombine]);
      if (now.ll_mask != all)
        send_to_simple_sources_too<kFormat, T, kValues>(b, buffers, &round->send_queue[kCombine]);
    } else {
      send_slots<kOwn, kFormat, T, kValues>(b, outgoing, buffers, &round->send_queue[kCombine]);
      if (now.ll_mask) send_to_ll_sources_too<kFormat, T, kValues>(b, &round->ll_queue[kCombine]);
    }
  }
  if (leader && threadIdx.x == 0 && args.send && ok) round->phases = 3;
  uint32_t sending_ranks = 0;
  bool receives = false;
  if (args.receive) {
    if (threadIdx.x == 0) b.wait.begin(kCombine);
    ok = ok && receive_signals(b, sends && args.send, sending_ranks, receives);
  }
  if (!args.receive) {
    if (leader && threadIdx.x == 0 && !ok) Wait::report(ex, round, b.wait.epoch, kCombine, {});
    return;
  }
  if constexpr (kLL) {
    if (receives)
      ok = sum_chunks<kCoarse ? kSendLines : 1, kOwn, kFormat, T, kValues>(
          b, sending_ranks, &round->recv_queue[kCombine]);
  } else if (receives) {
    constexpr int kMaxChunkVectors =
        384;  // about seven turns of a warp, so that late rows do not wait for long
    // Blocks that send may leave before they receive, so none of them starts with an item.
    WorkQueue queue(args.T, static_cast<int32_t>(args.D / kPerVector<T>), kernel.send_blocks,
                    kMaxChunkVectors);
    ok = queue.for_each(&round->recv_queue[kCombine], [&](int32_t t, int32_t chunk) {
      bool here = true;
      if constexpr (kOwn)
        sum_own_token<T>(b, t, chunk, queue.chunks, sending_ranks, buffers + kSendBufferBytes);
      else
        here = sum_token<kFormat, T>(b, t, chunk, queue.chunks, sending_ranks);
      if constexpr (kValues) here = here && (chunk || recv_values(b, t, sending_ranks));
      return here;
    });
  }
  if (leader && threadIdx.x == 0) {
    round->combine_epoch = b.wait.epoch;
    uint32_t aborted = all_ranks(plan) & ~sending_ranks;
    if (ok) round->phases = 0;
    if (ok && aborted) report_aborted(kernel, b.wait.epoch, aborted);
    round->send_queue[kDispatch] = round->recv_queue[kDispatch] = round->ll_queue[kDispatch] =
        round->done[kDispatch] = round->started[kDispatch] = round->receiving[kDispatch] =
            round->notified = round->num_tokens = 0;
  }
  if (!b.wait.failed(kCombine, ok)) return;
  auto* y = static_cast<T*>(args.y_TD);
  for (int64_t i = threadIdx.x; i < args.T * args.D; i += block_threads())
    y[i] = from_float<T>(0.0f);
  for (int64_t i = threadIdx.x; kValues && i < args.T * now.K; i += block_threads())
    args.pair_values_TK[i] = 0.0f;
}

template <typename Of, typename T>
  requires(blocks_per_sm(Of::value.send_lines) > 1)
__global__ void __launch_bounds__(threads_per_block(Of::value.send_lines),
                                  blocks_per_sm(Of::value.send_lines))
    combine_kernel(const __grid_constant__ CombineKernel kernel) {
  combine_in_block<Of, T>(kernel);
}
// The same where a block has a multiprocessor to itself. A launch bound would allow all registers.
template <typename Of, typename T>
  requires(blocks_per_sm(Of::value.send_lines) == 1)
__global__ void __maxnreg__(kMostRegisters)
    combine_kernel(const __grid_constant__ CombineKernel kernel) {
  combine_in_block<Of, T>(kernel);
}

template <WireFormat kFormat, typename T, bool kValues>
auto variant_of(int64_t send_lines, bool coarse, bool own) {
  constexpr bool kCoarse = !wire(kFormat).has_scales();
  constexpr auto of = [](int lines, bool coarse, bool own) {
    return Variant{
        .send_lines = lines, .coarse = coarse, .own = own, .format = kFormat, .values = kValues};
  };
  if (send_lines == 0)
    return own ? combine_kernel<Compiled<of(0, false, kCoarse)>, T>
               : combine_kernel<Compiled<of(0, false, false)>, T>;
  if (send_lines == 1) return combine_kernel<Compiled<of(1, false, false)>, T>;
  if (own) return combine_kernel<Compiled<of(kMaxSumLines, kCoarse, kCoarse)>, T>;
  if (coarse) return combine_kernel<Compiled<of(kMaxSumLines, kCoarse, false)>, T>;
  return combine_kernel<Compiled<of(kMaxSumLines, false, false)>, T>;
}
// Rounds that return values have sums without scales.
auto* variant_for(int64_t send_lines, bool coarse, bool own, WireFormat format, DType dtype,
                  bool values) {
  return with_format(format, [&](auto of) {
    return visit(dtype, [&](auto type) {
      if constexpr (!wire(of).has_scales())
        if (values) return variant_of<of, decltype(type), true>(send_lines, coarse, own);
      return variant_of<of, decltype(type), false>(send_lines, coarse, own);
    });
  });
}

}  // namespace

cudaError_t load_combine() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (WireFormat format : kWireFormats)
      for (int send_lines : {0, 1, kMaxSumLines})
        for (bool coarse : {false, true})
          for (bool own : {false, true})
            for (bool values : {false, true})
              if (cudaError_t error =
                      load(variant_for(send_lines, coarse, own, format, dtype, values)))
                return error;
  return cudaSuccess;
}

cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype,
                    cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  CombineLaunch policy = combine_launch(
      exchange.plan, args, dtype, {device.multiprocessors, device.major, device.shared_bytes});
  CombineKernel kernel{exchange, args, static_cast<int32_t>(policy.send_blocks),
                       static_cast<int32_t>(policy.team),
                       static_cast<int32_t>(policy.rows_per_release)};
  auto* variant = variant_for(policy.send_lines, policy.coarse, policy.own,
                              exchange.plan.combine_format, dtype, args.row_values_N != nullptr);
  return launch(variant, policy.blocks, static_cast<int>(policy.threads), policy.shared_bytes,
                stream, kernel);
}

}  // namespace epmoe::cuda
