// The experts stage in fp8 as one kernel: gate and up, activation and down.
#include <cuda.h>

#include "cuda/device/fp8.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/hopper/ring.cuh"
#include "cuda/local/gates.cuh"
#include "cuda/local/real_rows.cuh"
#include "cuda/hopper/experts.h"

namespace epmoe::cuda {
namespace {

#ifndef KN
#define KN 144
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif

// Tokens of a tile, at most, and the step in which tiles adapt to them.
constexpr int kMostTokens = KN;
constexpr int kTokenStep = 16;
// Weight rows of a tile: two halves, of gates and their ups or of outputs.
constexpr int kHalfRows = 128;
constexpr int kWeightBytes = 2 * kHalfRows * kLineBytes;
constexpr int kStages = STAGES;
constexpr int kStageBytes = kWeightBytes + kMostTokens * kLineBytes;
// Of a stage: scales of the tokens, then those of both weight blocks.
constexpr int kStageScales = kMostTokens + 4;
// Warps: two warpgroups multiply; of the third one warp loads weights, one rows, one scales, and one
// claims tiles and announces h.
constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kMathWarps = kMultipliers / 32;
constexpr int kThreads = 3 * kWarpgroup;
enum Role { kLoadsWeights = kMathWarps, kLoadsRows, kLoadsScales, kClaims };
constexpr int kConsumers = kMathWarps + 4;  // warps that read a turn
// Products on their way out: h of a tile, or 64 outputs of 64 tokens for each warpgroup.
constexpr int kLeavingBytes = kMostTokens * kLineBytes;
constexpr int kLeavingOfGroup = kLeavingBytes / 2 / 1024 * 1024;
constexpr int kOutputsAtOnce = kLeavingOfGroup / kLineBytes / 16 * 16;
// Turns that the claiming warp may be ahead.
constexpr int kQueue = 4;
// Boxes of rows: large ones, then small ones.
constexpr int kLargeBox = 64;

enum Barrier { kAllMultipliers = 1, kOfGroup = 2, kWritten = 4, kTurnOf = 5 };

// A tile: some rows of an expert by 128 columns of h, or by 256 outputs.
struct Turn {
  int32_t expert;
  int32_t row;
  int32_t count;
  int32_t width;
  int32_t column;      // in blocks of 128 columns of h or 256 outputs
  int32_t token_tile;  // of all experts
  int32_t down;        // 0: gate and up; 1: down; -1: there is no more
  int32_t together;    // whether both blocks of a cluster have the same weights
};
using Stages = Ring<kStages, kStageBytes>;
using Queue = Ring<kQueue, sizeof(Turn)>;

// What a row of h is divided by, in the terms of to_fp8().
struct Divisor {
  float upscaled, inverse, up, scale;
};

struct Shared {
  char stages[kStages * kStageBytes];
  char leaving[kLeavingBytes];
  Divisor divisors[kMostTokens];
  float scales[kStages][kStageScales];
  uint64_t stage_mbarriers[2 * kStages];
  uint64_t queue_mbarriers[2 * kQueue];
  Turn queue[kQueue];
  int32_t table[1];  // Table
};

int64_t shared_bytes(int64_t e) {
  return static_cast<int64_t>(sizeof(Shared)) + (3 * e + 4) * static_cast<int64_t>(sizeof(int32_t));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Arrives at a barrier of so many threads without waiting there.
__device__ __forceinline__ void arrive_at(int32_t number, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ int32_t ceil_of(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Which tile has a number. Tiles of gate and up come first. Blocks of a cluster have neighbouring
// numbers: the same weights and two token tiles of an expert, or, where it has only one, two tiles
// of weights.
template <int kCluster>
struct Table {
  const ExpertsArgs& args;
  int32_t* first;  // [e + 1]: token tiles of the experts before
  int32_t* begin;  // [e]
  int32_t* count;  // [e]

  __device__ __forceinline__ Table(const ExpertsArgs& given, int32_t* shared)
      : args(given), first(shared), begin(shared + e() + 1), count(shared + 2 * e() + 1) {}
  __device__ __forceinline__ int32_t e() const { return args.segments.num_local_experts; }
  __device__ __forceinline__ int32_t across(bool down) const {
    const int32_t tiles = down ? ceil_of(static_cast<int32_t>(args.D), 2 * kHalfRows)
                               : static_cast<int32_t>(args.F) / kHalfRows;
    return ceil_of(tiles, kCluster) * kCluster;
  }

  // The whole block builds it.
  __device__ __forceinline__ void build() const {
    for (int32_t i = threadIdx.x; i < e(); i += kThreads) {
      SegmentRows rows = rows_of_expert(args.segments, args.N, i);
      begin[i] = rows.begin;
      count[i] = rows.count;
      first[i] = ceil_of(rows.count, kMostTokens);
      if (first[i] > 1) first[i] = ceil_of(rows.count, kCluster * kMostTokens) * kCluster;
    }
    __syncthreads();
    if (threadIdx.x < 32) lengths_to_starts(first, e(), 1);
    __syncthreads();
  }
  __device__ __forceinline__ int32_t size() const {
    return first[e()] * (across(false) + across(true));
  }
  __device__ __forceinline__ Turn operator[](int32_t number) const {
    Turn turn = {};
    turn.down = number >= first[e()] * across(false);
    if (turn.down) number -= first[e()] * across(false);
    const int32_t across = this->across(turn.down);
    turn.expert = segment_at(first, e(), number / across);
    const int32_t parts = first[turn.expert + 1] - first[turn.expert];
    const int32_t i = number - first[turn.expert] * across;
    const int32_t part = i % parts;
    turn.column = i / parts;
    turn.token_tile = first[turn.expert] + part;
    turn.width = ceil_of(ceil_of(count[turn.expert], parts), kTokenStep) * kTokenStep;
    const int32_t before = part * turn.width;
    turn.row = begin[turn.expert] + before;
    turn.count = max(min(turn.width, count[turn.expert] - before), 0);
    turn.together = kCluster > 1 && parts > 1;
    return turn;
  }
};

// Addresses in another block of the cluster, and arrivals there.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
__device__ __forceinline__ void arrive_in_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
               : "memory");
}
template <int kCluster>
__device__ __forceinline__ uint32_t block_in_cluster() {
  uint32_t rank = 0;
  if (kCluster > 1) asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}
template <int kCluster>
__device__ __forceinline__ void sync_cluster() {
  if (kCluster == 1) return;
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// A warp has no use for the stage any more, and so says to all that may fill it.
template <int kCluster>
__device__ __forceinline__ void release_stage(Stages& ring) {
  const uint32_t empty = shared_address(&ring.empty[ring.turn % kStages]);
  if (kCluster == 1) {
    if (threadIdx.x % 32 == 0) arrive(&ring.empty[ring.turn % kStages]);
  } else if (threadIdx.x % 32 < kCluster) {
    arrive_in_cluster(address_in(empty, threadIdx.x % 32));
  }
  ++ring.turn;
}

// Turns, from the first block of a cluster to the warps of all.
template <int kCluster>
struct Turns {
  Shared& shared;
  Queue queue;

  __device__ __forceinline__ Turns(Shared& shared)
      : shared(shared),
        queue(reinterpret_cast<const char*>(shared.queue), shared.queue_mbarriers, 1,
              kConsumers * kCluster) {}
  __device__ __forceinline__ const Turn& wait() const {
    const uint32_t full = shared_address(queue.filled());
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, "
          "[%1], %2;\n\tselp.u32 %0, 1, 0, done;\n\t}"
          : "=r"(done)
          : "r"(full), "r"(queue.turn / kQueue & 1)
          : "memory");
    return shared.queue[queue.turn % kQueue];
  }
  // One lane of a warp that has read the turn.
  __device__ __forceinline__ void done() {
    const uint32_t empty = shared_address(&queue.empty[queue.turn % kQueue]);
    if (kCluster == 1)
      arrive(&queue.empty[queue.turn % kQueue]);
    else
      arrive_in_cluster(address_in(empty, 0));
  }
  __device__ __forceinline__ void advance() { ++queue.turn; }
};

// One thread claims tiles for the cluster.
template <int kCluster>
struct Claims {
  const Table<kCluster>& table;
  Shared& shared;
  Queue queue;  // its turn is the next to be told
  int32_t next;
  bool more = true;

  __device__ __forceinline__ void claim() {
    next = atomicAdd(table.args.counters, 1);
  }
  __device__ __forceinline__ void tell() {
    if (!more) return;
    const int32_t number = next * kCluster;
    more = number < table.size();
    if (more) claim();
    queue.wait_empty();
    for (uint32_t block = 0; block < kCluster; ++block) {
      Turn turn = {};
      turn.down = -1;
      if (more) turn = table[number + block];
      if (kCluster == 1) {
        shared.queue[queue.turn % kQueue] = turn;
        arrive(queue.filled());
        continue;
      }
      const uint32_t to = address_in(queue.stage(), block);
      const int4* words = reinterpret_cast<const int4*>(&turn);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16 * i),
                     "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w)
                     : "memory");
      arrive_in_cluster(address_in(shared_address(queue.filled()), block));
    }
    ++queue.turn;
  }
};

// 128 weight rows of a half, for this block or for both of the cluster.
template <bool kForBoth>
__device__ __forceinline__ void load_weights(const CUtensorMap& map, uint32_t to,
                                             uint64_t* mbarrier, int32_t k, int32_t row,
                                             int32_t half, int32_t expert) {
  if constexpr (kForBoth)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(shared_address(mbarrier)), "r"(k), "r"(row), "r"(half), "r"(expert),
        "h"(static_cast<uint16_t>(3))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(shared_address(mbarrier)), "r"(k), "r"(row), "r"(half), "r"(expert)
        : "memory");
}
__device__ __forceinline__ void copy_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void arrive_after_copies(uint64_t* mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(mbarrier))
               : "memory");
}

