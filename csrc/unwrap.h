// From tensors to pointers, with the checks that keep a wrong call from becoming a wild pointer.
// Python checks what users pass, and words those errors; a check that fails here shows a bug in
// this package. Of the headers, only this one includes torch's.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <type_traits>

#include "args.h"
#include "cuda_api.h"
#include "wire_format.h"

namespace epmoe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return DType::kFloat8E4M3;
    default:
      STD_TORCH_CHECK(false, "expected float32, float16, bfloat16 or float8_e4m3fn");
  }
}

inline bool is_wide(const Tensor& ids) {
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long,
                  "ids must be int32 or int64");
  return ids.scalar_type() == ScalarType::Long;
}

// Checks for a matrix whose rows are contiguous; the stride between rows is free.
inline void check_rows(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 2 && (t.size(0) == 0 || t.size(1) <= 1 || t.stride(1) == 1), "`", name,
                  "` must be 2-D with contiguous rows");
}

// Whether a tensor is contiguous, of this dtype and shape.
inline bool is_whole(const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) {
  bool same = t.scalar_type() == dtype && t.is_contiguous() &&
              t.dim() == static_cast<int64_t>(shape.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == shape.begin()[i];
  return same;
}

// Whether a tensor begins where kernels read 16 bytes at once.
inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
inline constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType kScalarType<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kScalarType<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kScalarType<uint8_t> = ScalarType::Byte;

// The data of a contiguous tensor of T with at least `numel` elements.
template <typename T>
T* pointer(const Tensor& t, int64_t numel, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == kScalarType<T> && t.is_contiguous() && t.numel() >= numel, "`",
                  name, "` must be contiguous, of the right dtype, with at least ", numel,
                  " elements");
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
T* pointer(const MaybeTensor& t, int64_t numel, const char* name) {
  return t ? pointer<T>(*t, numel, name) : nullptr;
}

// The format of weights in e2m1, by their scales.
inline WeightFormat packed_format(const Tensor& scales) {
  return scales.scalar_type() == ScalarType::Float8_e4m3fn ? WeightFormat::kNvfp4
                                                           : WeightFormat::kMxfp4;
}

// The scales of weights [e, n, k] in MXFP4 or NVFP4: bytes [e, n, k / 2] of codes, read 16 at a
// time, and [e, n, k / 32] or [e, n, k / 16].
inline const uint8_t* mxfp4_scales(const Tensor& codes, const Tensor& scales) {
  const int64_t group = group_of(packed_format(scales));
  int64_t e = codes.size(0);
  int64_t n = codes.size(1);
  int64_t k = 2 * codes.size(2);
  STD_TORCH_CHECK(
      is_whole(codes, codes.scalar_type(), {e, n, k / 2}) && is_aligned(codes) &&
          is_whole(scales, scales.scalar_type(), {e, n, k / group}) && k % group == 0 &&
          codes.element_size() == 1 && scales.element_size() == 1,
      "weights in MXFP4 or NVFP4 must be contiguous bytes [e, n, k / 2], aligned to 16, "
      "with scales [e, n, k / 32] or [e, n, k / 16]");
  return static_cast<const uint8_t*>(scales.data_ptr());
}

// Which of the expert-major rows are rows of pairs.
inline Segments segments_of(const Tensor& expert_offsets, const MaybeTensor& tokens_per_expert) {
  int64_t e = expert_offsets.numel() - 1;
  STD_TORCH_CHECK(e >= 0, "expert_offsets is empty");
  return {
      .expert_offsets = pointer<int32_t>(expert_offsets, 1, "expert_offsets"),
      .tokens_per_expert = pointer<int32_t>(tokens_per_expert, e, "tokens_per_expert"),
      .num_local_experts = static_cast<int32_t>(e),
  };
}

inline Gating gating_of(double limit, double alpha, double up_offset) {
  return {static_cast<float>(limit), static_cast<float>(alpha), static_cast<float>(up_offset)};
}

// Quantizes x [T, D] into `q`, with a scale for each `block` elements of a row, or one for all: see
// QuantizeArgs.
inline QuantizeArgs quantize_args(const Tensor& x, const MaybeTensor& num_tokens, int64_t num_rows,
                                  int64_t block, const Tensor& q) {
  return {
      .x_TD = x.data_ptr(),
      .dtype = dtype_of(x),
      .x_stride = x.stride(0),
      .num_tokens = pointer<int32_t>(num_tokens, 1, "num_tokens"),
      .T = x.size(0),
      .num_rows = num_rows,
      .D = x.size(1),
      .block = block,
      .q_TD = q.data_ptr(),
  };
}

// Puts the tokens of a call into DispatchArgs or RailPackArgs: x [T, D], ids and weights [T, K],
// and the scales of rows that are in a format with scales already.
template <typename Args>
void take_tokens(Args& args, const Tensor& x, const Tensor& ids, const Tensor& weights,
                 const MaybeTensor& scales, const MaybeTensor& num_tokens, int64_t num_rows,
                 WireFormat format) {
  check_rows(x, "x");
  check_rows(ids, "ids");
  check_rows(weights, "weights");
  args.T = x.size(0), args.D = x.size(1), args.K = static_cast<int32_t>(ids.size(1)),
  args.num_rows = num_rows;
  args.dtype = dtype_of(x), args.weights_dtype = dtype_of(weights), args.wide_ids = is_wide(ids);
  STD_TORCH_CHECK(args.K >= 1 && ids.size(0) == args.T && weights.size(0) == args.T &&
                      weights.size(1) == args.K,
                  "x, ids and weights must fit one another");
  WireTraits traits = wire(format);
  STD_TORCH_CHECK(
      (traits.has_scales() && !traits.quantizes(args.dtype)) == scales.has_value(),
      "rows that are in a payload with scales already, and no others, come with scales");
  args.x_TD = x.data_ptr(), args.ids_TK = ids.data_ptr(), args.weights_TK = weights.data_ptr();
  args.x_stride_bytes = x.stride(0) * itemsize(args.dtype);
  args.ids_stride = ids.stride(0), args.weights_stride = weights.stride(0);
  args.num_tokens = pointer<int32_t>(num_tokens, 1, "num_tokens");
  if (!scales) return;
  check_rows(*scales, "scales");
  STD_TORCH_CHECK(scales->scalar_type() == ScalarType::Float && scales->size(0) == args.T &&
                      scales->size(1) == traits.num_scales(args.D),
                  "scales must be float32, one for each block of a row");
  args.scales_TB = static_cast<const float*>(scales->data_ptr()),
  args.scales_stride = scales->stride(0);
}

// Calls `launch(api, stream)` with the current stream of the tensor's device. The device becomes
// the current one only if it is not: to ask costs the host less than to set it.
template <typename F>
void launch_on_device_of(const Tensor& t, F&& launch) {
  const cuda::Library& cuda = cuda::library();
  auto check = [&](int error) {
    STD_TORCH_CHECK(error == 0, "CUDA: ", cuda.api->error_string(error));
  };
  int current = -1;
  check(cuda.api->current_device(&current));
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (current != t.get_device_index()) guard.emplace(t.get_device_index());
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda.current_stream(t.get_device_index(), &stream) == 0,
                  "torch has no current stream");
  check(launch(*cuda.api, stream));
}

template <typename Args>
using OnCuda = int (*cuda::Api::*)(const Args&, cuda::Stream);

// Calls a function of the CUDA kernels.
template <typename Args>
void launch(const Tensor& like, const Args& args, OnCuda<Args> on_cuda) {
  launch_on_device_of(like, [&](const cuda::Api& api, cuda::Stream stream) {
    return (api.*on_cuda)(args, stream);
  });
}

// Calls `on_cuda` for a tensor on a GPU, else `on_cpu`.
template <typename Args>
void launch(const Tensor& like, const Args& args, void (*on_cpu)(const Args&),
            OnCuda<Args> on_cuda) {
  like.is_cuda() ? launch(like, args, on_cuda) : on_cpu(args);
}

inline Tensor empty_like_device(const Tensor& t, std::initializer_list<int64_t> shape,
                                ScalarType dtype) {
  return torch::stable::new_empty(t, shape, dtype);
}

}  // namespace epmoe
