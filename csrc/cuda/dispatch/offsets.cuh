// The offsets of expert-major rows, from the count matrix. The segments of the experts follow one
// another; within a segment the pairs of source 0 come first. docs/kernels.md works an example with
// numbers.
#pragma once
#include "cuda/device/scan.cuh"
#include "cuda/dispatch/counts.cuh"

namespace epmoe::cuda {

// One warp lays out segments of `length` rows, one a lane, from `next` on. Returns where the lane's
// segment starts; `next` becomes the end of the last one.
__device__ __forceinline__ int32_t segment_start(int32_t length, int32_t alignment, int32_t& next) {
  length = aligned(length, alignment);
  int32_t end = warp_inclusive_sum(length);
  int32_t start = next + end - length;
  next += __shfl_sync(kAllLanes, end, 31);
  return start;
}

// The whole block computes where this source's pairs start on each expert's rank. Returns false,
// without waiting, if a count is missing.
__device__ __forceinline__ bool compute_send_offsets(DispatchBlock& b) {
  auto most = static_cast<int32_t>(b.plan.most_local_experts);
  auto alignment = static_cast<int32_t>(b.plan.alignment);
  bool arrived = true;
  for (int32_t owner = threadIdx.x / 32; owner < b.plan.R; owner += block_warps()) {
    int32_t next = 0;
    for (int32_t base = 0; base < b.shared.num_experts[owner]; base += 32) {
      int32_t local = base + threadIdx.x % 32;
      int32_t total = 0;
      int32_t before = 0;
      if (local < b.shared.num_experts[owner])
        arrived =
            arrived && each_source<false>(b, owner, local, 0, 1, [&](int32_t r, int32_t pairs) {
              if (r < b.plan.rank) before += pairs;
              total += pairs;
            });
      __syncwarp();
      int32_t start = segment_start(total, alignment, next);
      if (local < b.shared.num_experts[owner]) b.send_offset[owner * most + local] = start + before;
    }
  }
  return __syncthreads_and(arrived);
}

// The other warps of the block turn the pairs of each source into those of the sources before it,
// in place, and append the total. Only where the table fits into shared memory.
__device__ __forceinline__ void sum_source_counts(const DispatchBlock& b, int32_t R,
                                                  int32_t experts) {
  int32_t others = block_threads() - 32;
#pragma unroll 1
  for (int32_t local = threadIdx.x - 32;
       b.kernel.source_offset_entries && local >= 0 && local < experts; local += others) {
    int32_t total = 0, *before = b.source_offset + local;
#pragma unroll 1
    for (int32_t r = 0; r < R; ++r, before += experts) {
      int32_t pairs = *before;
      *before = total;
      total += pairs;
    }
    *before = total;
  }
}

// The whole block awaits all counts and computes what each source sends and where each local
// expert's segment starts. A block that has sent also learns whether all that send have started.
// Returns false if a rank did not open the round, or opened it with another shape.
__device__ __forceinline__ bool receive_counts(DispatchBlock& b) {
  auto experts = static_cast<int32_t>(b.plan.num_local_experts);
  auto rank = static_cast<int32_t>(b.plan.rank);
  auto R = static_cast<int32_t>(b.plan.R);
  DispatchShared& shared = b.shared;
  __syncthreads();
  if (!b.may_open()) return false;
  if (threadIdx.x == 0)
    shared.mismatched = shared.ll_mask = 0, shared.other = kNoOther,
    shared.ll_most_tokens = shared.simple_most_rows = shared.late = shared.more_rounds = 0;
  for (int32_t local = threadIdx.x; local < experts; local += block_threads()) b.count[local] = 0;
  __syncthreads();
  bool arrived = true;
  if (threadIdx.x == block_threads() - 64 && b.number < b.kernel.sending_blocks())
    shared.late = !b.wait.have_started(kDispatch, b.kernel.sending_blocks());
  // Several threads share the sources of an expert, so that all words are loaded at once.
  int32_t sharing = max(1, min(R, block_threads() / max(experts, 1)));
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < experts * sharing; i += block_threads()) {
    int32_t share = i / experts;
    int32_t local = i - share * experts;
    arrived =
        arrived && each_source<true>(b, rank, local, share, sharing, [&](int32_t r, int32_t pairs) {
          atomicAdd(&b.count[local], pairs);
          if (b.kernel.source_offset_entries) b.source_offset[r * experts + local] = pairs;
        });
  }
  // The last warps have the fewest words to await.
  if (int32_t r = block_threads() - 1 - threadIdx.x; r < b.plan.R) {
    int32_t words[kCountColumns] = {};
    Word* first = b.kernel.counts(rank, r);
    arrived = b.wait.await_counted(first, r, words) && arrived;
    CallWords call{static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1])};
    bool ll = call.is_ll();
    shared.rank_count[r] =
        min(call.rows(), static_cast<int32_t>(ll ? b.plan.ll_max_tokens : b.plan.M));
    int32_t tokens = min(call.ll_tokens(), static_cast<int32_t>(b.plan.ll_max_tokens));
    shared.ll_tokens[r] = tokens;
    atomicMax(tokens ? &shared.ll_most_tokens : &shared.simple_most_rows,
              tokens ? tokens : shared.rank_count[r]);
    if (ll) atomicOr(&shared.ll_mask, 1u << r);
    if (call.differs(b.kernel.call) && call.shape != kEmptySeatShape) {
      atomicOr(&shared.mismatched, 1u << r);
      if (call.tag() != b.kernel.call.tag()) atomicMin(&shared.other, 1 + (r << 16 | call.tag()));
    }
    if (call.shape & kMoreRounds) shared.more_rounds = 1;
  }
  if (!__syncthreads_and(arrived)) {
    shared.mismatched = 0;  // the missing rank is the failure to tell
    return false;
  }
  if (shared.mismatched) return false;
  if (threadIdx.x <
      32) {  // sources of the Simple protocol write into rows of all ranks, and know one alignment
    bool small = __popc(shared.ll_mask) == R && b.args.T <= b.plan.small_alignment_tokens;
    lengths_to_starts(b.count, experts,
                      static_cast<int32_t>(small ? b.plan.small_alignment : b.plan.alignment));
  }
  sum_source_counts(b, R, experts);
  __syncthreads();
  return true;
}

}  // namespace epmoe::cuda
