// combine over NVLink, one kernel: some blocks finalize the rows of each source and send them straight into
// its window; all others, and senders once they are done, sum what comes back for this rank's tokens, in rank
// order, as it arrives.
#include "exchange_launch.h"
#include "fp8.cuh"
#include "units.cuh"

namespace epmoe::cuda {
namespace {

struct Kernel {
  Exchange ex;
  CombineArgs args;
  int32_t senders;  // blocks that send first
};

// kCount elements at once in fp32; fp8 rows come with the scale of their block.
template <typename T, int kCount>
__device__ __forceinline__ void add_vector(float (&sum)[kCount], const Vector<T, kCount>& row, float weight) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += weight * to_float(row.at[i]);
}

// The rows of one slot and their weights, those that count.
struct Pairs {
  int32_t count, rows[kMaxExchangeTopK];
  float weights[kMaxExchangeTopK];
};

// One lane's pair of a slot, fetched ahead.
struct Pair {
  int32_t row;
  float weight;
};

__device__ __forceinline__ Pair fetch_pair(const Kernel& kernel, int64_t slot) {
  const ExchangePlan& plan = kernel.ex.plan;
  int64_t lane = threadIdx.x % 32, pair = slot * plan.K + lane;
  if (lane >= plan.K || slot >= plan.R * plan.M) return {-1, 0.0f};
  return {in_scratch<int32_t>(kernel.ex, plan.row_of_pair)[pair],
          in_scratch<float>(kernel.ex, plan.pair_weights)[pair]};
}

__device__ __forceinline__ void keep_pairs(const Kernel& kernel, int32_t K, Pair pair, Pairs& pairs) {
  int lane = threadIdx.x % 32;
  bool counts = lane < K && pair.row >= 0 && pair.row < kernel.args.num_rows && pair.weight != 0.0f;
  uint32_t kept = __ballot_sync(kAllLanes, counts);
  if (counts) {
    int place = __popc(kept & ((1u << lane) - 1));
    pairs.rows[place] = pair.row;
    pairs.weights[place] = pair.weight;
  }
  if (lane == 0) pairs.count = __popc(kept);
}

// Named barriers between the warps that move data and the last one, which looks ahead and raises flags: its fence,
// which takes longer than anything else here, holds nobody up.
constexpr int kDataThreads = kThreads - 32;
enum Barrier { kReady = 1, kSent = 3 };  // two each, by turns

__device__ __forceinline__ void arrive(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void sync(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// One slot's weighted sum, or its partial row as it is, into the window of its source.
template <typename T, bool kFp8>
__device__ void send_slot(const Kernel& kernel, int64_t D, int64_t source, int64_t s, const Pairs& pairs) {
  constexpr int kCount = kPerVector<T>, kLanes = kScaleBlock / kCount;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int64_t place = plan.rank * plan.M + s, vectors = D / kCount;
  char* out = in_window<char>(ex, source, plan.combine_rows) + place * plan.combine_stride_bytes;
  auto* rows = static_cast<const char*>(kernel.args.rows);
#pragma unroll 2
  for (int64_t base = 0; base < vectors; base += kDataThreads) {
    int64_t v = base + threadIdx.x;
    float sum[kCount] = {};
    if (v < vectors && !kernel.args.expert_major) {
      int64_t row = source * plan.M + s;
      add_vector(sum, reinterpret_cast<const Vector<T, kCount>*>(rows + row * kernel.args.rows_stride_bytes)[v], 1.0f);
    } else if (v < vectors) {
      constexpr int kDepth = 4;  // loads in flight
      for (int begin = 0; begin < pairs.count; begin += kDepth) {
        Vector<T, kCount> values[kDepth];
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
          if (begin + i < pairs.count)
            values[i] = reinterpret_cast<const Vector<T, kCount>*>(rows + pairs.rows[begin + i] *
                                                                              kernel.args.rows_stride_bytes)[v];
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
          if (begin + i < pairs.count) add_vector(sum, values[i], pairs.weights[begin + i]);
      }
    }
    if constexpr (kFp8) {
      float scale = block_scale<kCount, kLanes>(sum);
      Vector<uint8_t, kCount> packed = to_fp8(sum, scale);
      if (v >= vectors) continue;
      reinterpret_cast<Vector<uint8_t, kCount>*>(out)[v] = packed;
      if (v % kLanes == 0)
        in_window<float>(ex, source, plan.combine_scales)[place * plan.scale_blocks + v / kLanes] = scale;
    } else if (v < vectors) {
      Vector<T, kCount> packed;
#pragma unroll
      for (int i = 0; i < kCount; ++i) packed.at[i] = from_float<T>(sum[i]);
      reinterpret_cast<Vector<T, kCount>*>(out)[v] = packed;
    }
  }
}

template <typename T, bool kFp8>
__device__ void send_slots(const Kernel& kernel, const RoundState& now, uint32_t epoch, const int32_t* count_R,
                           int64_t most, Pair next) {
  __shared__ Pairs pairs[2];
  const ExchangePlan& plan = kernel.ex.plan;
  bool control = threadIdx.x >= kDataThreads;
  uint32_t* to_raise = nullptr;
  int turn = 0;
  for (int64_t n = blockIdx.x; n < most * plan.R; n += kernel.senders) {
    int64_t source = (n + plan.rank) % plan.R, s = n / plan.R, after = n + kernel.senders;
    bool real = s < count_R[source];
    if (control) {
      Pair pair = next;
      next = fetch_pair(kernel, (after + plan.rank) % plan.R * plan.M + after / plan.R);
      if (!real) continue;
      keep_pairs(kernel, now.K, pair, pairs[turn]);
      arrive(kReady + turn);
      if (to_raise) {
        sync(kSent + (turn ^ 1));
        if (threadIdx.x == kDataThreads) raise_flag(to_raise, epoch);
      }
      to_raise = in_window<uint32_t>(kernel.ex, source, plan.combine_flags) + plan.rank * plan.M + s;
    } else if (real) {
      sync(kReady + turn);
      send_slot<T, kFp8>(kernel, now.D, source, s, pairs[turn]);
      arrive(kSent + turn);
    }
    turn ^= real;
  }
  if (!to_raise) return;
  sync(kSent + (turn ^ 1));
  if (threadIdx.x == kDataThreads) raise_flag(to_raise, epoch);
}

// One piece of a token's row: waits for the ranks that owe it, then adds theirs in rank order.
template <typename T, bool kFp8>
__device__ bool sum_token(const Kernel& kernel, const Wait& wait, int64_t t, int32_t piece, int32_t pieces,
                          uint32_t senders, int64_t tokens, int64_t D) {
  constexpr int kCount = kPerVector<T>;
  using Wire = Vector<std::conditional_t<kFp8, uint8_t, T>, kCount>;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int lane = threadIdx.x % 32;
  int32_t slot = t < tokens && lane < plan.R ? in_scratch<int32_t>(ex, plan.slots)[t * plan.R + lane] : -1;
  if (!(senders >> lane & 1u)) slot = -1;  // a rank that gave the round up has sent no rows
  auto* flags = in_window<uint32_t>(ex, plan.rank, plan.combine_flags) + lane * plan.M;
  bool here = slot < 0 || wait.for_flag(flags + slot, lane);
  if (!__all_sync(kAllLanes, here)) return false;
  uint32_t ranks = __ballot_sync(kAllLanes, slot >= 0);
  auto* window = in_window<char>(ex, plan.rank, plan.combine_rows);
  auto* scales = in_window<float>(ex, plan.rank, plan.combine_scales);
  auto* y = reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(kernel.args.y_TD) + t * D);
  int64_t vectors = D / kCount, begin = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
  for (int64_t base = begin; base < end; base += 32) {
    int64_t v = base + lane;
    float sum[kCount] = {};
    uint32_t left = ranks;
    while (left) {
      constexpr int kDepth = 4;  // loads in flight
      Wire values[kDepth];
      float scale[kDepth];
      uint32_t here = left;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (!left) break;
        int rank = __ffs(left) - 1;
        left &= left - 1;
        int64_t place = rank * plan.M + __shfl_sync(kAllLanes, slot, rank);
        if (v < end) values[i] = reinterpret_cast<const Wire*>(window + place * plan.combine_stride_bytes)[v];
        if (kFp8 && v < end) scale[i] = scales[place * plan.scale_blocks + v * kCount / kScaleBlock];
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i, here &= here - 1) {
        if (!here || v >= end) break;
        if constexpr (kFp8) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) sum[j] += scale[i] * from_fp8(values[i].at[j]);
        } else {
          add_vector(sum, values[i], 1.0f);
        }
      }
    }
    Vector<T, kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.at[i] = from_float<T>(sum[i]);
    if (v < end) y[v] = out;
  }
  return true;
}

