// The warpgroup's matrix product of Hopper: sums [64, 2 kCount] += a [64, 16] · b [16, 2 kCount] in
// bf16, or 32 of k in e4m3, with sums in fp32. Both factors lie in shared memory. It runs on while
// the warpgroup goes on, until wgmma_wait().
#pragma once
#include "cuda/device/common.cuh"

namespace epmoe::cuda {

// The place of a factor in shared memory, as written by TMA in lines of 128 bytes with their 16
// bytes swizzled. Eight lines follow one another, and so do eights unless `eights` says otherwise.
// `next` is the distance in bytes between parts of 64 in a factor whose lines run across k, and
// `eights` that between eights of lines.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t shared_address, uint32_t next = 0,
                                                  uint32_t eights = 1024) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{eights >> 4} << 32 | uint64_t{next >> 4} << 16 |
         (shared_address & 0x3ffff) >> 4;
}

// Before the first product of a group: registers and shared memory that this thread has written are
// seen.
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the last kPending groups are complete. The sums may be read when none is pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The registers of 16 columns, of i times 16 columns as operands, and the same in the text of the
// instruction. The first two operands are others.
#define EPMOE_SUMS(i)                                                                             \
  "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
      "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define EPMOE_ALL_SUMS_0 EPMOE_SUMS(0)
#define EPMOE_ALL_SUMS_1 EPMOE_ALL_SUMS_0, EPMOE_SUMS(1)
#define EPMOE_ALL_SUMS_2 EPMOE_ALL_SUMS_1, EPMOE_SUMS(2)
#define EPMOE_ALL_SUMS_3 EPMOE_ALL_SUMS_2, EPMOE_SUMS(3)
#define EPMOE_ALL_SUMS_4 EPMOE_ALL_SUMS_3, EPMOE_SUMS(4)
#define EPMOE_ALL_SUMS_5 EPMOE_ALL_SUMS_4, EPMOE_SUMS(5)
#define EPMOE_ALL_SUMS_6 EPMOE_ALL_SUMS_5, EPMOE_SUMS(6)
#define EPMOE_ALL_SUMS_7 EPMOE_ALL_SUMS_6, EPMOE_SUMS(7)
#define EPMOE_ALL_SUMS_8 EPMOE_ALL_SUMS_7, EPMOE_SUMS(8)
#define EPMOE_ALL_SUMS_9 EPMOE_ALL_SUMS_8, EPMOE_SUMS(9)
#define EPMOE_ALL_SUMS_10 EPMOE_ALL_SUMS_9, EPMOE_SUMS(10)
#define EPMOE_ALL_SUMS_11 EPMOE_ALL_SUMS_10, EPMOE_SUMS(11)
#define EPMOE_ALL_SUMS_12 EPMOE_ALL_SUMS_11, EPMOE_SUMS(12)
#define EPMOE_ALL_SUMS_13 EPMOE_ALL_SUMS_12, EPMOE_SUMS(13)
#define EPMOE_ALL_SUMS_14 EPMOE_ALL_SUMS_13, EPMOE_SUMS(14)
#define EPMOE_ALL_SUMS_15 EPMOE_ALL_SUMS_14, EPMOE_SUMS(15)
#define EPMOE_ALL_TEXT_0 "%2, %3, %4, %5, %6, %7, %8, %9"
#define EPMOE_ALL_TEXT_1 EPMOE_ALL_TEXT_0 ", %10, %11, %12, %13, %14, %15, %16, %17"
#define EPMOE_ALL_TEXT_2 EPMOE_ALL_TEXT_1 ", %18, %19, %20, %21, %22, %23, %24, %25"
#define EPMOE_ALL_TEXT_3 EPMOE_ALL_TEXT_2 ", %26, %27, %28, %29, %30, %31, %32, %33"
#define EPMOE_ALL_TEXT_4 EPMOE_ALL_TEXT_3 ", %34, %35, %36, %37, %38, %39, %40, %41"
#define EPMOE_ALL_TEXT_5 EPMOE_ALL_TEXT_4 ", %42, %43, %44, %45, %46, %47, %48, %49"
#define EPMOE_ALL_TEXT_6 EPMOE_ALL_TEXT_5 ", %50, %51, %52, %53, %54, %55, %56, %57"
#define EPMOE_ALL_TEXT_7 EPMOE_ALL_TEXT_6 ", %58, %59, %60, %61, %62, %63, %64, %65"
#define EPMOE_ALL_TEXT_8 EPMOE_ALL_TEXT_7 ", %66, %67, %68, %69, %70, %71, %72, %73"
#define EPMOE_ALL_TEXT_9 EPMOE_ALL_TEXT_8 ", %74, %75, %76, %77, %78, %79, %80, %81"
#define EPMOE_ALL_TEXT_10 EPMOE_ALL_TEXT_9 ", %82, %83, %84, %85, %86, %87, %88, %89"
#define EPMOE_ALL_TEXT_11 EPMOE_ALL_TEXT_10 ", %90, %91, %92, %93, %94, %95, %96, %97"
#define EPMOE_ALL_TEXT_12 EPMOE_ALL_TEXT_11 ", %98, %99, %100, %101, %102, %103, %104, %105"
#define EPMOE_ALL_TEXT_13 EPMOE_ALL_TEXT_12 ", %106, %107, %108, %109, %110, %111, %112, %113"
#define EPMOE_ALL_TEXT_14 EPMOE_ALL_TEXT_13 ", %114, %115, %116, %117, %118, %119, %120, %121"
#define EPMOE_ALL_TEXT_15 EPMOE_ALL_TEXT_14 ", %122, %123, %124, %125, %126, %127, %128, %129"

