// The roles that load the stages of a tile, some steps along k ahead of the product: one thread
// loads weights, and waits for nothing but room; one loads rows, or h once it is written; and a
// warp loads all scales.
#pragma once
#include "cuda/hopper/fused_experts/claims.cuh"

namespace epmoe::cuda::fused {

// Steps before its end at which the loader of a tile's rows wants the next tile: a claim takes as
// long, and with two passes it takes as long again to find the next tile's largest scales. A block
// that waits for h claims no further tile, since others may be free for it.
template <typename T>
constexpr int kWantedBefore = T::kPasses == 1 ? 4 : 8;
// A wait for h ends after it. Running blocks compute what it waits for, so it ends long before,
// unless the GPU or this code is broken. An operator has no status to report, so its outputs are
// NaN then.
#if defined(EPMOE_MUTATE_LOST_H)
constexpr uint64_t kLongestNs = 2'000'000;
#else
constexpr uint64_t kLongestNs = 60'000'000'000;
#endif

// What TMA reads. Gates and ups are matrices of their own, also where weights have them by turns.
struct WeightMaps {
  CUtensorMap gates, ups, down;
};
// Rows of a tile come by 16, but those of a full one all at once.
struct Maps : WeightMaps {
  CUtensorMap rows, h, full_rows, full_h;
  WeightMaps few;  // for tiles of Fp8Few
};

template <typename T>
__device__ __forceinline__ void load_weights(const FewRowsArgs& args, const WeightMaps& maps,
                                             Shared<T>& shared, Stages<T> ring) {
  constexpr int kHalf = kBoxRows<T> * kLineBytes;
  Tiles<T> tiles(shared, shared.claimed);
  while (true) {
    const Tile tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const CUtensorMap& first = tile.down ? maps.down : maps.gates;
    const CUtensorMap& second = tile.down ? maps.down : maps.ups;
    const int32_t second_row = tile.down ? tile.column + kBoxRows<T> : tile.column;
    // Half of the last tile of outputs may lie behind the last output.
    const bool both = !tile.down || second_row < args.D;
    int32_t step = 0;
    if constexpr (T::kStepsAtOnce == 2) {
#pragma unroll 1
      for (; step + 1 < tile.steps; step += 2) {
        Stages<T> next = ring;
        ++next.turn;
        for (const auto* stage : {&ring, &next}) {
          stage->wait_empty();
          expect_bytes(stage->filled(), both ? 2 * kHalf : kHalf);
        }
        // Boxes of the same rows follow one another.
        const int32_t k = step * kStep<T>;
        load_box(first, ring.stage(), ring.filled(), k, tile.column, tile.expert);
        load_box(first, next.stage(), next.filled(), k + kStep<T>, tile.column, tile.expert);
        if (both) {
          load_box(second, ring.stage() + kHalf, ring.filled(), k, second_row, tile.expert);
          load_box(second, next.stage() + kHalf, next.filled(), k + kStep<T>, second_row,
                   tile.expert);
        }
        ring.turn += 2;
      }
    }
#pragma unroll 1
    for (; step < tile.steps; ++step, ++ring.turn) {
      ring.wait_empty();
      expect_bytes(ring.filled(), both ? 2 * kHalf : kHalf);
      load_box(first, ring.stage(), ring.filled(), step * kStep<T>, tile.column, tile.expert);
      if (both)
        load_box(second, ring.stage() + kHalf, ring.filled(), step * kStep<T>, second_row,
                 tile.expert);
    }
    tiles.done();
  }
}

// --- Rows ---

__device__ __forceinline__ int32_t acquire(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Waits until `wanted` tiles of h are written, or says that they are late. Then this thread's TMA
// may read h. Who reads `late` for a tile before may see it, too, and makes outputs NaN that were
// right.
__device__ __forceinline__ void await_h(const int32_t* written, int32_t wanted, bool& late) {
  uint64_t deadline_ns = 0;
  for (uint32_t tries = 1; acquire(written) < wanted; ++tries) {
    __nanosleep(20);
    if (tries % 64) continue;
    const uint64_t now = now_ns();
    if (!deadline_ns) deadline_ns = now + kLongestNs;
    if (now >= deadline_ns) {
      late = true;
      return;
    }
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

template <typename T>
__device__ __forceinline__ void load_rows(const FewRowsArgs& args, const Maps& maps,
                                          Shared<T>& shared, Stages<T> ring) {
  const int32_t tiles_of_h = h_tiles<T>(static_cast<int32_t>(args.F));
  Tiles<T> tiles(shared, shared.claimed);
  while (true) {
    const Tile& claimed = tiles.current();
    // After one wait that was too long, none waits.
    if (claimed.expert != kNoTile && claimed.down && !shared.late)
      await_h(&args.counters[kWritten + claimed.part], tiles_of_h, shared.late);
    if constexpr (T::kScaled) arrive(&shared.readable[tiles.place()]);
    if (claimed.expert == kNoTile) return;
    const bool full = is_full<T>(claimed);
    const CUtensorMap& by_steps = claimed.down ? maps.h : maps.rows;
    const CUtensorMap& at_once = claimed.down ? maps.full_h : maps.full_rows;
    int32_t width = claimed.width;
    if constexpr (kBoxTokens<T> != kTokenStep)
      width = ceil_of(width, kBoxTokens<T>) * kBoxTokens<T>;
    const int32_t row = claimed.row;
    const int32_t end = claimed.steps * kStep<T>;
    const int32_t wanted_at = max(claimed.steps - kWantedBefore<T>, 0) * kStep<T>;
    int32_t left = passes_of<T>(args, claimed);
#pragma unroll 1
    do {
      --left;
#pragma unroll 1
      for (int32_t k = 0; k < end; k += kStep<T>, ++ring.turn) {
        if (k == wanted_at && left == 0) arrive(&shared.wanted);
        ring.wait_empty();
        uint64_t* filled = ring.filled();
        if constexpr (T::kOrdered) filled = &shared.more.arrived[ring.turn % T::kStages];
        expect_bytes(filled, width * kLineBytes);
        const uint32_t to = ring.stage() + kWeightBytes<T>;
        int32_t line = 0;
        if (full) {
          load_box(at_once, to, filled, k, row, 0);
          line = kFullTokens;
          // Factors may have been written where the tokens beyond come.
          if (width > line) fence_shared_for_tma();
        }
#pragma unroll 1
        for (; line < width; line += kBoxTokens<T>)
          load_box(by_steps, to + line * kLineBytes, filled, k, row + line, 0);
      }
    } while (left);
    tiles.done();
  }
}

// --- Scales ---

// Starts to copy a scale into shared memory.
__device__ __forceinline__ void copy_scale(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
// The thread arrives when the copies that it has started are complete.
__device__ __forceinline__ void arrive_with_copies(uint64_t* mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(mbarrier))
               : "memory");
}

// Where the scale or the factor of a row lies among those of a tile whose threads read four at
// once: of two neighbours, and of those 8 rows further on.
__device__ __forceinline__ int32_t place_of_factor(int32_t row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

// Of a step's weights in fp8: each warpgroup's two sums have one, or each of two sums has two.
constexpr int kWeightScales = 2 * Fp8::kGroups;

// Scales of a tile as one lane copies them, or loads them a step ahead: a number for each step
// along k of every 32nd row, and in fp8 of one of the four parts of its weights. What lies behind
// the rows stays as it is.
template <typename T>
class LaneScales {
 public:
  __device__ __forceinline__ LaneScales(const FewRowsArgs& args, const Tile& tile)
      : lane_(threadIdx.x % 32), count_(tile.count) {
    const int64_t row_stride = tile.down ? 1 : args.row_scales_stride;
    const float* of_rows = tile.down ? args.h_scales_BN : args.row_scales_NB;
    step_ = tile.down ? args.h_scales_stride : 1;
    next_row_ = 32 * row_stride;
    of_row_ = of_rows + (tile.row + lane_) * row_stride;
    if constexpr (!T::kPacked) of_weights_ = of_weights(args, tile);
  }

  // Starts to copy those of the next step.
  __device__ __forceinline__ void copy_next(Shared<T>& shared, int32_t stage) {
    const float* from = of_row_;
    auto& scales = shared.scales[stage];
    // Where threads read the scales of four tokens at once, these follow one another.
    float* to = &scales.of_rows[T::kPasses > 1 ? place_of_factor(lane_) : lane_];
#pragma unroll 1
    for (int32_t token = lane_; token < count_; token += 32, from += next_row_, to += 32)
      copy_scale(to, from);
    if constexpr (!T::kPacked)
      if (lane_ < kWeightScales) copy_scale(&scales.of_weights[lane_ / 2][lane_ % 2], of_weights_);
    of_row_ += step_;
    if constexpr (!T::kPacked) ++of_weights_;
  }

  // Fills the stage of the ring with those of the next step, or with NaN.
  __device__ __forceinline__ void fill(Shared<T>& shared, const Stages<T>& ring, bool spoilt) {
    const int32_t stage = ring.turn % T::kStages;
    if (spoilt) {
      spoil(shared, stage);
      arrive(ring.filled());
    } else {
      copy_next(shared, stage);
      arrive_with_copies(ring.filled());
    }
  }

  // Starts to load those of the next step.
  __device__ __forceinline__ void load_next() {
#pragma unroll
    for (int i = 0; i < kFactorRows; ++i)
      rows_[i] = lane_ + 32 * i < count_ ? of_row_[i * next_row_] : 0;
    weights_ = *of_weights_;
    of_row_ += step_;
    ++of_weights_;
  }

  // Writes the products of those that were loaded, or NaN.
  __device__ __forceinline__ void write_factors(ScaleFactors& factors, bool spoilt) const {
    const int32_t place = place_of_factor(lane_);
#pragma unroll
    for (int part = 0; part < kWeightScales; ++part) {
      const float of_part = spoilt ? NAN : __shfl_sync(kAllLanes, weights_, part);
#pragma unroll
      for (int i = 0; i < kFactorRows; ++i)
        if (lane_ + 32 * i < count_) factors.of_tokens[part][place + 32 * i] = rows_[i] * of_part;
    }
  }

  // Where h has not come in time all sums become NaN, and so do the outputs.
  __device__ __forceinline__ void spoil(Shared<T>& shared, int32_t stage) const {
    for (int32_t token = lane_; token < T::kTokens; token += 32)
      shared.scales[stage].of_rows[token] = NAN;
  }

 private:
  static constexpr int kFactorRows = kMostColumns / 32;

  // Of the weight rows of warpgroup lane / 2, gates or ups, or either half of its outputs. In a
  // full tile of the weight rows of sum lane / 2, either half of them.
  __device__ __forceinline__ const float* of_weights(const FewRowsArgs& args,
                                                     const Tile& tile) const {
    const int32_t first = lane_ / 2 % (kWeightScales / 2);
    const int32_t second = lane_ % 2;
    const int32_t D = static_cast<int32_t>(args.D / kScaleBlock);
    const int32_t F = static_cast<int32_t>(args.F / kScaleBlock);
    const int32_t block = tile.column / static_cast<int32_t>(kScaleBlock);
    if (tile.down) {
      const int64_t row = int64_t{tile.expert} * D + min(block + first, D - 1);
      return static_cast<const float*>(args.down_scales) + row * F;
    }
    const int32_t half = is_full<T>(tile) ? second : first;
    const int32_t matrix = is_full<T>(tile) ? first : second;
    // By turns, 64 gates and their ups share a scale.
    const int32_t in_expert = args.interleaved ? 2 * block + half : block + matrix * F;
    const int64_t row = int64_t{tile.expert} * 2 * F + in_expert;
    return static_cast<const float*>(args.gate_up_scales) + row * D;
  }

  int32_t lane_, count_;
  int64_t step_, next_row_;
  const float* of_row_;
  const float* of_weights_;
  float rows_[kFactorRows];
  float weights_;
};

template <typename T>
__device__ __forceinline__ void load_scales(const FewRowsArgs& args, Shared<T>& shared,
                                            Stages<T> ring) {
  Tiles<T> tiles(shared, shared.readable);
  while (true) {
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    const bool spoilt = tile.down && shared.late;
    const int32_t end = ring.turn + tile.steps;
    LaneScales<T> scales(args, tile);
    const bool as_factors = has_factors<T>(tile);
    tiles.done_as_warp();
    if constexpr (kHasFull<T>)
      if (as_factors) {
        scales.load_next();
#pragma unroll 1
        for (; ring.turn < end; ++ring.turn) {
          ring.wait_empty();
          scales.write_factors(shared.factors(ring.turn % T::kStages), spoilt);
          arrive(ring.filled());
          if (ring.turn + 1 < end) scales.load_next();
        }
        continue;
      }
#pragma unroll 1
    for (; ring.turn < end; ++ring.turn) {
      ring.wait_empty();
      scales.fill(shared, ring, spoilt);
    }
  }
}

}  // namespace epmoe::cuda::fused
