// permute on the GPU: a stable counting sort of the pairs by local expert, then each row is read once and written to
// its places.
//
// up to 256 slots: one kernel. Every block counts all pairs for itself, while its share of x is on the way; a warp
// ranks
//                  each pair of its slot among those before it; the block copies.
// above:           three. `count` histograms a chunk of pairs a block; `place` adds up the chunks before its own, and
//                  gives each pair its row; `expand` copies.
//
// Within an expert rows follow the order of the pairs; nothing depends on the order in which atomics arrive.
#include "args.h"
#include "copy_rows.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "segments.cuh"

namespace epmoe::cuda {
namespace {

constexpr int kOneKernelSlots = 256, kThreads = 512, kMaxChunks = 128, kExpandThreads = 256;

// Of many experts fewer warps' counters fit in shared memory.
int sort_threads(int32_t experts) { return experts > 1024 ? 128 : kThreads; }

// Pairs a block sorts in the three-kernel path: one step of each warp, or more where that makes too many blocks.
int32_t chunk_pairs(int64_t pairs) {
  return static_cast<int32_t>(std::max<int64_t>(1, ceil_div(pairs, int64_t{kThreads} * kMaxChunks)) * kThreads);
}

__device__ __forceinline__ int64_t id_of_pair(const PermuteArgs& args, int64_t slot, int32_t k) {
  int64_t at = slot * args.ids_stride + k;
  return args.wide_ids ? static_cast<const int64_t*>(args.ids_SK)[at] : static_cast<const int32_t*>(args.ids_SK)[at];
}

// Or -1. The loads do not wait for one another's conditions, so that several pairs' overlap.
__device__ __forceinline__ int32_t local_expert(const PermuteArgs& args, const Slots& slots, uint32_t pair) {
  uint32_t slot = pair / args.K;
  int64_t id = id_of_pair(args, slot, pair - slot * args.K);
  int32_t local = id >= 0 && id < args.P ? args.expert_map_P[id] : -1;
  return local < args.num_local_experts && slots.is_real(slot) ? max(local, -1) : -1;
}

__device__ __forceinline__ int32_t row_at(const PermuteArgs& args, int32_t begin, uint32_t rank) {
  uint32_t row = begin + rank;
  return row < args.max_rows ? static_cast<int32_t>(row) : -1;
}

__device__ __forceinline__ void publish_row(const PermuteArgs& args, int64_t slot, int32_t k, int32_t row) {
#if defined(EPMOE_MUTATE_SORT_GUARD)
  // As in the field: entries nobody writes, of pairs without a row and of an id's second occurrence in a slot.
  bool written = row >= 0;
  for (int32_t i = 0; i < k; ++i) written &= id_of_pair(args, slot, i) != id_of_pair(args, slot, k);
  if (!written) return;
#endif
  args.row_of_pair_SK[slot * args.row_of_pair_stride + k] = row;
}

// The rank of a pair among those of its expert: a warp counts the ones before it.
__device__ __forceinline__ uint32_t rank_of(const int32_t* local_of_pair, int32_t pair) {
  int32_t local = local_of_pair[pair];
  uint32_t before = 0;
#pragma unroll 8
  for (int32_t i = threadIdx.x % 32; i < pair; i += 32) before += local_of_pair[i] == local;
  return __reduce_add_sync(kAllLanes, before);
}

template <typename V>
__global__ void __launch_bounds__(kThreads)
    permute_small(const __grid_constant__ PermuteArgs args, Slots slots, Chunks chunks) {
  extern __shared__ int32_t shared[];  // a Segment an expert, the local expert of each pair, the rows of one slot
  int32_t experts = args.num_local_experts, pairs = static_cast<int32_t>(args.S) * args.K;
  auto* segment_E = reinterpret_cast<Segment*>(shared);
  int32_t *local_of_pair = shared + 3 * experts, *rows_K = local_of_pair + pairs;
  for (int i = threadIdx.x; i < experts; i += blockDim.x) segment_E[i].kept = 0;  // counts, at first
  wait_for_predecessor();
  let_successor_start();
  RowCopy<V, 2> copy(args, chunks);
  uint32_t unit = blockIdx.x;
  int64_t slot = slots.real_slot(unit / chunks.count);
  if (slot >= 0) copy.load(slot, unit % chunks.count);
  __syncthreads();
  constexpr int kStep = 4;  // pairs a thread looks up at a time
  for (int32_t from = threadIdx.x; from < pairs; from += kStep * kThreads) {
    int32_t local[kStep];
#pragma unroll
    for (int j = 0; j < kStep; ++j) local[j] = local_expert(args, slots, min(from + j * kThreads, pairs - 1));
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      int32_t pair = from + j * kThreads;
      if (pair >= pairs) break;
      local_of_pair[pair] = local[j];
      if (local[j] >= 0) {
        atomicAdd(&segment_E[local[j]].kept, 1);
      } else if (blockIdx.x == 0) {
        publish_row(args, pair / args.K, pair % args.K, -1);
      }
    }
  }
  __syncthreads();
  place_segments(
      args, blockIdx.x == 0, [&](int32_t expert) { return segment_E[expert].kept; },
      [&](int32_t expert, const Segment& segment) { segment_E[expert] = segment; });
  for (; slot >= 0; unit += gridDim.x, slot = slots.real_slot(unit / chunks.count)) {
    if (unit != blockIdx.x) copy.load(slot, unit % chunks.count);
    for (int k = threadIdx.x / 32; k < args.K; k += blockDim.x / 32) {
      int32_t pair = static_cast<int32_t>(slot) * args.K + k, local = local_of_pair[pair];
      int32_t row = local < 0 ? -1 : row_at(args, segment_E[local].begin, rank_of(local_of_pair, pair));
      if (threadIdx.x % 32 == 0) rows_K[k] = row;
      if (threadIdx.x % 32 == 0 && local >= 0 && unit % chunks.count == 0) publish_row(args, slot, k, row);
    }
    __syncthreads();
    copy.store(rows_K, slot, unit % chunks.count);
    __syncthreads();
  }
  if (args.alignment > 1)
    for (int i = 0; i < experts; ++i) copy.clear(segment_E[i].begin + segment_E[i].kept, segment_E[i].end);
}

// This warp's pairs: a stretch of its block's chunk, whole steps of 32 from its begin.
struct Stretch {
  int32_t begin, end;

