// combine over NVLink, one kernel: some blocks finalize the rows of each source and send them straight into its window;
// all others, and senders once they are done, sum what comes back for this rank's tokens, in rank order, as it arrives.
// On few multiprocessors, rows that need no sums (layout="rank") are forwarded by one warp of each block instead.
#include <bit>
#include <cstddef>

#include "combine_few.cuh"
#include "combine_forward.cuh"
#include "combine_rows.cuh"
#include "exchange_launch.h"
#include "launch_kernel.cuh"

namespace epmoe::cuda {
namespace {

static_assert(kForwarded * kForwardedBytes <= kStepsBytes);  // they share what a block has

// By the whole block: the ranks that send rows, as a mask; those that give the round up do not. False if one is
// missing.
__device__ __forceinline__ bool receive_openings(const CombineBlock& b, uint32_t& senders) {
  const ExchangePlan& plan = b.plan;
  __shared__ uint32_t mask;
  if (threadIdx.x == 0) mask = 0;
  __syncthreads();
  bool arrived = true;
  if (threadIdx.x < plan.R) {
    int32_t sends[1] = {};
    auto* mail = in_window<Mail>(b.ex, plan.rank, plan.combine_mail) + threadIdx.x;
    arrived = b.wait.for_words(reinterpret_cast<const uint64_t*>(mail), 0, threadIdx.x, 0, 1, sends);
    if (sends[0]) atomicOr(&mask, 1u << threadIdx.x);
  }
  arrived = __syncthreads_and(arrived);
  senders = mask;
  return arrived;
}

// What a kernel meets only where other ranks bring few tokens and this one many, or the reverse.
template <typename T, bool kFp8>
__device__ __noinline__ void send_slots_too(CombineBlock b, char* shared, int32_t* ticket) {
  Owed owed(b, first_slot(b), 1);
  owed.read(b);
  send_slots<T, kFp8>(b, owed, shared, ticket);
}
template <typename T, bool kFp8>
__device__ __noinline__ void send_parts_too(CombineBlock b, int32_t* ticket) {
  Owed owed(b, first_part(b), parts_of(wire_bytes<T, kFp8>(b), 1));
  owed.read(b);
  send_parts<1, false, T, kFp8>(b, owed, ticket);
}

// kSent: lines of a row that a lane sends at a time where the rows of this rank's tokens come back as those of few do,
// 0 where they come with flags. kWide: it also sums so many at a time, else one, and has more pairs in flight.
template <int kSent, bool kWide, typename T, bool kFp8>
__global__ void __launch_bounds__(threads_of(kSent), blocks_together(kSent))
    combine_kernel(const __grid_constant__ CombineKernel kernel) {
  constexpr bool kFew = kSent > 0;
  __shared__ RoundState now;
  __shared__ int32_t count_R[kMaxExchangeRanks], most[2];
  __shared__ int64_t sink;
  extern __shared__ __align__(128) char steps[];
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  const CombineArgs& args = kernel.args;
  fetch_arguments(kernel, &sink);
  auto* round = in_scratch<RoundState>(ex, plan.state);
  CombineBlock b{kernel, ex, plan, args, Wait(ex, round, 0), now, count_R, most};
  bool sends = static_cast<int32_t>(blockIdx.x) < kernel.senders && args.rows;
  bool forwards = !kFew && !kFp8 && kernel.forwards;
  Owed owed(b, kFew ? first_part(b) : first_slot(b), kFew ? parts_of(wire_bytes<T, kFp8>(b), kSent) : 1);
  compute_now(&sink, owed.index, owed.slot.source, owed.slot.s, owed.pair_at);
  wait_for_predecessor();
  if (args.send && args.receive) let_successor_start();
  if (sends && !forwards) owed.read(b);  // all that can be without knowing the rest is asked for at once
  if (threadIdx.x < 32) {                // one warp: all of a grid that ask for the same line keep one another waiting
    constexpr int kStateWords = offsetof(RoundState, sent) / 4, kFewWord = offsetof(RoundState, few) / 4;
    uint32_t word = threadIdx.x < kStateWords ? reinterpret_cast<const uint32_t*>(round)[threadIdx.x] : 0;
    int32_t count = threadIdx.x < plan.R ? in_scratch<int32_t>(ex, plan.slots_used)[threadIdx.x] : 0;
    if (threadIdx.x < kStateWords) reinterpret_cast<uint32_t*>(&now)[threadIdx.x] = word;
    uint32_t few = __shfl_sync(kAllLanes, word, kFewWord);
    bool is_few = few >> threadIdx.x & 1u;
    count = max(min(count, static_cast<int32_t>(is_few ? plan.few_tokens : plan.M)), 0);
    count_R[threadIdx.x] = count;
    most[0] = __reduce_max_sync(kAllLanes, is_few ? 0 : count);
    most[1] = __reduce_max_sync(kAllLanes, is_few ? count : 0);
  }
  __syncthreads();
  b.wait.epoch = now.dispatch_epoch;
  bool ok = !now.latched;
  // By the last warp, which has the least to send, of the block that starts first.
  if (int32_t rank = block_threads() - 1 - threadIdx.x; blockIdx.x == 0 && rank < plan.R && ok && args.send) {
    Mail* mail = in_window<Mail>(ex, rank, plan.combine_mail) + plan.rank;
    store_word(reinterpret_cast<uint64_t*>(mail), b.wait.epoch, args.rows ? 1 : 0);
  }
  if (sends && ok) {
    uint32_t all = plan.R == 32 ? kAllLanes : (1u << plan.R) - 1;
    if constexpr (kFew) {
      send_parts<kSent, kWide, T, kFp8>(b, owed, &round->few_ticket[kCombine]);
      if (now.few != all) send_slots_too<T, kFp8>(b, steps, &round->sent[kCombine]);
    } else {
      if (!forwards) send_slots<T, kFp8>(b, owed, steps, &round->sent[kCombine]);
      if (now.few) send_parts_too<T, kFp8>(b, &round->few_ticket[kCombine]);
    }
  }
  uint32_t senders = 0;
  if (args.receive) ok = ok && receive_openings(b, senders);  // by all warps, so before one of them forwards
  if constexpr (!kFew && !kFp8)
    if (forwards && sends && ok && threadIdx.x < 32) forward_rows<T>(b, steps, &round->sent[kCombine]);
  if (!args.receive) return;
  if constexpr (kFew) {
    ok = ok && sum_parts<kWide ? kSent : 1, T, kFp8>(b, senders, &round->ticket[kCombine]);
  } else if (ok) {
    constexpr int kLongest = 384;  // seven turns or so: what arrives last is not kept waiting
    Units units(args.T, static_cast<int32_t>(args.D / kPerVector<T>), forwards ? 0 : kernel.senders, kLongest);
    ok = units.for_each(&round->ticket[kCombine], [&](int32_t t, int32_t piece) {
      return sum_token<T, kFp8>(b, t, piece, units.pieces, senders);
    });
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    round->combine_epoch = b.wait.epoch;
    round->sent[kDispatch] = round->ticket[kDispatch] = round->few_ticket[kDispatch] = round->done[kDispatch] =
        round->told = 0;
  }
  if (!b.wait.failed(kCombine, ok)) return;
  auto* y = static_cast<T*>(args.y_TD);
  for (int64_t i = threadIdx.x; i < args.T * args.D; i += block_threads()) y[i] = from_float<T>(0.0f);
}

template <typename T, bool kFp8>
auto* kernel_of(int sent, bool wide) {
  return sent == 0   ? combine_kernel<0, false, T, kFp8>
         : sent == 1 ? combine_kernel<1, false, T, kFp8>
         : wide      ? combine_kernel<kSumLines, !kFp8, T, kFp8>
                     : combine_kernel<kSumLines, false, T, kFp8>;
}
auto* kernel_for(int sent, bool wide, bool fp8, DType dtype) {
  return visit(dtype, [&](auto type) {
    using T = decltype(type);
    return fp8 ? kernel_of<T, true>(sent, wide) : kernel_of<T, false>(sent, wide);
  });
}

// Lines of a row that a lane sends at a time, 0 where rows come with flags. As measured: of few rows and in halves one.
int lines_to_send(const ExchangePlan& plan, const CombineArgs& args, int64_t row_bytes, bool whole) {
  constexpr int64_t kFewParts = 960;  // of rows, of one line a lane
  if (args.T > plan.few_tokens) return 0;
  int64_t parts = args.T * parts_of(row_bytes, 1);
  bool one = plan.R <= kFewRanks ? parts <= kFewParts : args.T <= (plan.combine_fp8 ? 128 : 64);
  return one || !whole ? 1 : kSumLines;
}

// Of so many blocks, those that send first where rows come back as those of few tokens do; as measured. Among few ranks
// by what a token's row costs those who send, who read K rows and write R sums, and those who receive, who read and
// unset these and write one row.
int64_t share_sending(const ExchangePlan& plan, const CombineArgs& args, int64_t blocks, int lines, bool whole) {
  int64_t T = args.T;
  bool fp8 = plan.combine_fp8;
  if (lines > 1 && plan.R <= kFewRanks) {
    int64_t sending = 10 * ((args.expert_major ? plan.K : plan.R) + plan.R);
    int64_t receiving = (fp8 ? 5 : 9) * (2 * plan.R + 1);
    return blocks * sending / (sending + receiving);
  }
  if (lines > 1) return blocks * (fp8 ? 70 : T <= 128 ? 42 : 50) / 100;
  if (!whole) return blocks * (fp8 ? 56 : T <= 128 ? 50 : 62) / 100;
  if (fp8) return blocks * (T <= 96 ? 56 : 68) / 100;
  return blocks * (T <= 16 ? 50 : 40) / 100;
}

}  // namespace

cudaError_t load_combine() {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (bool fp8 : {false, true})
      for (int sent : {0, 1, kSumLines})
        for (bool wide : {false, true})
          if (cudaError_t error = load(kernel_for(sent, wide, fp8, dtype))) return error;
  return cudaSuccess;
}

cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype, cudaStream_t stream) {
  const ExchangePlan& plan = exchange.plan;
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t sms = std::min<int64_t>(plan.num_sms, device.multiprocessors);
  // What this rank has received it knows on the device only: as much as it sends, on average.
  int64_t T = std::max<int64_t>(args.T, 1), slots = T * plan.R;
  int64_t row_bytes = args.D * (plan.combine_fp8 ? 1 : itemsize(dtype));
  bool whole = args.send && args.receive;
  int sent = lines_to_send(plan, args, row_bytes, whole);
  bool forwards =
      args.rows && !args.expert_major && !plan.combine_fp8 && !sent && device.major >= 9 && device.is_scarce(sms);
  bool wide = sent > 1 && plan.R <= kFewRanks && !plan.combine_fp8;  // fp8 of 256 tokens loses what 1024 gain
  int together = blocks_together(sent), threads = threads_of(sent), warps = threads / 32;
  int64_t most = whole ? sms * together : device.blocks_of_half(sms, args.receive);
  int64_t team = 4, senders = slots, receivers = most, share = std::max<int64_t>(most * 3 / 4, 1);
  if (sent) {
    senders = ceil_div(slots * parts_of(row_bytes, sent), warps);
    receivers = ceil_div(T * parts_of(row_bytes, wide ? sent : 1), warps);
    share = share_sending(plan, args, most, sent, whole);
  } else if (forwards) {
    senders = share = most;
  } else {  // as many warps a row as there are for all at once, or four, or fewer if there is more to do
    while (team < warps && slots * team * 2 <= share * warps) team *= 2;
    int64_t rows = ceil_div(slots * team, share * warps);  // of a team
    if (slots <= most) share = most * 5 / 6;
    if (rows > 1) share = most * 5 / 8;
    bool sums = args.expert_major && plan.K > 2 * plan.R;  // of so many rows that those take longer than the wire
    if (rows > 64) share = most * 11 / 12;
    if (rows > 64 || sums) team = 2;
    if (plan.combine_fp8 && slots > share * warps * 4) team = 1;
  }
  if (plan.combine_team)
    team = std::min<int64_t>(std::bit_floor(static_cast<uint64_t>(plan.combine_team)), warps & -warps);
  while (plan.combine_fp8 && warps / team * scale_bytes(args.D) > kStepsBytes / 2) team *= 2;
  senders = plan.combine_senders ? std::min(plan.combine_senders, most) : std::min(senders, share);
  senders = std::max<int64_t>(senders, 1);
  if (!args.send) senders = 0;
  if (!args.receive) receivers = 0;
  CombineKernel kernel{exchange, args, static_cast<int32_t>(senders), static_cast<int32_t>(team), forwards};
  int64_t blocks = std::clamp<int64_t>(senders + receivers, 1, most);
  auto* function = kernel_for(sent, wide, plan.combine_fp8, dtype);
  return launch(function, blocks, threads, senders ? kStepsBytes : 0, stream, kernel);
}

}  // namespace epmoe::cuda
