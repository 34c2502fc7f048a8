// The sums of a tile with weights in MXFP4 and many tokens. A thread widens codes in registers,
// from where the tensor core takes its first factor.
//
// e4m3 has all values of e2m1 times a power of two, for 15 such powers. So scales become part of
// the factors: by how far a scale is below the largest of its weight row, a table says what the
// eight magnitudes of its codes are in e4m3. The largest scale multiplies the sums of the row,
// once. A code that is too small beside it is rounded to what e4m3 has.
//
// A step's codes are loaded into registers while the products of the step before run. Then each
// group is widened, and its product starts.
#pragma once
#include "cuda/device/fp8.cuh"
#include "cuda/hopper/fused_experts/mxfp4/many_loads.cuh"
#include "cuda/hopper/fused_experts/mxfp4/sums.cuh"

namespace epmoe::cuda::fused {

// --- The table ---

// The largest code, 6, times 2^6 is 384, which e4m3 has.
constexpr int kRaised = 6;
// What widened() multiplies. Read from memory it stays in its register, which each use would fill
// otherwise.
constexpr uint32_t kOnes = 0x01010101;
constexpr int kOnesAt = kTableEntries - 1;

// Each thread makes some entries. Those in front are of scales above the largest, which no row has;
// what stands in place of scales behind the end of k may be such.
__device__ __forceinline__ void make_table(Shared<ManyMxfp4>& shared) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int32_t i = threadIdx.x; i < kTableEntries; i += kThreads<ManyMxfp4>) {
    const int32_t below = i - kMostBelow;
    // 2^(6 - below). Below 2^-120 all is 0 in e4m3 anyway.
    const int32_t exponent = max(127 + kRaised - below, 7);
    const float power = below < 0 ? 0.0f : __uint_as_float(static_cast<uint32_t>(exponent) << 23);
    float values[8];
#pragma unroll
    for (int code = 0; code < 8; ++code) values[code] = kMagnitudes[code] * power;
    const auto bytes = packed_fp8(values, [](float value) { return -value; });
    memcpy(&shared.more.table[i], &bytes, sizeof(uint2));
    if (i == kOnesAt) shared.more.table[i].x = kOnes;
  }
}

// --- Codes ---

__device__ __forceinline__ uint32_t load_2(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint2 load_8(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

// Four codes as bytes. The table has negative numbers, and those of positive codes lose their sign:
// where the upper bit of a selector is set, prmt gives the sign of the selected byte in place of
// it, here 0 in place of 1.
__device__ __forceinline__ uint32_t widened(uint32_t codes, uint2 negative, uint32_t ones) {
  constexpr uint32_t kSign = 0x80;
  const uint32_t values = __byte_perm(negative.x, negative.y, codes & 0x7777);
  uint32_t is_positive;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(is_positive) : "r"(ones), "r"(codes));
  return values - kSign * is_positive;
}

// Where a byte of scales leads in the table: `from` less eight bytes for each unit of the byte.
template <int kByte>
__device__ __forceinline__ uint32_t place_in_table(uint32_t from, uint32_t scales) {
  constexpr uint32_t kBack = 0xf8u << 8 * kByte;
  uint32_t at;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(at) : "r"(scales), "r"(kBack), "r"(from));
  return at;
}

// This thread's codes of a step, four in a number, and the table's entries of their scales.
struct Codes {
  uint32_t of[kGroupsOfStep][4];   // as the tensor core has them
  uint2 values[kGroupsOfStep][2];  // of either weight row
};

// Loads this thread's codes of a pass, of two weight rows, 8 apart.
class LoadsOfCodes {
 public:
  // `row` is the first, in its pass.
  __device__ __forceinline__ LoadsOfCodes(const FewRowsArgs& args, const Tile& tile,
                                          const Shared<ManyMxfp4>& shared, int32_t pass,
                                          const uint8_t* largest, int32_t row) {
    const int32_t in_tile = row_in_tile<ManyMxfp4>(tile.down, pass, row);
    const int32_t before = ScaleRow(args, tile, in_tile).before();
    // Bits 4 and 5 are swizzled.
    codes_ = row * kWeightLineBytes<ManyMxfp4> + row / 2 % 4 * 16 + threadIdx.x % 4 * 2;
    scales_ = row * kWindowBytes + before / 4 * 4;
    shift_ = before % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      from_[i] = shared_address(&shared.more.table[kMostBelow + largest[in_tile + 8 * i]]);
  }

