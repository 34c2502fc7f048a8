// dispatch over NVLink, one kernel, three roles of blocks. Send blocks send each token once to each
// rank that needs it. Notify blocks count, so that every rank learns all counts while rows are on
// the wire. All other blocks, and send blocks once they are done, move what has arrived to its
// expert-major rows. A sender gives each pair its ordinal among this source's pairs of the expert;
// the counts say where (expert, source) starts.
//  - LL protocol: rows leave at once, and the notify blocks send the pairs. A row's lines tell by
//  themselves that they
//    have arrived. Up to two ranks, this rank's own rows stay where the caller has them until they
//    are moved.
//  - Simple protocol: a sender that knows all counts writes a row straight to its first
//  expert-major row; the receiver
//    only copies it to the others. A slot's flag says that its row has arrived.
// docs/protocol.md has the round's timeline, docs/kernels.md the roles, the variants and an example
// with numbers.
#include "cuda/device/launch.cuh"
#include "cuda/dispatch/counts.cuh"
#include "cuda/dispatch/ll_recv.cuh"
#include "cuda/dispatch/offsets.cuh"
#include "cuda/dispatch/outputs.cuh"
#include "cuda/dispatch/simple_recv.cuh"
#include "cuda/dispatch/simple_send.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

static_assert(num_chunks(kMostProductBytes, kMaxLines<WireFormat::kAuto>) <= kProductParts);  // LL
static_assert(kMostProductBytes / 16 / kMaxChunkVectors <= kProductParts);  // Simple

// The real tokens of the call, as the block of this rank that first reads them finds them: a caller
// that writes `num_tokens` during the kernel must not make blocks disagree. The whole block calls
// it.
__device__ __forceinline__ int32_t real_tokens(const DispatchBlock& b) {
  if (!b.args.num_tokens) return b.kernel.tokens(b.args.num_rows);
  if (threadIdx.x == 0) {
    int32_t tokens = b.kernel.tokens(*b.args.num_tokens);
    int32_t first = atomicCAS(&b.wait.round->num_tokens, 0, tokens + 1);
    b.shared.tokens = first ? first - 1 : tokens;
  }
  __syncthreads();
  return b.shared.tokens;
}

// Reads the tables that no kernel writes, so it may run before the predecessor has ended.
__device__ void read_tables(DispatchBlock& b) {
  DispatchShared& shared = b.shared;
  Quotas quotas = quotas_of(b.ex);
  if (threadIdx.x == 0) shared.quotas = quotas;
  if (threadIdx.x < kMaxExchangeRanks) {
    shared.rank_count[threadIdx.x] = shared.num_experts[threadIdx.x] = 0;
    if (threadIdx.x < b.plan.R)
      shared.sentinel[threadIdx.x] = in_scratch<int32_t>(b.ex, b.plan.table_sentinels)[threadIdx.x];
  }
  for (int32_t expert = threadIdx.x; b.plan.copies != 1 && expert < b.plan.E;
       expert += block_threads())
    b.only_copy[expert] = only_copy(b.ex, quotas, expert);
  __syncthreads();
  for (int32_t p = threadIdx.x; p < b.plan.P; p += block_threads()) {
    int32_t local = in_scratch<int32_t>(b.ex, b.plan.table_local_index)[p];
    int32_t owner = in_scratch<int32_t>(b.ex, b.plan.table_owners)[p];
    b.location[p] = owner << 16 | local;
    b.count[p] = 0;
    atomicMax(&shared.num_experts[owner], local + 1);
  }
  __syncthreads();
}

