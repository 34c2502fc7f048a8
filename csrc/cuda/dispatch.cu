// dispatch over NVLink, one kernel: some blocks send tokens, each once to each rank that needs it; one block
// counts, so that every rank learns all counts while rows are on the wire; all others, and senders once they
// are done, move what has arrived to its expert-major place. Flags go by slot, so that a row moves as soon as
// it is here.
//
// Slots and places need no atomics' order: a sender counts the tokens before its own, and sends with each
// pair its ordinal among this source's pairs of that expert; the receiver adds the start of (expert, source),
// which the counts give.
#include "exchange_launch.h"
#include "mail.cuh"
#include "scoring.h"

namespace epmoe::cuda {
namespace {

constexpr int kMaxExperts = 4096;

struct Kernel {
  Exchange ex;
  DispatchArgs args;
  int32_t senders;  // blocks that send; the next one counts
};

struct Shared {
  int32_t expert_count[kMaxExperts + 1];  // of the tokens before; later, the start of each expert's segment
  int32_t rank_count[kMaxExchangeRanks];
  int32_t slot[kMaxExchangeRanks];
  int32_t ids[kMaxExchangeTopK], ordinals[kMaxExchangeTopK];
  float weights[kMaxExchangeTopK];
  int32_t most;
};

__device__ __forceinline__ int64_t num_tokens(const DispatchArgs& args) {
  int64_t wanted = args.num_tokens ? *args.num_tokens : args.num_rows;
  return min(max(wanted, int64_t{0}), args.T);
}

__device__ __forceinline__ int64_t load_id(const DispatchArgs& args, int64_t t, int32_t k) {
  int64_t index = t * args.ids_stride + k;
  return args.wide_ids ? static_cast<const int64_t*>(args.ids_TK)[index]
                       : static_cast<const int32_t*>(args.ids_TK)[index];
}

// The physical expert of a pair, -1 where there is nothing to compute, and its weight.
__device__ __forceinline__ int32_t read_pair(const Exchange& ex, const DispatchArgs& args, int64_t t,
                                             int32_t k, float& weight) {
  int64_t id = load_id(args, t, k);
  weight = load_float(args.weights_TK, args.weights_dtype, t * args.weights_stride + k);
  if (id < 0 || id >= ex.plan.E || weight == 0.0f || !is_finite(weight)) {
    weight = 0.0f;
    return -1;
  }
  if (ex.plan.copies == 1) return static_cast<int32_t>(id);
  int32_t copies = in_scratch<int32_t>(ex, ex.plan.num_copies)[id];
  return in_scratch<int32_t>(ex, ex.plan.copies_table)[id * ex.plan.copies + (t + ex.plan.rank) % copies];
}

// By the whole block: adds tokens [begin, end) to the counts by expert and by rank.
__device__ void count_tokens(const Kernel& kernel, int64_t begin, int64_t end, Shared& shared) {
  const Exchange& ex = kernel.ex;
  auto* owners = in_scratch<int32_t>(ex, ex.plan.owners);
  for (int64_t base = begin; base < end; base += kThreads) {
    int64_t t = base + threadIdx.x;
    uint32_t ranks = 0;
    for (int32_t k = 0; t < end && k < kernel.args.K; ++k) {
      float weight;
      int32_t id = read_pair(ex, kernel.args, t, k, weight);
      if (id < 0) continue;
      atomicAdd(&shared.expert_count[id], 1);
      ranks |= 1u << owners[id];
    }
    for (int32_t r = 0; r < ex.plan.R; ++r) {
      uint32_t votes = __ballot_sync(kAllLanes, ranks >> r & 1u);
      if (votes && threadIdx.x % 32 == 0) atomicAdd(&shared.rank_count[r], __popc(votes));
    }
  }
}

// What is wrong with the input, into the health counters.
__device__ void count_health(const Kernel& kernel, int64_t tokens) {
  const DispatchArgs& args = kernel.args;
  auto* counters =
      reinterpret_cast<unsigned long long*>(in_scratch<int64_t>(kernel.ex, kernel.ex.plan.counters));
  for (int64_t t = threadIdx.x; t < tokens; t += kThreads) {
    int32_t out_of_range = 0, duplicates = 0, nonfinite = 0;
    for (int32_t k = 0; k < args.K; ++k) {
      int64_t id = load_id(args, t, k);
      nonfinite += !is_finite(load_float(args.weights_TK, args.weights_dtype, t * args.weights_stride + k));
      bool valid = id >= 0 && id < kernel.ex.plan.E;
      out_of_range += !valid && id != -1 && id != kernel.ex.plan.E;
      bool again = false;
      for (int32_t before = 0; valid && before < k; ++before) again |= load_id(args, t, before) == id;
      duplicates += again;
    }
    if (out_of_range) atomicAdd(&counters[kOutOfRangeIds], out_of_range);
    if (duplicates) atomicAdd(&counters[kDuplicateIds], duplicates);
    if (nonfinite) atomicAdd(&counters[kNonfiniteWeights], nonfinite);
  }
  int64_t wanted = args.num_tokens ? *args.num_tokens : args.num_rows;
  if (threadIdx.x == 0 && wanted != tokens) atomicAdd(&counters[kClampedNumTokens], 1ull);
}

__device__ void clear_counts(const Exchange& ex, Shared& shared) {
  for (int64_t p = threadIdx.x; p < ex.plan.P; p += kThreads) shared.expert_count[p] = 0;
  if (threadIdx.x < kMaxExchangeRanks) shared.rank_count[threadIdx.x] = 0;
  __syncthreads();
}

// One block: counts everything and tells every rank, which opens the round.
__device__ void send_counts(const Kernel& kernel, uint32_t epoch, int64_t tokens, Shared& shared) {
  const Exchange& ex = kernel.ex;
  clear_counts(ex, shared);
  count_tokens(kernel, 0, tokens, shared);
  __syncthreads();
  auto* owners = in_scratch<int32_t>(ex, ex.plan.owners);
  auto* local_index = in_scratch<int32_t>(ex, ex.plan.local_index);
  for (int64_t p = threadIdx.x; p < ex.plan.P; p += kThreads) {
    auto* row = in_window<int32_t>(ex, owners[p], ex.plan.recv_expert_counts) +
                ex.plan.rank * ex.plan.most_local_experts;
    row[local_index[p]] = shared.expert_count[p];
  }
  __syncthreads();
  Mail mail = {
      epoch, 0, static_cast<int32_t>(kernel.args.D), kernel.args.K, static_cast<int32_t>(kernel.args.dtype),
      {}};
  send_mail(ex, ex.plan.dispatch_mail, mail, shared.rank_count);
  auto* sent = in_scratch<int64_t>(ex, ex.plan.rows_sent);
  if (threadIdx.x < ex.plan.R) sent[threadIdx.x] += shared.rank_count[threadIdx.x];
  count_health(kernel, tokens);
}

// One row as fp8 with a scale for each 128 elements: kLanes threads share a block of them.
template <typename T>
__device__ void send_row_fp8(const Kernel& kernel, int64_t t, uint32_t ranks, const Shared& shared) {
  constexpr int kCount = kPerVector<T>, kLanes = kScaleBlock / kCount;
  const Exchange& ex = kernel.ex;
  auto* row = reinterpret_cast<const Vector<T, kCount>*>(static_cast<const char*>(kernel.args.x_TD) +
                                                         t * kernel.args.x_stride_bytes);
  int64_t vectors = kernel.args.D / kCount;
  for (int64_t base = 0; base < vectors; base += kThreads) {
    int64_t v = base + threadIdx.x;
    Vector<T, kCount> x = {};
    if (v < vectors) x = row[v];
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(x.at[i]);
    float scale = block_scale<kCount, kLanes>(values);
    Vector<uint8_t, kCount> q;
#pragma unroll
    for (int i = 0; i < kCount; ++i) q.at[i] = to_fp8(values[i] / scale);
    for (uint32_t left = ranks; left && v < vectors; left &= left - 1) {
      int64_t rank = __ffs(left) - 1, place = ex.plan.rank * ex.plan.M + shared.slot[rank];
      char* out = in_window<char>(ex, rank, ex.plan.recv_x) + place * ex.plan.x_stride_bytes;
      reinterpret_cast<Vector<uint8_t, kCount>*>(out)[v] = q;
      if (v % kLanes == 0)
        in_window<float>(ex, rank, ex.plan.recv_scales)[place * ex.plan.scale_blocks + v / kLanes] = scale;
    }
  }
}

__device__ void send_row(const Kernel& kernel, int64_t t, uint32_t ranks, const Shared& shared) {
  const Exchange& ex = kernel.ex;
  if (ex.plan.payload_fp8) {
    if (kernel.args.dtype == DType::kFloat32) return send_row_fp8<float>(kernel, t, ranks, shared);
    if (kernel.args.dtype == DType::kFloat16) return send_row_fp8<__half>(kernel, t, ranks, shared);
    return send_row_fp8<__nv_bfloat16>(kernel, t, ranks, shared);
  }
  auto* row = reinterpret_cast<const uint4*>(static_cast<const char*>(kernel.args.x_TD) +
                                             t * kernel.args.x_stride_bytes);
  int64_t vectors = kernel.args.D * itemsize(kernel.args.dtype) / 16;
#pragma unroll 2
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    uint4 value = row[v];
    for (uint32_t left = ranks; left; left &= left - 1) {
      int64_t rank = __ffs(left) - 1, place = ex.plan.rank * ex.plan.M + shared.slot[rank];
      reinterpret_cast<uint4*>(in_window<char>(ex, rank, ex.plan.recv_x) +
                               place * ex.plan.x_stride_bytes)[v] = value;
    }
  }
}

// By warp 0: the token's pairs, ordinals and slots. Returns the ranks it goes to.
__device__ uint32_t place_token(const Kernel& kernel, int64_t t, Shared& shared) {
  const Exchange& ex = kernel.ex;
  int lane = threadIdx.x;
  float weight = 0.0f;
  int32_t id = lane < kernel.args.K ? read_pair(ex, kernel.args, t, lane, weight) : -1;
  uint32_t same = __match_any_sync(kAllLanes, id), before = (1u << lane) - 1;
  uint32_t rank_bit = id < 0 ? 0 : 1u << in_scratch<int32_t>(ex, ex.plan.owners)[id];
  uint32_t ranks = __reduce_or_sync(kAllLanes, rank_bit);
  shared.ids[lane] = id;
  shared.weights[lane] = weight;
  shared.ordinals[lane] = id < 0 ? -1 : shared.expert_count[id] + __popc(same & before);
  shared.slot[lane] = ranks >> lane & 1u ? shared.rank_count[lane] : -1;
  if (lane < ex.plan.R) in_scratch<int32_t>(ex, ex.plan.slots)[t * ex.plan.R + lane] = shared.slot[lane];
  return ranks;
}

__device__ void send_tokens(const Kernel& kernel, uint32_t epoch, int64_t tokens, Shared& shared) {
  const Exchange& ex = kernel.ex;
  __shared__ uint32_t ranks_of_token;
  int64_t counted = 0;
  clear_counts(ex, shared);
  for (int64_t t = blockIdx.x; t < tokens; t += kernel.senders) {
    count_tokens(kernel, counted, t, shared);
    counted = t;
    __syncthreads();
    if (threadIdx.x < 32) {
      uint32_t ranks = place_token(kernel, t, shared);
      if (threadIdx.x == 0) ranks_of_token = ranks;
    }
    __syncthreads();
    uint32_t ranks = ranks_of_token;
    send_row(kernel, t, ranks, shared);
    for (int32_t i = threadIdx.x; i < ex.plan.R * kernel.args.K; i += kThreads) {
      int32_t rank = i / kernel.args.K, k = i % kernel.args.K;
      if (shared.slot[rank] < 0) continue;
      int64_t place = (ex.plan.rank * ex.plan.M + shared.slot[rank]) * ex.plan.K + k;
      int32_t sentinel = in_scratch<int32_t>(ex, ex.plan.sentinels)[rank];
      in_window<int32_t>(ex, rank, ex.plan.recv_ids)[place] = shared.ids[k] < 0 ? sentinel : shared.ids[k];
      in_window<int32_t>(ex, rank, ex.plan.recv_ordinals)[place] = shared.ordinals[k];
      in_window<float>(ex, rank, ex.plan.recv_weights)[place] = shared.weights[k];
    }
    __syncthreads();
    if (threadIdx.x < ex.plan.R && shared.slot[threadIdx.x] >= 0) {
      fence_system();
      int64_t place = ex.plan.rank * ex.plan.M + shared.slot[threadIdx.x];
      store_relaxed(in_window<uint32_t>(ex, threadIdx.x, ex.plan.recv_flags) + place, epoch);
    }
  }
}

__device__ __forceinline__ int32_t total_of_expert(const Exchange& ex, int64_t local) {
  auto* counts = in_window<int32_t>(ex, ex.plan.rank, ex.plan.recv_expert_counts) + local;
  int32_t total = 0;
  for (int64_t r = 0; r < ex.plan.R; ++r) total += counts[r * ex.plan.most_local_experts];
  return total;
}

__device__ __forceinline__ int64_t row_bytes_of(const Kernel& kernel) {
  return kernel.ex.plan.payload_fp8 ? kernel.args.D : kernel.args.D * itemsize(kernel.args.dtype);
}

// By the whole block: counts by source and, in shared.expert_count, where each expert's segment starts.
__device__ void read_counts(const Exchange& ex, Shared& shared) {
  auto* mail = in_window<Mail>(ex, ex.plan.rank, ex.plan.dispatch_mail);
  int32_t experts = static_cast<int32_t>(ex.plan.num_local_experts);
  if (threadIdx.x < 32) {
    int32_t count =
        threadIdx.x < ex.plan.R ? min(max(mail[threadIdx.x].count, 0), static_cast<int32_t>(ex.plan.M)) : 0;
    shared.rank_count[threadIdx.x] = count;
    int32_t most = __reduce_max_sync(kAllLanes, count);
    if (threadIdx.x == 0) shared.most = most;
  }
  for (int32_t i = threadIdx.x; i < experts; i += kThreads) shared.expert_count[i] = total_of_expert(ex, i);
  __syncthreads();
  if (threadIdx.x < 32) {
    auto alignment = static_cast<int32_t>(ex.plan.alignment);
    int32_t start = 0;
    for (int32_t base = 0; base <= experts; base += 32) {
      int32_t i = base + threadIdx.x;
      int32_t length = i < experts ? (shared.expert_count[i] + alignment - 1) / alignment * alignment : 0;
      int32_t end = length;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t below = __shfl_up_sync(kAllLanes, end, offset);
        if (threadIdx.x >= offset) end += below;
      }
      if (i <= experts) shared.expert_count[i] = start + end - length;
      start += __shfl_sync(kAllLanes, end, 31);
    }
  }
  __syncthreads();
}

