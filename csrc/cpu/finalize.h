// The weighted sum of one received slot over this rank's experts. finalize stores it; combine sends
// it.
#pragma once
#include "args.h"
#include "convert.h"

namespace epmoe::cpu {

template <typename T>
inline void add_row(float* sum, const T* row, float weight, int64_t n) {
  for (int64_t d = 0; d < n; ++d) sum[d] += weight * to_float(row[d]);
}

// sum_D = sum over k of weight * row, in the order of k; zeros if the slot has no row. Rows of
// weight 0 are skipped, so that 0 * NaN never arises. The tests build finalize without the check of
// the row.
template <typename T, bool checked = true>
inline void finalize_slot(const FinalizeArgs& args, int64_t slot, float* sum_D) {
  std::fill_n(sum_D, args.D, 0.0f);
  for (int32_t k = 0; k < args.K; ++k) {
    int64_t row = args.row_of_pair_SK[slot * args.row_of_pair_stride + k];
    float weight = load_float(args.weights_SK, args.weights_dtype, slot * args.weights_stride + k);
    if (checked && (row < 0 || row >= args.num_rows)) continue;
    if (weight == 0.0f) continue;
    auto* rows = static_cast<const char*>(args.rows_ND) + row * args.rows_stride_bytes;
    add_row(sum_D, reinterpret_cast<const T*>(rows), weight, args.D);
  }
}

}  // namespace epmoe::cpu
