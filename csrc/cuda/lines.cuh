// Lines: 16 bytes, written and read in one access, so that who sees one word of a line sees the others too. Rows and
// pairs of few tokens travel in lines that tell by themselves whether they are here: neither flag nor fence lies
// between sender and receiver.
//  - Of a row nothing but its own bytes travels. Wherever nothing has arrived, the last word of each line of its
//    buffer is kUnset, which that of no row is, and who has read a line unsets it for the next round (FlashInfer and
//    TensorRT-LLM call such buffers of their all-reduce Lamport's). Its reader's kernel has ended before the next stage
//    opens, and no rank writes there again before it has seen that stage open (mail.cuh).
//  - The last word of a pair's line is the round's epoch (as in NCCL's LL protocols).
#pragma once
#include "fp8.cuh"
#include "wait.cuh"

namespace epmoe::cuda {

constexpr uint32_t kUnset = 0xffffffff;        // a NaN in every dtype, alone or as several elements
constexpr uint32_t kAlmostUnset = 0x7fffffff;  // a NaN as well, sent in its place
constexpr int kScaleLines = kScaleBlock / 16;  // of fp8, that share a scale

// One access each: with type b128 neither is torn (PTX ISA, memory consistency model).
__device__ __forceinline__ void store_line(uint4* to, uint4 line) {
  asm volatile(
      "{\n\t.reg .b128 line;\n\t.reg .b64 low, high;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
      "mov.b128 line, {low, high};\n\tst.relaxed.sys.global.b128 [%0], line;\n\t}" ::"l"(to),
      "r"(line.x), "r"(line.y), "r"(line.z), "r"(line.w)
      : "memory");
}
__device__ __forceinline__ uint4 load_line(const uint4* from) {
  uint4 line;
  asm volatile(
      "{\n\t.reg .b128 line;\n\t.reg .b64 low, high;\n\tld.relaxed.sys.global.b128 line, [%4];\n\t"
      "mov.b128 {low, high}, line;\n\tmov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
      : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
      : "l"(from)
      : "memory");
  return line;
}

__device__ __forceinline__ uint32_t settable(uint32_t word) { return word == kUnset ? kAlmostUnset : word; }

// A line of a row, and the scale of its block if it is fp8.
struct Line {
  uint4 words;
  uint32_t scale;

  __device__ __forceinline__ void make_settable() { words.w = settable(words.w), scale = settable(scale); }
  __device__ __forceinline__ bool is_here(bool fp8) const { return words.w != kUnset && (!fp8 || scale != kUnset); }
};

// What a warp takes of a row of `row_bytes`, behind which lie the scales of fp8: N lines a lane.
template <int N, bool kFp8>
struct Part {
  int32_t first, row_lines;

  __device__ __forceinline__ Part(int32_t part, int64_t row_bytes)
      : first(part * N * 32 + threadIdx.x % 32), row_lines(static_cast<int32_t>(row_bytes / 16)) {}
  __device__ __forceinline__ bool is_first() const { return first < 32; }
  // The lane's n-th line.
  __device__ __forceinline__ int32_t at(int n) const { return first + n * 32; }
  __device__ __forceinline__ bool inside(int n) const { return at(n) < row_lines; }
  __device__ __forceinline__ bool has_scale(int n) const { return kFp8 && at(n) % kScaleLines == 0; }

  __device__ __forceinline__ void store(char* row, const Line (&lines)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!inside(n)) continue;
      store_line(reinterpret_cast<uint4*>(row) + at(n), lines[n].words);
      if (has_scale(n)) store_scale(row, n, lines[n].scale);
    }
  }
  // Of a row that has not travelled.
  __device__ __forceinline__ void read(const char* row, Line (&lines)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (inside(n)) lines[n].words = reinterpret_cast<const uint4*>(row)[at(n)];
  }
  // A bit for each of the lane's lines, of so many rows one after the other.
  __device__ __forceinline__ uint32_t mask(int32_t rows = 1) const {
    uint32_t lines = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) lines |= uint32_t{inside(n)} << n;
    return lines * (((1u << rows * N) - 1) / ((1u << N) - 1));
  }
  // Asks for the missing lines of all rows, then looks which of them are here. Those that have come are not asked for
  // again: what is still on its way would wait behind them.
  template <int kRows>
  __device__ __forceinline__ bool load(char* const (&rows)[kRows], Line (&lines)[kRows][N], uint32_t& missing) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (!(missing & 1u << (i * N + n))) continue;
        lines[i][n].words = load_line(reinterpret_cast<const uint4*>(rows[i]) + at(n));
        if (kFp8) lines[i][n].scale = load_relaxed(scale_at(rows[i], n));
      }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t line = 1u << (i * N + n);
        if (missing & line && lines[i][n].is_here(kFp8)) missing &= ~line;
      }
    return !missing;
  }
  // After all lanes have loaded theirs.
  __device__ __forceinline__ void unset(char* row) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (!inside(n)) continue;
      store_line(reinterpret_cast<uint4*>(row) + at(n), make_uint4(kUnset, kUnset, kUnset, kUnset));
      if (has_scale(n)) store_scale(row, n, kUnset);
    }
  }

 private:
  __device__ __forceinline__ uint32_t* scale_at(char* row, int n) const {
    return reinterpret_cast<uint32_t*>(row) + row_lines * 4 + at(n) / kScaleLines;
  }
  __device__ __forceinline__ void store_scale(char* row, int n, uint32_t scale) const {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(scale_at(row, n)), "r"(scale) : "memory");
  }
};

// Ranks up to which rows without flags wait for this GPU's own work more than for the wire; as measured of 1, 2 and 4.
constexpr int64_t kFewRanks = 2;

// Parts of N lines a lane.
constexpr EPMOE_HD int32_t parts_of(int64_t row_bytes, int n) {
  return static_cast<int32_t>((row_bytes + n * 512 - 1) / (n * 512));
}

// Blocks that share a multiprocessor, by the lines that a lane moves at a time. Stores that wait for the wire hold up
// the loads of a block beside them, so that where rows fill the wire each has one to itself, and with it more registers
// than two can have, which is what keeps a second one away. Not in halves: what waits for a rank must leave registers
// for a block of any other stage.
constexpr EPMOE_HD int blocks_together(int n) { return n > 1 ? 1 : 2; }

// Their threads: of two blocks of 384 each has 80 registers, with which waiting for a line spills little; of 512, 64.
constexpr EPMOE_HD int threads_of(int n) { return n == 1 ? 384 : kThreads; }
static_assert(threads_of(0) == kThreads);  // where rows go through shared memory

// 16 elements as fp8.
__device__ __forceinline__ Line fp8_line(const float (&values)[16]) {
  float scale = block_scale<16, kScaleLines>(values);
  return {to_fp8(values, scale), __float_as_uint(scale)};
}

}  // namespace epmoe::cuda