__device__ __forceinline__ int32_t steps_of(const ExpertsArgs& args, const Turn& turn) {
  return static_cast<int32_t>(turn.down ? args.F : args.D) / kLineBytes;
}

// One thread loads weights.
template <int kCluster>
__device__ __forceinline__ void load_all_weights(const ExpertsArgs& args, Stages ring,
                                                 Turns<kCluster> turns,
                                                 const CUtensorMap& gate_up,
                                                 const CUtensorMap& down) {
  constexpr int kHalfBytes = kWeightBytes / 2;
  for (;; turns.advance()) {
    const Turn& turn = turns.wait();
    if (turn.down < 0) return;
    const CUtensorMap* map = turn.down ? &down : &gate_up;
    const int32_t steps = steps_of(args, turn);
    // Halves are 128 rows apart, or a coordinate of their own.
    const int32_t row = turn.column * (turn.down ? 2 * kHalfRows : kHalfRows);
    const int32_t row_step = turn.down ? kHalfRows : 0;
    const int32_t half_step = turn.down ? 0 : 1;
    const int32_t expert = turn.expert;
    const bool together = turn.together;
    turns.done();
    const int32_t own = block_in_cluster<kCluster>();
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      ring.wait_empty();
      expect_bytes(ring.filled(), kWeightBytes);
      const int32_t k = step * kLineBytes;
      if (kCluster > 1 && together) {
        load_weights<true>(*map, ring.stage() + own * kHalfBytes, ring.filled(), k,
                           row + own * row_step, own * half_step, expert);
        continue;
      }
      load_weights<false>(*map, ring.stage(), ring.filled(), k, row, 0, expert);
      load_weights<false>(*map, ring.stage() + kHalfBytes, ring.filled(), k, row + row_step,
                          half_step, expert);
    }
  }
}