  // Those of a step. `windows` is the place of its scales.
  __device__ __forceinline__ void load(uint32_t stage, uint32_t windows, Codes& codes) const {
    constexpr uint32_t kToNextRow = 8 * kWeightLineBytes<ManyMxfp4>;
    constexpr uint32_t kToNextWindow = 8 * kWindowBytes;
    const uint32_t scales = windows + scales_;
    const uint32_t words[2][2] = {
        {load_4(scales), load_4(scales + 4)},
        {load_4(scales + kToNextWindow), load_4(scales + kToNextWindow + 4)}};
#pragma unroll
    for (int j = 0; j < kGroupsOfStep; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        codes.of[j][i] = load_2(((stage + codes_) ^ 16 * j) + i % 2 * kToNextRow + i / 2 * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = __funnelshift_r(words[i][0], words[i][1], shift_);
      codes.values[0][i] = load_8(place_in_table<0>(from_[i], four));
      codes.values[1][i] = load_8(place_in_table<1>(from_[i], four));
      codes.values[2][i] = load_8(place_in_table<2>(from_[i], four));
      codes.values[3][i] = load_8(place_in_table<3>(from_[i], four));
    }
  }

 private:
  uint32_t codes_;    // their place in a stage
  uint32_t scales_;   // that of a batch's scales in a window
  int32_t shift_;     // of these in their words, in bits
  uint32_t from_[2];  // the table's entry of a scale of 0, of either row
};

// --- Sums ---

// A ring as the warps that multiply go through it. To divide by its stages would cost them time.
template <typename T>
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const T& ring) : ring_(ring), stage_(ring.buffers) {}

  __device__ __forceinline__ int32_t index() const { return index_; }
  __device__ __forceinline__ uint32_t stage() const { return stage_; }
  __device__ __forceinline__ void wait_filled() const {
    wait_mbarrier(&ring_.full[index_], parity_);
  }
  __device__ __forceinline__ void advance() {
    ++index_;
    stage_ += T::kStage;
    if (index_ < T::kStages) return;
    index_ = 0;
    stage_ = ring_.buffers;
    parity_ ^= 1;
  }
  // This warp has no use for the stage of a number any more.
  __device__ __forceinline__ void release(int32_t index) const {
    __syncwarp();
    arrive_as_warp(&ring_.empty[index]);
  }

 private:
  T ring_;
  int32_t index_ = 0;
  uint32_t parity_ = 0;
  uint32_t stage_;
};
using WalkOfSteps = Walk<Stages<ManyMxfp4>>;
using WalkOfWindows = Walk<ScaleStages<ManyMxfp4>>;

// Widens each group of a step and starts its product, which runs while the next one is widened.
template <int kCount>
__device__ __forceinline__ void widen_and_start(float (&step)[kCount], Codes& codes,
                                                Weights& weights, uint64_t tokens, uint32_t ones) {
  constexpr int kUnit = 16;  // bytes, of an operand
#pragma unroll
  for (int j = 0; j < kGroupsOfStep; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("" : "+r"(codes.of[j][i])::"memory");  // not sooner
      weights[j][i] = widened(codes.of[j][i], codes.values[j][i % 2], ones);
    }
    wgmma_begin();
    if (j == 0)
      wgmma_of_registers<false>(step, weights[j], tokens);
    else
      wgmma_of_registers<true>(step, weights[j], tokens + j * kGroup / kUnit);
  }
  wgmma_commit();
}

// Nothing reads the products or overwrites their factors before.
template <int kCount>
__device__ __forceinline__ void finish_step(float (&step)[kCount], Weights& weights) {
  wgmma_wait<0>();
#pragma unroll
  for (float& sum : step) asm volatile("" : "+f"(sum)::"memory");
#pragma unroll
  for (auto& group : weights)
#pragma unroll
    for (uint32_t& four : group) asm volatile("" : "+r"(four)::"memory");
}

