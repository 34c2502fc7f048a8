// The sending half of dispatch. Slots and ordinals need no atomics' order: a block counts the tokens before its own.
#pragma once
#include "dispatch.cuh"
#include "fp8.cuh"

namespace epmoe::cuda {

__device__ __forceinline__ int64_t load_id(const DispatchArgs& args, int64_t t, int32_t k) {
  int64_t index = t * args.ids_stride + k;
  return args.wide_ids ? static_cast<const int64_t*>(args.ids_TK)[index]
                       : static_cast<const int32_t*>(args.ids_TK)[index];
}

// The physical expert of a pair, -1 where there is nothing to compute, and its weight.
__device__ __forceinline__ int32_t read_pair(const DispatchKernel& kernel, int64_t t, int32_t k, float& weight) {
  const ExchangePlan& plan = kernel.ex.plan;
  int64_t id = load_id(kernel.args, t, k);
  weight = load_float(kernel.args.weights_TK, kernel.args.weights_dtype, t * kernel.args.weights_stride + k);
  if (id < 0 || id >= plan.E || weight == 0.0f || !is_finite(weight)) {
    weight = 0.0f;
    return -1;
  }
  if (plan.copies == 1) return static_cast<int32_t>(id);
  int32_t copies = in_scratch<int32_t>(kernel.ex, plan.num_copies)[id];
  return in_scratch<int32_t>(kernel.ex, plan.copies_table)[id * plan.copies + (t + plan.rank) % copies];
}

// By the whole block: adds tokens [begin, end) to the counts by expert and by rank.
__device__ __forceinline__ void count_tokens(const DispatchKernel& kernel, int64_t begin, int64_t end,
                                             DispatchShared& shared) {
  for (int64_t base = begin; base < end; base += kThreads) {
    int64_t t = base + threadIdx.x;
    uint32_t ranks = 0;
    for (int32_t k = 0; t < end && k < kernel.args.K; ++k) {
      float weight;
      int32_t id = read_pair(kernel, t, k, weight);
      if (id < 0) continue;
      atomicAdd(&shared.count[id], 1);
      ranks |= 1u << (shared.place[id] >> 16);
    }
    for (int32_t r = 0; r < kernel.ex.plan.R; ++r) {
      uint32_t votes = __ballot_sync(kAllLanes, ranks >> r & 1u);
      if (votes && threadIdx.x % 32 == 0) atomicAdd(&shared.rank_count[r], __popc(votes));
    }
  }
}

// By one block: counts everything and tells every rank, which opens the round.
__device__ __forceinline__ void send_counts(const DispatchKernel& kernel, uint32_t epoch, int64_t tokens,
                                            DispatchShared& shared) {
  const ExchangePlan& plan = kernel.ex.plan;
  count_tokens(kernel, 0, tokens, shared);
  __syncthreads();
  for (int64_t p = threadIdx.x; p < plan.P; p += kThreads) {
    int32_t place = shared.place[p];
    store_word(kernel.counts(place >> 16, plan.rank) + kCountColumns + (place & 0xffff), epoch, shared.count[p]);
  }
  if (threadIdx.x < plan.R) {
    store_word(kernel.counts(threadIdx.x, plan.rank), epoch, shared.rank_count[threadIdx.x]);
    store_word(kernel.counts(threadIdx.x, plan.rank) + 1, epoch, kernel.shape());
    in_scratch<int64_t>(kernel.ex, plan.rows_sent)[threadIdx.x] += shared.rank_count[threadIdx.x];
  }
}

// What is wrong with the input, into the health counters.
__device__ __forceinline__ void count_health(const DispatchKernel& kernel, int64_t tokens) {
  const DispatchArgs& args = kernel.args;
  auto* counters = reinterpret_cast<unsigned long long*>(in_scratch<int64_t>(kernel.ex, kernel.ex.plan.counters));
  for (int64_t t = threadIdx.x; t < tokens; t += kThreads) {
    int32_t out_of_range = 0, duplicates = 0, nonfinite = 0;
    for (int32_t k = 0; k < args.K; ++k) {
      int64_t id = load_id(args, t, k);
      nonfinite += !is_finite(load_float(args.weights_TK, args.weights_dtype, t * args.weights_stride + k));
      bool valid = id >= 0 && id < kernel.ex.plan.E, again = false;
      out_of_range += !valid && id != -1 && id != kernel.ex.plan.E;  // those two say "no expert"
      for (int32_t before = 0; valid && before < k; ++before) again |= load_id(args, t, before) == id;
      duplicates += again;
    }
    if (out_of_range) atomicAdd(&counters[kOutOfRangeIds], out_of_range);
    if (duplicates) atomicAdd(&counters[kDuplicateIds], duplicates);
    if (nonfinite) atomicAdd(&counters[kNonfiniteWeights], nonfinite);
  }
  int64_t wanted = args.num_tokens ? *args.num_tokens : args.num_rows;
  if (threadIdx.x == 0 && wanted != tokens) atomicAdd(&counters[kClampedNumTokens], 1ull);
}

__device__ __forceinline__ int64_t slot_on(const DispatchKernel& kernel, int64_t rank, const DispatchShared& shared) {
  return kernel.ex.plan.rank * kernel.ex.plan.M + shared.slot[rank];
}

// One row as fp8: kLanes threads share a block of 128 elements.
template <typename T>
__device__ __forceinline__ void send_row_fp8(const DispatchKernel& kernel, int64_t t, const DispatchShared& shared) {
  constexpr int kCount = kPerVector<T>, kLanes = kScaleBlock / kCount;
  const Exchange& ex = kernel.ex;
  const char* x = static_cast<const char*>(kernel.args.x_TD) + t * kernel.args.x_stride_bytes;
  int64_t vectors = kernel.args.D / kCount;
  for (int64_t base = 0; base < vectors; base += kThreads) {
    int64_t v = base + threadIdx.x;
    float values[kCount] = {};
    if (v < vectors) {
      auto row = reinterpret_cast<const Vector<T, kCount>*>(x)[v];
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = to_float(row.at[i]);
    }
    float scale = block_scale<kCount, kLanes>(values);
    Vector<uint8_t, kCount> packed = to_fp8(values, scale);
    for (uint32_t left = shared.ranks; left && v < vectors; left &= left - 1) {
      int64_t rank = __ffs(left) - 1, slot = slot_on(kernel, rank, shared);
      char* out = in_window<char>(ex, rank, ex.plan.recv_x) + slot * ex.plan.x_stride_bytes;
      reinterpret_cast<Vector<uint8_t, kCount>*>(out)[v] = packed;
      if (v % kLanes == 0)
        in_window<float>(ex, rank, ex.plan.recv_scales)[slot * ex.plan.scale_blocks + v / kLanes] = scale;
    }
  }
}

__device__ __forceinline__ void send_row(const DispatchKernel& kernel, int64_t t, const DispatchShared& shared) {
  const Exchange& ex = kernel.ex;
  const char* x = static_cast<const char*>(kernel.args.x_TD) + t * kernel.args.x_stride_bytes;
  int64_t vectors = kernel.row_bytes() / 16;
#pragma unroll 2
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    uint4 value = reinterpret_cast<const uint4*>(x)[v];
    for (uint32_t left = shared.ranks; left; left &= left - 1) {
      int64_t rank = __ffs(left) - 1;
      char* out = in_window<char>(ex, rank, ex.plan.recv_x) + slot_on(kernel, rank, shared) * ex.plan.x_stride_bytes;
      reinterpret_cast<uint4*>(out)[v] = value;
    }
  }
}