// One block: what dispatch returns beside the rows, gap rows, and the totals.
__device__ void write_offsets(const Kernel& kernel, const Shared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  if (threadIdx.x < plan.R)
    in_scratch<int32_t>(ex, plan.counts)[threadIdx.x] = shared.rank_count[threadIdx.x];
  int32_t needed = shared.expert_count[plan.num_local_experts];
  if (threadIdx.x == 0 && needed > plan.max_rows)
    ex.status->needed_rows = max(ex.status->needed_rows, int64_t{needed});
  for (int32_t i = threadIdx.x; i <= plan.num_local_experts; i += kThreads) {
    int64_t start = min(static_cast<int64_t>(shared.expert_count[i]), plan.max_rows);
    in_scratch<int32_t>(ex, plan.expert_offsets)[i] = static_cast<int32_t>(start);
    if (i == plan.num_local_experts) break;
    int64_t total = total_of_expert(ex, i);
    int64_t kept = min(max(plan.max_rows - shared.expert_count[i], int64_t{0}), total);
    in_scratch<int32_t>(ex, plan.tokens_per_expert)[i] = static_cast<int32_t>(kept);
    in_scratch<int64_t>(ex, plan.total_tokens_per_expert)[i] += kept;
    auto* dropped =
        reinterpret_cast<unsigned long long*>(in_scratch<int64_t>(ex, plan.counters) + kDroppedPairs);
    if (kept < total) atomicAdd(dropped, static_cast<unsigned long long>(total - kept));
  }
}

