// Rows in the formats of wire_format.h: what a line of 16 bytes holds, and how floats become
// elements.
#pragma once
#include "cuda/device/fp8.cuh"
#include "wire_format.h"

namespace epmoe::cuda {

// An element on the wire, of rows of T; bytes where it is not a T.
template <WireFormat kFormat, typename T>
using WireElement = std::conditional_t<wire(kFormat).has_scales(), uint8_t, T>;

// Elements of rows of T in a line.
template <WireFormat kFormat, typename T = uint8_t>
constexpr int kLineElements =
    wire(kFormat).has_scales() ? 128 / wire(kFormat).element_bits : kPerVector<T>;

// Lines that share a scale; 1 where there is none.
template <WireFormat kFormat>
constexpr int kScaleLines =
    wire(kFormat).has_scales() ? wire(kFormat).block / kLineElements<kFormat> : 1;

// Bytes of T's elements that become one byte of the wire; void: of rows that are in the format
// already.
template <WireFormat kFormat, typename T>
constexpr int kPerByte = static_cast<int>(8 * sizeof(T) / wire(kFormat).element_bits);
template <WireFormat kFormat>
constexpr int kPerByte<kFormat, void> = 1;

// kCount elements of a format with scales, packed into registers.
template <WireFormat kFormat, int kCount>
using WireRegisters = Registers<
    Vector<uint8_t, wire(kFormat).has_scales() ? kCount * wire(kFormat).element_bits / 8 : kCount>>;

// The elements of values that share `scale`, by the type of elements: `to_floats` of fp8.cuh reads
// e4m3.
template <WireFormat kFormat, int kCount>
__device__ __forceinline__ WireRegisters<kFormat, kCount> quantized(const float (&values)[kCount],
                                                                    float scale) {
  static_assert(wire(kFormat).element == DType::kFloat8E4M3);
  return to_fp8(values, scale);
}

}  // namespace epmoe::cuda
