// The warpgroup's matrix product of Hopper: sums [64, kWidth] += a [64, 16] · b [16, kWidth], in bf16 with sums in
// fp32. Both factors lie in shared memory. It runs on while the warpgroup goes on, until wgmma_wait().
#pragma once
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

// The place of a factor in shared memory, as written by TMA in lines of 128 bytes with their 16 bytes swizzled. Eight
// lines follow one another. `next` is the distance in bytes between parts of 64 in a factor whose lines run across k.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t shared_address, uint32_t next = 0) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightLines = 1024;
  return kSwizzle128 | kEightLines >> 4 << 32 | uint64_t{next >> 4} << 16 | (shared_address & 0x3ffff) >> 4;
}

// Before the first product of a group: registers and shared memory that this thread has written are seen.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last kPending groups are complete. The sums may be read when none is pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The registers of 16 columns, as operands and in the text of the instruction. The first two operands are others.
#define EPMOE_SUMS_0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define EPMOE_SUMS_1 \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define EPMOE_SUMS_2 \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define EPMOE_SUMS_3 \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define EPMOE_SUMS_4 \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define EPMOE_SUMS_5 \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define EPMOE_SUMS_6 \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define EPMOE_SUMS_7 \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define EPMOE_SUMS_8 \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define EPMOE_SUMS_9 \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define EPMOE_SUMS_10 \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define EPMOE_SUMS_11 \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define EPMOE_SUMS_12 \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define EPMOE_SUMS_13 \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define EPMOE_SUMS_14 \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define EPMOE_SUMS_15 \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define EPMOE_TEXT_0 "%2, %3, %4, %5, %6, %7, %8, %9"
#define EPMOE_TEXT_1 "%10, %11, %12, %13, %14, %15, %16, %17"
#define EPMOE_TEXT_2 "%18, %19, %20, %21, %22, %23, %24, %25"
#define EPMOE_TEXT_3 "%26, %27, %28, %29, %30, %31, %32, %33"
#define EPMOE_TEXT_4 "%34, %35, %36, %37, %38, %39, %40, %41"
#define EPMOE_TEXT_5 "%42, %43, %44, %45, %46, %47, %48, %49"
#define EPMOE_TEXT_6 "%50, %51, %52, %53, %54, %55, %56, %57"
#define EPMOE_TEXT_7 "%58, %59, %60, %61, %62, %63, %64, %65"
#define EPMOE_TEXT_8 "%66, %67, %68, %69, %70, %71, %72, %73"
#define EPMOE_TEXT_9 "%74, %75, %76, %77, %78, %79, %80, %81"
#define EPMOE_TEXT_10 "%82, %83, %84, %85, %86, %87, %88, %89"
#define EPMOE_TEXT_11 "%90, %91, %92, %93, %94, %95, %96, %97"
#define EPMOE_TEXT_12 "%98, %99, %100, %101, %102, %103, %104, %105"
#define EPMOE_TEXT_13 "%106, %107, %108, %109, %110, %111, %112, %113"
#define EPMOE_TEXT_14 "%114, %115, %116, %117, %118, %119, %120, %121"
#define EPMOE_TEXT_15 "%122, %123, %124, %125, %126, %127, %128, %129"
#define EPMOE_ALL_SUMS_1 EPMOE_SUMS_0, EPMOE_SUMS_1
#define EPMOE_ALL_SUMS_2 EPMOE_ALL_SUMS_1, EPMOE_SUMS_2
#define EPMOE_ALL_SUMS_3 EPMOE_ALL_SUMS_2, EPMOE_SUMS_3
#define EPMOE_ALL_SUMS_4 EPMOE_ALL_SUMS_3, EPMOE_SUMS_4
#define EPMOE_ALL_SUMS_5 EPMOE_ALL_SUMS_4, EPMOE_SUMS_5
#define EPMOE_ALL_SUMS_6 EPMOE_ALL_SUMS_5, EPMOE_SUMS_6
#define EPMOE_ALL_SUMS_7 EPMOE_ALL_SUMS_6, EPMOE_SUMS_7
#define EPMOE_ALL_SUMS_8 EPMOE_ALL_SUMS_7, EPMOE_SUMS_8
#define EPMOE_ALL_SUMS_9 EPMOE_ALL_SUMS_8, EPMOE_SUMS_9
#define EPMOE_ALL_SUMS_10 EPMOE_ALL_SUMS_9, EPMOE_SUMS_10
#define EPMOE_ALL_SUMS_11 EPMOE_ALL_SUMS_10, EPMOE_SUMS_11
#define EPMOE_ALL_SUMS_12 EPMOE_ALL_SUMS_11, EPMOE_SUMS_12
#define EPMOE_ALL_SUMS_13 EPMOE_ALL_SUMS_12, EPMOE_SUMS_13
#define EPMOE_ALL_SUMS_14 EPMOE_ALL_SUMS_13, EPMOE_SUMS_14
#define EPMOE_ALL_SUMS_15 EPMOE_ALL_SUMS_14, EPMOE_SUMS_15
#define EPMOE_ALL_TEXT_1 EPMOE_TEXT_0 ", " EPMOE_TEXT_1
#define EPMOE_ALL_TEXT_2 EPMOE_ALL_TEXT_1 ", " EPMOE_TEXT_2
#define EPMOE_ALL_TEXT_3 EPMOE_ALL_TEXT_2 ", " EPMOE_TEXT_3
#define EPMOE_ALL_TEXT_4 EPMOE_ALL_TEXT_3 ", " EPMOE_TEXT_4
#define EPMOE_ALL_TEXT_5 EPMOE_ALL_TEXT_4 ", " EPMOE_TEXT_5
#define EPMOE_ALL_TEXT_6 EPMOE_ALL_TEXT_5 ", " EPMOE_TEXT_6
#define EPMOE_ALL_TEXT_7 EPMOE_ALL_TEXT_6 ", " EPMOE_TEXT_7
#define EPMOE_ALL_TEXT_8 EPMOE_ALL_TEXT_7 ", " EPMOE_TEXT_8
#define EPMOE_ALL_TEXT_9 EPMOE_ALL_TEXT_8 ", " EPMOE_TEXT_9
#define EPMOE_ALL_TEXT_10 EPMOE_ALL_TEXT_9 ", " EPMOE_TEXT_10
#define EPMOE_ALL_TEXT_11 EPMOE_ALL_TEXT_10 ", " EPMOE_TEXT_11
#define EPMOE_ALL_TEXT_12 EPMOE_ALL_TEXT_11 ", " EPMOE_TEXT_12
#define EPMOE_ALL_TEXT_13 EPMOE_ALL_TEXT_12 ", " EPMOE_TEXT_13
#define EPMOE_ALL_TEXT_14 EPMOE_ALL_TEXT_13 ", " EPMOE_TEXT_14
#define EPMOE_ALL_TEXT_15 EPMOE_ALL_TEXT_14 ", " EPMOE_TEXT_15
#define EPMOE_ALL_SUMS_0 EPMOE_SUMS_0
#define EPMOE_ALL_TEXT_0 EPMOE_TEXT_0
#define EPMOE_WGMMA(columns, last, across_a, across_b)                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" EPMOE_ALL_TEXT_##last \
               "}, %0, %1, 1, 1, 1, " #across_a ", " #across_b ";"                                      \
               : "+l"(a), "+l"(b), EPMOE_ALL_SUMS_##last)
