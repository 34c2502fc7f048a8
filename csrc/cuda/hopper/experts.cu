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
// Warps: two warpgroups multiply, one warp loads weights, one loads rows, one announces h.
constexpr int kMultipliers = 2 * kWarpgroup;
constexpr int kMathWarps = kMultipliers / 32;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kWeightsWarp = kMathWarps;
constexpr int kRowsWarp = kMathWarps + 1;
constexpr int kAnnouncingWarp = kMathWarps + 2;
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
  int32_t unused;
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

// Which tile has a number. Tiles of gate and up come first.
struct Table {
  int32_t e, across_h, across_out;
  int32_t* first;  // [e + 1]: token tiles of the experts before
  int32_t* begin;  // [e]
  int32_t* count;  // [e]

  __device__ __forceinline__ Table(const ExpertsArgs& args, int32_t* shared)
      : e(args.segments.num_local_experts),
        across_h(static_cast<int32_t>(args.F) / kHalfRows),
        across_out(ceil_of(static_cast<int32_t>(args.D), 2 * kHalfRows)),
        first(shared),
        begin(shared + e + 1),
        count(shared + 2 * e + 1) {}

  // The whole block builds it.
  __device__ __forceinline__ void build(const ExpertsArgs& args) const {
    for (int32_t i = threadIdx.x; i < e; i += kThreads) {
      SegmentRows rows = rows_of_expert(args.segments, args.N, i);
      begin[i] = rows.begin;
      count[i] = rows.count;
      first[i] = ceil_of(rows.count, kMostTokens);
    }
    __syncthreads();
    if (threadIdx.x < 32) lengths_to_starts(first, e, 1);
    __syncthreads();
  }
  __device__ __forceinline__ Turn operator[](int32_t number) const {
    const int32_t all = first[e];
    Turn turn = {};
    turn.down = number >= all * across_h;
    if (turn.down) number -= all * across_h;
    const int32_t across = turn.down ? across_out : across_h;
    turn.expert = segment_at(first, e, number / across);
    const int32_t parts = first[turn.expert + 1] - first[turn.expert];
    const int32_t i = number - first[turn.expert] * across;
    const int32_t part = i % parts;
    turn.column = i / parts;
    turn.token_tile = first[turn.expert] + part;
    turn.width = ceil_of(ceil_of(count[turn.expert], parts), kTokenStep) * kTokenStep;
    const int32_t before = part * turn.width;
    turn.row = begin[turn.expert] + before;
    turn.count = min(turn.width, count[turn.expert] - before);
    return turn;
  }
  __device__ __forceinline__ int32_t size() const { return first[e] * (across_h + across_out); }
};

