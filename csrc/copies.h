// Which copy of an expert a token takes: one text for dispatch and the rail, on CPU and CUDA.
#pragma once
#include "types.h"

namespace epmoe {

// The physical expert that token t of `rank` takes for a logical one. Copies take turns, so that they share the load.
EPMOE_HD int32_t copy_in_turn(const int32_t* copies_EC, const int32_t* num_copies_E, int64_t copies, int64_t rank,
                              int64_t t, int32_t expert) {
  auto copy = (static_cast<uint32_t>(t) + static_cast<uint32_t>(rank)) % static_cast<uint32_t>(num_copies_E[expert]);
  return copies_EC[expert * copies + copy];
}

// The same where experts move. An entry of the table is a quota: its high 16 bits are the last of 65536 numbers that
// the copy takes, its low 16 bits the physical expert. Last numbers ascend, to 65535 in some entry. A token's number is
// the same on every run: the finaliser of MurmurHash3 (Appleby) over token, rank and expert.
EPMOE_HD int32_t copy_by_quota(const int32_t* quotas_EC, int64_t copies, int64_t rank, int64_t t, int32_t expert) {
  uint32_t h = static_cast<uint32_t>(t) * 0x9e3779b1u + (static_cast<uint32_t>(rank) << 20) +
               static_cast<uint32_t>(expert) * 0x85ebca77u;
  h = (h ^ h >> 16) * 0x85ebca6bu, h = (h ^ h >> 13) * 0xc2b2ae35u, h ^= h >> 16;
  const int32_t* quotas_C = quotas_EC + expert * copies;
  int64_t copy = 0;
  while (copy < copies - 1 && static_cast<uint32_t>(quotas_C[copy]) >> 16 < h >> 16) ++copy;
  return quotas_C[copy] & 0xffff;
}

}  // namespace epmoe