// Rows of the gaps that alignment leaves between segments become zeros; an expert a block.
__device__ void zero_gaps(const Kernel& kernel, const Shared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int64_t vectors = row_bytes_of(kernel) / 16, blocks = (kernel.args.D + kScaleBlock - 1) / kScaleBlock;
  for (int64_t i = blockIdx.x; i < plan.num_local_experts; i += gridDim.x) {
    int64_t begin = shared.expert_count[i] + total_of_expert(ex, i);
    int64_t end = min(static_cast<int64_t>(shared.expert_count[i + 1]), plan.max_rows);
    auto* rows = reinterpret_cast<uint4*>(in_scratch<char>(ex, plan.rows));
    for (int64_t v = begin * vectors + threadIdx.x; v < end * vectors; v += kThreads)
      rows[v] = make_uint4(0, 0, 0, 0);
    auto* scales = in_scratch<float>(ex, plan.row_scales);
    for (int64_t b = begin * blocks + threadIdx.x; plan.payload_fp8 && b < end * blocks; b += kThreads)
      scales[b] = 1.0f;
  }
}

// One piece of a received row to each of its expert-major places, as soon as it is here.
__device__ bool move_row(const Kernel& kernel, const Wait& wait, int64_t r, int64_t s, int32_t piece,
                         int32_t pieces, const Shared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int lane = threadIdx.x % 32;
  int64_t slot = r * plan.M + s;
  bool here = lane != 0 || wait.for_flag(in_window<uint32_t>(ex, plan.rank, plan.recv_flags) + slot, r);
  if (!__all_sync(kAllLanes, here)) return false;
  if (!kernel.args.expert_major) return true;
  int32_t row = -1;
  if (lane < kernel.args.K) {
    int64_t pair = slot * plan.K + lane;
    int32_t id = in_window<int32_t>(ex, plan.rank, plan.recv_ids)[pair];
    int32_t ordinal = in_window<int32_t>(ex, plan.rank, plan.recv_ordinals)[pair];
    int32_t local = id >= 0 && id < plan.P ? in_scratch<int32_t>(ex, plan.expert_map)[id] : -1;
    if (local >= 0 && local < plan.num_local_experts && ordinal >= 0) {
      auto* counts = in_window<int32_t>(ex, plan.rank, plan.recv_expert_counts) + local;
      row = shared.expert_count[local] + ordinal;
      for (int64_t before = 0; before < r; ++before) row += counts[before * plan.most_local_experts];
      if (row >= min(static_cast<int64_t>(shared.expert_count[local + 1]), plan.max_rows)) row = -1;
    }
    if (piece == 0) {
      in_scratch<int32_t>(ex, plan.row_of_pair)[pair] = row;
      in_scratch<float>(ex, plan.pair_weights)[pair] =
          in_window<float>(ex, plan.rank, plan.recv_weights)[pair];
    }
  }
  uint32_t pairs = __ballot_sync(kAllLanes, row >= 0);
  int64_t row_bytes = row_bytes_of(kernel);
  int64_t vectors = row_bytes / 16, begin = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
  auto* from = reinterpret_cast<const uint4*>(in_window<char>(ex, plan.rank, plan.recv_x) +
                                              slot * plan.x_stride_bytes);
  constexpr int kDepth = 8;  // loads in flight
  for (int64_t base = begin; base < end; base += kDepth * 32) {
    uint4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (int64_t v = base + i * 32 + lane; v < end) values[i] = from[v];
    for (uint32_t left = pairs; left; left &= left - 1) {
      int64_t place = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      auto* to = reinterpret_cast<uint4*>(in_scratch<char>(ex, plan.rows) + place * row_bytes);
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (int64_t v = base + i * 32 + lane; v < end) to[v] = values[i];
    }
  }
  if (plan.payload_fp8 && piece == 0) {
    int64_t blocks = (kernel.args.D + kScaleBlock - 1) / kScaleBlock;
    auto* scales = in_window<float>(ex, plan.rank, plan.recv_scales) + slot * plan.scale_blocks;
    for (uint32_t left = pairs; left; left &= left - 1) {
      int64_t place = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      for (int64_t b = lane; b < blocks; b += 32)
        in_scratch<float>(ex, plan.row_scales)[place * blocks + b] = scales[b];
    }
  }
  return true;
}