#define EPMOE_WGMMA_OF(columns, last)   \
  if constexpr (kWidth == columns) {    \
    if constexpr (!kAcrossA)            \
      EPMOE_WGMMA(columns, last, 0, 0); \
    else if constexpr (!kAcrossB)       \
      EPMOE_WGMMA(columns, last, 1, 0); \
    else                                \
      EPMOE_WGMMA(columns, last, 1, 1); \
  }

// Starts a product. kAcross: the lines of this factor run across k.
template <int kWidth, bool kAcrossA, bool kAcrossB>
__device__ __forceinline__ void wgmma(float (&d)[kWidth / 2], uint64_t a, uint64_t b) {
  EPMOE_WGMMA_OF(16, 0)
  EPMOE_WGMMA_OF(32, 1)
  EPMOE_WGMMA_OF(48, 2)
  EPMOE_WGMMA_OF(64, 3)
  EPMOE_WGMMA_OF(80, 4)
  EPMOE_WGMMA_OF(96, 5)
  EPMOE_WGMMA_OF(112, 6)
  EPMOE_WGMMA_OF(128, 7)
  EPMOE_WGMMA_OF(144, 8)
  EPMOE_WGMMA_OF(160, 9)
  EPMOE_WGMMA_OF(176, 10)
  EPMOE_WGMMA_OF(192, 11)
  EPMOE_WGMMA_OF(208, 12)
  EPMOE_WGMMA_OF(224, 13)
  EPMOE_WGMMA_OF(240, 14)
  EPMOE_WGMMA_OF(256, 15)
}

#undef EPMOE_WGMMA_OF
#undef EPMOE_WGMMA

}  // namespace epmoe::cuda