// All columns of h of a token tile are there.
__device__ __forceinline__ void await_h(const ExpertsArgs& args, const Turn& turn,
                                        int32_t wanted) {
  const int32_t* at = args.counters + 1 + turn.token_tile;
  int32_t seen = 0;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  } while (seen < wanted);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// One thread loads rows, and the scales of h.
template <int kCluster>
__device__ __forceinline__ void load_all_rows(const ExpertsArgs& args, Shared& shared, Stages ring,
                                              Turns<kCluster> turns, const RowMaps& rows) {
  for (;; turns.advance()) {
    const Turn& turn = turns.wait();
    if (turn.down < 0) return;
    const bool down = turn.down;
    const int32_t steps = steps_of(args, turn);
    const int32_t width = turn.width;
    const int32_t row = turn.row;
    const CUtensorMap* large = &rows.maps[down ? 2 : 0];
    const int32_t across_h = static_cast<int32_t>(args.F) / kHalfRows;
    const float* h_scales = args.h_scales + int64_t{turn.token_tile} * across_h * kMostTokens;
    if (down) await_h(args, turn, across_h);
    turns.done();
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      ring.wait_empty();
      expect_bytes(ring.filled(), width * (kLineBytes + (down ? 4 : 0)));
      uint32_t to = ring.stage() + kWeightBytes;
      int32_t line = 0;
      for (; line + kLargeBox <= width; line += kLargeBox, to += kLargeBox * kLineBytes)
        load_box(*large, to, ring.filled(), step * kLineBytes, row + line, 0);
      for (; line < width; line += kTokenStep, to += kTokenStep * kLineBytes)
        load_box(large[1], to, ring.filled(), step * kLineBytes, row + line, 0);
      if (!down) continue;
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_address(shared.scales[ring.turn % kStages])),
          "l"(h_scales), "r"(width * 4), "r"(shared_address(ring.filled()))
          : "memory");
      h_scales += kMostTokens;
    }
  }
}

