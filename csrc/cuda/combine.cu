// combine over NVLink, one kernel: some blocks finalize the rows of each source and send them straight into
// its window; all others, and senders once they are done, sum what comes back for this rank's tokens, in rank
// order, as it arrives.
#include "exchange_launch.h"
#include "mail.cuh"

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

__device__ __forceinline__ float from_fp8(uint8_t bits) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

// The rows of one slot and their weights, by warp 0 into shared memory.
struct Pairs {
  int32_t count, rows[kMaxExchangeTopK];
  float weights[kMaxExchangeTopK];
};

__device__ void read_pairs(const Kernel& kernel, int32_t K, int64_t slot, Pairs& pairs) {
  const ExchangePlan& plan = kernel.ex.plan;
  int lane = threadIdx.x;
  int64_t pair = slot * plan.K + lane;
  int32_t row = lane < K ? in_scratch<int32_t>(kernel.ex, plan.row_of_pair)[pair] : -1;
  float weight = lane < K ? in_scratch<float>(kernel.ex, plan.pair_weights)[pair] : 0.0f;
  bool counts = row >= 0 && row < kernel.args.num_rows && weight != 0.0f;
  uint32_t kept = __ballot_sync(kAllLanes, counts);
  if (counts) {
    int place = __popc(kept & ((1u << lane) - 1));
    pairs.rows[place] = row;
    pairs.weights[place] = weight;
  }
  if (lane == 0) pairs.count = __popc(kept);
}

// One slot's weighted sum, or its partial row as it is, into the window of its source.
template <typename T>
__device__ void send_slot(const Kernel& kernel, int64_t D, int64_t source, int64_t s, const Pairs& pairs) {
  constexpr int kCount = kPerVector<T>, kLanes = kScaleBlock / kCount;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int64_t place = plan.rank * plan.M + s, vectors = D / kCount;
  char* out = in_window<char>(ex, source, plan.combine_rows) + place * plan.combine_stride_bytes;
  auto* rows = static_cast<const char*>(kernel.args.rows);
  for (int64_t base = 0; base < vectors; base += kThreads) {
    int64_t v = base + threadIdx.x;
    float sum[kCount] = {};
    if (v < vectors && !kernel.args.expert_major) {
      int64_t row = source * plan.M + s;
      add_vector(sum,
                 reinterpret_cast<const Vector<T, kCount>*>(rows + row * kernel.args.rows_stride_bytes)[v],
                 1.0f);
    } else if (v < vectors) {
      constexpr int kDepth = 4;  // loads in flight
      for (int begin = 0; begin < pairs.count; begin += kDepth) {
        Vector<T, kCount> values[kDepth];
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
          if (begin + i < pairs.count)
            values[i] = reinterpret_cast<const Vector<T, kCount>*>(
                rows + pairs.rows[begin + i] * kernel.args.rows_stride_bytes)[v];
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
          if (begin + i < pairs.count) add_vector(sum, values[i], pairs.weights[begin + i]);
      }
    }
    if (!plan.combine_fp8) {
      Vector<T, kCount> packed;
#pragma unroll
      for (int i = 0; i < kCount; ++i) packed.at[i] = from_float<T>(sum[i]);
      if (v < vectors) reinterpret_cast<Vector<T, kCount>*>(out)[v] = packed;
      continue;
    }
    float scale = block_scale<kCount, kLanes>(sum);
    Vector<uint8_t, kCount> packed;
#pragma unroll
    for (int i = 0; i < kCount; ++i) packed.at[i] = to_fp8(sum[i] / scale);
    if (v >= vectors) continue;
    reinterpret_cast<Vector<uint8_t, kCount>*>(out)[v] = packed;
    if (v % kLanes == 0)
      in_window<float>(ex, source, plan.combine_scales)[place * plan.scale_blocks + v / kLanes] = scale;
  }
}