// A kernel meets the other protocol only where ranks bring different numbers of tokens. Out of
// line, so that the usual case stays short. A block as the argument would take registers throughout
// the kernel.
template <WireFormat kFormat>
__device__ __noinline__ bool recv_simple_sources_too(const DispatchKernel& kernel,
                                                     DispatchShared& shared, uint32_t epoch) {
  DispatchBlock b(kernel, shared, epoch, kernel.args.to_caller);
  return recv_rows<kFormat, false, false>(b);
}
template <WireFormat kFormat, bool kMultiplies>
__device__ __noinline__ bool recv_ll_sources_too(const DispatchKernel& kernel,
                                                 DispatchShared& shared, uint32_t epoch) {
  DispatchBlock b(kernel, shared, epoch, kernel.args.to_caller);
  return recv_chunks<kMaxLines<kFormat>, kFormat, false, kMultiplies>(
      b, first_incoming<kMaxLines<kFormat>>(b));
}

// What a kernel is compiled for.
struct Variant {
  // Lines of a row that a receiving lane moves at once with the LL protocol; 0: Simple protocol.
  int recv_lines;
  bool coarse;        // senders also move recv_lines lines at once, otherwise one
  WireFormat format;  // of the payload
  int blocks_per_sm;  // that fit at least
  bool trains;        // `to_caller`
  bool multiplies;    // `outputs_ND`, of calls by the Simple protocol

  // Whether this rank's own rows stay where the caller has them.
  EPMOE_HD constexpr bool skips_self() const { return coarse && !wire(format).has_scales(); }
  EPMOE_HD constexpr int send_lines() const { return coarse ? recv_lines : 1; }
};

// A variant as a type. nvcc has no name for a value of a class among the template arguments of a
// kernel.
template <Variant kVariant>
struct Compiled {
  static constexpr Variant value = kVariant;
};