// A warp loads the other scales: of rows, and of both weight blocks.
template <int kCluster>
__device__ __forceinline__ void load_all_scales(const ExpertsArgs& args, Shared& shared,
                                                Stages ring, Turns<kCluster> turns) {
  const int32_t lane = threadIdx.x % 32;
  for (;; turns.advance()) {
    const Turn& turn = turns.wait();
    if (turn.down < 0) return;
    const int32_t steps = steps_of(args, turn);
    const int32_t count = turn.down ? 0 : turn.count;
    // Weight blocks are those of the halves, or, where gates and ups lie by turns, of the
    // warpgroups.
    const float* weight_scales = turn.down ? args.down_scales : args.gate_up_scales;
    const int32_t block_rows = static_cast<int32_t>(turn.down ? args.D : 2 * args.F) / kHalfRows;
    int32_t block_row = 2 * turn.column + lane;
    if (!turn.down && !args.interleaved) block_row = turn.column + lane * (block_rows / 2);
    block_row = min(block_row, block_rows - 1);
    weight_scales += (int64_t{turn.expert} * block_rows + block_row) * steps;
    const float* row_scales =
        args.row_scales_NB + (int64_t{turn.row} + lane) * args.row_scales_stride;
    __syncwarp();
    if (lane == 0) turns.done();
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      ring.wait_empty();
      float* scales = shared.scales[ring.turn % kStages] + lane;
      if (lane < 2) copy_word(scales + kMostTokens, weight_scales + step);
      const float* from = row_scales + step;
      for (int32_t t = lane; t < count; t += 32) {
        copy_word(scales, from);
        scales += 32;
        from += 32 * args.row_scales_stride;
      }
      arrive_after_copies(ring.filled());
    }
  }
}