// By the whole block: the ranks that send rows, as a mask; those that give the round up do not. False if one is
// missing.
__device__ bool receive_openings(const Wait& wait, uint32_t& senders) {
  const ExchangePlan& plan = wait.ex.plan;
  __shared__ uint32_t mask;
  if (threadIdx.x == 0) mask = 0;
  __syncthreads();
  bool arrived = true;
  if (threadIdx.x < plan.R) {
    int32_t sends = 0;
    auto* mail = in_window<Mail>(wait.ex, plan.rank, plan.combine_mail) + threadIdx.x;
    arrived = wait.for_word(reinterpret_cast<uint64_t*>(mail), threadIdx.x, sends);
    if (sends) atomicOr(&mask, 1u << threadIdx.x);
  }
  arrived = __syncthreads_and(arrived);
  senders = mask;
  return arrived;
}

template <typename T, bool kFp8>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(const __grid_constant__ Kernel kernel) {
  __shared__ int32_t count_R[kMaxExchangeRanks];
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  wait_for_predecessor();
  auto* round = in_scratch<RoundState>(ex, plan.state);
  const RoundState now = *round;
  Wait wait(ex, round, now.dispatch_epoch);
  bool ok = !now.latched, sends = kernel.args.rows && blockIdx.x < kernel.senders;
  if (blockIdx.x == 0 && threadIdx.x < plan.R && ok) {
    Mail* mail = in_window<Mail>(ex, threadIdx.x, plan.combine_mail) + plan.rank;
    store_word(reinterpret_cast<uint64_t*>(mail), wait.epoch, kernel.args.rows ? 1 : 0);
  }
  if (sends && ok) {
    Pair first = {};
    if (threadIdx.x >= kDataThreads)
      first = fetch_pair(kernel, (blockIdx.x + plan.rank) % plan.R * plan.M + blockIdx.x / plan.R);
    if (threadIdx.x < 32) {
      int32_t count = threadIdx.x < plan.R ? in_scratch<int32_t>(ex, plan.counts)[threadIdx.x] : 0;
      count_R[threadIdx.x] = min(max(count, 0), static_cast<int32_t>(plan.M));
    }
    __syncthreads();
    int32_t most = 0;
    for (int32_t r = 0; r < plan.R; ++r) most = max(most, count_R[r]);
    send_slots<T, kFp8>(kernel, now, wait.epoch, count_R, most, first);
  }
  uint32_t senders = 0;
  ok = ok && receive_openings(wait, senders);
  if (ok) {
    Units units(kernel.args.T, now.D / kPerVector<T>, kernel.senders);
    ok = units.for_each(&round->ticket[kCombine], [&](int64_t t, int32_t piece) {
      return sum_token<T, kFp8>(kernel, wait, t, piece, units.pieces, senders, now.T, now.D);
    });
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    round->combine_epoch = wait.epoch;
    round->ticket[kDispatch] = round->done[kDispatch] = 0;
  }
  if (!wait.failed(kCombine, ok)) return;
  auto* y = static_cast<T*>(kernel.args.y_TD);
  for (int64_t i = threadIdx.x; i < kernel.args.T * now.D; i += kThreads) y[i] = from_float<T>(0.0f);
}

}  // namespace

cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t sms = std::min<int64_t>(exchange.plan.num_sms, device.multiprocessors);
  // What this rank has received it knows on the device only: as much as it sends, on average.
  int64_t tokens = std::max<int64_t>(args.T, 1);
  int64_t senders = std::min(tokens * exchange.plan.R, 2 * sms * 3 / 4), receivers = std::min(4 * tokens, sms / 2);
  Kernel kernel{exchange, args, static_cast<int32_t>(senders)};
  int64_t blocks = std::min(senders + receivers, 2 * sms);
  return visit(dtype, [&](auto type) {
    using T = decltype(type);
    auto* chosen = exchange.plan.combine_fp8 ? combine_kernel<T, true> : combine_kernel<T, false>;
    return launch(chosen, blocks, kThreads, 0, stream, kernel);
  });
}

}  // namespace epmoe::cuda