// What the sums of a weight row lack: its largest scale, less what codes were raised by.
__device__ __forceinline__ float factor_of_row(uint32_t largest) {
  constexpr uint32_t kFewestNormal = kRaised + 1;
  constexpr uint32_t kNan = 255;
  if (largest == kNan) return NAN;
  // 2^(largest - 133), which is below the normal numbers of fp32 up to 2^-127.
  const bool is_normal = largest >= kFewestNormal;
  return __uint_as_float(is_normal ? (largest - kRaised) << 23 : 1u << (16 + largest));
}

// add_with_factors(), of tokens whose scales lack this factor.
template <int kCount>
__device__ __forceinline__ void add_small(float (&sums)[kCount], const float (&step)[kCount],
                                          const float* token_scales, float factor) {
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    const float4 four = *reinterpret_cast<const float4*>(token_scales + 2 * i);
    const float of_tokens[] = {four.x * factor, four.y * factor, four.z * factor, four.w * factor};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      sums[i + j] = fmaf(of_tokens[j / 4 * 2 + j % 2], step[i + j], sums[i + j]);
  }
}

// A warpgroup's sums of 64 weight rows of a pass. kSomeSmall: the largest scales of some warps may
// be small. All warps of a tile run the same loop.
template <int kWidth, bool kSomeSmall>
__device__ __forceinline__ void sum_pass(const FewRowsArgs& args, const Tile& tile,
                                         const Shared<ManyMxfp4>& shared, WalkOfSteps& ring,
                                         WalkOfWindows& windows, int32_t pass,
                                         const uint8_t* largest, float (&sums)[kWidth / 2]) {
  constexpr int32_t kBatchBytes = kBatchSteps * kGroupsOfStep;
  // The shuffle tells the compiler that a warp has one group.
  const int32_t group = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const int32_t row = 64 * group + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
  const LoadsOfCodes loads(args, tile, shared, pass, largest, row);
  const uint32_t ones = load_4(shared_address(&shared.more.table[kOnesAt]));
  const int32_t in_tile = row_in_tile<ManyMxfp4>(tile.down, pass, row);
  uint32_t of_warp = kOne;
  if constexpr (kSomeSmall)
    of_warp = __reduce_max_sync(kAllLanes, max(largest[in_tile], largest[in_tile + 8]));
  const bool is_small = of_warp < kSmallScale;
  const float factor = is_small ? factor_of_row(of_warp) : 1.0f;
  int32_t in_batch = 0;  // bytes of scales of a row in front of those of a step
  auto leave_windows = [&] {
    in_batch = 0;
    windows.release(windows.index());
    windows.advance();
  };
  Codes codes;
  auto load_step = [&] {
    ring.wait_filled();
    if (in_batch == 0) windows.wait_filled();
    loads.load(ring.stage(), windows.stage() + in_batch, codes);
    in_batch += kGroupsOfStep;
    if (in_batch == kBatchBytes) leave_windows();
  };
  Weights weights;
  float step[kWidth / 2];
  load_step();
#pragma unroll 1
  for (int32_t left = tile.steps; left; --left) {
    const int32_t stage = ring.index();
    const uint64_t tokens = wgmma_operand(ring.stage() + kWeightBytes<ManyMxfp4>);
    const float* token_scales = shared.scales[stage].of_rows + threadIdx.x % 4 * 4;
    widen_and_start(step, codes, weights, tokens, ones);
    ring.advance();
    if (left > 1) load_step();
    finish_step(step, weights);
    if constexpr (kSomeSmall)
      add_small(sums, step, token_scales, factor);
    else
      add_with_factors(sums, step, token_scales);
    ring.release(stage);
  }
  if (in_batch) leave_windows();
  // Small ones have that of the warp already.
  const uint32_t later = is_small ? kOne + kRaised - of_warp : 0;
  const float factors[] = {factor_of_row(largest[in_tile] + later),
                           factor_of_row(largest[in_tile + 8] + later)};
#pragma unroll
  for (int c = 0; c < kWidth / 2; ++c) sums[c] *= factors[c / 2 % 2];
}

}  // namespace epmoe::cuda::fused