// A warp claims tiles, some ahead, and says that columns of h are written, while the others go on.
template <int kCluster>
__device__ __forceinline__ void claim_and_announce(const ExpertsArgs& args,
                                                   const Table<kCluster>& table, Shared& shared,
                                                   Turns<kCluster> turns) {
  const bool claims = block_in_cluster<kCluster>() == 0 && threadIdx.x % 32 == 0;
  const int32_t across_h = static_cast<int32_t>(args.F) / kHalfRows;
  Claims<kCluster> claimed{table, shared, turns.queue, 0};
  if (claims) {
    claimed.claim();
    claimed.tell();
    claimed.tell();
  }
  for (;; turns.advance()) {
    __syncwarp();
    const Turn& turn = turns.wait();
    const int32_t down = turn.down;
    const int32_t token_tile = turn.token_tile;
    const bool real = turn.column < across_h;
    __syncwarp();
    if (down < 0) return;
    if (threadIdx.x % 32 == 0) turns.done();
    if (!down) barrier(kWritten, kMultipliers + 32);
    if (!down && real && threadIdx.x % 32 == 0) {
      __threadfence();
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(args.counters + 1 + token_tile)
                   : "memory");
    }
    if (claims) claimed.tell();
  }
}

template <int kCount>
__device__ __forceinline__ void start_products(uint32_t a, uint32_t b, float (&block)[kCount]) {
  wgmma_begin();
  wgmma<Factors::kFirstFp8>(block, wgmma_operand(a), wgmma_operand(b));
#pragma unroll
  for (int k = 32; k < kLineBytes; k += 32)
    wgmma<Factors::kFp8>(block, wgmma_operand(a + k), wgmma_operand(b + k));
  wgmma_commit();
}
template <int kCount>
__device__ __forceinline__ void promote(float (&sums)[kCount], float (&block)[kCount],
                                        const float* scales, float weight) {
#pragma unroll
  for (float& sum : block) asm volatile("" : "+f"(sum)::"memory");  // nothing reads it before
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float2 scale = *reinterpret_cast<const float2*>(scales + 2 * i);
    scale.x *= weight;
    scale.y *= weight;
    sums[i] = fmaf(scale.x, block[i], sums[i]);
    sums[i + 1] = fmaf(scale.y, block[i + 1], sums[i + 1]);
    sums[i + 2] = fmaf(scale.x, block[i + 2], sums[i + 2]);
    sums[i + 3] = fmaf(scale.y, block[i + 3], sums[i + 3]);
  }
}