// Factors in bf16, whose lines run along k, or across it in a alone or in both; and in e4m3.
// kFirstFp8 replaces the sums, all others add to them.
enum class Factors { kAlong, kAcrossA, kAcrossBoth, kFp8, kFirstFp8 };

// Starts a product.
template <Factors kFactors, int kCount>
__device__ __forceinline__ void wgmma(float (&d)[kCount], uint64_t a, uint64_t b) {
#define EPMOE_WGMMA(columns, last, type, flags)                                             \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns type " {" EPMOE_ALL_TEXT_##last \
               "}, %0, %1, " flags ";"                                                      \
               : "+l"(a), "+l"(b), EPMOE_ALL_SUMS_##last)
#define EPMOE_WGMMA_OF(columns, last)                                   \
  if constexpr (2 * kCount == columns) {                                \
    if constexpr (kFactors == Factors::kAlong)                          \
      EPMOE_WGMMA(columns, last, "k16.f32.bf16.bf16", "1, 1, 1, 0, 0"); \
    else if constexpr (kFactors == Factors::kAcrossA)                   \
      EPMOE_WGMMA(columns, last, "k16.f32.bf16.bf16", "1, 1, 1, 1, 0"); \
    else if constexpr (kFactors == Factors::kAcrossBoth)                \
      EPMOE_WGMMA(columns, last, "k16.f32.bf16.bf16", "1, 1, 1, 1, 1"); \
    else if constexpr (kFactors == Factors::kFp8)                       \
      EPMOE_WGMMA(columns, last, "k32.f32.e4m3.e4m3", "1, 1, 1");       \
    else                                                                \
      EPMOE_WGMMA(columns, last, "k32.f32.e4m3.e4m3", "0, 1, 1");       \
  }
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
#undef EPMOE_WGMMA_OF
#undef EPMOE_WGMMA
}

// Starts a product in e4m3 whose first factor lies in registers. It replaces the sums, or adds to
// them. A thread has of two rows, 8 apart, four neighbouring elements each, and the four of both
// that are 16 further along k. The factor stays as it is until wgmma_wait().
template <bool kAdds = false, int kCount>
__device__ __forceinline__ void wgmma_of_registers(float (&d)[kCount], uint32_t (&a)[4],
                                                   uint64_t b) {
  if constexpr (kCount == 4)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "%8, 0, 1, 1;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+r"(a[0]), "+r"(a[1]), "+r"(a[2]),
          "+r"(a[3])
        : "l"(b));
// The last three registers of a come behind the sums.
#define EPMOE_WGMMA(columns, last, a1, a2, a3, adds)                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                              \
               "k32.f32.e4m3.e4m3 {" EPMOE_ALL_TEXT_##last "}, {%0, " a1 ", " a2 ", " a3 \
                                                           "}, %1, " adds ", 1, 1;"      \
               : "+r"(a[0]), "+l"(b), EPMOE_ALL_SUMS_##last, "+r"(a[1]), "+r"(a[2]), "+r"(a[3]))
#define EPMOE_WGMMA_OF(columns, last, a1, a2, a3)  \
  if constexpr (2 * kCount == columns) {           \
    if constexpr (kAdds)                           \
      EPMOE_WGMMA(columns, last, a1, a2, a3, "1"); \
    else                                           \
      EPMOE_WGMMA(columns, last, a1, a2, a3, "0"); \
  }
  EPMOE_WGMMA_OF(16, 0, "%10", "%11", "%12")
  EPMOE_WGMMA_OF(32, 1, "%18", "%19", "%20")
  EPMOE_WGMMA_OF(48, 2, "%26", "%27", "%28")
  EPMOE_WGMMA_OF(64, 3, "%34", "%35", "%36")
  EPMOE_WGMMA_OF(80, 4, "%42", "%43", "%44")
  EPMOE_WGMMA_OF(96, 5, "%50", "%51", "%52")
  EPMOE_WGMMA_OF(112, 6, "%58", "%59", "%60")
  EPMOE_WGMMA_OF(128, 7, "%66", "%67", "%68")
  EPMOE_WGMMA_OF(144, 8, "%74", "%75", "%76")
#undef EPMOE_WGMMA_OF
#undef EPMOE_WGMMA
}

}  // namespace epmoe::cuda
