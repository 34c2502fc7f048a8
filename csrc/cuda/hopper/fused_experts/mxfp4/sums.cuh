// The sums of a tile with weights in MXFP4. A thread widens codes in registers, from where the
// tensor core takes its first factor.
//
// e2m1 becomes e4m3 by moving bits: its sign, and its exponent and mantissa to where e4m3 has the
// last two bits of the exponent and the first of the mantissa. So all values are 2^-6 of what they
// were, 0.5 too, which is subnormal in both. Bytes with even codes come before those with odd ones,
// and rows lie in that order.
//
// A product of 32 along k is scaled in fp32 by its weight row, the four products of a step are
// added, and then scaled by their token and added: in one order, for any number of tokens.
#pragma once
#include "cuda/hopper/fused_experts/mxfp4/loads.cuh"
#include "cuda/hopper/fused_experts/sums.cuh"

namespace epmoe::cuda::fused {

// --- Codes ---

__device__ __forceinline__ uint32_t even_codes(uint32_t eight) {
  return eight << 4 & 0x80808080 | eight << 2 & 0x1c1c1c1c;
}
__device__ __forceinline__ uint32_t odd_codes(uint32_t eight) {
  return eight & 0x80808080 | eight >> 2 & 0x1c1c1c1c;
}

__device__ __forceinline__ uint32_t load_4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// Factors of a product, of a group each.
using Weights = uint32_t[kGroupsOfStep][4];

// This thread's codes of a step, of rows `row` and `row + 8`, become factors.
__device__ __forceinline__ void widen(uint32_t stage, int32_t row, Weights& weights) {
  constexpr uint32_t kToNextRow = 8 * kWeightLineBytes<Mxfp4>;
  // Bits 4 and 5 are swizzled.
  const uint32_t at =
      stage + row * kWeightLineBytes<Mxfp4> + row / 2 % 4 * 16 + threadIdx.x % 4 * 4;
  uint32_t codes[kGroupsOfStep][2];
#pragma unroll
  for (int j = 0; j < kGroupsOfStep; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) codes[j][i] = load_4((at ^ 16 * j) + i * kToNextRow);
#pragma unroll
  for (int j = 0; j < kGroupsOfStep; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weights[j][i] = even_codes(codes[j][i]);
      weights[j][2 + i] = odd_codes(codes[j][i]);
    }
}

// --- Scales ---

// Of this thread's two weight rows, for kSteps of a batch: exponents of fp32, a byte for each
// group, of what the scales are times 2^6, which codes have lost.
template <int kSteps>
struct Exponents {
  static constexpr uint32_t kLost = 0x06060606;
  static constexpr uint32_t kLarge = 0x80808080;
  uint32_t of[kSteps][2];

  // `window` is that of the first row, `before` the bytes in front of the batch. `groups` are left
  // in a row. `nan`: a row has a scale of NaN.
  __device__ __forceinline__ Exponents(uint32_t window, int32_t before, int32_t groups,
                                       bool (&nan)[2]) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = window + before / 4 * 4 + i * 8 * kWindowBytes;
      uint32_t words[kSteps + 1];
#pragma unroll
      for (int s = 0; s <= kSteps; ++s) words[s] = load_4(at + 4 * s);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        of[s][i] = __funnelshift_r(words[s], words[s + 1], before % 4 * 8);
        any |= of[s][i];
      }
    }
    if (groups < kSteps * kGroupsOfStep) leave_out(groups);
    if (any & kLarge) {
      take_large(nan);
      return;
    }
#pragma unroll
    for (auto& rows : of)
#pragma unroll
      for (uint32_t& scales : rows) scales += kLost;
  }

  __device__ __forceinline__ float factor(int step, int row, int group) const {
    const int left = 23 - 8 * group;
    const uint32_t scales = of[step][row];
    return __uint_as_float((left > 0 ? scales << left : scales >> -left) & 0x7f800000);
  }

 private:
  // Groups behind the end of k have codes of 0, and count as little as can be.
  __device__ __forceinline__ void leave_out(int32_t groups) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int32_t real = min(max(groups - s * kGroupsOfStep, 0), kGroupsOfStep);
      const uint32_t mask = real == kGroupsOfStep ? ~0u : (1u << 8 * real) - 1;
      of[s][0] &= mask;
      of[s][1] &= mask;
    }
  }
  // Some scale is at least 2. Above 2^121 it counts as Inf.
  __device__ __forceinline__ void take_large(bool (&nan)[2]) {
#pragma unroll
    for (auto& rows : of)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        nan[i] |= __vcmpeq4(rows[i], ~0u) != 0;
        rows[i] = __vaddus4(rows[i], kLost);
      }
  }
};

