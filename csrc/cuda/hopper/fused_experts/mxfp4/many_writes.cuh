// The role that writes where weights are MXFP4 and an expert has many rows. It finds the largest
// scales of a tile, too, before that is multiplied.
#pragma once
#include "cuda/hopper/fused_experts/mxfp4/many_loads.cuh"
#include "cuda/hopper/fused_experts/writes.cuh"

namespace epmoe::cuda::fused {

// The next tile is claimed before this one has been summed.
__device__ __forceinline__ void write_tiles_of_passes(const FewRowsArgs& args,
                                                      Shared<ManyMxfp4>& shared) {
  Tiles<ManyMxfp4> ahead(shared, shared.claimed);
  Tiles<ManyMxfp4> tiles(shared, shared.claimed);
  for (int32_t departed = -1;; ++departed) {
    // Scales of the next tile. Behind the last one it stays there.
    const Tile& next = ahead.current();
    if (next.expert != kNoTile) {
      const int32_t place = ahead.place();
      const bool small = find_largest(args, next, shared.more.largest[place]);
      if (threadIdx.x % 32 == 0) shared.more.some_small[place][threadIdx.x % kWriters / 32] = small;
      arrive(&shared.more.scaled[place]);
      ahead.advance();
    }
    if (departed < 0) continue;
    // Products of this one.
    const Tile& tile = tiles.current();
    if (tile.expert == kNoTile) return;
    write_rows(args, tile, shared, departed, 0);
    if (!tile.down) count_h(args, tile);
    tiles.done_as_warp();
  }
}

}  // namespace epmoe::cuda::fused
