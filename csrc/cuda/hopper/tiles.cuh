// The tiles of a grouped product, one expert after the other. Experts have any number of rows, and
// a tile adapts to them: by rows, weights are the rows of a tile, and the expert's rows its
// columns, up to 256 in steps of 16. For weights a tile is a part of an expert's [n, k], and sums
// over the expert's rows.
#pragma once
#include "args.h"
#include "cuda/device/scan.cuh"

namespace epmoe::cuda {

enum class Product { kByRows, kByRowsTransposed, kForWeights };

constexpr int kRows = 128;       // of a tile
constexpr int kColumns = 256;    // of a tile, at most
constexpr int kColumnStep = 16;  // by rows, a tile's columns are a multiple of it

struct Tile {
  int32_t expert, row, count;  // rows of the expert: all, or those of the tile
  int32_t m, c;                // where the tile starts in the product
  int32_t width;               // columns, a multiple of kColumnStep
};

__device__ __forceinline__ int32_t ceil_of(int32_t a, int32_t b) { return (a + b - 1) / b; }

// The tiles of all experts, one expert after the other. `first` is a table in shared memory: the
// tiles before each.
template <Product kProduct>
struct Tiles {
  const GroupedGemmArgs& args;
  int32_t* first;

  // The row behind an expert's, clamped: what memory says is unchecked.
  __device__ __forceinline__ int32_t end_of(int32_t expert) const {
    return expert < 0 ? 0 : min(max(args.ends[expert], 0), static_cast<int32_t>(args.N));
  }
  __device__ __forceinline__ int32_t count_of(int32_t expert) const {
    return max(end_of(expert) - end_of(expert - 1), 0);
  }
  __device__ __forceinline__ int32_t across() const {
    return ceil_of(static_cast<int32_t>(args.n), kRows);
  }
  __device__ __forceinline__ int32_t of_rows(int32_t count) const {
    return across() *
           ceil_of(kProduct == Product::kForWeights ? static_cast<int32_t>(args.k) : count,
                   kColumns);
  }

  // The first warp builds the table.
  __device__ __forceinline__ void build() {
    int32_t before = 0;
    for (int32_t i = threadIdx.x; i - static_cast<int32_t>(threadIdx.x) < args.e; i += 32) {
      int32_t here = i < args.e ? of_rows(count_of(i)) : 0;
      int32_t through = warp_inclusive_sum(here);
      if (i < args.e) first[i] = before + through - here;
      before += __shfl_sync(kAllLanes, through, 31);
    }
    if (threadIdx.x == 0) first[args.e] = before;
  }
  __device__ __forceinline__ int32_t count() const { return first[args.e]; }

  __device__ __forceinline__ Tile operator[](int32_t number) const {
    const int32_t expert = segment_at(first, args.e, number), begin = end_of(expert - 1),
                  rows = count_of(expert);
    const int32_t i = number - first[expert];
    if (kProduct == Product::kForWeights) {
      int32_t m = i % across();
      return {expert, begin, rows, m * kRows, i / across() * kColumns, kColumns};
    }
    // Tiles of an expert that has too many rows for one have as many each.
    int32_t parts = ceil_of(rows, kColumns);
    int32_t width = ceil_of(ceil_of(rows, parts), kColumnStep) * kColumnStep,
            before = i % parts * width;
    return {expert, begin + before, min(width, rows - before), i / parts * kRows, 0, width};
  }
};

}  // namespace epmoe::cuda