__device__ __forceinline__ float rounded_bf16(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// Gates and ups of a thread become h: fp8 with a scale for the 128 columns of each token.
template <int kCount>
__device__ __forceinline__ void write_h(const ExpertsArgs& args, Shared& shared, const Turn& turn,
                                        float (&gates)[kCount], const float (&ups)[kCount]) {
  constexpr int kWidth = 2 * kCount;
  const int32_t group = threadIdx.x / kWarpgroup;
  const int32_t warp = threadIdx.x % kWarpgroup / 32;
  const int32_t lane = threadIdx.x % 32;
  auto* most = reinterpret_cast<float*>(shared.leaving);  // [kMathWarps, kMostTokens]
  // The activation of products in bf16, in place.
  const int32_t h_column = turn.column * kHalfRows + group * 64 + warp * 16 + lane / 4;
  float gate_bias[2] = {};
  float up_bias[2] = {};
  if (args.gate_up_bias && turn.column * kHalfRows < args.F) {
    const __nv_bfloat16* bias = args.gate_up_bias + int64_t{turn.expert} * 2 * args.F;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t column = h_column + 8 * j;
      gate_bias[j] = __bfloat162float(bias[args.interleaved ? 2 * column : column]);
      up_bias[j] = __bfloat162float(bias[args.interleaved ? 2 * column + 1 : args.F + column]);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    gates[i] = gated_fast(rounded_bf16(gates[i]) + gate_bias[i / 2 % 2],
                          rounded_bf16(ups[i]) + up_bias[i / 2 % 2], args.gating);
  barrier(kAllMultipliers, kMultipliers);  // what lay there has been read
  // The largest finite value of each token.
  auto finite = [](float value) {
    value = fabsf(value);
    return value < INFINITY ? value : 0.0f;
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float2 largest = {fmaxf(finite(gates[i]), finite(gates[i + 2])),
                      fmaxf(finite(gates[i + 1]), finite(gates[i + 3]))};
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(kAllLanes, largest.x, offset));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(kAllLanes, largest.y, offset));
    }
    if (lane < 4)
      *reinterpret_cast<float2*>(most + (group * 4 + warp) * kMostTokens + 2 * i + 2 * lane) =
          largest;
  }
  barrier(kAllMultipliers, kMultipliers);
  if (threadIdx.x < kWidth) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kMathWarps; ++i)
      largest = fmaxf(largest, most[i * kMostTokens + threadIdx.x]);
    const float scale = scale_for(largest);
    constexpr float kSmall = 0x1p-64f;  // as in to_fp8()
    const float up = scale < kSmall ? 1.0f / kSmall : 1.0f;
    const float upscaled = scale * up;
    shared.divisors[threadIdx.x] = {upscaled, 1.0f / upscaled, up, scale};
    if (static_cast<int32_t>(threadIdx.x) < turn.count && turn.column * kHalfRows < args.F)
      args.h_scales[(turn.token_tile * (args.F / kHalfRows) + turn.column) * kMostTokens +
                    threadIdx.x] = scale;
  }
  barrier(kAllMultipliers, kMultipliers);
  auto divided = [](float value, const Divisor& by) {
    const float first = value * by.up * by.inverse;
    const float second = corrected(first, value * by.up, by.upscaled, by.inverse);
    return is_nan(second) ? first : second;
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const Divisor& even = shared.divisors[2 * i + 2 * (lane % 4)];
    const Divisor& odd = shared.divisors[2 * i + 2 * (lane % 4) + 1];
    // Bytes of rows r and r + 8 of a token make 16 bits of an 8 x 8 matrix, which is turned.
    const uint32_t low = __nv_cvt_float2_to_fp8x2(
        {divided(gates[i], even), divided(gates[i + 2], even)}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(
        {divided(gates[i + 1], odd), divided(gates[i + 3], odd)}, __NV_SATFINITE, __NV_E4M3);
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(turned)
                 : "r"(low | high << 16));
    const uint32_t both = __byte_perm(turned, 0, 0x3120);  // of rows r, r + 1; r + 8, r + 9
    const int32_t token = 2 * i + lane / 4;
    const int32_t part = group * 4 + warp;
    char* at = shared.leaving + in_box(token, part) + 2 * (lane % 4);
    *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(both);
    *reinterpret_cast<uint16_t*>(at + 8) = static_cast<uint16_t>(both >> 16);
  }
  barrier(kAllMultipliers, kMultipliers);
  const int32_t part = threadIdx.x % 8;
  uint8_t* h = args.h_NF + turn.row * args.F + turn.column * kHalfRows + part * 16;
  const int32_t count = turn.column * kHalfRows < args.F ? turn.count : 0;
  for (int32_t line = threadIdx.x / 8; line < count; line += kMultipliers / 8)
    *reinterpret_cast<uint4*>(h + line * args.F) =
        *reinterpret_cast<const uint4*>(shared.leaving + in_box(line, part));
  asm volatile("fence.proxy.async.global;" ::: "memory");
  arrive_at(kWritten, kMultipliers + 32);
  barrier(kAllMultipliers, kMultipliers);
}

