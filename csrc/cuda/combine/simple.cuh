// combine, Simple protocol: a slot's sum travels as a row, then its flag.
#pragma once
#include "cuda/combine/values.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wire.cuh"
#include "cuda/exchange/warp_team.cuh"

namespace epmoe::cuda {

constexpr int kVectorsInFlight = 2;  // vectors of a row that a thread sums at a time: a step
// Of own sums: the same, and the pairs whose loads are in flight. One row of a token after another
// would take longer, and more loads at once find no registers.
constexpr int kOwnVectors = 1;
constexpr int kOwnDepth = 4;
constexpr int kSendStages = 4;  // steps of a team on their way through shared memory
static_assert(kSendStages * kVectorsInFlight * kThreads * 16 == kSendBufferBytes);

// A team sends one slot's weighted sum, or its partial row as it is, to the window of the slot's
// source: it sums a step into shared memory and stores it from there by TMA. The scales of the row
// leave last. `stored` counts the team's steps.
template <WireFormat kFormat, typename T>
__device__ __forceinline__ void send_slot(const CombineBlock& b, const WarpTeam& team,
                                          int32_t source, int32_t s, ReceivedPair pair,
                                          char* shared, int32_t& stored) {
  constexpr WireTraits kWire = wire(kFormat);
  constexpr int kCount = kPerVector<T>;
  constexpr int kLanes = kWire.block / kCount;
  using Out =
      std::conditional_t<kWire.has_scales(), WireRegisters<kFormat, kCount>, Vector<T, kCount>>;
  static_assert(!kWire.has_scales() ||
                kSendStages * kVectorsInFlight * kThreads * sizeof(Out) <= kSendBufferBytes / 2);
  const ExchangePlan& plan = b.plan;
  int64_t at = plan.rank * plan.M + s;
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
  auto* out = reinterpret_cast<Out*>(in_window<char>(b.ex, source, plan.combine_rows) +
                                     at * plan.combine_stride_bytes);
  uint32_t kept = pair.kept();
  int32_t length = kVectorsInFlight * team.threads();
  bool first_warp = team.thread < 32;
  auto* scales = reinterpret_cast<float*>(shared + kSendBufferBytes / 2 +
                                          team.index * kWire.padded_scale_bytes(b.args.D));
  for (int32_t base = 0; base < vectors; base += length, ++stored) {
    int32_t v[kVectorsInFlight];
    bool inside[kVectorsInFlight];
    float sum[kVectorsInFlight][kCount];
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i)
      v[i] = base + i * team.threads() + team.thread, inside[i] = v[i] < vectors;
    sum_pairs<T, 2>(b, pair, kept, v, inside, sum, [] {});
    Out* step =
        reinterpret_cast<Out*>(shared) + (team.index * kSendStages + stored % kSendStages) * length;
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) {
      if constexpr (kWire.has_scales()) {
        float scale = block_scale<kCount, kLanes>(sum[i]);
        if (!inside[i]) continue;
        step[v[i] - base] = quantized<kFormat>(sum[i], scale);
        if (v[i] % kLanes == 0) scales[v[i] / kLanes] = scale;
      } else if (inside[i]) {
        step[v[i] - base] = rounded<T>(sum[i]);
      }
    }
    fence_shared_for_tma();
    // After the barrier below, the team may overwrite the oldest step: its store has left shared
    // memory.
    if (first_warp && stored + 1 >= kSendStages) tma_wait_read<kSendStages - 2>();
    team.sync();
    auto bytes = static_cast<int32_t>(min(length, vectors - base) * sizeof(Out));
    if (first_warp) tma_store(team.leads() ? out + base : nullptr, step, bytes);
  }
  if (!first_warp) return;
  if constexpr (kWire.has_scales()) {
    float* to =
        in_window<float>(b.ex, source, plan.combine_scales) + at * plan.combine_scale_blocks;
    tma_store(team.leads() ? to : nullptr, scales, kWire.padded_scale_bytes(b.args.D));
  }
  tma_wait_written<0>();
  __syncwarp();
  if (team.leads())
    Flag::publish(in_window<Flag>(b.ex, source, plan.combine_flags) + at, b.wait.epoch);
}

// The n-th slot that the senders visit. kOwn: of the slots of other ranks alone.
template <bool kOwn>
__device__ __forceinline__ OutgoingSum outgoing_slot(const CombineBlock& b, int32_t n) {
  return {b, {n, 0, slot_of<kOwn>(b.plan, n)}};
}

// The slot that this warp's team sends first: the team's number in the grid.
template <bool kOwn>
__device__ __forceinline__ OutgoingSum first_slot(const CombineBlock& b) {
  int32_t team = WarpTeam(b.kernel.team).index;
  return outgoing_slot<kOwn>(b, team * b.kernel.send_blocks + static_cast<int32_t>(blockIdx.x));
}

