// permute on the GPU: a stable counting sort of the pairs by local expert, then each row is read once and written to
// its places.
//
// up to 256 slots: one kernel. Every block sorts all pairs for itself, while its share of x is on the way, and copies.
// above:           three. `count` histograms a chunk of pairs a block; `place` adds up the chunks before its own, and
//                  gives each pair its row; `expand` copies.
//
// Within an expert rows follow the order of the pairs: each warp owns a stretch of consecutive pairs, and takes the
// ranks of 32 at a time. Nothing depends on the order in which atomics arrive.
#include "args.h"
#include "copy_rows.cuh"
#include "launch.h"

namespace epmoe::cuda {
namespace {

constexpr int kOneKernelSlots = 256, kThreads = 512, kMaxChunks = 128, kExpandThreads = 128;
constexpr int kManyExperts = 1024;  // above it fewer warps, whose counters must fit in shared memory

int sort_threads(int32_t experts) { return experts > kManyExperts ? 128 : kThreads; }

// Pairs a block sorts in the three-kernel path, and the blocks that this makes.
int32_t chunk_pairs(int64_t pairs) { return static_cast<int32_t>(std::max<int64_t>(kThreads, ceil_div(pairs, kMaxChunks))); }

struct Pairs {
  const PermuteArgs& args;
  Slots slots;
  int32_t begin, end;  // this block's

  __device__ __forceinline__ int32_t local_expert(int32_t pair) const {
    uint32_t K = args.K, slot = static_cast<uint32_t>(pair) / K, k = static_cast<uint32_t>(pair) - slot * K;
    if (!slots.is_real(slot)) return -1;
    int64_t at = slot * args.ids_stride + k;
    int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.ids_SK)[at] : static_cast<const int32_t*>(args.ids_SK)[at];
    if (id < 0 || id >= args.P) return -1;
    int32_t local = args.expert_map_P[id];
    return local < args.num_local_experts ? max(local, -1) : -1;
  }