// A warpgroup's 64 outputs of both halves leave as rows.
template <int kCount>
__device__ __forceinline__ void write_outputs(const ExpertsArgs& args, Shared& shared,
                                              const Turn& turn, int32_t half,
                                              const float (&sums)[kCount]) {
  using Part = Vector<__nv_bfloat16, 8>;
  const int32_t group = threadIdx.x / kWarpgroup;
  const int32_t part = threadIdx.x % 8;
  const int32_t first = (2 * turn.column + half) * kHalfRows;
  if (first >= args.D) return;
  char* leaving = shared.leaving + group * kLeavingOfGroup;
  const int64_t column = first + 64 * group + 8 * part;
  __nv_bfloat16* out = args.out_ND + turn.row * args.D + column;
  Part bias = {};
  if (args.down_bias)
    bias = *reinterpret_cast<const Part*>(args.down_bias + turn.expert * args.D + column);
#pragma unroll
  for (int from = 0; from < 2 * kCount; from += kOutputsAtOnce) {
    barrier(kOfGroup + group, kWarpgroup);  // what lay there has been read
    store_turned<kOutputsAtOnce>(shared_address(leaving), sums, from);
    barrier(kOfGroup + group, kWarpgroup);
    for (int32_t line = threadIdx.x % kWarpgroup / 8;
         line < min(turn.count - from, kOutputsAtOnce); line += kWarpgroup / 8) {
      Part products = *reinterpret_cast<const Part*>(leaving + in_box(line, part));
      if (args.down_bias) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          products.at[i] =
              from_float<__nv_bfloat16>(to_float(products.at[i]) + to_float(bias.at[i]));
      }
      *reinterpret_cast<Part*>(out + (from + line) * args.D) = products;
    }
  }
}

template <int kCluster, int kWidth = kTokenStep>
__device__ __forceinline__ void multiply(const ExpertsArgs& args, Shared& shared, const Turn& turn,
                                         Stages& ring) {
  if constexpr (kWidth < kMostTokens)
    if (turn.width > kWidth)
      return multiply<kCluster, kWidth + kTokenStep>(args, shared, turn, ring);
  constexpr bool kByTurns = PINGPONG && kWidth >= 64;
  const int32_t group = threadIdx.x / kWarpgroup;
  const int32_t steps = static_cast<int32_t>(turn.down ? args.F : args.D) / kLineBytes;
  const bool interleaved = args.interleaved && !turn.down;
  const int32_t first_scale = interleaved ? group : 0;
  const int32_t second_scale = interleaved ? group : 1;
  float first[kWidth / 2] = {};
  float second[kWidth / 2] = {};
  float block[kWidth / 2];
  for (int32_t step = 0; step < steps; ++step) {
    ring.wait_filled();
    const uint32_t a = ring.stage() + group * kBoxBytes;
    const uint32_t b = ring.stage() + kWeightBytes;
    const float* weight_scales = shared.scales[ring.turn % kStages] + kMostTokens;
    const float* scales = shared.scales[ring.turn % kStages] + 2 * (threadIdx.x % 4);
    if (kByTurns) barrier(kTurnOf + group, kMultipliers);
    start_products(a, b, block);
    if (kByTurns)
      arrive_at(kTurnOf + (group ^ 1), kMultipliers);
    const float first_weight = weight_scales[first_scale];
    const float second_weight = weight_scales[second_scale];
    wgmma_wait<0>();
    promote(first, block, scales, first_weight);
    if (kByTurns) barrier(kTurnOf + group, kMultipliers);
    start_products(a + 2 * kBoxBytes, b, block);
    if (kByTurns)
      arrive_at(kTurnOf + (group ^ 1), kMultipliers);
    wgmma_wait<0>();
    promote(second, block, scales, second_weight);
    release_stage<kCluster>(ring);
  }
  if (turn.down) {
    write_outputs(args, shared, turn, 0, first);
    write_outputs(args, shared, turn, 1, second);
  } else {
    write_h(args, shared, turn, first, second);
  }
}

#endif

template <int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsArgs args,
                   const __grid_constant__ CUtensorMap gate_up,
                   const __grid_constant__ CUtensorMap down,
                   const __grid_constant__ RowMaps rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char given[];
  Shared& shared = *reinterpret_cast<Shared*>(given);
  // A stage is filled by the threads for weights and rows, and by each lane for scales.
  Stages ring(shared.stages, shared.stage_mbarriers, 2 + 32, kMathWarps * kCluster);
  Turns<kCluster> turns(shared);
  const Table<kCluster> table(args, shared.table);
  sync_cluster<kCluster>();
  wait_for_predecessor();
  let_successor_start();
  table.build();
  const int32_t warp = threadIdx.x / 32;
  const bool first_lane = threadIdx.x % 32 == 0;