// --- Sums ---

// Where this thread's scales lie in a window, those of a tile: `before` bytes in front of those of
// a batch, and `groups` in a row.
struct ScalesOfThread {
  int32_t before, groups;
  uint32_t at;

  __device__ __forceinline__ ScalesOfThread(const FewRowsArgs& args, const Tile& tile, int32_t row)
      : before(ScaleRow(args, tile, row).before()),
        groups(ScaleRow::bytes(args, tile)),
        at(row * kWindowBytes) {}
};

// The first of this thread's two weight rows, which are 8 apart.
__device__ __forceinline__ int32_t row_of_thread(const Tile& tile) {
  // The shuffle tells the compiler that a warp has one group.
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const int32_t first_row = tile.down ? 64 * group : group % 2 * 128 + group / 2 * 64;
  return first_row + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
}

// Starts products of some groups of 32.
template <int kFirst, int kCount, int kSums>
__device__ __forceinline__ void start(float (&products)[kCount][kSums], Weights& weights,
                                      uint64_t tokens) {
  constexpr int kUnit = 16;  // bytes, of an operand
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    wgmma_of_registers(products[i], weights[kFirst + i], tokens + (kFirst + i) * kGroup / kUnit);
  wgmma_commit();
}

// Nothing reads products or overwrites their factors before.
template <int kFirst, int kCount, int kSums>
__device__ __forceinline__ void finish(float (&products)[kCount][kSums], Weights& weights) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (float& product : products[i]) asm volatile("" : "+f"(product)::"memory");
#pragma unroll
    for (uint32_t& four : weights[kFirst + i]) asm volatile("" : "+r"(four)::"memory");
  }
}

// Adds products of groups, each times its factor.
template <int kFirst, int kCount, int kSums, int kSteps>
__device__ __forceinline__ void scale(float (&scaled)[kSums],
                                      const float (&products)[kCount][kSums],
                                      const Exponents<kSteps>& exponents, int step) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float factors[] = {exponents.factor(step, 0, kFirst + i),
                             exponents.factor(step, 1, kFirst + i)};
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
      const float factor = factors[c / 2 % 2];
      scaled[c] = kFirst + i ? fmaf(products[i][c], factor, scaled[c]) : products[i][c] * factor;
    }
  }
}

// Adds sums of a step, times the scales of tokens.
template <int kCount>
__device__ __forceinline__ void add_step(float* sums, const float (&step)[kCount],
                                         const float* token_scales) {
#pragma unroll
  for (int c = 0; c < kCount; c += 4) {
    const float2 scale = *reinterpret_cast<const float2*>(token_scales + 2 * c);
    sums[c] = fmaf(scale.x, step[c], sums[c]);
    sums[c + 1] = fmaf(scale.y, step[c + 1], sums[c + 1]);
    sums[c + 2] = fmaf(scale.x, step[c + 2], sums[c + 2]);
    sums[c + 3] = fmaf(scale.y, step[c + 3], sums[c + 3]);
  }
}

template <int kCount>
__device__ __forceinline__ void spoil(float (&sums)[kCount], const bool (&nan)[2]) {
#pragma unroll
  for (int c = 0; c < kCount; ++c)
    if (nan[c / 2 % 2]) sums[c] = NAN;
}

