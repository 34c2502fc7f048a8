// The gradients of rows times their weights, on the CPU.
#include "convert.h"
#include "real_rows.h"
#include "stages.h"

namespace epmoe::cpu {

void weighted_rows_backward(const WeightedRowsArgs& args) {
  constexpr int64_t kSums = 16;  // side by side, so that the compiler may vectorise; added up in order
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_each_real_row(args.segments, args.N, [&](int32_t expert, int64_t t) {
      float sums[kSums] = {};
      if (is_of_pair(args, expert, t)) {
        T* grad = static_cast<T*>(args.grad_ND) + t * args.D;
        auto* row = static_cast<const T*>(args.rows_ND) + t * args.rows_stride;
        for (int64_t begin = 0; begin < args.D; begin += kSums)
          for (int64_t i = begin; i < std::min(begin + kSums, args.D); ++i)
            sums[i - begin] += to_float(grad[i]) * to_float(row[i]);
        for (int64_t i = 0; args.row_weights_N && i < args.D; ++i)
          grad[i] = from_float<T>(to_float(grad[i]) * args.row_weights_N[t]);
      }
      float sum = 0.0f;
      for (float part : sums) sum += part;
      args.grad_weights_N[t] = sum;
    });
  });
}

}  // namespace epmoe::cpu