template <typename T>
__device__ void send_slots(const Kernel& kernel, const RoundState& round, uint32_t epoch) {
  __shared__ Pairs pairs;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  auto* counts = in_scratch<int32_t>(ex, plan.counts);
  int64_t most = 0;
  for (int64_t r = 0; r < plan.R; ++r) most = max(most, int64_t{counts[r]});
  for (int64_t n = blockIdx.x; n < most * plan.R; n += kernel.senders) {
    int64_t source = (n + plan.rank) % plan.R, s = n / plan.R;
    if (s >= counts[source]) continue;
    __syncthreads();
    if (kernel.args.expert_major && threadIdx.x < 32) read_pairs(kernel, round.K, source * plan.M + s, pairs);
    __syncthreads();
    send_slot<T>(kernel, round.D, source, s, pairs);
    __syncthreads();
    if (threadIdx.x == 0) {
      fence_system();
      store_relaxed(in_window<uint32_t>(ex, source, plan.combine_flags) + plan.rank * plan.M + s, epoch);
    }
  }
}

// One piece of a token's row: waits for the ranks that owe it, then adds theirs in rank order.
template <typename T>
__device__ bool sum_token(const Kernel& kernel, const Wait& wait, int64_t t, int32_t piece, int32_t pieces,
                          uint32_t senders, int64_t tokens, int64_t D) {
  constexpr int kCount = kPerVector<T>;
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
      constexpr int kDepth = 4;
      Vector<T, kCount> values[kDepth];
      Vector<uint8_t, kCount> packed[kDepth];
      float weights[kDepth];
      int taken = 0;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (!left) break;
        int rank = __ffs(left) - 1;
        left &= left - 1;
        taken = i + 1;
        int64_t place = rank * plan.M + __shfl_sync(kAllLanes, slot, rank);
        if (v >= end) continue;
        const char* row = window + place * plan.combine_stride_bytes;
        if (plan.combine_fp8) {
          packed[i] = reinterpret_cast<const Vector<uint8_t, kCount>*>(row)[v];
          weights[i] = scales[place * plan.scale_blocks + v * kCount / kScaleBlock];
        } else {
          values[i] = reinterpret_cast<const Vector<T, kCount>*>(row)[v];
        }
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i >= taken || v >= end) continue;
        if (plan.combine_fp8) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) sum[j] += weights[i] * from_fp8(packed[i].at[j]);
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

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(const __grid_constant__ Kernel kernel) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  wait_for_predecessor();
  auto* round = in_scratch<RoundState>(ex, plan.state);
  Wait wait(ex, round->dispatch_epoch);
  const RoundState now = *round;
  bool arrived = !now.latched;
  if (arrived) {
    if (blockIdx.x == 0) {
      Mail mail = {wait.epoch, kernel.args.rows ? 1 : 0, now.D, now.K, now.dtype, {}};
      send_mail(ex, plan.combine_mail, mail, nullptr);
    }
    if (kernel.args.rows && blockIdx.x < kernel.senders) send_slots<T>(kernel, now, wait.epoch);
    arrived = wait_for_mails(wait, plan.combine_mail);
  }
  if (arrived) {
    uint32_t senders = 0;
    for (int32_t r = 0; r < plan.R; ++r)
      senders |= in_window<Mail>(ex, plan.rank, plan.combine_mail)[r].count ? 1u << r : 0u;
    Units units(kernel.args.T, now.D / kPerVector<T>);
    units.for_each(round, [&](int64_t t, int32_t piece) {
      return sum_token<T>(kernel, wait, t, piece, units.pieces, senders, now.T, now.D);
    });
  }
  if (!is_last_block(round)) return;
  bool failed = finish(wait, kCombine) || now.latched;
  auto* y = static_cast<T*>(kernel.args.y_TD);
  for (int64_t i = threadIdx.x; failed && i < kernel.args.T * now.D; i += kThreads)
    y[i] = from_float<T>(0.0f);
  if (threadIdx.x == 0) round->combine_epoch = wait.epoch;
}

}  // namespace

cudaError_t combine(const Exchange& exchange, const CombineArgs& args, DType dtype, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t sms = std::min<int64_t>(exchange.plan.num_sms, device.multiprocessors);
  // What this rank has received it knows on the device only: as much as it sends, on average.
  int64_t tokens = std::max<int64_t>(args.T, 1);
  int64_t senders = std::min(tokens * exchange.plan.R, 2 * sms * 3 / 4),
          receivers = std::min(4 * tokens, sms / 2);
  Kernel kernel{exchange, args, static_cast<int32_t>(senders)};
  int64_t blocks = std::min(senders + receivers, 2 * sms);
  return visit(dtype, [&](auto type) {
    return launch(combine_kernel<decltype(type)>, blocks, kThreads, 0, stream, kernel);
  });
}

}  // namespace epmoe::cuda