// Of: a `Compiled`. Source: the dtype that becomes the format; void where rows travel as they are.
template <typename Of, typename Source>
__global__ void __launch_bounds__(threads_per_block(Of::value.recv_lines), Of::value.blocks_per_sm)
    dispatch_kernel(const __grid_constant__ DispatchKernel kernel) {
  constexpr Variant kVariant = Of::value;
  constexpr int kRecvLines = kVariant.recv_lines;
  constexpr int kSendLines = kVariant.send_lines();
  constexpr bool kLL = kRecvLines > 0;
  constexpr bool kSkipSelf = kVariant.skips_self();
  constexpr bool kMultiplies = kVariant.multiplies;
  constexpr WireFormat kFormat = kVariant.format;
  // Simple: waiting for pairs costs more than registers. LL: longer code costs more.
  constexpr int kGroupsInFlight = kRecvLines == 1 ? 1 : kLL ? 2 : 4;
  __shared__ DispatchShared shared;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  DispatchBlock b(kernel, shared, 0, kVariant.trains);
  RoundState* round = b.wait.round;
  fetch_arguments(kernel, &shared.sink);
  read_tables(b);
  OutgoingChunk<kSendLines, kFormat, Source> outgoing(
      b, kLL ? first_outgoing(b.number, kernel.send_blocks) : 0,
      num_chunks(kernel.row_bytes(), kSendLines));
  compute_now(&shared.sink, outgoing.t, outgoing.chunk.first);
  wait_for_predecessor();
  if (kernel.args.send && kernel.args.receive) let_successor_start();
  bool sends = b.number < kernel.send_blocks;
  bool leader = b.number == kernel.send_blocks;
  bool ok = true;
  bool notifies = !sends && b.number < kernel.sending_blocks();
  // Load at once: the round's state, and the first chunk to send. One thread loads the state, since
  // the threads of a grid that load the same line delay one another.
  uint32_t last_epoch = 0;
  int32_t latched = 0;
  int32_t phases = 0;
  if (threadIdx.x == 0) {
    if (sends || notifies) b.wait.say_started(kDispatch);
    last_epoch = round->combine_epoch, latched = round->latched, phases = round->phases;
  }
  if (kLL && sends) outgoing.read(b);
  int32_t tokens = sends || notifies || leader ? real_tokens(b) : 0;
  if (leader) latched |= Wait::out_of_turn(kDispatch, kernel.args.send, phases);
  if (threadIdx.x == 0)
    shared.epoch = next_epoch(last_epoch), shared.latched = latched, shared.mismatched = 0;
  if (leader && kernel.args.send) {
    send_counts<kLL, kGroupsInFlight>(b, tokens);
    int64_t wanted = wanted_tokens(kernel.args);
    if (threadIdx.x == 0 && wanted != kernel.tokens(wanted))
      ++in_scratch<int64_t>(ex, plan.health_counters)[kClampedNumTokens];
  }
  if (sends)
    ok =
        kLL ? send_chunks<kSkipSelf>(b, tokens, outgoing)
            : send_rows<kFormat, Source, kGroupsInFlight>(b, tokens, &round->send_queue[kDispatch]);
  else if (kLL && notifies)
    send_pairs<kGroupsInFlight>(b, tokens);
  // Thread 0 reads what it wrote. Volatile, since the compiler would otherwise let all threads read
  // it in advance, beside the write. A register that lives until here changes the order of the
  // loads, and costs fp8 rows time.
  auto fails = [&] { return *static_cast<volatile int32_t*>(&shared.latched) != 0; };
  if (leader && threadIdx.x == 0 && kernel.args.send && !fails()) round->phases = 1;
  if (!kernel.args.receive) {
    if (leader && threadIdx.x == 0 && fails()) Wait::report(ex, round, shared.epoch, kDispatch, {});
    return;
  }
  if (threadIdx.x == 0) b.wait.begin(kDispatch);
  SlotChunk incoming = first_incoming<kLL ? kRecvLines : 1>(b);
  compute_now(&shared.sink, incoming.slot.source, incoming.slot.s, incoming.index);
  ok = ok && receive_counts(b);
  bool receives = ok && !shared.late;
  if (ok && !kernel.args.expert_major) fill_unused_slots(b);
  if constexpr (kLL) {
    if (receives) ok = recv_chunks<kRecvLines, kFormat, kSkipSelf>(b, incoming);
  } else if (receives && shared.ll_most_tokens) {
    ok = recv_ll_sources_too<kFormat, kMultiplies>(kernel, shared, b.wait.epoch);
  }
  if (ok) {
    if (receives && (!kLL || shared.simple_most_rows))
      ok = kLL ? recv_simple_sources_too<kFormat>(kernel, shared, b.wait.epoch)
               : recv_rows<kFormat, kMultiplies, true>(b);
    if (leader) write_offsets(b);
    if (kernel.args.expert_major && kernel.args.zero_gaps) zero_gaps(b);
    if (kVariant.trains && kernel.args.zero_tail) zero_tail(b);
  }
  if (leader && threadIdx.x == 0) {
    round->dispatch_epoch = b.wait.epoch;
    if (ok) round->phases = 2;
    round->T = tokens, round->K = kernel.args.K, round->ll_mask = shared.ll_mask;
    round->send_queue[kCombine] = round->recv_queue[kCombine] = round->ll_queue[kCombine] =
        round->done[kCombine] = round->started[kCombine] = round->receiving[kCombine] = 0;
    if (kernel.asked && ok) answer(b);
  }
  if (b.wait.failed(kDispatch, ok, {shared.mismatched, kernel.call.tag(), shared.other}))
    zero_outputs(ex);
}

template <WireFormat kFormat, typename Source, bool kTrains>
auto* variant_of(int64_t recv_lines, bool coarse, bool exclusive) {
  constexpr int kMost = kMaxLines<kFormat>;
  constexpr auto of = [](int lines, bool coarse, int blocks) {
    return Variant{.recv_lines = lines,
                   .coarse = coarse,
                   .format = kFormat,
                   .blocks_per_sm = blocks,
                   .trains = kTrains};
  };
  if (recv_lines == 0) return dispatch_kernel<Compiled<of(0, false, 2)>, Source>;
  if (recv_lines == 1)
    return exclusive ? dispatch_kernel<Compiled<of(1, false, 1)>, Source>
                     : dispatch_kernel<Compiled<of(1, false, 2)>, Source>;
  if (recv_lines == 2)
    return coarse ? dispatch_kernel<Compiled<of(2, true, 1)>, Source>
                  : dispatch_kernel<Compiled<of(2, false, 1)>, Source>;
  return coarse ? dispatch_kernel<Compiled<of(kMost, true, 1)>, Source>
                : dispatch_kernel<Compiled<of(kMost, false, 1)>, Source>;
}
// What a round of training asks of its kernel.
enum class Training { kNone, kRows, kProducts };

