// permute on the GPU: a stable counting sort of the pairs by local expert; then each row of x is
// read once and copied to the expert-major rows of its pairs.
//
// Up to 256 slots take one kernel, permute_small. Each block counts all pairs while the loads of
// its chunk of x are in flight. For each pair of its slot a warp counts the earlier pairs of the
// same expert, which gives the pair's row. Then the block copies.
//
// More slots take three kernels. Each block of the first two has a fixed number of consecutive
// pairs.
//   count_pairs   counts them by expert.
//   assign_rows   adds up the counts of the earlier blocks, and gives each pair its row.
//   copy_rows     copies, a chunk of a row a block.
//
// Within an expert, rows follow the order of the pairs. Nothing depends on the order of atomics.
#include "args.h"
#include "cuda/device/launch.cuh"
#include "cuda/local/copy_rows.cuh"
#include "cuda/local/segments.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kOneKernelSlots = 256;
constexpr int kThreads = 512;
constexpr int kCopyThreads = 256;
constexpr int kMaxSortBlocks = 128;  // of count_pairs and assign_rows

// Threads of count_pairs and assign_rows. Each warp has a counter an expert in shared memory: with
// more than 1024 experts only the counters of 4 warps fit.
int sort_threads(int32_t experts) { return experts > 1024 ? 128 : kThreads; }

// Pairs of a block of count_pairs and assign_rows: 512, or a multiple of 512 where that makes more
// than kMaxSortBlocks blocks.
int32_t pairs_per_block(int64_t pairs) {
  return static_cast<int32_t>(
      std::max<int64_t>(1, ceil_div(pairs, int64_t{kThreads} * kMaxSortBlocks)) * kThreads);
}

__device__ __forceinline__ int64_t id_of_pair(const PermuteArgs& args, int64_t slot, int32_t k) {
  int64_t index = slot * args.ids_stride + k;
  return args.wide_ids ? static_cast<const int64_t*>(args.ids_SK)[index]
                       : static_cast<const int32_t*>(args.ids_SK)[index];
}

// The local index of a pair's expert, -1 if the pair is not this rank's. No load depends on a
// branch, so that the loads of several pairs overlap.
__device__ __forceinline__ int32_t local_expert(const PermuteArgs& args, const Slots& slots,
                                                uint32_t pair) {
  uint32_t slot = pair / args.K;
  int64_t id = id_of_pair(args, slot, pair - slot * args.K);
  int32_t local = id >= 0 && id < args.P ? args.expert_map_P[id] : -1;
  return local < args.num_local_experts && slots.is_real(slot) ? max(local, -1) : -1;
}

// The row of the expert's pair with this ordinal, -1 if it is dropped. `begin` is the expert's
// first row.
__device__ __forceinline__ int32_t row_of(const PermuteArgs& args, int32_t begin,
                                          uint32_t ordinal) {
  uint32_t row = begin + ordinal;
  return row < args.max_rows ? static_cast<int32_t>(row) : -1;
}

__device__ __forceinline__ void store_row_of_pair(const PermuteArgs& args, int64_t slot, int32_t k,
                                                  int32_t row) {
#if defined(EPMOE_MUTATE_SORT_GUARD)
  // The known bug of the field: nobody writes the entries of pairs without a row, and of an id's
  // second occurrence in a slot.
  bool written = row >= 0;
  for (int32_t i = 0; i < k; ++i) written &= id_of_pair(args, slot, i) != id_of_pair(args, slot, k);
  if (!written) return;
#endif
  args.row_of_pair_SK[slot * args.row_of_pair_stride + k] = row;
}

// The ordinal of a pair among the pairs of its expert: a warp counts the earlier ones.
__device__ __forceinline__ uint32_t ordinal_of(const int32_t* local_of_pair, int32_t pair) {
  int32_t local = local_of_pair[pair];
  uint32_t before = 0;
#pragma unroll 8
  for (int32_t i = threadIdx.x % 32; i < pair; i += 32) before += local_of_pair[i] == local;
  return __reduce_add_sync(kAllLanes, before);
}

