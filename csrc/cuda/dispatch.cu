// dispatch over NVLink, one kernel: some blocks send tokens, each once to each rank that needs it; one block counts, so
// that every rank learns all counts while rows are on the wire; all others, and senders once they are done, move what
// has arrived to its expert-major place. A sender says with each pair its ordinal among this source's pairs of that
// expert, and the counts say where (expert, source) starts.
//  - Many tokens: a sender that knows all counts sends rows to their first place, says which that is, and they are only
//    copied to the others. A row's flag says that it is here.
//  - Few tokens: rows leave at once, and blocks of their own, the tellers, send what is said of pairs. A row's lines
//    say by themselves that they are here. With few ranks a large part of them are this rank's own, which then stay
//    where the caller has them until they are moved.
#include "dispatch_few_receive.cuh"
#include "dispatch_places.cuh"
#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"
#include "exchange_launch.h"
#include "launch_kernel.cuh"

namespace epmoe::cuda {
namespace {

// Tables that no kernel writes: they can be read before the one before this has ended.
__device__ void read_tables(DispatchBlock& b) {
  DispatchShared& shared = b.shared;
  if (threadIdx.x < kMaxExchangeRanks) {
    shared.rank_count[threadIdx.x] = shared.experts[threadIdx.x] = 0;
    if (threadIdx.x < b.plan.R) shared.sentinel[threadIdx.x] = in_scratch<int32_t>(b.ex, b.plan.sentinels)[threadIdx.x];
  }
  __syncthreads();
  for (int32_t p = threadIdx.x; p < b.plan.P; p += block_threads()) {
    int32_t local = in_scratch<int32_t>(b.ex, b.plan.local_index)[p];
    int32_t owner = in_scratch<int32_t>(b.ex, b.plan.owners)[p];
    b.place[p] = owner << 16 | local;
    b.count[p] = 0;
    atomicMax(&shared.experts[owner], local + 1);
  }
  __syncthreads();
}

__device__ void zero_outputs(const Exchange& ex) {
  for (int64_t i = threadIdx.x; i <= ex.plan.num_local_experts; i += block_threads()) {
    in_scratch<int32_t>(ex, ex.plan.expert_offsets)[i] = 0;
    if (i < ex.plan.num_local_experts) in_scratch<int32_t>(ex, ex.plan.tokens_per_expert)[i] = 0;
  }
  if (threadIdx.x < ex.plan.R)
    in_scratch<int32_t>(ex, ex.plan.counts)[threadIdx.x] = in_scratch<int32_t>(ex, ex.plan.slots_used)[threadIdx.x] = 0;
}

// By the blocks that receive: rows that come with flags, to their places.
template <bool kFp8>
__device__ __forceinline__ bool move_rows(DispatchBlock& b) {
  constexpr int kLongest = 256;  // what a warp has in flight at once, or little more
  Units units(static_cast<int32_t>(b.plan.R) * b.shared.most, static_cast<int32_t>(b.kernel.row_bytes() / 16),
              b.kernel.senders + b.kernel.tellers, kLongest);
  return units.for_each(&b.wait.round->ticket[kDispatch], [&](int32_t n, int32_t piece) {
    auto [r, s] = slot_of(b.plan, n);
    bool flagged = !b.shared.few_rows[r].tokens;
    return !flagged || s >= b.shared.rank_count[r] || move_row<kFp8>(b, r, s, piece, units.pieces);
  });
}
// What a kernel meets only where other ranks bring few tokens and this one many, or the reverse.
template <bool kFp8>
__device__ __noinline__ bool move_rows_too(DispatchBlock b) {
  return move_rows<kFp8>(b);
}
template <bool kFp8>
__device__ __noinline__ bool move_parts_too(DispatchBlock b) {
  return move_parts<kLines<kFp8>, kFp8, false>(b, first_arriving<kLines<kFp8>>(b));
}

// kMoved: lines of a row that a lane moves at a time where rows leave as those of few tokens, 0 where they leave with
// flags. kWide: it also sends so many at a time, else one, and takes this rank's own rows from where the caller has
// them, unless they become fp8. Source: of what fp8 rows are made, void for rows as they are. kTogether: blocks that
// may share a multiprocessor.
template <int kMoved, bool kWide, typename Source, int kTogether = blocks_together(kMoved)>
__global__ void __launch_bounds__(threads_of(kMoved), kTogether)
    dispatch_kernel(const __grid_constant__ DispatchKernel kernel) {
  constexpr bool kFp8 = !std::is_void_v<Source>, kFew = kMoved > 0, kStays = kWide && !kFp8;
  constexpr int kGroups = kMoved == 1 ? 1 : kFew ? 2 : 4;  // of many tokens waiting costs more, of few longer code
  __shared__ DispatchShared shared;
  extern __shared__ __align__(128) char dynamic[];
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  auto* round = in_scratch<RoundState>(ex, plan.state);
  auto* place = reinterpret_cast<int32_t*>(dynamic + kPieces * kernel.piece_bytes);
  int32_t *count = place + plan.P, *base = count + plan.P + 1;
  DispatchBlock b{kernel,  ex,    plan,  kernel.args, Wait(ex, round, 0), shared,
                  dynamic, place, count, base,        base + kernel.bases};
  fetch_arguments(kernel, &shared.sink);
  read_tables(b);
  constexpr int kSent = kWide ? kMoved : 1;
  Leaving<kSent, Source> leaving(b, kFew ? first_sent(kernel.senders) : 0, parts_of(kernel.row_bytes(), kSent));
  compute_now(&shared.sink, leaving.t, leaving.part.first);
  wait_for_predecessor();
  if (kernel.args.send && kernel.args.receive) let_successor_start();
  bool sends = blockIdx.x < kernel.senders, leader = blockIdx.x == kernel.senders, ok = true;
  // Asked for at once: the state, by one thread, since all of a grid that ask for the same line keep one another
  // waiting, and what is sent first.
  uint32_t last_epoch = 0;
  int32_t latched = 0;
  if (threadIdx.x == 0) last_epoch = round->combine_epoch, latched = round->latched;
  int64_t wanted = kernel.wanted_tokens();
  if (kFew && sends) leaving.read(b);
  int32_t tokens = kernel.tokens(wanted);
  if (threadIdx.x == 0) shared.epoch = last_epoch + 1, shared.latched = latched;
  if (leader && kernel.args.send) send_counts<kGroups>(b, tokens);
  if (sends) {
    ok = kFew ? send_parts<kStays>(b, tokens, leaving) : send_rows<Source, kGroups>(b, tokens, &round->sent[kDispatch]);
  } else if (kFew && static_cast<int32_t>(blockIdx.x) < kernel.senders + kernel.tellers) {
    send_pairs<kGroups>(b, tokens);
  }
  if (kernel.args.send && leader && threadIdx.x == 0 && wanted != tokens)
    ++in_scratch<int64_t>(ex, plan.counters)[kClampedNumTokens];
  if (!kernel.args.receive) return;
  SlotPart arriving = first_arriving<kFew ? kMoved : 1>(b);
  compute_now(&shared.sink, arriving.slot.source, arriving.slot.s, arriving.index);
  ok = ok && receive_counts(b);
  uint32_t differing = ok ? shared.differing : 0;
  if constexpr (kFew)
    ok = ok && move_parts<kMoved, kFp8, kStays>(b, arriving);
  else if (ok && shared.most_few)
    ok = move_parts_too<kFp8>(b);
  if (ok && !differing) {
    if (!kFew || shared.most) ok = kFew ? move_rows_too<kFp8>(b) : move_rows<kFp8>(b);
    if (leader) write_offsets(b);
    if (kernel.args.expert_major && plan.alignment > 1) zero_gaps(b);
    if (!kernel.args.expert_major) fill_unused_slots(b);
  }
  if (leader) {
    if (differing) zero_outputs(ex);
    if (threadIdx.x == 0) {
      round->dispatch_epoch = b.wait.epoch;
      round->T = differing ? 0 : tokens, round->K = kernel.args.K, round->few = shared.few;
      round->sent[kCombine] = round->ticket[kCombine] = round->few_ticket[kCombine] = round->done[kCombine] = 0;
      if (differing)
        *ex.status = {kMismatch, kDispatch, b.wait.epoch, differing, plan.rank, ex.status->needed_rows, {}};
    }
  }
  if (b.wait.failed(kDispatch, ok)) zero_outputs(ex);
}

// apart: whether each block has a multiprocessor to itself.
template <typename Source>
auto* kernel_of(int moved, bool wide, bool apart) {
  constexpr int kMost = kLines<!std::is_void_v<Source>>;
  if (moved == 0) return dispatch_kernel<0, false, Source>;
  if (moved == 1) return apart ? dispatch_kernel<1, false, Source, 1> : dispatch_kernel<1, false, Source>;
  if (moved == 2) return wide ? dispatch_kernel<2, true, Source> : dispatch_kernel<2, false, Source>;
  return wide ? dispatch_kernel<kMost, true, Source> : dispatch_kernel<kMost, false, Source>;
}
auto* kernel_for(int moved, bool wide, bool apart, bool fp8, DType dtype) {
  if (!fp8) return kernel_of<void>(moved, wide, apart);
  return visit(dtype, [&](auto source) { return kernel_of<decltype(source)>(moved, wide, apart); });
}

cudaError_t load_dispatch() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (bool fp8 : {false, true})
      for (int moved : {0, 1, 2, kLines<false>})
        for (bool wide : {false, true})
          for (bool apart : {false, true})
            if (cudaError_t error = load(kernel_for(moved, wide, apart, fp8, dtype))) return error;
  return cudaSuccess;
}

// Lines of an arrived row that a lane moves at a time, 0 where rows leave with flags. As measured: of few tokens and in
// halves one, else as many as it can, or two where warps would idle otherwise, or a few of them go twice.
int lines_to_move(const DispatchKernel& kernel, int64_t T, int64_t sms, bool whole) {
  constexpr int64_t kUneven = 128;  // tokens up to which that shows
  if (!kernel.sends_few()) return 0;
  if (T <= kFewest || sms < 2 || !whole) return 1;
  if (kernel.ex.plan.payload_fp8) return kLines<true>;
  int64_t warps = sms * kWarps * 2 / 3;  // that receive, more or less
  auto units = [&](int lines) { return kernel.ex.plan.R * T * parts_of(kernel.row_bytes(), lines); };
  bool idle = units(2) <= warps, uneven = units(kLines<false>) > warps && T <= kUneven;
  return idle || uneven ? 2 : kLines<false>;
}

// Of so many blocks, those that send first where rows leave as those of few tokens do; as measured. Among few ranks by
// what a token's row costs those who receive, who read R rows, unset slots and write K places.
int64_t share_sending(const DispatchKernel& kernel, int64_t blocks, bool whole) {
  const ExchangePlan& plan = kernel.ex.plan;
  int64_t T = kernel.args.T;
  int64_t sending = plan.payload_fp8 ? 8 : 3;  // fp8 is made by those who send, for this rank as well
  if (plan.R <= kFewRanks) return blocks * sending / (sending + 2 * plan.R + kernel.args.K);
  if (whole && T > 64 && T <= 256) return blocks / 4;  // of these sizes, those who receive are wanted more
  return plan.payload_fp8 ? blocks * 3 / 8 : blocks * 3 / 10;
}

}  // namespace

cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream) {
  constexpr int64_t kMaxBases = 8192, kMaxFirstRows = 4096;
  const ExchangePlan& plan = exchange.plan;
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (thread_local bool loaded[Device::kMost] = {}; !loaded[device.index % Device::kMost]) {
    for (auto* load_kernels : {load_dispatch, load_combine})
      if (cudaError_t error = load_kernels()) return error;
    loaded[device.index % Device::kMost] = true;
  }
  int64_t sms = std::min<int64_t>(plan.num_sms, device.multiprocessors);
  int64_t bases = plan.R * plan.most_local_experts, first_rows = (plan.R + 1) * plan.num_local_experts;
  DispatchKernel kernel{.ex = exchange,
                        .args = args,
                        .senders = 0,
                        .tellers = 0,
                        .bases = static_cast<int32_t>(bases <= kMaxBases ? bases : 0),
                        .first_rows = static_cast<int32_t>(first_rows <= kMaxFirstRows ? first_rows : 0),
                        .row_pieces = 0,
                        .piece_bytes = 0,
                        .tokens_a_release = 1};
  int64_t T = std::max<int64_t>(args.T, 1);
  bool whole = args.send && args.receive;
  int moved = lines_to_move(kernel, T, sms, whole);
  int64_t together = blocks_together(moved), threads = threads_of(moved), warps = threads / 32;
  int64_t most = whole ? sms * together : device.blocks_of_half(sms, args.receive);
  int64_t senders = T, receivers = most, share = most * 3 / 4;
  bool wide = false;
  if (moved) {
    share = std::max<int64_t>(share_sending(kernel, most, whole), 1);
    int64_t units = T * parts_of(kernel.row_bytes(), 1);
    wide = moved > 1 && plan.R <= kFewRanks && units * 2 > share * warps * 3;  // else most warps have one to send
    senders = ceil_div(wide ? T * parts_of(kernel.row_bytes(), moved) : units, warps);
    receivers = ceil_div(plan.R * T * parts_of(kernel.row_bytes(), moved), warps);
  }
  senders = plan.dispatch_senders ? std::min(plan.dispatch_senders, most - 1) : std::min(senders, share);
  senders = std::max<int64_t>(senders, 1);
  if (!args.send) senders = 0;
  if (!args.receive) receivers = 0;
  if (senders && !moved) {
    constexpr int64_t kStep = 512;  // a multiple of 128 elements
    int64_t x_bytes = args.D * itemsize(args.dtype), pieces = ceil_div(x_bytes, kMaxPieceBytes);
    kernel.piece_bytes = static_cast<int32_t>(ceil_div(ceil_div(x_bytes, pieces), kStep) * kStep);
    kernel.row_pieces = static_cast<int32_t>(ceil_div(x_bytes, kernel.piece_bytes));
    // Releases of a multiprocessor wait for each other: it shows where few of them have to do all, or rows are short.
    int64_t most_at_once = device.is_scarce(sms) ? kMostUnflagged : plan.payload_fp8 ? 2 : 1;
    kernel.tokens_a_release = static_cast<int32_t>(std::clamp<int64_t>(T / senders / 6, 1, most_at_once));
  }
  kernel.senders = static_cast<int32_t>(senders);
  // After the senders the block that counts, and after it those that send pairs; without room, it does that too.
  int64_t groups = moved ? ceil_div(args.T, warps) : 0;
  int64_t tellers = args.send ? std::clamp<int64_t>(most - senders, 1, groups + 1) : 0;
  int64_t blocks = std::max(std::min(senders + tellers + receivers, most), senders + std::max<int64_t>(tellers, 1));
  kernel.tellers = static_cast<int32_t>(tellers);
  bool apart = whole && blocks <= sms;  // there is a multiprocessor for each, with all its registers
  int64_t shared_bytes =
      kPieces * kernel.piece_bytes + (2 * plan.P + 1 + kernel.bases + kernel.first_rows) * sizeof(int32_t);
  auto* function = kernel_for(moved, wide, apart, plan.payload_fp8, args.dtype);
  return launch(function, blocks, threads, shared_bytes, stream, kernel);
}

}  // namespace epmoe::cuda
