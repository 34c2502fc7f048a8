// Where rows have their places: sources say how many pairs they bring for each expert, and experts' segments follow one
// another, each with the pairs of source 0 first.
#pragma once
#include "dispatch_counts.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ int32_t aligned(int32_t length, int32_t alignment) {
  return alignment == 1 ? length : (length + alignment - 1) / alignment * alignment;
}

// By a warp: where a segment of `length` rows starts in each lane, aligned, and in `next` where those after it will.
__device__ __forceinline__ int32_t segment_start(int32_t length, int32_t alignment, int32_t& next) {
  length = aligned(length, alignment);
  int32_t end = warp_inclusive_sum(length);
  int32_t start = next + end - length;
  next += __shfl_sync(kAllLanes, end, 31);
  return start;
}

// By the whole block: where this source's pairs start on each expert's owner, if all counts are here.
__device__ __forceinline__ bool learn_bases(DispatchBlock& b) {
  auto most = static_cast<int32_t>(b.plan.most_local_experts), alignment = static_cast<int32_t>(b.plan.alignment);
  bool arrived = true;
  for (int32_t owner = threadIdx.x / 32; owner < b.plan.R; owner += block_warps()) {
    int32_t next = 0;
    for (int32_t base = 0; base < b.shared.experts[owner]; base += 32) {
      int32_t local = base + threadIdx.x % 32, total = 0, before = 0;
      if (local < b.shared.experts[owner])
        arrived = arrived && each_source<false>(b, owner, local, 0, 1, [&](int32_t r, int32_t pairs) {
                    if (r < b.plan.rank) before += pairs;
                    total += pairs;
                  });
      __syncwarp();
      int32_t start = segment_start(total, alignment, next);
      if (local < b.shared.experts[owner]) b.base[owner * most + local] = start + before;
    }
  }
  return __syncthreads_and(arrived);
}

// By a warp: from the pairs of each expert to where its segment starts, in place. A lane takes neighbouring experts, so
// that one sum over the warp is enough.
static __device__ __noinline__ void start_segments(int32_t* count, int32_t experts, int32_t alignment) {
  int32_t each = experts / 32 + 1, begin = threadIdx.x * each, end = min(begin + each, experts + 1), length = 0;
#pragma unroll 1
  for (int32_t local = begin; local < end; ++local) {
    int32_t pairs = local < experts ? count[local] : 0;
    count[local] = length;
    length += aligned(pairs, alignment);
  }
  int32_t start = warp_inclusive_sum(length) - length;
#pragma unroll 1
  for (int32_t local = begin; local < end; ++local) count[local] += start;
}

// By the other warps of the block, where there is a table: from the pairs of each source to those of the sources
// before, and of all, in place.
__device__ __forceinline__ void start_sources(const DispatchBlock& b, int32_t R, int32_t experts) {
  int32_t others = block_threads() - 32;
#pragma unroll 1
  for (int32_t local = threadIdx.x - 32; b.kernel.first_rows && local >= 0 && local < experts; local += others) {
    int32_t total = 0, *before = b.first + local;
#pragma unroll 1
    for (int32_t r = 0; r < R; ++r, before += experts) {
      int32_t pairs = *before;
      *before = total;
      total += pairs;
    }
    *before = total;
  }
}

// Of a source whose call differs: its rows are no good, but they come.
static __device__ __noinline__ FewRows few_rows_of(const ExchangePlan& plan, int32_t shape, int32_t tokens) {
  int64_t D = min(shape & 0x1ffff, static_cast<int32_t>(plan.D));
  int64_t bytes = plan.payload_fp8 ? D : D * itemsize(static_cast<DType>(shape >> 24 & 0xf));
  return {shape >> 28 & 1 ? tokens : 0, static_cast<int32_t>(min(bytes, plan.x_stride_bytes)),
          min(shape >> 17 & 0x7f, static_cast<int32_t>(plan.K))};
}

// By the whole block: what each source sends, and where each local expert's segment starts. False if a rank did not
// open the round.
__device__ __forceinline__ bool receive_counts(DispatchBlock& b) {
  auto experts = static_cast<int32_t>(b.plan.num_local_experts), rank = static_cast<int32_t>(b.plan.rank);
  auto R = static_cast<int32_t>(b.plan.R);
  DispatchShared& shared = b.shared;
  __syncthreads();
  if (!b.may_open()) return false;
  if (threadIdx.x == 0)
    shared.differing = shared.few = 0, shared.most_few = shared.most = 0,
    shared.longest_few = static_cast<int32_t>(b.kernel.row_bytes());
  for (int32_t local = threadIdx.x; local < experts; local += block_threads()) b.count[local] = 0;
  __syncthreads();
  bool arrived = true;
  // As many threads share an expert's sources as there are for all experts, so that all words are asked for at once.
  int32_t sharing = max(1, min(R, block_threads() / max(experts, 1)));
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < experts * sharing; i += block_threads()) {
    int32_t share = i / experts, local = i - share * experts;
    arrived = arrived && each_source<true>(b, rank, local, share, sharing, [&](int32_t r, int32_t pairs) {
                atomicAdd(&b.count[local], pairs);
                if (b.kernel.first_rows) b.first[r * experts + local] = pairs;
              });
  }
  // The last warps have the fewest words to wait for.
  if (int32_t r = block_threads() - 1 - threadIdx.x; r < b.plan.R) {
    int32_t words[kCountColumns] = {};
    uint64_t* first = b.kernel.counts(rank, r);
    arrived = b.wait.for_words(first, 1, r, 0, kCountColumns, words) && arrived;
    bool few = words[0] & 1, differs = words[1] != b.kernel.shape();
    int32_t rows = few ? words[0] >> (1 + kFewBits) : words[0] >> 1, tokens = few ? words[0] >> 1 & kMostFew : 0;
    shared.rank_count[r] = max(min(rows, static_cast<int32_t>(few ? b.plan.few_tokens : b.plan.M)), 0);
    FewRows awaited = {b.args.expert_major ? tokens : 0, static_cast<int32_t>(b.kernel.row_bytes()), b.args.K};
    if (differs) awaited = few_rows_of(b.plan, words[1], tokens);
    awaited.tokens = min(awaited.tokens, static_cast<int32_t>(b.plan.few_tokens));
    shared.few_rows[r] = awaited;
    atomicMax(awaited.tokens ? &shared.most_few : &shared.most, awaited.tokens ? awaited.tokens : shared.rank_count[r]);
    if (few) atomicOr(&shared.few, 1u << r);
    if (differs) atomicMax(&shared.longest_few, awaited.row_bytes), atomicOr(&shared.differing, 1u << r);
  }
  if (!__syncthreads_and(arrived)) return false;
  if (threadIdx.x < 32) start_segments(b.count, experts, static_cast<int32_t>(b.plan.alignment));
  start_sources(b, R, experts);
  __syncthreads();
  return true;
}

}  // namespace epmoe::cuda