  __device__ __forceinline__ Stretch(const PermuteArgs& args, int32_t chunk) {
    int32_t pairs = static_cast<int32_t>(args.S) * args.K, length = chunk / (blockDim.x / 32);
    begin = min(blockIdx.x * chunk + threadIdx.x / 32 * length, pairs);
    end = min(begin + length, pairs);
  }
};

// counts_WE[w][i]: how many of warp w's pairs go to expert i.
__device__ __forceinline__ void count_pairs(const PermuteArgs& args, const Slots& slots, Stretch stretch,
                                            int32_t* counts_WE) {
  int32_t experts = args.num_local_experts;
  for (int i = threadIdx.x; i < blockDim.x / 32 * experts; i += blockDim.x) counts_WE[i] = 0;
  __syncthreads();
  int32_t* counts_E = counts_WE + threadIdx.x / 32 * experts;
  for (int32_t pair = stretch.begin + threadIdx.x % 32; pair < stretch.end; pair += 32)
    if (int32_t local = local_expert(args, slots, pair); local >= 0) atomicAdd(counts_E + local, 1);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    count(const __grid_constant__ PermuteArgs args, Slots slots, int32_t chunk) {
  extern __shared__ int32_t counts_WE[];
  wait_for_predecessor();
  let_successor_start();
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace);
  count_pairs(args, slots, Stretch(args, chunk), counts_WE);
  for (int i = threadIdx.x; i < experts; i += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += counts_WE[w * experts + i];
    counts_BE[static_cast<int64_t>(blockIdx.x) * experts + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    place(const __grid_constant__ PermuteArgs args, Slots slots, int32_t chunk) {
  extern __shared__ int32_t next_WE[];  // first each warp's counts, then the row of its next pair of each expert
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace), before = 0;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Stretch stretch(args, chunk);
  count_pairs(args, slots, stretch, next_WE);  // of inputs that are older than `count`
  wait_for_predecessor();
  let_successor_start();
  auto total = [&](int32_t expert) {
    int32_t sum = 0;
    before = 0;
#pragma unroll 16
    for (int b = 0; b < gridDim.x; ++b) {
      int32_t here = counts_BE[static_cast<int64_t>(b) * experts + expert];
      sum += here;
      before += b < blockIdx.x ? here : 0;
    }
    return sum;
  };
  place_segments(args, blockIdx.x == 0, total, [&](int32_t expert, const Segment& segment) {
    int32_t next = segment.begin + before;
    for (int w = 0; w < blockDim.x / 32; ++w) {
      int32_t here = next_WE[w * experts + expert];
      next_WE[w * experts + expert] = next;
      next += here;
    }
  });
  int32_t* next_E = next_WE + warp * experts;
  for (int32_t from = stretch.begin; from < stretch.end; from += 32) {
    int32_t pair = from + lane, local = pair < stretch.end ? local_expert(args, slots, pair) : -1;
    unsigned peers = __match_any_sync(kAllLanes, local), earlier = peers & ((1u << lane) - 1);
    int32_t row = local < 0 ? -1 : row_at(args, next_E[local], __popc(earlier));
    __syncwarp();
    if (local >= 0 && earlier == 0) next_E[local] += __popc(peers);
    __syncwarp();
    if (pair < stretch.end) publish_row(args, pair / args.K, pair % args.K, row);
  }
}

template <typename V>
__global__ void __launch_bounds__(kExpandThreads)
    expand(const __grid_constant__ PermuteArgs args, Slots slots, Chunks chunks) {
  RowCopy<V, 4> copy(args, chunks);
  uint32_t unit = blockIdx.x, count = chunks.count;
  int64_t slot = slots.real_slot(unit / count);
  if (slot >= 0) copy.load(slot, unit % count);  // x is older than `count`
  wait_for_predecessor();
  let_successor_start();
  while (slot >= 0) {
    copy.store(args.row_of_pair_SK + slot * args.row_of_pair_stride, slot, unit % count);
    unit += gridDim.x;
    slot = slots.real_slot(unit / count);
    if (slot >= 0) copy.load(slot, unit % count);
  }
  if (args.alignment > 1)
    for (int i = 0; i < args.num_local_experts; ++i)
      copy.clear(args.expert_offsets[i] + args.tokens_per_expert[i], args.expert_offsets[i + 1]);
}

template <typename V>
cudaError_t launch_permute(const PermuteArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  int threads = sort_threads(args.num_local_experts);
  int64_t pairs = args.S * args.K, vectors = args.D * itemsize(args.dtype) / static_cast<int64_t>(sizeof(V));
  int64_t counters = static_cast<int64_t>(threads / 32) * args.num_local_experts * sizeof(int32_t);
  Slots slots = slots_of(args);
  if (args.S <= kOneKernelSlots) {
    int64_t wanted = device.multiprocessors / std::max<int64_t>(args.S, 1);
    Chunks chunks = chunks_of(vectors, 2 * kThreads, wanted);
    int64_t blocks = std::max<int64_t>(args.S * chunks.count, 1);
    int64_t shared = args.num_local_experts * int64_t{sizeof(Segment)} + (pairs + args.K) * int64_t{sizeof(int32_t)};
    return launch(permute_small<V>, blocks, kThreads, shared, stream, args, slots, chunks);
  }
  int32_t chunk = chunk_pairs(pairs);
  int64_t blocks = ceil_div(pairs, chunk);
  if (cudaError_t error = launch(count, blocks, threads, counters, stream, args, slots, chunk)) return error;
  if (cudaError_t error = launch(place, blocks, threads, counters, stream, args, slots, chunk)) return error;
  Chunks chunks = chunks_of(vectors, kExpandThreads * 4, 1);
  int64_t units = args.S * chunks.count;
  if (units > INT32_MAX) return cudaErrorInvalidValue;
  if (args.counts_R) units = std::min<int64_t>(units, 16 * device.multiprocessors);
  auto width = static_cast<int>(ceil_div(chunks.length, 4 * 32) * 32);
  return launch(expand<V>, units, width, 0, stream, args, slots, chunks);
}

}  // namespace

int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts) {
  if (S <= kOneKernelSlots) return 0;
  return ceil_div(S * K, chunk_pairs(S * K)) * num_local_experts * static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t permute(const PermuteArgs& args, cudaStream_t stream) {
  if (args.S * args.K > INT32_MAX / 2 || args.alignment > INT32_MAX) return cudaErrorInvalidValue;
  bool wide = is_aligned(args.x_SD, args.x_stride_bytes) && is_aligned(args.rows_ND, args.D * itemsize(args.dtype));
  return wide ? launch_permute<uint4>(args, stream) : launch_permute<unsigned char>(args, stream);
}

}  // namespace epmoe::cuda