// By warp 0: the token's pairs, their ordinals, and its slot on each rank that it goes to.
__device__ __forceinline__ void place_token(const DispatchKernel& kernel, int64_t t, DispatchShared& shared) {
  const ExchangePlan& plan = kernel.ex.plan;
  int lane = threadIdx.x;
  float weight = 0.0f;
  int32_t id = lane < kernel.args.K ? read_pair(kernel, t, lane, weight) : -1;
  uint32_t same = __match_any_sync(kAllLanes, id), before = (1u << lane) - 1;
  uint32_t ranks = __reduce_or_sync(kAllLanes, id < 0 ? 0u : 1u << (shared.place[id] >> 16));
  shared.ids[lane] = id;
  shared.weights[lane] = weight;
  shared.ordinals[lane] = id < 0 ? -1 : shared.count[id] + __popc(same & before);
  shared.slot[lane] = ranks >> lane & 1u ? shared.rank_count[lane] : -1;
  if (lane == 0) shared.ranks = ranks;
  if (lane < plan.R) in_scratch<int32_t>(kernel.ex, plan.slots)[t * plan.R + lane] = shared.slot[lane];
}

__device__ __forceinline__ void send_tokens(const DispatchKernel& kernel, uint32_t epoch, int64_t tokens,
                                            DispatchShared& shared) {
  const Exchange& ex = kernel.ex;
  const ExchangePlan& plan = ex.plan;
  int64_t counted = 0;
  for (int64_t t = blockIdx.x; t < tokens; t += kernel.senders) {
    count_tokens(kernel, counted, t, shared);
    counted = t;
    __syncthreads();
    if (threadIdx.x < 32) place_token(kernel, t, shared);
    __syncthreads();
    if (!plan.payload_fp8) {
      send_row(kernel, t, shared);
    } else if (kernel.args.dtype == DType::kFloat32) {
      send_row_fp8<float>(kernel, t, shared);
    } else if (kernel.args.dtype == DType::kFloat16) {
      send_row_fp8<__half>(kernel, t, shared);
    } else {
      send_row_fp8<__nv_bfloat16>(kernel, t, shared);
    }
    // The last warps, which have the least of the row to send, send what is said about it.
    for (int32_t i = kThreads - 1 - threadIdx.x; i < plan.R * kernel.args.K; i += kThreads) {
      int32_t rank = i / kernel.args.K, k = i % kernel.args.K;
      if (shared.slot[rank] < 0) continue;
      int64_t pair = slot_on(kernel, rank, shared) * plan.K + k;
      int32_t sentinel = in_scratch<int32_t>(ex, plan.sentinels)[rank];
      in_window<int32_t>(ex, rank, plan.recv_ids)[pair] = shared.ids[k] < 0 ? sentinel : shared.ids[k];
      in_window<int32_t>(ex, rank, plan.recv_ordinals)[pair] = shared.ordinals[k];
      in_window<float>(ex, rank, plan.recv_weights)[pair] = shared.weights[k];
    }
    __syncthreads();
    if (threadIdx.x < plan.R && shared.slot[threadIdx.x] >= 0)
      raise_flag(in_window<uint32_t>(ex, threadIdx.x, plan.recv_flags) + slot_on(kernel, threadIdx.x, shared), epoch);
  }
}

}  // namespace epmoe::cuda
