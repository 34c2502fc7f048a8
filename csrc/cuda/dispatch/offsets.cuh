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

// Calls f(owner, local, entry of send_offset) for the experts of all ranks. The threads of the
// block share them.
template <typename F>
__device__ __forceinline__ void each_expert(const DispatchBlock& b, F&& f) {
  auto most = static_cast<int32_t>(b.plan.most_local_experts);
  int32_t entries = static_cast<int32_t>(b.plan.R) * most;
#pragma unroll 1
  for (int32_t entry = threadIdx.x; entry < entries; entry += block_threads()) {
    int32_t owner = entry / most;
    int32_t local = entry - owner * most;
    if (local < b.shared.num_experts[owner]) f(owner, local, entry);
  }
}

// Whether a source has said that it uses the LL protocol. Its counts then go to each expert's rank
// alone.
__device__ __forceinline__ bool any_source_uses_ll(const DispatchBlock& b) {
  bool any = false;
#pragma unroll 1
  for (int32_t r = 0; r < b.plan.R; ++r) {
    Word word = Word::peek(b.kernel.counts(b.plan.rank, r));
    CallWords call{static_cast<uint32_t>(word.value()), 0, 0};
    any = any || (b.wait.reached(word.epoch()) && call.is_ll());
  }
  return any;
}

// The whole block computes where this source's pairs start on each expert's rank. Returns false if
// a count has not come within `patience_ns`.
__device__ __forceinline__ bool compute_send_offsets(DispatchBlock& b, uint64_t patience_ns) {
  auto most = static_cast<int32_t>(b.plan.most_local_experts);
  auto alignment = static_cast<int32_t>(b.plan.alignment);
  // The pairs of each expert from all sources.
  bool arrived = true;
  uint64_t begin_ns = 0;
  each_expert(b, [&](int32_t owner, int32_t local, int32_t entry) {
    int32_t total = 0;
    auto has_all = [&] {
      total = 0;
      return each_source<false>(b, owner, local, 0, 1,
                                [&](int32_t, int32_t pairs) { total += pairs; });
    };
    while (arrived && !has_all()) {
      uint64_t ns = now_ns();
      if (!begin_ns) begin_ns = ns;
      arrived = ns - begin_ns < patience_ns && !any_source_uses_ll(b);
    }
    b.send_offset[entry] = total;
  });
  if (!__syncthreads_and(arrived)) return false;
  // Where their segments start: a warp for each rank.
  for (int32_t owner = threadIdx.x / 32; owner < b.plan.R; owner += block_warps()) {
    int32_t next = 0;
    for (int32_t base = 0; base < b.shared.num_experts[owner]; base += 32) {
      int32_t local = base + threadIdx.x % 32;
      bool inside = local < b.shared.num_experts[owner];
      int32_t* offset = b.send_offset + owner * most + local;
      int32_t start = segment_start(inside ? *offset : 0, alignment, next);
      if (inside) *offset = start;
    }
  }
  __syncthreads();
  // Where this source's pairs start in them.
  if (b.plan.rank == 0) return true;
  each_expert(b, [&](int32_t owner, int32_t local, int32_t entry) {
    each_source<false>(b, owner, local, 0, 1, [&](int32_t r, int32_t pairs) {
      if (r < b.plan.rank) b.send_offset[entry] += pairs;
    });
  });
  __syncthreads();
  return true;
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
    CallWords call{static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[1]), words[2]};
    bool ll = call.is_ll();
    shared.rank_count[r] =
        min(call.rows(), static_cast<int32_t>(ll ? b.plan.ll_max_tokens : b.plan.M));
    int32_t most_tokens = ll ? static_cast<int32_t>(b.plan.ll_max_tokens) : 0;
    int32_t tokens = min(max(call.ll_tokens, 0), most_tokens);
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
