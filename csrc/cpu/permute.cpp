// permute on the CPU: one counting sort by local expert; then each row of x is read once and copied
// to its expert-major rows.
#include <algorithm>
#include <vector>

#include "convert.h"
#include "real_rows.h"
#include "stages.h"
#include "stream.h"

namespace epmoe::cpu {
namespace {

// The local index of a pair's expert, -1 if the pair is not this rank's.
int32_t local_expert(const PermuteArgs& args, int64_t slot, int32_t k) {
  int64_t id = load_id(args.ids_SK, args.wide_ids, slot * args.ids_stride + k);
  if (id < 0 || id >= args.P) return -1;
  int32_t local = args.expert_map_P[id];
  return local < args.num_local_experts ? local : -1;
}

}  // namespace

void permute(const PermuteArgs& args) {
  int32_t experts = args.num_local_experts;
  int64_t slab = args.R > 0 ? args.S / args.R : 0;
  std::vector<int64_t> next(experts + 1, 0), pairs(experts, 0);
  for_each_slot(args, [&](int64_t slot) {
    for (int32_t k = 0; k < args.K; ++k)
      if (int32_t local = local_expert(args, slot, k); local >= 0) ++pairs[local];
  });
  // Segments start at multiples of the alignment. Pairs whose row would lie past max_rows are
  // dropped; the order is expert-major.
  int64_t begin = 0;
  int64_t dropped = 0;
  for (int32_t i = 0; i < experts; ++i) {
    next[i] = begin;
    args.expert_offsets[i] = static_cast<int32_t>(std::min(begin, args.max_rows));
    int64_t kept = std::clamp<int64_t>(args.max_rows - begin, 0, pairs[i]);
    dropped += pairs[i] - kept;
    args.tokens_per_expert[i] = static_cast<int32_t>(kept);
    begin += (pairs[i] + args.alignment - 1) / args.alignment * args.alignment;
  }
  args.expert_offsets[experts] = static_cast<int32_t>(std::min(begin, args.max_rows));
  if (args.needed) *args.needed = begin;
  if (args.counters) args.counters[kDroppedPairs] += dropped;

  int64_t row_bytes = args.D * itemsize(args.dtype);
  int64_t blocks = args.B;
  char* rows = static_cast<char*>(args.rows_ND);
  bool stream = streams(begin * row_bytes);
  for_each_slot(args, [&](int64_t slot) {
    const char* x = static_cast<const char*>(args.x_SD) + slot * args.x_stride_bytes;
    for (int32_t k = 0; k < args.K; ++k) {
      int32_t local = local_expert(args, slot, k);
      int64_t row = local < 0 ? -1 : next[local]++;
      if (row >= args.max_rows) row = -1;
#if defined(EPMOE_MUTATE_SORT_GUARD)
      if (row < 0) continue;  // the known bug of the field: nobody writes this entry
#endif
      args.row_of_pair_SK[slot * args.row_of_pair_stride + k] = static_cast<int32_t>(row);
      if (row < 0) continue;
      copy_row(rows + row * row_bytes, x, row_bytes, stream);
      if (args.scales_SB)
        std::memcpy(args.row_scales_NB + row * blocks, args.scales_SB + slot * args.scales_stride,
                    blocks * sizeof(float));
    }
  });

  if (stream) finish_streaming();

  // Slots that are not real get -1 in the map, and the rows of the gaps become zeros: no output
  // stays uninitialised.
  for (int64_t r = 0; args.counts_R && r < args.R; ++r) {
    int64_t count = std::clamp<int64_t>(args.counts_R[r], 0, slab);
    for (int64_t slot = r * slab + count; slot < (r + 1) * slab; ++slot)
      std::fill_n(args.row_of_pair_SK + slot * args.row_of_pair_stride, args.K, -1);
  }
  for (int32_t i = 0; i < experts; ++i) {
    int64_t first_gap = args.expert_offsets[i] + args.tokens_per_expert[i];
    int64_t end = args.expert_offsets[i + 1];
    std::memset(rows + first_gap * row_bytes, 0, (end - first_gap) * row_bytes);
    if (args.scales_SB)
      std::fill(args.row_scales_NB + first_gap * blocks, args.row_scales_NB + end * blocks, 1.0f);
  }
}

}  // namespace epmoe::cpu
