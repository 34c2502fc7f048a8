// Training: combine also brings a value of each pair back to the pair's source, such as the
// gradient of its weight. A value travels in a word of its own, which tells by itself that it has
// arrived. Both functions are out of line, so that other rounds stay short.
#pragma once
#include "cuda/combine/block.cuh"

namespace epmoe::cuda {

// Where `sender` puts the values of `slot`, in `rank`'s window.
__device__ __forceinline__ Word* values_at(const CombineBlock& b, int64_t rank, int64_t sender,
                                           int64_t slot) {
  return in_window<Word>(b.ex, rank, b.plan.combine_values) + (sender * b.plan.M + slot) * b.plan.K;
}

// The value of a row; 0 where there is none.
__device__ __forceinline__ float value_of(const CombineBlock& b, int32_t row) {
  return row >= 0 && row < b.args.num_rows ? b.args.row_values_N[row] : 0.0f;
}

// One warp sends the values of a received slot, of which each lane has the row of a pair. Those of
// this rank's own tokens do not travel.
static __device__ __noinline__ void send_values(CombineBlock b, Slot slot, int32_t row) {
  int32_t lane = threadIdx.x % 32;
  if (slot.source == b.plan.rank || lane >= b.now.K) return;
  Word* to = values_at(b, slot.source, b.plan.rank, slot.s) + lane;
  Word::publish(to, b.wait.epoch, __float_as_int(value_of(b, row)));
}

// One warp writes the values of token t: the sum over the ranks that return any, of which only the
// pair's own rank has another one than 0.
static __device__ __noinline__ bool recv_values(CombineBlock b, int32_t t, uint32_t sending_ranks) {
  const ExchangePlan& plan = b.plan;
  int32_t lane = threadIdx.x % 32;
  int32_t slot = slot_of_sum(b, t, sending_ranks);
  bool has_pair = lane < b.now.K;
  float sum = 0.0f;
  for (uint32_t left = __ballot_sync(kAllLanes, slot >= 0); left; left &= left - 1) {
    int32_t rank = __ffs(left) - 1;
    int32_t s = __shfl_sync(kAllLanes, slot, rank);
    if (rank == plan.rank) {
      if (has_pair)
        sum += value_of(
            b, in_scratch<int32_t>(b.ex, plan.row_of_pair)[(rank * plan.M + s) * plan.K + lane]);
      continue;
    }
    const Word* from = values_at(b, plan.rank, rank, s) + lane;
    Word word{};
    auto arrived = [&] { return !has_pair || (word = Word::peek(from)).epoch() == b.wait.epoch; };
    if (!__all_sync(kAllLanes, b.wait.until(arrived, rank))) return false;
    if (has_pair) sum += __int_as_float(word.value());
  }
  if (has_pair) b.args.pair_values_TK[int64_t{t} * b.now.K + lane] = sum;
  return true;
}

}  // namespace epmoe::cuda
