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

}  // namespace epmoe
