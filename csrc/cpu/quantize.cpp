// Padding and fp8 on the CPU. Rows at and past the number of tokens are stale memory: both kernels
// make them zeros, and they never count in an amax.
#include <algorithm>

#include "convert.h"
#include "real_rows.h"
#include "stages.h"

namespace epmoe::cpu {
namespace {

template <typename T>
void quantize_tensor(const QuantizeArgs& args, int64_t real) {
  auto row_at = [&](int64_t t) { return static_cast<const T*>(args.x_TD) + t * args.x_stride; };
  float largest = 0.0f;
  for (int64_t t = 0; t < real; ++t) largest = std::max(largest, finite_amax(row_at(t), args.D));
  *args.scales_TB = scale_for(largest);
  Float8* out = static_cast<Float8*>(args.q_TD);
  for (int64_t t = 0; t < real; ++t)
    for (int64_t d = 0; d < args.D; ++d)
      out[t * args.D + d] = from_float<Float8>(to_float(row_at(t)[d]) / *args.scales_TB);
}

}  // namespace

void zero_padding_rows(const PaddingArgs& args) {
  for (int64_t t = real_tokens(args); t < args.T; ++t)
    std::memset(static_cast<char*>(args.x_TD) + t * args.stride_bytes, 0, args.row_bytes);
}

void quantize(const QuantizeArgs& args) {
  int64_t real = real_tokens(args);
  int64_t blocks = args.block ? ceil_div(args.D, args.block) : 0;
  bool packed = !args.scales_TB;  // the scales of a row lie behind it
  int64_t row_bytes = packed ? wire(WireFormat::kPackedFp8).packed_row_bytes(args.D) : args.D;
  char* q = static_cast<char*>(args.q_TD);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (!args.block) return quantize_tensor<T>(args, real);
    for (int64_t t = 0; t < real; ++t) {
      char* row = q + t * row_bytes;
      float* scales = packed ? reinterpret_cast<float*>(row + args.D) : args.scales_TB + t * blocks;
      quantize_row(static_cast<const T*>(args.x_TD) + t * args.x_stride, args.D, row, scales,
                   args.block);
    }
  });
  std::memset(q + real * row_bytes, 0, (args.T - real) * row_bytes);
  if (!packed) std::fill(args.scales_TB + real * blocks, args.scales_TB + args.T * blocks, 1.0f);
}

void unpack(const UnpackArgs& args) {
  int64_t row_bytes = wire(WireFormat::kPackedFp8).packed_row_bytes(args.D);
  visit(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_each_real_row(args.segments, args.N, [&](int32_t, int64_t t) {
      auto* packed = static_cast<const char*>(args.packed_N) + t * row_bytes;
      auto* q = reinterpret_cast<const Float8*>(packed);
      auto* scales = reinterpret_cast<const float*>(packed + args.D);
      T* out = static_cast<T*>(args.rows_ND) + t * args.D;
      for (int64_t i = 0; i < args.D; ++i)
        out[i] = from_float<T>(to_float(q[i]) * scales[i / kScaleBlock]);
    });
  });
}

}  // namespace epmoe::cpu