template <typename V>
__global__ void __launch_bounds__(kThreads)
    permute_small(const __grid_constant__ PermuteArgs args, Slots slots, Chunks chunks) {
  extern __shared__ int32_t
      shared[];  // Segment [e], local expert of each pair [S * K], rows of one slot [K]
  int32_t experts = args.num_local_experts;
  int32_t pairs = static_cast<int32_t>(args.S) * args.K;
  auto* segment_E = reinterpret_cast<Segment*>(shared);
  int32_t *local_of_pair = shared + 3 * experts, *rows_K = local_of_pair + pairs;
  for (int i = threadIdx.x; i < experts; i += blockDim.x)
    segment_E[i].kept = 0;  // first counts pairs
  wait_for_predecessor();
  let_successor_start();
  RowCopy<V, 2> copy(args, chunks);
  uint32_t item = blockIdx.x;
  int64_t slot = slots.real_slot(item / chunks.count);
  if (slot >= 0) copy.load(slot, item % chunks.count);
  __syncthreads();
  constexpr int kStep = 4;  // pairs a thread looks up at a time
  for (int32_t from = threadIdx.x; from < pairs; from += kStep * kThreads) {
    int32_t local[kStep];
#pragma unroll
    for (int j = 0; j < kStep; ++j)
      local[j] = local_expert(args, slots, min(from + j * kThreads, pairs - 1));
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      int32_t pair = from + j * kThreads;
      if (pair >= pairs) break;
      local_of_pair[pair] = local[j];
      if (local[j] >= 0) {
        atomicAdd(&segment_E[local[j]].kept, 1);
      } else if (blockIdx.x == 0) {
        store_row_of_pair(args, pair / args.K, pair % args.K, -1);
      }
    }
  }
  __syncthreads();
  lay_out_segments(
      args, blockIdx.x == 0, [&](int32_t expert) { return segment_E[expert].kept; },
      [&](int32_t expert, const Segment& segment) { segment_E[expert] = segment; });
  for (; slot >= 0; item += gridDim.x, slot = slots.real_slot(item / chunks.count)) {
    if (item != blockIdx.x) copy.load(slot, item % chunks.count);
    for (int k = threadIdx.x / 32; k < args.K; k += blockDim.x / 32) {
      int32_t pair = static_cast<int32_t>(slot) * args.K + k;
      int32_t local = local_of_pair[pair];
      int32_t row =
          local < 0 ? -1 : row_of(args, segment_E[local].begin, ordinal_of(local_of_pair, pair));
      if (threadIdx.x % 32 == 0) rows_K[k] = row;
      if (threadIdx.x % 32 == 0 && local >= 0 && item % chunks.count == 0)
        store_row_of_pair(args, slot, k, row);
    }
    __syncthreads();
    copy.store(rows_K, slot, item % chunks.count);
    __syncthreads();
  }
  if (args.alignment > 1)
    for (int i = 0; i < experts; ++i)
      copy.clear(segment_E[i].begin + segment_E[i].kept, segment_E[i].end);
}

// This warp's pairs among its block's. Their number is a multiple of 32, except at the end of all
// pairs.
struct PairRange {
  int32_t begin, end;

  __device__ __forceinline__ PairRange(const PermuteArgs& args, int32_t block_pairs) {
    int32_t pairs = static_cast<int32_t>(args.S) * args.K;
    int32_t length = block_pairs / (blockDim.x / 32);
    begin = min(blockIdx.x * block_pairs + threadIdx.x / 32 * length, pairs);
    end = min(begin + length, pairs);
  }
};