__device__ __forceinline__ void load_weights(const CUtensorMap& map, uint32_t to,
                                             uint64_t* mbarrier, int32_t k, int32_t row,
                                             int32_t expert) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(mbarrier)), "r"(k), "r"(row), "r"(0), "r"(expert)
      : "memory");
}
__device__ __forceinline__ void expect_more(uint64_t* mbarrier, int32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(
                   shared_address(mbarrier)),
               "r"(bytes)
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

// One thread claims tiles, tells the other warps, and loads weights.
__device__ __forceinline__ void claim_and_load(const ExpertsArgs& args, const Table& table,
                                               Shared& shared, Stages ring, Queue queue,
                                               const CUtensorMap& gate_up,
                                               const CUtensorMap& down) {
  const int32_t size = table.size();
#ifdef STATIC_TURNS
  int32_t next = blockIdx.x;
#else
  int32_t next = atomicAdd(args.counters, 1);
#endif
  for (;; ++queue.turn) {
    Turn turn = {};
    turn.down = -1;
    if (next < size) {
      turn = table[next];
#ifdef STATIC_TURNS
      next += gridDim.x;
#else
      next = atomicAdd(args.counters, 1);
#endif
    }
    queue.wait_empty();
    shared.queue[queue.turn % kQueue] = turn;
    arrive(queue.filled());
    if (turn.down < 0) return;
    const CUtensorMap& map = turn.down ? down : gate_up;
    const int32_t steps = static_cast<int32_t>(turn.down ? args.F : args.D) / kLineBytes;
    const int32_t row = turn.column * (turn.down ? 2 * kHalfRows : kHalfRows);
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      ring.wait_empty();
      expect_bytes(ring.filled(), kWeightBytes);
      load_weights(map, ring.stage(), ring.filled(), step * kLineBytes, row, turn.expert);
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

// A warp loads rows and scales.
__device__ __forceinline__ void load_rows(const ExpertsArgs& args, const Table& table,
                                          Shared& shared, Stages ring, Queue queue,
                                          const CUtensorMap (&maps)[4]) {
  const int32_t lane = threadIdx.x % 32;
  for (;; ++queue.turn) {
    queue.wait_filled();
    const Turn turn = shared.queue[queue.turn % kQueue];
    __syncwarp();
    ++queue.turn;
    queue.release(1);
    --queue.turn;
    if (turn.down < 0) return;
    const int32_t steps = static_cast<int32_t>(turn.down ? args.F : args.D) / kLineBytes;
    const CUtensorMap& large = maps[turn.down ? 2 : 0];
    const CUtensorMap& small = maps[turn.down ? 3 : 1];
    if (turn.down && lane == 0) await_h(args, turn, table.across_h);
    __syncwarp();
    // Scales of both weight blocks: of the halves, or, where gates and ups lie by turns, of the
    // warpgroups.
    const float* weight_scales = args.gate_up_scales;
    int32_t block_rows = static_cast<int32_t>(2 * args.F) / kHalfRows;
    int32_t block_row = turn.column + lane * table.across_h;
    if (args.interleaved) block_row = 2 * turn.column + lane;
    if (turn.down) {
      weight_scales = args.down_scales;
      block_rows = static_cast<int32_t>(args.D) / kHalfRows;
      block_row = 2 * turn.column + lane;
    }
    block_row = min(block_row, block_rows - 1);
    weight_scales += (int64_t{turn.expert} * block_rows + block_row) * steps;
    const float* h_scales =
        args.h_scales + int64_t{turn.token_tile} * table.across_h * kMostTokens;
    for (int32_t step = 0; step < steps; ++step, ++ring.turn) {
      ring.wait_empty();
      float* scales = shared.scales[ring.turn % kStages];
      const uint32_t to = ring.stage() + kWeightBytes;
      if (lane < 2) copy_word(scales + kMostTokens + lane, weight_scales + step);
      if (!turn.down)
        for (int32_t t = lane; t < turn.width; t += 32) {
          const int64_t row = min(turn.row + t, static_cast<int32_t>(args.N) - 1);
          copy_word(scales + t, args.row_scales_NB + row * args.row_scales_stride + step);
        }
      if (lane == 0) {
        expect_more(ring.filled(), turn.width * (kLineBytes + (turn.down ? 4 : 0)));
        int32_t line = 0;
        for (; line + kLargeBox <= turn.width; line += kLargeBox)
          load_box(large, to + line * kLineBytes, ring.filled(), step * kLineBytes,
                   turn.row + line, 0);
        for (; line < turn.width; line += kTokenStep)
          load_box(small, to + line * kLineBytes, ring.filled(), step * kLineBytes,
                   turn.row + line, 0);
        if (turn.down)
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
              "[%3];" ::"r"(shared_address(scales)),
              "l"(h_scales + step * kMostTokens), "r"(turn.width * 4),
              "r"(shared_address(ring.filled()))
              : "memory");
      }
      __syncwarp();
      arrive_after_copies(ring.filled());
    }
  }
}

// A warp says that columns of h are written, while the others go on.
__device__ __forceinline__ void announce_h(const ExpertsArgs& args, Shared& shared, Queue queue) {
  for (;;) {
    queue.wait_filled();
    const Turn turn = shared.queue[queue.turn % kQueue];
    __syncwarp();
    ++queue.turn;
    queue.release(1);
    if (turn.down < 0) return;
    if (turn.down) continue;
    barrier(kWritten, kMultipliers + 32);
    if (threadIdx.x % 32 == 0) {
      __threadfence();
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(args.counters + 1 +
                                                                   turn.token_tile)
                   : "memory");
    }
    __syncwarp();
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
  if (args.gate_up_bias) {
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
    if (static_cast<int32_t>(threadIdx.x) < turn.count)
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
  for (int32_t line = threadIdx.x / 8; line < turn.count; line += kMultipliers / 8)
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

template <int kWidth = kTokenStep>
__device__ __forceinline__ void multiply(const ExpertsArgs& args, Shared& shared, const Turn& turn,
                                         Stages& ring) {
  if constexpr (kWidth < kMostTokens)
    if (turn.width > kWidth)
      return multiply<kWidth + kTokenStep>(args, shared, turn, ring);
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
    ++ring.turn;
    ring.release(1);
  }
  if (turn.down) {
    write_outputs(args, shared, turn, 0, first);
    write_outputs(args, shared, turn, 1, second);
  } else {
    write_h(args, shared, turn, first, second);
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsArgs args,
                   const __grid_constant__ CUtensorMap gate_up,
                   const __grid_constant__ CUtensorMap down,
                   const __grid_constant__ RowMaps rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char given[];
  Shared& shared = *reinterpret_cast<Shared*>(given);
  // A stage is filled by the warp of weights, and by each lane of the warp of rows.
  Stages ring(shared.stages, shared.stage_mbarriers, 1 + 32, kMathWarps);
  Queue queue(reinterpret_cast<const char*>(shared.queue), shared.queue_mbarriers, 1,
              kMathWarps + 2);
  Table table(args, shared.table);
  wait_for_predecessor();
  let_successor_start();
  table.build(args);
  const int32_t warp = threadIdx.x / 32;
#ifdef CLOCKS
  long long cycles = clock64();
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
#endif
  if (warp >= kMathWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kWeightsWarp && threadIdx.x % 32 == 0)
      claim_and_load(args, table, shared, ring, queue, gate_up, down);
    else if (warp == kRowsWarp)
      load_rows(args, table, shared, ring, queue, rows.maps);
    else if (warp == kAnnouncingWarp)
      announce_h(args, shared, queue);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if (PINGPONG && threadIdx.x >= kWarpgroup)
    arrive_at(kTurnOf, kMultipliers);
  for (;;) {
    queue.wait_filled();
    const Turn& turn = shared.queue[queue.turn % kQueue];
    if (turn.down < 0) break;
    multiply(args, shared, turn, ring);
    __syncwarp();
    ++queue.turn;
    queue.release(1);
  }
#ifdef CLOCKS
  if (threadIdx.x == 0 && args.clocks) {
    uint64_t end;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
    args.clocks[2 * blockIdx.x] = clock64() - cycles;
    args.clocks[2 * blockIdx.x + 1] = end - ns;
  }
#endif
#endif
}

// Weights [e, halves, rows, k], whose halves may lie by turns, in boxes of both halves.
cudaError_t describe_weights(CUtensorMap& map, const void* at, int64_t k, int64_t rows,
                             int64_t halves, int64_t e, bool interleaved, int box_rows) {
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
  cuuint32_t box[] = {kLineBytes, static_cast<cuuint32_t>(box_rows),
                      static_cast<cuuint32_t>(halves), 1};
  cuuint32_t steps[] = {1, 1, 1, 1};
  CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(at), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

int64_t token_tiles(int64_t N, int64_t e) { return e + N / kMostTokens; }
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
                                           args.interleaved, kHalfRows))
    return error;
  if (cudaError_t error =
          describe_weights(down, args.down_eDF, args.F, args.D, 1, e, false, 2 * kHalfRows))
    return error;
  for (int i = 0; i < 4; ++i)
    if (cudaError_t error =
            describe(rows.maps[i], i < 2 ? args.rows_ND : args.h_NF, i < 2 ? args.D : args.F,
                     args.N, 1, i % 2 ? kTokenStep : kLargeBox, 1))
      return error;
  if (cudaError_t error = cudaMemsetAsync(
          args.counters, 0, (1 + token_tiles(args.N, e)) * sizeof(int32_t), stream))
    return error;
  return launch(experts_kernel, device.multiprocessors, kThreads, shared_bytes(e), stream, args,
                gate_up, down, rows);
}

}  // namespace epmoe::cuda
