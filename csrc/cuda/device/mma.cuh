// A warp's matrix product, with sums in fp32, on any GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace epmoe::cuda {

__device__ __forceinline__ uint32_t component(const uint4& four, int i) {
  if (i == 0) return four.x;
  if (i == 1) return four.y;
  if (i == 2) return four.z;
  return four.w;
}

// sums [16 weight rows, 8 tokens] += a [16, 16] · b [16, 8], in fp16 or bf16.
template <bool kFp16>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  // mma.sync with operands of this type
#define EPMOE_MMA(type)                                            \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"    \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (kFp16)
    EPMOE_MMA("f16");
  else
    EPMOE_MMA("bf16");
#undef EPMOE_MMA
}

}  // namespace epmoe::cuda