#ifdef CLOCKS
  long long cycles = clock64();
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
#endif
  if (warp >= kMathWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kLoadsWeights) {
      if (first_lane) load_all_weights<kCluster>(args, ring, turns, gate_up, down);
    } else if (warp == kLoadsRows) {
      if (first_lane) load_all_rows<kCluster>(args, shared, ring, turns, rows);
    } else if (warp == kLoadsScales) {
      load_all_scales<kCluster>(args, shared, ring, turns);
    } else {
      claim_and_announce<kCluster>(args, table, shared, turns);
    }
    __syncwarp();
    sync_cluster<kCluster>();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if (PINGPONG && threadIdx.x >= kWarpgroup) arrive_at(kTurnOf, kMultipliers);
  for (;; turns.advance()) {
    const Turn& turn = turns.wait();
    if (turn.down < 0) break;
    multiply<kCluster>(args, shared, turn, ring);
    __syncwarp();
    if (first_lane) turns.done();
  }
#ifdef CLOCKS
  if (threadIdx.x == 0 && args.clocks) {
    uint64_t end;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
    args.clocks[2 * blockIdx.x] = clock64() - cycles;
    args.clocks[2 * blockIdx.x + 1] = end - ns;
  }
#endif
  sync_cluster<kCluster>();
#endif
}

// Starts early, as its successor does.
__global__ void clear_counters(int32_t* counters, int32_t count) {
  wait_for_predecessor();
  let_successor_start();
  const int32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) counters[i] = 0;
}

// Weights [e, halves, rows, k], whose halves may lie by turns, in boxes of 128 rows.
cudaError_t describe_weights(CUtensorMap& map, const void* at, int64_t k, int64_t rows,
                             int64_t halves, int64_t e, bool interleaved) {
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                         cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  cuuint64_t sizes[] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows),
                        static_cast<cuuint64_t>(halves), static_cast<cuuint64_t>(e)};
  cuuint64_t strides[] = {static_cast<cuuint64_t>(interleaved ? halves * k : k),
                          static_cast<cuuint64_t>(interleaved ? k : rows * k),
                          static_cast<cuuint64_t>(halves * rows * k)};
  cuuint32_t box[] = {kLineBytes, kHalfRows, 1, 1};
  cuuint32_t steps[] = {1, 1, 1, 1};
  CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(at), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

int64_t token_tiles(int64_t N, int64_t e) { return 2 * e + N / kMostTokens; }
int64_t h_scales_size(int64_t N, int64_t F, int64_t e) {
  return token_tiles(N, e) * (F / kHalfRows) * kMostTokens;
}

cudaError_t experts(const ExpertsArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (device.major != 9) return cudaErrorNoKernelImageForDevice;
  const int64_t e = args.segments.num_local_experts;
  if (args.N == 0 || e == 0) return cudaSuccess;
  CUtensorMap gate_up, down;
  RowMaps rows;
  if (cudaError_t error = describe_weights(gate_up, args.gate_up_e2FD, args.D, args.F, 2, e,
                                           args.interleaved))
    return error;
  if (cudaError_t error =
          describe_weights(down, args.down_eDF, args.F, args.D, 1, e, false))
    return error;
  for (int i = 0; i < 4; ++i)
    if (cudaError_t error =
            describe(rows.maps[i], i < 2 ? args.rows_ND : args.h_NF, i < 2 ? args.D : args.F,
                     args.N, 1, i % 2 ? kTokenStep : kLargeBox, 1))
      return error;
  const int64_t counters = 1 + token_tiles(args.N, e);
  if (cudaError_t error = launch(clear_counters, ceil_div(counters, 1024), 1024, 0, stream,
                                 args.counters, static_cast<int32_t>(counters)))
    return error;
  auto* kernel = args.cluster == 2 ? experts_kernel<2> : experts_kernel<1>;
  if (cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), device.index))
    return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = args.cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(device.multiprocessors / args.cluster * args.cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes(e);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args, gate_up, down, rows);
}

}  // namespace epmoe::cuda