// A warpgroup's sums of 64 weight rows and few tokens. While the products of a step run, the codes
// of the next one are widened.
template <int kWidth>
__device__ __forceinline__ void sum_few(const FewRowsArgs& args, const Tile& tile,
                                        const Shared<Mxfp4>& shared, Stages<Mxfp4>& ring,
                                        ScaleStages<Mxfp4>& windows, float (&sums)[kWidth / 2]) {
  const int32_t row = row_of_thread(tile);
  const int32_t steps = tile.steps;
  const ScalesOfThread scales(args, tile, row);
  bool nan[2] = {};
  Weights weights[2];
  ring.wait_filled();
  widen(ring.stage(), row, weights[0]);
#pragma unroll 1
  for (int32_t first = 0; first < steps; first += kBatchSteps) {
    windows.wait_filled();
    const Exponents<kBatchSteps> exponents(windows.stage() + scales.at, scales.before,
                                           scales.groups - first * kGroupsOfStep, nan);
    ++windows.turn;
    __syncwarp();
    windows.release(1);
#pragma unroll
    for (int s = 0; s < kBatchSteps; ++s) {
      if (first + s == steps) break;
      const uint64_t tokens = wgmma_operand(ring.stage() + kWeightBytes<Mxfp4>);
      const float* token_scales =
          shared.scales[ring.turn % Mxfp4::kStages].of_rows + threadIdx.x % 4 * 2;
      float products[kGroupsOfStep][kWidth / 2];
      start<0>(products, weights[s % 2], tokens);
      ++ring.turn;
      if (first + s + 1 < steps) {
        ring.wait_filled();
        widen(ring.stage(), row, weights[(s + 1) % 2]);
      }
      finish<0>(products, weights[s % 2]);
      float step[kWidth / 2];
      scale<0>(step, products, exponents, s);
      add_step(sums, step, token_scales);
      __syncwarp();
      ring.release(1);
    }
  }
  spoil(sums, nan);
}

// The same of more tokens.
template <int kWidth>
__device__ __forceinline__ void sum_many(const FewRowsArgs& args, const Tile& tile,
                                         const Shared<Mxfp4>& shared, Stages<Mxfp4>& ring,
                                         ScaleStages<Mxfp4>& windows, float (&sums)[kWidth / 2]) {
  // Tokens whose products are summed together: more leave no registers.
  constexpr int kPart = kWidth % 32 ? 16 : 32;
  constexpr int kSums = kPart / 2;
  const int32_t row = row_of_thread(tile);
  const int32_t steps = tile.steps;
  const ScalesOfThread scales(args, tile, row);
  bool nan[2] = {};
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    const int32_t in_batch = step % kBatchSteps;
    if (in_batch == 0) windows.wait_filled();
    ring.wait_filled();
    Weights weights;
    widen(ring.stage(), row, weights);
    const Exponents<1> exponents(windows.stage() + scales.at + in_batch * kGroupsOfStep,
                                 scales.before, scales.groups - step * kGroupsOfStep, nan);
    const float* token_scales =
        shared.scales[ring.turn % Mxfp4::kStages].of_rows + threadIdx.x % 4 * 2;
#pragma unroll
    for (int part = 0; part < kWidth; part += kPart) {
      const uint64_t tokens = wgmma_operand(ring.stage() + kWeightBytes<Mxfp4> + part * kLineBytes);
      float of_step[kSums];
      constexpr int kAtOnce = kWidth == 64 ? 1 : 2;
      float products[kAtOnce][kSums];
      start<0>(products, weights, tokens);
      finish<0>(products, weights);
      scale<0>(of_step, products, exponents, 0);
      if constexpr (kAtOnce == 1) {
        start<1>(products, weights, tokens);
        finish<1>(products, weights);
        scale<1>(of_step, products, exponents, 0);
      }
      start<2>(products, weights, tokens);
      finish<2>(products, weights);
      scale<2>(of_step, products, exponents, 0);
      if constexpr (kAtOnce == 1) {
        start<3>(products, weights, tokens);
        finish<3>(products, weights);
        scale<3>(of_step, products, exponents, 0);
      }
      add_step(&sums[part / 2], of_step, token_scales + part);
    }
    ++ring.turn;
    __syncwarp();
    ring.release(1);
    if (in_batch == kBatchSteps - 1 || step == steps - 1) {
      ++windows.turn;
      windows.release(1);
    }
  }
  spoil(sums, nan);
}

// The sums leave in bf16, as those of fp8 do. A warpgroup has a box.
template <int kCount>
__device__ __forceinline__ void leave_box(Shared<Mxfp4>& shared, int32_t departed,
                                          const float (&sums)[kCount]) {
  if constexpr (kCount == 4) {
    const float padded[8] = {sums[0], sums[1], sums[2], sums[3]};
    return leave_box(shared, departed, padded);
  }
  await_room(shared, departed);
  const int32_t thread = thread_of_tile();
  store_turned<2 * kCount>(shared_address(shared.leaving[thread / kWarpgroup]), sums, 0, thread);
  __syncwarp();
  arrive_as_warp(&shared.summed, thread);
}

}  // namespace epmoe::cuda::fused
