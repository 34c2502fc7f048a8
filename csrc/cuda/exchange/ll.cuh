// The LL protocol (low latency): payload travels in lines of 16 bytes that tell by themselves
// whether they have arrived. One access writes or reads a line, so a reader that sees one of its
// words sees all of them. No flag and no fence lies between sender and receiver.
//  - A line of a row is all payload. Wherever no payload has arrived, the last word of each line is
//  kEmpty, which is
//    the last word of no row. The reader re-arms each line for the next round. (FlashInfer and
//    TensorRT-LLM call such buffers of their all-reduce Lamport buffers.) The kernel that re-arms
//    ends before its rank opens the next stage, and no rank writes the line again before it has
//    seen that stage open: docs/protocol.md.
//  - The last word of a pair's line is the epoch of its round, as in NCCL's LL protocols. It needs
//  no re-arming.
#pragma once
#include "cuda/device/wire.cuh"
#include "cuda/exchange/wait.cuh"

namespace epmoe::cuda {

constexpr uint32_t kEmpty = 0xffffffff;  // a NaN in every dtype, as one element or as several
constexpr uint32_t kEmptySubstitute = 0x7fffffff;  // another NaN, which is sent in place of kEmpty

__device__ __forceinline__ uint32_t never_empty(uint32_t word) {
  return word == kEmpty ? kEmptySubstitute : word;
}

// 16 bytes in a window. Accesses of type b128 are single-copy atomic (PTX ISA, memory consistency
// model).
struct Line {
  uint4 words;

  static __device__ __forceinline__ void publish(Line* to, uint4 line) {
    asm volatile(
        "{\n\t.reg .b128 line;\n\t.reg .b64 low, high;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, "
        "{%3, %4};\n\t"
        "mov.b128 line, {low, high};\n\tst.relaxed.sys.global.b128 [%0], line;\n\t}" ::"l"(to),
        "r"(line.x), "r"(line.y), "r"(line.z), "r"(line.w)
        : "memory");
  }
  static __device__ __forceinline__ uint4 peek(const Line* from) {
    uint4 line;
    asm volatile(
        "{\n\t.reg .b128 line;\n\t.reg .b64 low, high;\n\tld.relaxed.sys.global.b128 line, "
        "[%4];\n\t"
        "mov.b128 {low, high}, line;\n\tmov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
        : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
        : "l"(from)
        : "memory");
    return line;
  }
  static __device__ __forceinline__ void rearm(Line* line) {
    publish(line, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  }
};
static_assert(sizeof(Line) == 16);

// What a line holds of a pair: the physical expert, its place and its weight. The expert is the
// sentinel where the pair has none. The place is the pair's ordinal within (source, expert), with
// layout="rank" the token's slot; -1 for none.
struct PairLine {
  int32_t id, place;
  float weight;
  uint32_t epoch;

  static __device__ __forceinline__ void publish(Line* line, const PairLine& pair) {
    Line::publish(line, {static_cast<uint32_t>(pair.id), static_cast<uint32_t>(pair.place),
                         __float_as_uint(pair.weight), pair.epoch});
  }
};

// A line's payload in registers, and the scale of its block if the format has scales.
struct LineData {
  uint4 words;
  uint32_t scale;

  __device__ __forceinline__ void avoid_empty() {
    words.w = never_empty(words.w), scale = never_empty(scale);
  }
  __device__ __forceinline__ bool has_arrived(bool scaled) const {
    return words.w != kEmpty && (!scaled || scale != kEmpty);
  }
};

// The elements of a line, with their block's scale.
template <WireFormat kFormat, int kCount>
__device__ __forceinline__ LineData quantized_line(const float (&values)[kCount]) {
  static_assert(wire(kFormat).scale_bytes == sizeof(LineData::scale));
  float scale = block_scale<kCount, kScaleLines<kFormat>>(values);
  return {quantized<kFormat>(values, scale), __float_as_uint(scale)};
}

// The chunk of a row that one warp moves at once: N lines a lane. The scales of a row lie behind
// its `row_bytes`.
template <int N, WireFormat kFormat>
struct RowChunk {
  static constexpr bool kScaled = wire(kFormat).has_scales();
  int32_t first, row_lines;

  __device__ __forceinline__ RowChunk(int32_t chunk, int64_t row_bytes)
      : first(chunk * N * 32 + threadIdx.x % 32), row_lines(static_cast<int32_t>(row_bytes / 16)) {}
  __device__ __forceinline__ bool is_first() const { return first < 32; }
  // The index of the lane's n-th line in the row.
  __device__ __forceinline__ int32_t at(int n) const { return first + n * 32; }
  __device__ __forceinline__ bool inside(int n) const { return at(n) < row_lines; }
  __device__ __forceinline__ bool has_scale(int n) const {
    return kScaled && at(n) % kScaleLines<kFormat> == 0;
  }

  __device__ __forceinline__ void publish(char* row, const LineData (&lines)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!inside(n)) continue;
      Line::publish(line_at(row, n), lines[n].words);
      if (has_scale(n)) publish_scale(row, n, lines[n].scale);
    }
  }
  // Reads a row that has not travelled.
  __device__ __forceinline__ void read(const char* row, LineData (&lines)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (inside(n)) lines[n].words = reinterpret_cast<const uint4*>(row)[at(n)];
  }
  // A bit for each of the lane's lines in `rows` rows, row after row.
  __device__ __forceinline__ uint32_t mask(int32_t rows = 1) const {
    uint32_t lines = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) lines |= uint32_t{inside(n)} << n;
    return lines * (((1u << rows * N) - 1) / ((1u << N) - 1));
  }
  // Loads the missing lines of all rows, then removes the arrived ones from `missing`. Returns
  // whether none is missing. Arrived lines are not loaded again: lines still on their way would
  // queue behind these loads.
  template <int kRows>
  __device__ __forceinline__ bool poll(char* const (&rows)[kRows], LineData (&lines)[kRows][N],
                                       uint32_t& missing) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (!(missing & 1u << (i * N + n))) continue;
        lines[i][n].words = Line::peek(line_at(rows[i], n));
        if (kScaled) lines[i][n].scale = Flag::peek(scale_at(rows[i], n));
      }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t line = 1u << (i * N + n);
        if (missing & line && lines[i][n].has_arrived(kScaled)) missing &= ~line;
      }
    return !missing;
  }
  // Call this after all lanes have loaded their lines.
  __device__ __forceinline__ void rearm(char* row) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!inside(n)) continue;
      Line::rearm(line_at(row, n));
      if (has_scale(n)) publish_scale(row, n, kEmpty);
    }
  }

 private:
  __device__ __forceinline__ Line* line_at(char* row, int n) const {
    return reinterpret_cast<Line*>(row) + at(n);
  }
  // A scale is empty or has arrived by itself: it is a flag whose epoch is the scale's bits.
  __device__ __forceinline__ Flag* scale_at(char* row, int n) const {
    return reinterpret_cast<Flag*>(row) + row_lines * 4 + at(n) / kScaleLines<kFormat>;
  }
  __device__ __forceinline__ void publish_scale(char* row, int n, uint32_t scale) const {
    Flag::publish_released(scale_at(row, n), scale);
  }
};

}  // namespace epmoe::cuda
