// combine, Simple protocol: a slot's sum travels as a row, then its flag.
#pragma once
#include "cuda/combine/values.cuh"
#include "cuda/device/tma.cuh"
#include "cuda/device/wire.cuh"
#include "cuda/exchange/warp_team.cuh"

namespace epmoe::cuda {

constexpr int kVectorsInFlight = 2;  // vectors of a row that a thread sums at a time: a step
constexpr int kStepBytes = kVectorsInFlight * kThreads * 16;  // of all threads of a block
constexpr int kSendStages = kSendBufferBytes / kStepBytes;    // steps of a team on their way out
constexpr int kRowsInFlight = kPlaceBytes / kStepBytes;       // rows of which a thread loads a step

// The sums of a thread's vectors over the rows of a slot's pairs. The vectors pass through shared
// memory, into places of the thread's own: so it has more loads in flight than registers, from one
// step to the next.
template <typename T>
struct RowSums {
  static constexpr int kCount = kPerVector<T>;
  const CombineBlock& b;
  ReceivedPair pair;
  uint32_t kept;            // pairs that have a row
  int32_t begin, end;       // vectors of the row
  int32_t threads, thread;  // that share a step
  uint4* places;            // [kRowsInFlight, kVectorsInFlight, threads of the block]

  __device__ __forceinline__ RowSums(const CombineBlock& b, ReceivedPair pair, int32_t begin,
                                     int32_t end, int32_t threads, int32_t thread, char* places)
      : b(b),
        pair(pair),
        kept(pair.kept()),
        begin(begin),
        end(end),
        threads(threads),
        thread(thread),
        places(reinterpret_cast<uint4*>(places) + threadIdx.x) {}

  __device__ __forceinline__ int32_t vector(int32_t base, int j) const {
    return base + j * threads + thread;
  }
  __device__ __forceinline__ uint4* place(int32_t row, int j) const {
    return places + (row * kVectorsInFlight + j) * kThreads;
  }

  // Calls step(base, sums) for each step of the row: sums[j] is that of vector `base` + j * threads
  // + thread, where the thread has one. The pairs are added in their order.
  template <typename F>
  __device__ __forceinline__ void each_step(F&& step) const {
    int32_t length = kVectorsInFlight * threads;
    // The next row to load, and of which step.
    int32_t base_ahead = begin;
    uint32_t left_ahead = kept;
    auto load = [&](int32_t at) {
      if (base_ahead < end && kept) {
        int64_t row = __shfl_sync(kAllLanes, pair.row, __ffs(left_ahead) - 1);
        auto* from = reinterpret_cast<const uint4*>(static_cast<const char*>(b.args.rows) +
                                                    row * b.args.rows_stride_bytes);
#pragma unroll
        for (int j = 0; j < kVectorsInFlight; ++j)
          if (vector(base_ahead, j) < end) load_async(place(at, j), from + vector(base_ahead, j));
        left_ahead &= left_ahead - 1;
        if (!left_ahead) left_ahead = kept, base_ahead += length;
      }
      commit_loads();
    };
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) load(i);
    int32_t at = 0;
#pragma unroll 1
    for (int32_t base = begin; base < end; base += length) {
      float sums[kVectorsInFlight][kCount] = {};
#pragma unroll 1
      for (uint32_t left = kept; left; left &= left - 1) {
        float weight = __shfl_sync(kAllLanes, pair.weight, __ffs(left) - 1);
        await_loads<kRowsInFlight - 1>();
#pragma unroll
        for (int j = 0; j < kVectorsInFlight; ++j)
          if (vector(base, j) < end) add_weighted<T>(sums[j], *place(at, j), weight);
        load(at);
        at = at + 1 < kRowsInFlight ? at + 1 : 0;
      }
      step(base, sums);
    }
  }
};

// The sums that a team has sent, and whose flags are not published: a lane of its first warp each.
struct Unsignaled {
  Flag* flag;
  int32_t count = 0;

  // The first warp notes a sum that lane 0 has started to send.
  __device__ __forceinline__ void add(Flag* of) {
    if (threadIdx.x % 32 == count) flag = of;
    ++count;
  }
  // The first warp waits until the sums have arrived, and publishes their flags by one release.
  __device__ __forceinline__ void publish(uint32_t epoch) {
    if (count == 0) return;
    tma_wait_written<0>();
    __syncwarp();
    release_all();
    if (static_cast<int32_t>(threadIdx.x % 32) < count) Flag::publish_released(flag, epoch);
    count = 0;
  }
};

