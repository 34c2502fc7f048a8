// The formats in which rows travel between ranks, on CPU and CUDA. A format is a row of `wire`;
// epmoe/native/formats.py has the same table. What makes elements of a format from floats, and
// floats from them, stands in cuda/device/wire.cuh and cpu/convert.h.
#pragma once
#include <iterator>
#include <type_traits>

#include "types.h"

namespace epmoe {

// The numbers of the formats.
enum class WireFormat : int64_t {
  kAuto,  // the dtype of x, without scales
  kFp8,   // e4m3 with an fp32 scale a block
  // The same in one piece, for training: pack_fp8 makes such rows, and unpack_fp8 reads them.
  kPackedFp8,
};
// The formats that the exchange knows: its kernels are compiled for each of them. Packed rows
// travel as elements in kAuto.
constexpr WireFormat kWireFormats[] = {WireFormat::kAuto, WireFormat::kFp8};
constexpr int64_t kNumWireFormats = std::size(kWireFormats);

struct WireTraits {
  DType element;         // of rows that come quantized; without scales any dtype
  int64_t element_bits;  // on the wire; 0: as many as in the dtype of x
  int64_t scale_bytes;   // of a scale; 0: there are none
  int64_t block;         // elements of a row that share a scale
  bool packed;  // scales lie behind the elements of their row, which has whole lines of 16 bytes

  // Whether scales travel with the rows.
  constexpr EPMOE_HD bool has_scales() const { return scale_bytes > 0 && !packed; }
  // Whether rows of `dtype` become others on their way. Rows that are in the format already come
  // with their scales.
  constexpr EPMOE_HD bool quantizes(DType dtype) const { return has_scales() && dtype != element; }
  // The dtype of rows on the wire, of an x of `dtype`.
  constexpr EPMOE_HD DType dtype_of(DType dtype) const { return has_scales() ? element : dtype; }
  // Bytes of D elements, each of `itemsize` bytes in x: of a row, unless it is packed.
  constexpr EPMOE_HD int64_t row_bytes(int64_t D, auto itemsize) const {
    return !element_bits      ? D * itemsize
           : element_bits % 8 ? ceil_div(D * element_bits, 8)
                              : D * (element_bits / 8);
  }
  // Bytes of a packed row. It stands alone, since a further case in `row_bytes` would change the
  // machine code of combine.
  constexpr EPMOE_HD int64_t packed_row_bytes(int64_t D) const {
    return ceil_div(row_bytes(D, 1) + num_scales(D) * scale_bytes, 16) * 16;
  }
  constexpr EPMOE_HD int64_t num_scales(int64_t D) const {
    return scale_bytes ? ceil_div(D, block) : 0;
  }
  // Elements of a row of D as it travels: with scales whole blocks.
  constexpr EPMOE_HD int64_t width(int64_t D) const {
    return has_scales() ? num_scales(D) * block : D;
  }
  // Bytes of a row's scales, rounded up to TMA copies of 16 bytes.
  constexpr EPMOE_HD int32_t padded_scale_bytes(int64_t D) const {
    return has_scales() ? static_cast<int32_t>(ceil_div(D, block * 16 / scale_bytes) * 16) : 0;
  }
};

constexpr EPMOE_HD WireTraits wire(WireFormat format) {
  switch (format) {
    case WireFormat::kFp8:
      return {DType::kFloat8E4M3, 8, 4, kScaleBlock, false};
    case WireFormat::kPackedFp8:
      return {DType::kFloat8E4M3, 8, 4, kScaleBlock, true};
    default:
      return {};
  }
}

// Calls f with `format` as a constant, on the host.
template <int64_t kFirst = 0, typename F>
auto with_format(WireFormat format, F&& f) {
  constexpr std::integral_constant<WireFormat, kWireFormats[kFirst]> kThis{};
  if constexpr (kFirst + 1 < kNumWireFormats)
    return format == kThis ? f(kThis) : with_format<kFirst + 1>(format, f);
  else
    return f(kThis);
}

// Bytes of a row of D elements of `dtype`, without its scales.
template <int64_t kFirst = 0>
EPMOE_HD int64_t wire_row_bytes(WireFormat format, int64_t D, DType dtype) {
  constexpr WireFormat kThis = kWireFormats[kFirst];
  if constexpr (kFirst + 1 < kNumWireFormats)
    return format != kThis ? wire_row_bytes<kFirst + 1>(format, D, dtype)
                           : wire(kThis).row_bytes(D, itemsize(dtype));
  else
    return wire(kThis).row_bytes(D, itemsize(dtype));
}

// Scales of a row, in a format that has some. In kAuto it is a number that nobody uses, and takes
// no branch.
template <int64_t kFirst = 1>
EPMOE_HD int64_t wire_scales(WireFormat format, int64_t D) {
  constexpr WireFormat kThis = kWireFormats[kFirst];
  if constexpr (kFirst + 1 < kNumWireFormats)
    return format != kThis ? wire_scales<kFirst + 1>(format, D) : wire(kThis).num_scales(D);
  else
    return wire(kThis).num_scales(D);
}

// The fewest elements that share a scale, in any format.
constexpr int64_t kLeastScaleBlock = [] {
  int64_t least = kScaleBlock;
  for (WireFormat format : kWireFormats)
    if (wire(format).has_scales() && wire(format).block < least) least = wire(format).block;
  return least;
}();

// Whether an element of a format with scales is a byte, in all formats.
constexpr bool kBytesWithScales = [] {
  for (WireFormat format : kWireFormats)
    if (wire(format).has_scales() && wire(format).element_bits != 8) return false;
  return true;
}();

}  // namespace epmoe
