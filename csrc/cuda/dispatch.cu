// dispatch over NVLink, one kernel: some blocks send tokens, each once to each rank that needs it; one block counts, so
// that every rank learns all counts while rows are on the wire; all others, and senders once they are done, move what
// has arrived to its expert-major place. Flags go by slot, so that a row moves as soon as it is here: the sender says
// with each pair its ordinal among this source's pairs of that expert, and the counts say where (expert, source)
// starts.
#include "dispatch_send.cuh"
#include "exchange_launch.h"
#include "units.cuh"

namespace epmoe::cuda {
namespace {

// By the whole block: every source's counts, and in shared.count where each local expert's segment starts. False if a
// rank did not open the round; `differing` are those that brought another shape.
__device__ bool receive_counts(const DispatchKernel& kernel, const Wait& wait, DispatchShared& shared,
                               uint32_t& differing) {
  const ExchangePlan& plan = kernel.ex.plan;
  auto experts = static_cast<int32_t>(plan.num_local_experts), R = static_cast<int32_t>(plan.R);
  __syncthreads();
  for (int32_t i = threadIdx.x; i <= experts; i += kThreads) shared.count[i] = 0;
  if (threadIdx.x == 0) shared.most = 0, shared.ranks = 0;
  __syncthreads();
  bool arrived = true;
  int32_t columns = experts + kCountColumns;
  for (int32_t i = threadIdx.x; i < R * columns; i += kThreads) {
    int32_t r = i / columns, column = i % columns, value = 0;
    arrived = arrived && wait.for_word(kernel.counts(plan.rank, r) + column, r, value);
    if (column == 0) {
      value = min(max(value, 0), static_cast<int32_t>(plan.M));
      shared.rank_count[r] = value;
      atomicMax(&shared.most, value);
    } else if (column == 1) {
      if (value != kernel.shape()) atomicOr(&shared.ranks, 1u << r);
    } else {
      if (R * experts <= kMaxCachedCounts) shared.by_source[r * experts + column - kCountColumns] = value;
      atomicAdd(&shared.count[column - kCountColumns], value);
    }
  }
  if (!__syncthreads_and(arrived)) return false;
  differing = shared.ranks;
  if (threadIdx.x < 32) {
    auto alignment = static_cast<int32_t>(plan.alignment);
    int32_t start = 0;
    for (int32_t base = 0; base <= experts; base += 32) {
      int32_t i = base + threadIdx.x;
      int32_t length = i < experts ? (shared.count[i] + alignment - 1) / alignment * alignment : 0, end = length;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t below = __shfl_up_sync(kAllLanes, end, offset);
        if (threadIdx.x >= offset) end += below;
      }
      if (i <= experts) shared.count[i] = start + end - length;
      start += __shfl_sync(kAllLanes, end, 31);
    }
  }
  __syncthreads();
  return true;
}

// Pairs of a local expert from sources before r; from all with r = R.
__device__ int32_t pairs_before(const DispatchKernel& kernel, int64_t r, int32_t local, const DispatchShared& shared) {
  const ExchangePlan& plan = kernel.ex.plan;
  bool cached = plan.R * plan.num_local_experts <= kMaxCachedCounts;
  int32_t sum = 0;
  for (int64_t s = 0; s < r; ++s)
    sum += cached ? shared.by_source[s * plan.num_local_experts + local]
                  : static_cast<int32_t>(load_word(kernel.counts(plan.rank, s) + kCountColumns + local) >> 32);
  return sum;
}

// By one block: what dispatch returns beside the rows, and the totals.
__device__ void write_offsets(const DispatchKernel& kernel, const DispatchShared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  if (threadIdx.x < plan.R) in_scratch<int32_t>(ex, plan.counts)[threadIdx.x] = shared.rank_count[threadIdx.x];
  int32_t needed = shared.count[plan.num_local_experts];
  if (threadIdx.x == 0 && needed > plan.max_rows) ex.status->needed_rows = max(ex.status->needed_rows, int64_t{needed});
  for (int32_t i = threadIdx.x; i <= plan.num_local_experts; i += kThreads) {
    int64_t start = min(int64_t{shared.count[i]}, plan.max_rows);
    in_scratch<int32_t>(ex, plan.expert_offsets)[i] = static_cast<int32_t>(start);
    if (i == plan.num_local_experts) break;
    int64_t total = pairs_before(kernel, plan.R, i, shared), kept = min(plan.max_rows - start, total);
    in_scratch<int32_t>(ex, plan.tokens_per_expert)[i] = static_cast<int32_t>(kept);
    in_scratch<int64_t>(ex, plan.total_tokens_per_expert)[i] += kept;
    auto* dropped = reinterpret_cast<unsigned long long*>(in_scratch<int64_t>(ex, plan.counters) + kDroppedPairs);
    if (kept < total) atomicAdd(dropped, static_cast<unsigned long long>(total - kept));
  }
}

// Rows of the gaps that alignment leaves between segments become zeros; an expert a block.
__device__ void zero_gaps(const DispatchKernel& kernel, const DispatchShared& shared) {
  const ExchangePlan& plan = kernel.ex.plan;
  int64_t vectors = kernel.row_bytes() / 16, blocks = (kernel.args.D + kScaleBlock - 1) / kScaleBlock;
  auto* rows = in_window<uint4>(kernel.ex, plan.rank, plan.rows);
  auto* scales = in_window<float>(kernel.ex, plan.rank, plan.row_scales);
  for (int32_t i = blockIdx.x; i < plan.num_local_experts; i += gridDim.x) {
    int64_t begin = shared.count[i] + pairs_before(kernel, plan.R, i, shared);
    int64_t end = min(int64_t{shared.count[i + 1]}, plan.max_rows);
    for (int64_t v = begin * vectors + threadIdx.x; v < end * vectors; v += kThreads) rows[v] = make_uint4(0, 0, 0, 0);
    for (int64_t b = begin * blocks + threadIdx.x; plan.payload_fp8 && b < end * blocks; b += kThreads)
      scales[b] = 1.0f;
  }
}

// One piece of a received row to each of its expert-major places, as soon as it is here.
__device__ bool move_row(const DispatchKernel& kernel, const Wait& wait, int64_t r, int64_t s, int32_t piece,
                         int32_t pieces, const DispatchShared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int lane = threadIdx.x % 32;
  int64_t slot = r * plan.M + s;
  bool here = lane != 0 || wait.for_flag(in_window<uint32_t>(ex, plan.rank, plan.recv_flags) + slot, r);
  if (!__all_sync(kAllLanes, here)) return false;
  if (!kernel.args.expert_major) return true;
  int64_t vectors = kernel.row_bytes() / 16, begin = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
  auto* from = reinterpret_cast<const uint4*>(in_window<char>(ex, plan.rank, plan.recv_x) + slot * plan.x_stride_bytes);
  int64_t pair = slot * plan.K + lane;
  int32_t id = -1, ordinal = -1, row = -1;
  float weight = 0.0f;
  if (lane < kernel.args.K) {
    id = in_window<int32_t>(ex, plan.rank, plan.recv_ids)[pair];
    ordinal = in_window<int32_t>(ex, plan.rank, plan.recv_ordinals)[pair];
    weight = in_window<float>(ex, plan.rank, plan.recv_weights)[pair];
  }
  constexpr int kDepth = 4;  // loads in flight
  for (int64_t base = begin; base < end; base += kDepth * 32) {
    uint4 values[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (int64_t v = base + i * 32 + lane; v < end) values[i] = from[v];
    if (base == begin) {  // while the row's first loads are under way
      int32_t place = id >= 0 && id < plan.P ? shared.place[id] : -1, local = place & 0xffff;
      if (place >> 16 == plan.rank && ordinal >= 0) {
        row = shared.count[local] + pairs_before(kernel, r, local, shared) + ordinal;
        if (row >= min(int64_t{shared.count[local + 1]}, plan.max_rows)) row = -1;
      }
      if (piece == 0 && lane < kernel.args.K) {
        in_scratch<int32_t>(ex, plan.row_of_pair)[pair] = row;
        in_scratch<float>(ex, plan.pair_weights)[pair] = weight;
      }
    }
    for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left; left &= left - 1) {
      int64_t place = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
      auto* to = in_window<uint4>(ex, plan.rank, plan.rows) + place * vectors;
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (int64_t v = base + i * 32 + lane; v < end) to[v] = values[i];
    }
  }
  if (!plan.payload_fp8 || piece) return true;
  int64_t blocks = (kernel.args.D + kScaleBlock - 1) / kScaleBlock;
  auto* scales = in_window<float>(ex, plan.rank, plan.recv_scales) + slot * plan.scale_blocks;
  for (uint32_t left = __ballot_sync(kAllLanes, row >= 0); left; left &= left - 1) {
    int64_t place = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
    for (int64_t b = lane; b < blocks; b += 32)
      in_window<float>(ex, plan.rank, plan.row_scales)[place * blocks + b] = scales[b];
  }
  return true;
}

// layout="rank": unused slots carry the sentinel and 0 throughout.
__device__ void fill_unused_slots(const DispatchKernel& kernel, const DispatchShared& shared) {
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

__device__ void zero_outputs(const Exchange& ex) {
  for (int64_t i = threadIdx.x; i <= ex.plan.num_local_experts; i += kThreads) {
    in_scratch<int32_t>(ex, ex.plan.expert_offsets)[i] = 0;
    if (i < ex.plan.num_local_experts) in_scratch<int32_t>(ex, ex.plan.tokens_per_expert)[i] = 0;
  }
  if (threadIdx.x < ex.plan.R) in_scratch<int32_t>(ex, ex.plan.counts)[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(kThreads, 2) dispatch_kernel(const __grid_constant__ DispatchKernel kernel) {
  __shared__ DispatchShared shared;
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  for (int64_t p = threadIdx.x; p < plan.P; p += kThreads) {
    int32_t local = in_scratch<int32_t>(ex, plan.local_index)[p];
    shared.place[p] = in_scratch<int32_t>(ex, plan.owners)[p] << 16 | local;
    shared.count[p] = 0;
  }
  if (threadIdx.x < kMaxExchangeRanks) shared.rank_count[threadIdx.x] = 0;
  wait_for_predecessor();
  auto* round = in_scratch<RoundState>(ex, plan.state);
  Wait wait(ex, round, round->combine_epoch + 1);
  int64_t tokens = kernel.tokens();
  bool ok = !round->latched, leader = blockIdx.x == kernel.senders;
  uint32_t differing = 0;
  __syncthreads();
  if (ok) {
    if (blockIdx.x < kernel.senders) send_tokens(kernel, wait.epoch, tokens, shared);
    if (leader) send_counts(kernel, wait.epoch, tokens, shared);
    ok = receive_counts(kernel, wait, shared, differing);
  }
  if (ok && !differing) {
    Units units(plan.R * shared.most, kernel.row_bytes() / 16, kernel.senders + 1);
    ok = units.for_each(&round->ticket[kDispatch], [&](int64_t n, int32_t piece) {
      int64_t r = (n + plan.rank) % plan.R, s = n / plan.R;
      return s >= shared.rank_count[r] || move_row(kernel, wait, r, s, piece, units.pieces, shared);
    });
    if (leader) write_offsets(kernel, shared);
    if (kernel.args.expert_major && plan.alignment > 1) zero_gaps(kernel, shared);
    if (!kernel.args.expert_major) fill_unused_slots(kernel, shared);
  }
  if (leader) {
    count_health(kernel, tokens);
    if (differing) zero_outputs(ex);
    if (threadIdx.x == 0) {
      round->dispatch_epoch = wait.epoch;
      round->T = differing ? 0 : static_cast<int32_t>(tokens), round->D = static_cast<int32_t>(kernel.args.D);
      round->K = kernel.args.K, round->dtype = static_cast<int32_t>(kernel.args.dtype);
      round->ticket[kCombine] = round->done[kCombine] = 0;
      if (differing) *ex.status = {kMismatch, kDispatch, wait.epoch, differing, plan.rank, ex.status->needed_rows, {}};
    }
  }
  if (wait.failed(kDispatch, ok)) zero_outputs(ex);
}

}  // namespace

cudaError_t dispatch(const Exchange& exchange, const DispatchArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int64_t sms = std::min<int64_t>(exchange.plan.num_sms, device.multiprocessors);
  // A quarter of the blocks suffices to move rows at the speed of the wire; few tokens need few blocks.
  int64_t senders = std::clamp<int64_t>(args.T, 1, 2 * sms * 3 / 4);
  int64_t receivers = std::clamp<int64_t>(4 * args.T, 16, std::max<int64_t>(16, sms / 2));
  int64_t blocks = std::min(senders + 1 + receivers, 2 * sms);
  DispatchKernel kernel{exchange, args, static_cast<int32_t>(senders)};
  return launch(dispatch_kernel, blocks, kThreads, 0, stream, kernel);
}

}  // namespace epmoe::cuda