// A thread writes its sums of a step, as they travel.
template <WireFormat kFormat, typename Out, typename T, int kCount>
__device__ __forceinline__ void write_step(const RowSums<T>& rows, int32_t base,
                                           float (&sums)[kVectorsInFlight][kCount], Out* step,
                                           float* scales) {
#pragma unroll
  for (int i = 0; i < kVectorsInFlight; ++i) {
    int32_t v = rows.vector(base, i);
    if constexpr (wire(kFormat).has_scales()) {
      constexpr int kLanes = wire(kFormat).block / kCount;
      float scale = block_scale<kCount, kLanes>(sums[i]);
      if (v >= rows.end) continue;
      step[v - base] = quantized<kFormat>(sums[i], scale);
      if (v % kLanes == 0) scales[v / kLanes] = scale;
    } else if (v < rows.end) {
      step[v - base] = rounded<T>(sums[i]);
    }
  }
}

// A team sends one slot's weighted sum, or its partial row as it is, to the window of the slot's
// source: it sums a step into shared memory and stores it from there by TMA. The scales of the row
// leave last. `stored` counts the team's steps.
template <WireFormat kFormat, typename T>
__device__ __forceinline__ void send_slot(const CombineBlock& b, const WarpTeam& team,
                                          int32_t source, int32_t s, ReceivedPair pair,
                                          char* shared, int32_t& stored) {
  constexpr WireTraits kWire = wire(kFormat);
  constexpr int kCount = kPerVector<T>;
  using Out =
      std::conditional_t<kWire.has_scales(), WireRegisters<kFormat, kCount>, Vector<T, kCount>>;
  static_assert(!kWire.has_scales() ||
                kSendStages * kVectorsInFlight * kThreads * sizeof(Out) <= kSendBufferBytes / 2);
  const ExchangePlan& plan = b.plan;
  int64_t at = plan.rank * plan.M + s;
  auto vectors = static_cast<int32_t>(b.args.D / kCount);
  auto* out = reinterpret_cast<Out*>(in_window<char>(b.ex, source, plan.combine_rows) +
                                     at * plan.combine_stride_bytes);
  int32_t length = kVectorsInFlight * team.threads();
  bool first_warp = team.thread < 32;
  auto* scales = reinterpret_cast<float*>(shared + kSendBufferBytes / 2 +
                                          team.index * kWire.padded_scale_bytes(b.args.D));
  RowSums<T> rows(b, pair, 0, vectors, team.threads(), team.thread, shared + kSendBufferBytes);
  rows.each_step([&](int32_t base, float (&sums)[kVectorsInFlight][kCount]) {
    Out* step =
        reinterpret_cast<Out*>(shared) + (team.index * kSendStages + stored % kSendStages) * length;
    write_step<kFormat, Out>(rows, base, sums, step, scales);
    fence_shared_for_tma();
    // After the barrier below, the team may overwrite the oldest step: its store has left shared
    // memory.
    if (first_warp && stored + 1 >= kSendStages) tma_wait_read<kSendStages - 2>();
    team.sync();
    auto bytes = static_cast<int32_t>(min(length, vectors - base) * sizeof(Out));
    if (first_warp) tma_store(team.leads() ? out + base : nullptr, step, bytes);
    ++stored;
  });
  if (!first_warp) return;
  if constexpr (kWire.has_scales()) {
    float* to =
        in_window<float>(b.ex, source, plan.combine_scales) + at * plan.combine_scale_blocks;
    tma_store(team.leads() ? to : nullptr, scales, kWire.padded_scale_bytes(b.args.D));
  }
  // The team's next row writes over the scales.
  if constexpr (kWire.has_scales()) tma_wait_read<0>();
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
  Unsignaled sums;
  bool first_warp = team.thread < 32;
  bool more = num_slots > teams;
  // A slot's work hides the way of the next claim to memory and back, and that of the next pairs.
  int32_t claimed = more && team.leads() ? claim(head) : 0;
  for (int32_t turn = 0; outgoing.item < num_slots; ++turn) {
    OutgoingSum ahead = outgoing;
    if (more) {
      if (team.leads()) {
        next[turn % 2][team.index] = teams + claimed;
        claimed = claim(head);
      }
      team.sync();
      ahead = outgoing_slot<kOwn>(b, next[turn % 2][team.index]);
      if (ahead.item < num_slots) ahead.read(b);
    }
    auto [source, s] = outgoing.slot;
    if (s < b.count_R[source] && !b.is_ll(source)) {
      if (kValues && first_warp) send_values(b, outgoing.slot, outgoing.pair.row);
      send_slot<kFormat, T>(b, team, source, s, checked(b, outgoing.pair), shared, stored);
      if (first_warp) {
        sums.add(in_window<Flag>(b.ex, source, b.plan.combine_flags) + b.plan.rank * b.plan.M + s);
        if (sums.count == b.kernel.rows_per_release) sums.publish(b.wait.epoch);
      }
    }
    if (!more) break;
    outgoing = ahead;
  }
  if (first_warp) sums.publish(b.wait.epoch);
}