// By the block: counts_WE[w][i] becomes the number of warp w's pairs of expert i.
__device__ __forceinline__ void count_by_warp(const PermuteArgs& args, const Slots& slots,
                                              PairRange range, int32_t* counts_WE) {
  int32_t experts = args.num_local_experts;
  for (int i = threadIdx.x; i < blockDim.x / 32 * experts; i += blockDim.x) counts_WE[i] = 0;
  __syncthreads();
  int32_t* counts_E = counts_WE + threadIdx.x / 32 * experts;
  for (int32_t pair = range.begin + threadIdx.x % 32; pair < range.end; pair += 32)
    if (int32_t local = local_expert(args, slots, pair); local >= 0) atomicAdd(counts_E + local, 1);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    count_pairs(const __grid_constant__ PermuteArgs args, Slots slots, int32_t block_pairs) {
  extern __shared__ int32_t counts_WE[];
  wait_for_predecessor();
  let_successor_start();
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace);
  count_by_warp(args, slots, PairRange(args, block_pairs), counts_WE);
  for (int i = threadIdx.x; i < experts; i += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += counts_WE[w * experts + i];
    counts_BE[static_cast<int64_t>(blockIdx.x) * experts + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    assign_rows(const __grid_constant__ PermuteArgs args, Slots slots, int32_t block_pairs) {
  extern __shared__ int32_t
      next_WE[];  // first the counts of each warp, then the row of its next pair, by expert
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace),
          before = 0;
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  PairRange range(args, block_pairs);
  count_by_warp(args, slots, range,
                next_WE);  // ids and counts_R are older than count_pairs: no need to wait
  wait_for_predecessor();
  let_successor_start();
  auto total = [&](int32_t expert) {
    int32_t sum = 0;
    before = 0;
#pragma unroll 16
    for (int b = 0; b < gridDim.x; ++b) {
      int32_t pairs = counts_BE[static_cast<int64_t>(b) * experts + expert];
      sum += pairs;
      before += b < blockIdx.x ? pairs : 0;
    }
    return sum;
  };
  lay_out_segments(args, blockIdx.x == 0, total, [&](int32_t expert, const Segment& segment) {
    int32_t next = segment.begin + before;
    for (int w = 0; w < blockDim.x / 32; ++w) {
      int32_t pairs = next_WE[w * experts + expert];
      next_WE[w * experts + expert] = next;
      next += pairs;
    }
  });
  int32_t* next_E = next_WE + warp * experts;
  for (int32_t from = range.begin; from < range.end; from += 32) {
    int32_t pair = from + lane;
    int32_t local = pair < range.end ? local_expert(args, slots, pair) : -1;
    unsigned same = __match_any_sync(kAllLanes, local), earlier = same & ((1u << lane) - 1);
    int32_t row = local < 0 ? -1 : row_of(args, next_E[local], __popc(earlier));
    __syncwarp();
    if (local >= 0 && earlier == 0) next_E[local] += __popc(same);
    __syncwarp();
    if (pair < range.end) store_row_of_pair(args, pair / args.K, pair % args.K, row);
  }
}

template <typename V>
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows(const __grid_constant__ PermuteArgs args, Slots slots, Chunks chunks) {
  RowCopy<V, 4> copy(args, chunks);
  uint32_t item = blockIdx.x;
  uint32_t count = chunks.count;
  int64_t slot = slots.real_slot(item / count);
  if (slot >= 0)
    copy.load(slot, item % count);  // x and counts_R are older than count_pairs: no need to wait
  wait_for_predecessor();
  let_successor_start();
  while (slot >= 0) {
    copy.store(args.row_of_pair_SK + slot * args.row_of_pair_stride, slot, item % count);
    item += gridDim.x;
    slot = slots.real_slot(item / count);
    if (slot >= 0) copy.load(slot, item % count);
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
  int64_t pairs = args.S * args.K;
  int64_t vectors = args.D * itemsize(args.dtype) / static_cast<int64_t>(sizeof(V));
  int64_t counter_bytes =
      static_cast<int64_t>(threads / 32) * args.num_local_experts * sizeof(int32_t);
  Slots slots = slots_of(args);
  if (args.S <= kOneKernelSlots) {
    int64_t wanted = device.multiprocessors / std::max<int64_t>(args.S, 1);
    Chunks chunks = chunks_of(vectors, 2 * kThreads, wanted);
    int64_t blocks = std::max<int64_t>(args.S * chunks.count, 1);
    int64_t shared = args.num_local_experts * int64_t{sizeof(Segment)} +
                     (pairs + args.K) * int64_t{sizeof(int32_t)};
    return launch(permute_small<V>, blocks, kThreads, shared, stream, args, slots, chunks);
  }
  int32_t block_pairs = pairs_per_block(pairs);
  int64_t blocks = ceil_div(pairs, block_pairs);
  if (cudaError_t error =
          launch(count_pairs, blocks, threads, counter_bytes, stream, args, slots, block_pairs))
    return error;
  if (cudaError_t error =
          launch(assign_rows, blocks, threads, counter_bytes, stream, args, slots, block_pairs))
    return error;
  Chunks chunks = chunks_of(vectors, kCopyThreads * 4, 1);
  int64_t items = args.S * chunks.count;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  if (args.counts_R) items = std::min<int64_t>(items, 16 * device.multiprocessors);
  auto copy_threads = static_cast<int>(ceil_div(chunks.length, 4 * 32) * 32);
  return launch(copy_rows<V>, items, copy_threads, 0, stream, args, slots, chunks);
}

}  // namespace

int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts) {
  if (S <= kOneKernelSlots) return 0;
  return ceil_div(S * K, pairs_per_block(S * K)) * num_local_experts *
         static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t permute(const PermuteArgs& args, cudaStream_t stream) {
  if (args.S * args.K > INT32_MAX / 2 || args.alignment > INT32_MAX) return cudaErrorInvalidValue;
  bool wide = is_aligned(args.x_SD, args.x_stride_bytes) &&
              is_aligned(args.rows_ND, args.D * itemsize(args.dtype));
  return wide ? launch_permute<uint4>(args, stream) : launch_permute<unsigned char>(args, stream);
}

}  // namespace epmoe::cuda