  // Calls f(first pair, past the last) with this warp's stretch, a multiple of 32 from the block's begin.
  template <typename F>
  __device__ __forceinline__ void stretch(F&& f) const {
    int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    int32_t length = (end - begin + warps * 32 - 1) / (warps * 32) * 32;
    f(min(begin + warp * length, end), min(begin + (warp + 1) * length, end));
  }
};

// next_WE[w][i]: first how many of warp w's pairs go to expert i, then the row of its next one.
__device__ __forceinline__ void count_pairs(const Pairs& pairs, int32_t* next_WE) {
  int32_t experts = pairs.args.num_local_experts;
  for (int i = threadIdx.x; i < blockDim.x / 32 * experts; i += blockDim.x) next_WE[i] = 0;
  __syncthreads();
  pairs.stretch([&](int32_t first, int32_t last) {
    int32_t* next_E = next_WE + threadIdx.x / 32 * experts;
    for (int32_t pair = first + threadIdx.x % 32; pair < last; pair += 32)
      if (int32_t local = pairs.local_expert(pair); local >= 0) atomicAdd(next_E + local, 1);
  });
  __syncthreads();
}

__device__ __forceinline__ int64_t block_inclusive_sum(int64_t value) {
  __shared__ int64_t totals[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    int64_t before = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += before;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += totals[w];
  __syncthreads();
  return value;
}

// Segments from the pairs of each expert: `load(expert, warps' sum, total, before)` tells how many there are in all and
// in the chunks before this block's. Writes offsets and counts where `publish` holds.
template <typename Load>
__device__ __forceinline__ void place_segments(const PermuteArgs& args, int32_t* next_WE, int2* gaps_E, bool publish,
                                               Load&& load) {
  __shared__ int64_t carry;
  int32_t experts = args.num_local_experts, warps = blockDim.x / 32;
  int64_t begin_of_tile = 0;
  for (int32_t tile = 0; tile < experts || tile == 0; tile += blockDim.x) {
    int32_t i = tile + threadIdx.x, total = 0, before = 0;
    if (i < experts) load(i, total, before);
    int64_t padded = (total + args.alignment - 1) / args.alignment * args.alignment;
    int64_t end = begin_of_tile + block_inclusive_sum(padded), begin = end - padded;
    auto first = static_cast<int32_t>(min(begin, args.max_rows)), last = static_cast<int32_t>(min(end, args.max_rows));
    auto kept = static_cast<int32_t>(min(static_cast<int64_t>(total), args.max_rows - first));
    if (i < experts) {
      int32_t row = first + before;
      for (int w = 0; w < warps; ++w) {
        int32_t here = next_WE[w * experts + i];
        next_WE[w * experts + i] = row;
        row += here;
      }
      if (gaps_E) gaps_E[i] = {first + kept, last};
      if (publish) {
        args.expert_offsets[i] = first;
        args.tokens_per_expert[i] = kept;
        if (args.counters && kept < total)
          atomicAdd(reinterpret_cast<unsigned long long*>(args.counters) + kDroppedPairs, total - kept);
      }
    }
    if (threadIdx.x == blockDim.x - 1) carry = end;
    __syncthreads();
    begin_of_tile = carry;
  }
  if (publish && threadIdx.x == 0) {
    args.expert_offsets[experts] = static_cast<int32_t>(min(begin_of_tile, args.max_rows));
    if (args.needed) *args.needed = begin_of_tile;
  }
}

// Calls emit(pair, row) for every pair of this block; the row is -1 where it has none.
template <typename Emit>
__device__ __forceinline__ void place_pairs(const Pairs& pairs, int32_t* next_WE, Emit&& emit) {
  unsigned lane = threadIdx.x % 32;
  int32_t* next_E = next_WE + threadIdx.x / 32 * pairs.args.num_local_experts;
  pairs.stretch([&](int32_t first, int32_t last) {
    for (int32_t from = first; from < last; from += 32) {
      int32_t pair = from + lane, local = pair < last ? pairs.local_expert(pair) : -1;
      unsigned peers = __match_any_sync(kAllLanes, local), before = peers & ((1u << lane) - 1);
      int64_t row = local < 0 ? -1 : int64_t{next_E[local]} + __popc(before);
      __syncwarp();
      if (local >= 0 && before == 0) next_E[local] += __popc(peers);
      __syncwarp();
      if (row >= pairs.args.max_rows) row = -1;
#if defined(EPMOE_MUTATE_SORT_GUARD)
      if (row < 0) continue;  // as in the field: an entry nobody writes
#endif
      if (pair < last) emit(pair, static_cast<int32_t>(row));
    }
  });
}

__device__ __forceinline__ void publish_row(const PermuteArgs& args, int32_t pair, int32_t row) {
  int64_t slot = static_cast<uint32_t>(pair) / static_cast<uint32_t>(args.K);
  args.row_of_pair_SK[slot * args.row_of_pair_stride + (pair - slot * args.K)] = row;
}

template <typename V>
__global__ void __launch_bounds__(kThreads) permute_small(const __grid_constant__ PermuteArgs args, Slots slots,
                                                          Chunks chunks) {
  extern __shared__ int32_t shared[];
  int2* gaps_E = reinterpret_cast<int2*>(shared);
  int32_t* next_WE = shared + 2 * args.num_local_experts;
  int32_t* row_of_pair = next_WE + blockDim.x / 32 * args.num_local_experts;
  Pairs pairs = {args, slots, 0, static_cast<int32_t>(args.S * args.K)};
  wait_for_predecessor();
  let_successor_start();
  RowCopy<V, 2> copy(args, chunks);
  uint32_t unit = blockIdx.x, count = chunks.count;
  int64_t slot = slots.real_slot(unit / count);
  if (slot >= 0) copy.load(slot, unit % count);
  count_pairs(pairs, next_WE);
  bool publish = blockIdx.x == 0;
  place_segments(args, next_WE, gaps_E, publish, [&](int32_t expert, int32_t& total, int32_t&) {
    for (int w = 0; w < blockDim.x / 32; ++w) total += next_WE[w * args.num_local_experts + expert];
  });
  place_pairs(pairs, next_WE, [&](int32_t pair, int32_t row) {
    row_of_pair[pair] = row;
    if (publish) publish_row(args, pair, row);
  });
  __syncthreads();
  while (slot >= 0) {
    copy.store(row_of_pair + slot * args.K, slot, unit % count);
    unit += gridDim.x;
    slot = slots.real_slot(unit / count);
    if (slot >= 0) copy.load(slot, unit % count);
  }
  if (args.alignment > 1)
    for (int i = 0; i < args.num_local_experts; ++i) copy.clear(gaps_E[i].x, gaps_E[i].y);
}

__device__ __forceinline__ Pairs chunk_of_block(const PermuteArgs& args, const Slots& slots, int32_t chunk) {
  auto pairs = static_cast<int32_t>(args.S * args.K);
  int32_t begin = blockIdx.x * chunk;
  return {args, slots, begin, min(begin + chunk, pairs)};
}

__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ PermuteArgs args, Slots slots, int32_t chunk) {
  extern __shared__ int32_t shared[];
  wait_for_predecessor();
  let_successor_start();
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace);
  count_pairs(chunk_of_block(args, slots, chunk), shared);
  for (int i = threadIdx.x; i < experts; i += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += shared[w * experts + i];
    counts_BE[static_cast<int64_t>(blockIdx.x) * experts + i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) place(const __grid_constant__ PermuteArgs args, Slots slots, int32_t chunk) {
  extern __shared__ int32_t next_WE[];
  int32_t experts = args.num_local_experts, *counts_BE = static_cast<int32_t*>(args.workspace);
  Pairs pairs = chunk_of_block(args, slots, chunk);
  count_pairs(pairs, next_WE);  // of inputs that are older than `count`
  wait_for_predecessor();
  let_successor_start();
  place_segments(args, next_WE, nullptr, blockIdx.x == 0, [&](int32_t expert, int32_t& total, int32_t& before) {
#pragma unroll 16
    for (int b = 0; b < gridDim.x; ++b) {
      int32_t here = counts_BE[static_cast<int64_t>(b) * experts + expert];
      total += here;
      before += b < blockIdx.x ? here : 0;
    }
  });
  place_pairs(pairs, next_WE, [&](int32_t pair, int32_t row) { publish_row(args, pair, row); });
}

template <typename V>
__global__ void __launch_bounds__(kExpandThreads) expand(const __grid_constant__ PermuteArgs args, Slots slots,
                                                         Chunks chunks) {
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
    int64_t wanted = ceil_div(device.multiprocessors, std::max<int64_t>(args.S, 1));
    Chunks chunks = chunks_of(vectors, 2 * threads, wanted);
    int64_t blocks = std::clamp<int64_t>(args.S * chunks.count, 1, 2 * device.multiprocessors);
    int64_t shared = counters + args.num_local_experts * int64_t{sizeof(int2)} + pairs * int64_t{sizeof(int32_t)};
    return launch(permute_small<V>, blocks, threads, shared, stream, args, slots, chunks);
  }
  int32_t chunk = chunk_pairs(pairs);
  int64_t blocks = ceil_div(pairs, chunk);
  if (cudaError_t error = launch(count, blocks, threads, counters, stream, args, slots, chunk)) return error;
  if (cudaError_t error = launch(place, blocks, threads, counters, stream, args, slots, chunk)) return error;
  Chunks chunks = chunks_of(vectors, kExpandThreads * 4, 1);
  int64_t units = args.S * chunks.count;
  if (units > INT32_MAX) return cudaErrorInvalidValue;
  if (args.counts_R) units = std::min<int64_t>(units, 16 * device.multiprocessors);
  return launch(expand<V>, units, kExpandThreads, 0, stream, args, slots, chunks);
}

}  // namespace

int64_t permute_workspace_bytes(int64_t S, int32_t K, int32_t num_local_experts) {
  if (S <= kOneKernelSlots) return 0;
  return ceil_div(S * K, chunk_pairs(S * K)) * num_local_experts * static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t permute(const PermuteArgs& args, cudaStream_t stream) {
  if (args.S * args.K >= INT32_MAX) return cudaErrorInvalidValue;
  bool wide = is_aligned(args.x_SD, args.x_stride_bytes) && is_aligned(args.rows_ND, args.D * itemsize(args.dtype));
  return wide ? launch_permute<uint4>(args, stream) : launch_permute<unsigned char>(args, stream);
}

}  // namespace epmoe::cuda