// A chunk of token t's row of y, of which a lane writes some vectors.
template <typename T>
struct OutputChunk {
  Vector<T, kPerVector<T>>* y;
  int32_t begin, end;  // vectors of the row

  __device__ __forceinline__ OutputChunk(const CombineBlock& b, int32_t t, int32_t chunk,
                                         int32_t chunks) {
    y = reinterpret_cast<Vector<T, kPerVector<T>>*>(static_cast<T*>(b.args.y_TD) +
                                                    int64_t{t} * b.args.D);
    auto vectors = static_cast<int32_t>(b.args.D / kPerVector<T>);
    begin = vectors * chunk / chunks;
    end = vectors * (chunk + 1) / chunks;
  }
  // Writes a step from vector `base` on.
  template <int kCount>
  __device__ __forceinline__ void write(int32_t base,
                                        float (&sums)[kVectorsInFlight][kCount]) const {
#pragma unroll
    for (int j = 0; j < kVectorsInFlight; ++j) {
      int32_t v = base + j * 32 + static_cast<int32_t>(threadIdx.x % 32);
      if (v < end) y[v] = rounded<T>(sums[j]);
    }
  }
};

// The same where there is no other rank: one warp makes the sum of a chunk itself.
template <typename T>
__device__ __forceinline__ void sum_own_token(const CombineBlock& b, int32_t t, int32_t chunk,
                                              int32_t chunks, uint32_t sending_ranks,
                                              char* places) {
  constexpr int kCount = kPerVector<T>;
  auto rank = static_cast<int32_t>(b.plan.rank);
  int32_t slot = __shfl_sync(kAllLanes, slot_of_sum(b, t, sending_ranks), rank);
  OutgoingSum own(b, {0, 0, {rank, slot}});
  if (slot >= 0) own.read(b);
  ReceivedPair pair = slot >= 0 ? checked(b, own.pair) : ReceivedPair{kForeign, 0.0f};
  OutputChunk<T> out(b, t, chunk, chunks);
  RowSums<T> rows(b, pair, out.begin, out.end, 32, threadIdx.x % 32, places);
  rows.each_step([&](int32_t base, float (&sums)[kVectorsInFlight][kCount]) {
  // As if the sum travelled: -0 becomes 0.
#pragma unroll
    for (int i = 0; i < kVectorsInFlight * kCount; ++i) {
      float& value = sums[i / kCount][i % kCount];
      value = 0.0f + to_float(from_float<T>(value));
    }
    out.write(base, sums);
  });
}

// One warp writes a chunk of token t's row of y: it waits for the ranks that return a sum and adds
// these in rank order.
template <WireFormat kFormat, typename T>
__device__ __forceinline__ bool sum_token(const CombineBlock& b, int32_t t, int32_t chunk,
                                          int32_t chunks, uint32_t sending_ranks) {
  constexpr int kCount = kPerVector<T>;
  using Wire = WireElement<kFormat, T>;
  constexpr bool kScaled = wire(kFormat).has_scales();
  using Loaded = Registers<Vector<Wire, kCount>>;
  const ExchangePlan& plan = b.plan;
  constexpr int kVectors = kVectorsInFlight;
  constexpr int kDepth = 2;  // ranks whose loads are in flight
  int32_t lane = threadIdx.x % 32;
  int32_t slot = slot_of_sum(b, t, sending_ranks);
  uint32_t ranks = __ballot_sync(kAllLanes, slot >= 0);
  auto* flags = in_window<Flag>(b.ex, plan.rank, plan.combine_flags) + lane * plan.M;
  bool here = slot < 0 || b.wait.await(flags + slot, lane);
  if (!__all_sync(kAllLanes, here)) return false;
  __syncwarp();  // what each lane has acquired holds for all
  auto* window = in_window<char>(b.ex, plan.rank, plan.combine_rows);
  auto* scales = in_window<float>(b.ex, plan.rank, plan.combine_scales);
  OutputChunk<T> out(b, t, chunk, chunks);
  for (int32_t base = out.begin; base < out.end; base += 32 * kVectors) {
    float sum[kVectors][kCount] = {};
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
          if (v < out.end) values[i][j] = __ldcg(row + v);
          if constexpr (kScaled)
            if (v < out.end)
              scale[i][j] = __ldcg(scales + at * plan.combine_scale_blocks +
                                   v * kCount / wire(kFormat).block);
        }
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (base + j * 32 + lane >= out.end) continue;
          add_weighted<Wire>(sum[j], values[i][j], kScaled ? scale[i][j] : 1.0f);
        }
      }
    }
    out.write(base, sum);
  }
  return true;
}

}  // namespace epmoe::cuda