// Rounds of training have rows without scales.
auto* variant_for(int64_t recv_lines, bool coarse, bool exclusive, WireFormat format, DType dtype,
                  Training training) {
  return with_format(format, [&](auto of) {
    auto of_source = [&]<typename Source>(Source*) {
      if constexpr (!wire(of).has_scales()) {
        if (training == Training::kProducts) {
          constexpr Variant kProducts{.recv_lines = 0,
                                      .coarse = false,
                                      .format = of,
                                      .blocks_per_sm = 2,
                                      .trains = true,
                                      .multiplies = true};
          return dispatch_kernel<Compiled<kProducts>, Source>;
        }
        if (training == Training::kRows)
          return variant_of<of, Source, true>(recv_lines, coarse, exclusive);
      }
      return variant_of<of, Source, false>(recv_lines, coarse, exclusive);
    };
    if constexpr (wire(of).has_scales())
      if (wire(of).quantizes(dtype))
        return visit(dtype, [&](auto source) { return of_source(&source); });
    return of_source(static_cast<void*>(nullptr));
  });
}

cudaError_t load_dispatch() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3})
    for (WireFormat format : kWireFormats)
      for (int recv_lines : {0, 1, 2, kMaxLines<WireFormat::kAuto>})
        for (bool coarse : {false, true})
          for (bool exclusive : {false, true})
            for (Training training : {Training::kNone, Training::kRows, Training::kProducts})
              if (cudaError_t error =
                      load(variant_for(recv_lines, coarse, exclusive, format, dtype, training)))
                return error;
  return cudaSuccess;
}

}  // namespace

cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (thread_local bool loaded[Device::kMaxDevices] = {};
      !loaded[device.index % Device::kMaxDevices]) {
    for (auto* load_kernels : {load_dispatch, load_combine})
      if (cudaError_t error = load_kernels()) return error;
    loaded[device.index % Device::kMaxDevices] = true;
  }
  DispatchLaunch policy = dispatch_launch(
      exchange.plan, args, {device.multiprocessors, device.major, device.shared_bytes});
  auto& progress = *reinterpret_cast<const Progress*>(exchange.status + 1);
  DispatchKernel kernel{.ex = exchange,
                        .args = args,
                        .send_blocks = static_cast<int32_t>(policy.send_blocks),
                        .notify_blocks = static_cast<int32_t>(policy.notify_blocks),
                        .send_offset_entries = static_cast<int32_t>(policy.send_offset_entries),
                        .source_offset_entries = static_cast<int32_t>(policy.source_offset_entries),
                        .row_chunks = static_cast<int32_t>(policy.row_chunks),
                        .chunk_bytes = static_cast<int32_t>(policy.chunk_bytes),
                        .batch_tokens = static_cast<int32_t>(policy.batch_tokens),
                        .asked = progress.more_rounds,
                        .call = {}};
  kernel.call = kernel.call_without_rows(static_cast<uint32_t>(progress.tag));
  Training training = Training::kNone;
  if (args.to_caller) training = Training::kRows;
  if (args.outputs_ND) training = Training::kProducts;
  auto* variant = variant_for(policy.recv_lines, policy.coarse, policy.exclusive,
                              exchange.plan.payload_format, args.dtype, training);
  return launch(variant, policy.blocks, static_cast<int>(policy.threads), policy.shared_bytes,
                stream, kernel);
}

}  // namespace epmoe::cuda