// The teams of the send blocks send a slot each, first `outgoing`, and then claim others.
template <bool kOwn, WireFormat kFormat, typename T, bool kValues>
__device__ __forceinline__ void send_slots(const CombineBlock& b, OutgoingSum outgoing,
                                           char* shared, int32_t* head) {
  __shared__ int32_t next[2][kWarps];
  WarpTeam team(b.kernel.team);
  int32_t teams = b.kernel.send_blocks * team.teams();
  int32_t num_slots = b.num_slots(false, b.plan.R - kOwn);
  int32_t stored = 0;
  for (int32_t turn = 0; outgoing.item < num_slots; ++turn) {
    int32_t claimed = 0;
    bool more = num_slots > teams;
    if (more && team.leads())
      claimed = claim(head);  // this slot's work hides the claim's way to memory and back
    if (turn) outgoing.read(b);
    auto [source, s] = outgoing.slot;
    if (s < b.count_R[source] && !b.is_ll(source)) {
      if (kValues && team.thread < 32) send_values(b, outgoing.slot, outgoing.pair.row);
      send_slot<kFormat, T>(b, team, source, s, checked(b, outgoing.pair), shared, stored);
    }
    if (!more) break;
    if (team.leads()) next[turn % 2][team.index] = teams + claimed;
    team.sync();
    outgoing = outgoing_slot<kOwn>(b, next[turn % 2][team.index]);
  }
}

// One warp writes a chunk of token t's row of y: it waits for the ranks that return a sum and adds
// these in rank order. kOwn: it makes this rank's own sum itself, before it waits. Among up to two
// ranks the order does not matter then.
template <bool kOwn, WireFormat kFormat, typename T>
__device__ __forceinline__ bool sum_token(const CombineBlock& b, int32_t t, int32_t chunk,
                                          int32_t chunks, uint32_t sending_ranks) {
  constexpr int kCount = kPerVector<T>;
  using Wire = WireElement<kFormat, T>;
  constexpr bool kScaled = wire(kFormat).has_scales();
  using Loaded = Registers<Vector<Wire, kCount>>;
  const ExchangePlan& plan = b.plan;
  constexpr int kVectors = kOwn ? kOwnVectors : kVectorsInFlight;
  int32_t lane = threadIdx.x % 32;
  int32_t slot = slot_of_sum(b, t, sending_ranks);
  uint32_t ranks = __ballot_sync(kAllLanes, slot >= 0);
  // This rank's own pairs of the token.
  int32_t own_slot = -1;
  if constexpr (kOwn) {
    own_slot = __shfl_sync(kAllLanes, slot, static_cast<int32_t>(plan.rank));
    ranks &= ~(1u << plan.rank);
    if (lane == plan.rank) slot = -1;
  }
  OutgoingSum own(b, {0, 0, {static_cast<int32_t>(plan.rank), own_slot}});
  if (kOwn && own_slot >= 0) own.read(b);
  // Calls this once, before the first sum of another rank is read.
  auto await = [&] {
    auto* flags = in_window<Flag>(b.ex, plan.rank, plan.combine_flags) + lane * plan.M;
    bool here = slot < 0 || b.wait.await(flags + slot, lane);
    here = __all_sync(kAllLanes, here);
    __syncwarp();  // what each lane has acquired holds for all
    return here;
  };
  if (!kOwn && !await()) return false;
  auto* window = in_window<char>(b.ex, plan.rank, plan.combine_rows);
  auto* scales = in_window<float>(b.ex, plan.rank, plan.combine_scales);
  auto* y =
      reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(b.args.y_TD) + int64_t{t} * b.args.D);
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
  int32_t begin = vectors * chunk / chunks;
  int32_t end = vectors * (chunk + 1) / chunks;
  constexpr int kDepth = kOwn ? 1 : 2;  // ranks whose loads are in flight
  for (int32_t base = begin; base < end; base += 32 * kVectors) {
    float sum[kVectors][kCount] = {};
    if constexpr (kOwn) {
      int32_t v[kVectors];
      bool inside[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[j] = base + j * 32 + lane, inside[j] = v[j] < end;
      if (own_slot >= 0) sum_own<T, kOwnDepth>(b, own.pair, v, inside, sum, [] {});
      if (base == begin && !await()) return false;
    }
    for (uint32_t left = ranks; left;) {
      Loaded values[kDepth][kVectors];
      float scale[kDepth][kVectors];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (!left) break;
        int rank = __ffs(left) - 1;
        left &= left - 1;
        ++count;
        int64_t at = rank * plan.M + __shfl_sync(kAllLanes, slot, rank);
        auto* row = reinterpret_cast<const Loaded*>(window + at * plan.combine_stride_bytes);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          int32_t v = base + j * 32 + lane;
          if (v < end) values[i][j] = __ldcg(row + v);
          if constexpr (kScaled)
            if (v < end)
              scale[i][j] = __ldcg(scales + at * plan.combine_scale_blocks +
                                   v * kCount / wire(kFormat).block);
        }
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (base + j * 32 + lane >= end) continue;
          add_weighted<Wire>(sum[j], values[i][j], kScaled ? scale[i][j] : 1.0f);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (int32_t v = base + j * 32 + lane; v < end) y[v] = rounded<T>(sum[j]);
  }
  return true;
}

}  // namespace epmoe::cuda
