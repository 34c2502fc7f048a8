// Which copy of an expert a token takes: one text for dispatch and the rail, on CPU and CUDA.
#pragma once
#include "types.h"

namespace epmoe {

// The physical expert that token t of `rank` takes for a logical one. Copies take turns, so that
// they share the load.
EPMOE_HD int32_t copy_in_turn(const int32_t* copies_EC, const int32_t* num_copies_E, int64_t copies,
                              int64_t rank, int64_t t, int32_t expert) {
  auto copy = (static_cast<uint32_t>(t) + static_cast<uint32_t>(rank)) %
              static_cast<uint32_t>(num_copies_E[expert]);
  return copies_EC[expert * copies + copy];
}

// Where experts move, a table of quotas says which copy a token takes. An entry is the last of
// 65536 numbers that the copy takes, in the high 16 bits, and the physical expert. Last numbers
// ascend, up to 65535; entries behind that one are never reached.
struct alignas(16) QuotaLine {
  uint32_t entry[4];
};
struct Quotas {
  const QuotaLine* lines;  // [E, lines_per_expert], or null: experts do not move
  uint32_t lines_per_expert;
  uint32_t salt;  // of the source rank
};

// The copy that all tokens of the source take, -1 if they choose among several.
EPMOE_HD int32_t only_copy(const Quotas& quotas, int32_t expert) {
  uint32_t first = quotas.lines[static_cast<uint32_t>(expert) * quotas.lines_per_expert].entry[0];
  return first >> 16 == 0xffff ? first & 0xffff : -1;
}

// A token's number is the same on every run: the finaliser of MurmurHash3 (Appleby) over token,
// rank and expert.
EPMOE_HD int32_t copy_by_quota(const Quotas& quotas, int64_t t, int32_t expert) {
  uint32_t h = static_cast<uint32_t>(t) * 0x9e3779b1u +
               static_cast<uint32_t>(expert) * 0x85ebca77u + quotas.salt;
  h = (h ^ h >> 16) * 0x85ebca6bu, h = (h ^ h >> 13) * 0xc2b2ae35u;
  uint32_t number = (h ^ h >> 16) >> 16;
  const QuotaLine* line = quotas.lines + static_cast<uint32_t>(expert) * quotas.lines_per_expert;
  for (uint32_t left = quotas.lines_per_expert;; ++line) {
    QuotaLine q = *line;
    if (number <= q.entry[3] >> 16 || --left == 0)
      return (number <= q.entry[0] >> 16   ? q.entry[0]
              : number <= q.entry[1] >> 16 ? q.entry[1]
              : number <= q.entry[2] >> 16 ? q.entry[2]
                                           : q.entry[3]) &
             0xffff;
  }
}

}  // namespace epmoe