// Ranks that brought another K, D or dtype, as a mask: the same in every thread.
__device__ uint32_t differing_ranks(const Kernel& kernel) {
  auto* mail = in_window<Mail>(kernel.ex, kernel.ex.plan.rank, kernel.ex.plan.dispatch_mail);
  uint32_t mask = 0;
  for (int32_t r = 0; r < kernel.ex.plan.R; ++r) {
    bool same = mail[r].K == kernel.args.K && mail[r].D == kernel.args.D &&
                mail[r].dtype == static_cast<int32_t>(kernel.args.dtype);
    mask |= same ? 0u : 1u << r;
  }
  return mask;
}

// layout="rank": unused slots carry the sentinel and 0 throughout.
__device__ void fill_unused_slots(const Kernel& kernel, const Shared& shared) {
  const ExchangePlan& plan = kernel.ex.plan;
  int32_t sentinel = in_scratch<int32_t>(kernel.ex, plan.sentinels)[plan.rank];
  for (int64_t r = 0; r < plan.R; ++r) {
    int64_t begin = (r * plan.M + shared.rank_count[r]) * plan.K, end = (r + 1) * plan.M * plan.K;
    for (int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end;
         i += int64_t{gridDim.x} * kThreads) {
      in_window<int32_t>(kernel.ex, plan.rank, plan.recv_ids)[i] = sentinel;
      in_window<float>(kernel.ex, plan.rank, plan.recv_weights)[i] = 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2) dispatch_kernel(const __grid_constant__ Kernel kernel) {
  __shared__ Shared shared;
  const Exchange& ex = kernel.ex;
  wait_for_predecessor();
  auto* round = in_scratch<RoundState>(ex, ex.plan.state);
  Wait wait(ex, round->dispatch_epoch + 1);
  int64_t tokens = num_tokens(kernel.args);
  bool arrived = !round->latched;
  if (arrived) {
    if (blockIdx.x < kernel.senders) {
      send_tokens(kernel, wait.epoch, tokens, shared);
    } else if (blockIdx.x == kernel.senders) {
      send_counts(kernel, wait.epoch, tokens, shared);
    }
    arrived = wait_for_mails(wait, ex.plan.dispatch_mail);
  }
  uint32_t differing = arrived ? differing_ranks(kernel) : 0;
  if (arrived && !differing) {
    read_counts(ex, shared);
    if (blockIdx.x == kernel.senders) write_offsets(kernel, shared);
    if (kernel.args.expert_major && ex.plan.alignment > 1) zero_gaps(kernel, shared);
    int64_t R = ex.plan.R;
    Units units(R * shared.most, ex.plan.x_stride_bytes / 16);
    units.for_each(round, [&](int64_t n, int32_t piece) {
      int64_t r = (n + ex.plan.rank) % R, s = n / R;
      return s >= shared.rank_count[r] || move_row(kernel, wait, r, s, piece, units.pieces, shared);
    });
    if (!kernel.args.expert_major) fill_unused_slots(kernel, shared);
  }
  if (!is_last_block(round)) return;
  bool failed = finish(wait, kDispatch);
  if (differing && threadIdx.x == 0) {
    *ex.status = {kMismatch, kDispatch, wait.epoch, differing, ex.plan.rank, ex.status->needed_rows, {}};
  }
  if (failed || differing) {
    for (int64_t i = threadIdx.x; i <= ex.plan.num_local_experts; i += kThreads) {
      in_scratch<int32_t>(ex, ex.plan.expert_offsets)[i] = 0;
      if (i < ex.plan.num_local_experts) in_scratch<int32_t>(ex, ex.plan.tokens_per_expert)[i] = 0;
    }
    if (threadIdx.x < ex.plan.R) in_scratch<int32_t>(ex, ex.plan.counts)[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    round->dispatch_epoch = wait.epoch;
    round->T = static_cast<int32_t>(tokens), round->D = static_cast<int32_t>(kernel.args.D);
    round->K = kernel.args.K, round->dtype = static_cast<int32_t>(kernel.args.dtype);
  }
}

}  // namespace

cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t sms = std::min<int64_t>(exchange.plan.num_sms, device.multiprocessors);
  // A quarter of the blocks suffices to move rows at the speed of the wire; few tokens need few blocks.
  int64_t senders = std::clamp<int64_t>(args.T, 1, 2 * sms * 3 / 4),
          receivers = std::clamp<int64_t>(4 * args.T, 16, sms / 2);
  Kernel kernel{exchange, args, static_cast<int32_t>(senders)};
  int64_t blocks = std::min(senders + 1 + receivers, 2 * sms);
  return launch(dispatch_kernel, blocks, kThreads, 0, stream, kernel);
}

}  // namespace epmoe::cuda
