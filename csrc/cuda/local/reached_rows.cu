// Rows of x that a gradient reaches, on the GPU; zeros in place of all others.
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kThreads = 128;

// A block has a row.
template <typename X, typename Grad, int kCount>
__global__ void __launch_bounds__(kThreads)
    reached_rows(const __grid_constant__ ReachedRowsArgs args) {
  wait_for_predecessor();
  let_successor_start();
  int64_t t = blockIdx.x;
  auto* grad = static_cast<const Grad*>(args.grad_TE) + t * args.E;
  auto* x = static_cast<const X*>(args.x_TD) + t * args.x_stride;
  auto* out = static_cast<Grad*>(args.out_TD) + t * args.D;

  // NaN is a gradient, too.
  bool reached = false;
  for (int64_t i = threadIdx.x; i < args.E; i += kThreads) reached |= to_float(grad[i]) != 0.0f;
  reached = __syncthreads_or(reached);

  for (int64_t first = threadIdx.x * kCount; first < args.D; first += kThreads * kCount) {
    float values[kCount] = {};
    if (reached) to_floats(*reinterpret_cast<const Vector<X, kCount>*>(x + first), values);
    *reinterpret_cast<Vector<Grad, kCount>*>(out + first) = rounded<Grad, kCount>(values);
  }
}

}  // namespace

cudaError_t reached_rows(const ReachedRowsArgs& args, cudaStream_t stream) {
  return visit(args.x_dtype, [&](auto x) {
    return visit(args.dtype, [&](auto grad) {
      using X = decltype(x);
      using Grad = decltype(grad);
      constexpr int kWide = 16 / sizeof(X) < 16 / sizeof(Grad) ? 16 / sizeof(X) : 16 / sizeof(Grad);
      int64_t bytes_of_row = args.x_stride * static_cast<int64_t>(sizeof(X));
      bool wide = args.D % kWide == 0 && is_aligned(args.x_TD, bytes_of_row);
      auto* kernel = wide ? reached_rows<X, Grad, kWide> : reached_rows<X, Grad, 1>;
      return launch(kernel, args.T, kThreads, 0, stream, args);
    });
  });
}

}  // namespace epmoe::cuda
