// Simple protocol: the blocks of dispatch count the tokens together. Each send block counts a part
// of the tokens, and leaves the counts in lines in scratch. A block that needs to know the pairs
// before a token adds up the lines of the parts before it. No block depends on another: where a
// part does not come, since its block has found no place on the GPU, a block counts the tokens
// itself.
#pragma once
#include "cuda/dispatch/routing.cuh"
#include "cuda/exchange/ll.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ int32_t divided_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

// The parts of a call.
struct Parts {
  int32_t tokens;  // of a part, a multiple of a batch; 0: each block counts for itself
  int32_t lines;   // of a part
  int32_t counts;  // in the lines: pairs of each physical expert, then rows for each rank

  __device__ __forceinline__ Parts(const DispatchBlock& b, int32_t all_tokens) {
    int32_t batch = b.kernel.batch_tokens;
    int32_t parts = min(b.kernel.send_blocks, kMaxParts);
    counts = static_cast<int32_t>(b.plan.P + b.plan.R);
    lines = divided_up(counts, kPartCounts);
    tokens = divided_up(divided_up(all_tokens, parts), batch) * batch;
    // A block counts few tokens as fast as it reads lines. A count has 16 bits, and a thread adds
    // up one line of each part.
    constexpr int32_t kFewTokens = 256;
    bool fits = int64_t{tokens} * b.args.K <= 0xffff && lines <= block_threads();
    if (all_tokens <= kFewTokens || !fits) tokens = 0;
  }
  __device__ __forceinline__ Line* line(const DispatchBlock& b, int32_t part, int32_t n) const {
    return in_scratch<Line>(b.ex, b.plan.part_counts) + int64_t{part} * lines + n;
  }
  // Where the block has the i-th count.
  __device__ __forceinline__ int32_t* count_at(const DispatchBlock& b, int32_t i) const {
    auto P = static_cast<int32_t>(b.plan.P);
    return i < P ? b.count + i : b.shared.rank_count + i - P;
  }
};

// The whole block hands out what it has counted of a part, and clears its own counts. The block
// knows the epoch.
__device__ __forceinline__ void share_part(const DispatchBlock& b, const Parts& parts,
                                           int32_t part) {
  for (int32_t n = threadIdx.x; n < parts.lines; n += block_threads()) {
    uint32_t counts[kPartCounts] = {};
#pragma unroll
    for (int i = 0; i < kPartCounts; ++i) {
      if (n * kPartCounts + i >= parts.counts) break;
      int32_t* count = parts.count_at(b, n * kPartCounts + i);
      counts[i] = *count;
      *count = 0;
    }
    Line::publish(parts.line(b, part, n), {counts[0] | counts[1] << 16, counts[2] | counts[3] << 16,
                                           counts[4] | counts[5] << 16, b.wait.epoch});
  }
}

// The whole block adds the parts [begin, end) to its counts. It adds nothing and returns false if
// one of them does not come.
__device__ __forceinline__ bool add_parts(const DispatchBlock& b, const Parts& parts, int32_t begin,
                                          int32_t end) {
  // Blocks that have places start within microseconds of one another.
  constexpr uint64_t kPatienceNs = 10'000;
  constexpr int kInFlight = 4;
  int32_t sharing = block_threads() / parts.lines;
  int32_t n = threadIdx.x % parts.lines;
  int32_t first = begin + static_cast<int32_t>(threadIdx.x) / parts.lines;
  if (first - begin >= sharing) first = end;
  uint32_t sums[kPartCounts] = {};
  uint64_t begin_ns = 0;
  bool all = true;
#pragma unroll 1
  for (int32_t part = first; part < end && all; part += kInFlight * sharing) {
    uint4 words[kInFlight];
    auto arrived = [&] {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        int32_t p = part + i * sharing;
        words[i] = p < end ? Line::peek(parts.line(b, p, n)) : make_uint4(0, 0, 0, b.wait.epoch);
      }
      bool here = true;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) here = here && words[i].w == b.wait.epoch;
      return here;
    };
    while (!arrived()) {
      uint64_t ns = now_ns();
      if (!begin_ns) begin_ns = ns;
      all = ns - begin_ns < kPatienceNs;
      if (!all) break;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sums[0] += words[i].x & 0xffff, sums[1] += words[i].x >> 16;
      sums[2] += words[i].y & 0xffff, sums[3] += words[i].y >> 16;
      sums[4] += words[i].z & 0xffff, sums[5] += words[i].z >> 16;
    }
  }
  if (!__syncthreads_and(all)) return false;
#pragma unroll
  for (int i = 0; i < kPartCounts; ++i)
    if (sums[i]) atomicAdd(parts.count_at(b, n * kPartCounts + i), static_cast<int32_t>(sums[i]));
  return true;
}

// What a block has counted so far, from token 0 on.
template <int kGroupsInFlight>
struct PartCounter {
  DispatchBlock& b;
  Parts parts;
  int32_t all_tokens;
  int32_t counted = 0;
  bool alone;  // a part has not come, or there are none

  __device__ __forceinline__ PartCounter(DispatchBlock& b, int32_t all_tokens)
      : b(b), parts(b, all_tokens), all_tokens(all_tokens), alone(parts.tokens == 0) {}

  // The whole block counts this block's part and hands it out. Warps have read the tokens of the
  // first batch, a warp each. Returns false if the round may not be opened.
  __device__ __forceinline__ bool share() {
    int32_t begin = b.number * parts.tokens;
    int32_t end = min(begin + parts.tokens, all_tokens);
    bool has_part = !alone && begin < all_tokens;
    bool is_batch = parts.tokens == b.kernel.batch_tokens;
    auto warp = static_cast<int32_t>(threadIdx.x / 32);
    if (has_part && !is_batch) count_tokens<1>(b, begin, end);
    __syncwarp();  // what lane 0 knows of the token
    if (has_part && is_batch && begin + warp < end) count_token_of_batch(b, warp);
    __syncthreads();
    if (!b.may_open()) return false;
    if (has_part) share_part(b, parts, b.number);
    __syncthreads();
    return true;
  }

  // The whole block counts the tokens before `end`. It needs a barrier before it reads the counts.
  __device__ __forceinline__ void count_up_to(int32_t end) {
    // Tokens up to `left` and from `right` on belong to parts that are not whole.
    int32_t left = end;
    int32_t right = end;
    if (!alone) {
      int32_t first = divided_up(counted, parts.tokens);
      int32_t last = end == all_tokens ? divided_up(end, parts.tokens) : end / parts.tokens;
      if (first < last) {
        alone = !add_parts(b, parts, first, last);
        if (!alone) left = first * parts.tokens, right = min(last * parts.tokens, end);
      }
    }
#pragma unroll 1
    for (int side = 0; side < 2; ++side)
      count_tokens<kGroupsInFlight>(b, side ? right : counted, side ? end : left);
    counted = end;
  }
};

}  // namespace epmoe::cuda
