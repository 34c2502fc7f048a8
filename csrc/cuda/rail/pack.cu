// rail_pack on the GPU, in two kernels.
//   assign_slots   One block for each node. It gives the tokens that need the node their slots, in
//   token order. copy_tokens    One block for each token. It reads the row once and writes it to
//   the token's slot in each slab. fp8
//                  is made on the way. Then its warps empty the slots that no token uses.
// Nothing depends on the order of atomics, except in counters, which are sums.
#include "cuda/device/launch.cuh"
#include "cuda/device/pairs.cuh"
#include "cuda/device/wire.cuh"
#include "cuda/local/segments.cuh"
#include "cuda/rail/slabs.cuh"
#include "cuda/stages.h"

namespace epmoe::cuda {
namespace {

constexpr int kSlotThreads = 32 * kMaxWarps;
constexpr int kCopyThreads = 256;

__device__ __forceinline__ int32_t physical(const RailPackArgs& args, int64_t t,
                                            const RoutedPair& pair) {
  return physical(pair, args.E, args.copies, [&](int32_t expert) {
    return copy_in_turn(args.copies_EC, args.copies_E, args.copies, args.rank, t, expert);
  });
}

// How many pairs of token t have their expert on `node`.
__device__ __forceinline__ int32_t pairs_on(const RailPackArgs& args, int64_t t, int32_t node) {
  constexpr int kInFlight = 4;
  int32_t found = 0;
  for (int32_t k = 0; k < args.K; k += kInFlight) {
    RoutedPair pairs[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) pairs[i] = {args, t, k + i, k + i < args.K};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      int32_t p = physical(args, t, pairs[i]);
      found += p >= 0 && args.node_of_P[p] == node;
    }
  }
  return found;
}

__global__ void __launch_bounds__(kSlotThreads)
    assign_slots(const __grid_constant__ RailPackArgs args) {
  __shared__ int64_t more;
  wait_for_predecessor();
  let_successor_start();
  int32_t node = blockIdx.x;
  int64_t tokens = real_tokens(args);
  int64_t wanted = 0;
  unsigned long long dropped = 0;
  for (int64_t begin = 0; begin < args.T; begin += kSlotThreads) {
    int64_t t = begin + threadIdx.x;
    int32_t pairs = t < tokens ? pairs_on(args, t, node) : 0;
    int64_t sum = block_inclusive_sum(pairs > 0);
    int64_t slot = wanted + sum - 1;
    bool fits = pairs > 0 && slot < args.slab_rows;
    if (t < args.T)
      args.slots_by_node[t * args.num_nodes + node] = fits ? static_cast<int32_t>(slot) : -1;
    if (!fits) dropped += pairs;
    if (threadIdx.x == kSlotThreads - 1) more = sum;
    __syncthreads();
    wanted += more;
  }
  if (dropped)
    atomicAdd(reinterpret_cast<unsigned long long*>(args.counters) + kDroppedPairs, dropped);
  if (threadIdx.x) return;
  int64_t rows = min(wanted, args.slab_rows);
  args.rows_by_node[node] = static_cast<int32_t>(rows);
  args.rows_sent_by_node[node] += rows;
  if (wanted > args.slab_rows) atomicMax(args.needed, static_cast<int32_t>(wanted));
  if (node == 0 && tokens != wanted_tokens(args)) ++args.counters[kClampedNumTokens];
}

__device__ __forceinline__ char* slot_at(const RailPackArgs& args, int64_t node, int64_t slot) {
  int64_t first = first_slot(args.slab_rows, args.node, node);
  return (node == args.node ? args.own : args.sent) + (first + slot) * args.slot.bytes;
}

__device__ __forceinline__ void write_pair(const RailPackArgs& args, char* slot, int32_t k,
                                           int32_t id, float weight) {
  reinterpret_cast<int32_t*>(slot + args.slot.ids)[k] = id;
  reinterpret_cast<float*>(slot + args.slot.weights)[k] = weight;
}

// One warp, a pair a lane, writes the ids and weights of token t into its slots, and counts what is
// wrong with its pairs. Returns how many slots the token has; `slots` are their addresses.
__device__ __forceinline__ int32_t write_pairs(const RailPackArgs& args, int64_t t, bool real,
                                               char** slots) {
  int32_t lane = threadIdx.x % 32;
  uint32_t lower = (1u << lane) - 1;
  RoutedPair pair(args, t, lane, lane < args.K);
  if (real) count_wrong(pair, args.E, args.counters);
  int32_t p = physical(args, t, pair);
  int32_t node = p < 0 ? -1 : args.node_of_P[p];
  int32_t slot = node < 0 ? -1 : args.slots_by_node[t * args.num_nodes + node];
  char* at = slot < 0 || slot >= args.slab_rows ? nullptr : slot_at(args, node, slot);
  uint32_t same = __match_any_sync(kAllLanes, node);
  uint32_t first = __ballot_sync(kAllLanes, at && !(same & lower));
  if (at && !(same & lower)) slots[__popc(first & lower)] = at;
  __syncwarp();
  int32_t local = p < 0 ? -1 : args.node_local_P[p];
  for (uint32_t left = first, n = 0; left; left &= left - 1, ++n) {
    bool here = node == __shfl_sync(kAllLanes, node, __ffs(left) - 1);
    if (lane < args.K)
      write_pair(args, slots[n], lane, here ? local : -1, here ? pair.weight : 0.0f);
  }
  return __popc(first);
}

// The block copies a row as it is, 16 bytes a thread and access.
__device__ __forceinline__ void copy_row(const RailPackArgs& args, int64_t t, char* const* slots,
                                         int32_t count) {
  constexpr int kInFlight = 4;
  auto* row =
      reinterpret_cast<const uint4*>(static_cast<const char*>(args.x_TD) + t * args.x_stride_bytes);
  auto vectors = static_cast<int32_t>(args.D * itemsize(args.dtype) / sizeof(uint4));
  for (int32_t begin = threadIdx.x; begin < vectors; begin += kInFlight * kCopyThreads) {
    uint4 held[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (begin + j * kCopyThreads < vectors) held[j] = row[begin + j * kCopyThreads];
    for (int32_t n = 0; n < count; ++n)
#pragma unroll
      for (int j = 0; j < kInFlight; ++j)
        if (begin + j * kCopyThreads < vectors)
          reinterpret_cast<uint4*>(slots[n])[begin + j * kCopyThreads] = held[j];
  }
  auto blocks = args.scales_TB ? static_cast<int32_t>(wire_scales(args.format, args.D)) : 0;
  for (int32_t i = threadIdx.x; i < blocks; i += kCopyThreads) {
    float scale = args.scales_TB[t * args.scales_stride + i];
    for (int32_t n = 0; n < count; ++n)
      reinterpret_cast<float*>(slots[n] + args.slot.scales)[i] = scale;
  }
}

// The block quantizes a row. kLanes lanes of a warp share a scale.
template <WireFormat kFormat, typename Source>
__device__ __forceinline__ void quantize_row(const RailPackArgs& args, int64_t t,
                                             char* const* slots, int32_t count) {
  auto* row = reinterpret_cast<const Source*>(static_cast<const char*>(args.x_TD) +
                                              t * args.x_stride_bytes);
  constexpr int kBlock = wire(kFormat).block;
  constexpr int kPerLane = kBlock > 128 ? kBlock / 32 : 4;
  constexpr int kLanes = kBlock / kPerLane;
  constexpr int kScales = 32 / kLanes;  // of a warp
  auto parts = static_cast<int32_t>((args.D + (kScales - 1) * kBlock) / (kScales * kBlock));
  int32_t lane = threadIdx.x % 32;
  for (int32_t i = threadIdx.x / 32; i < parts; i += kCopyThreads / 32) {
    int32_t first = i * kScales * kBlock + lane * kPerLane;
    bool inside = kScales == 1 || first < args.D;
    float value[kPerLane] = {};
    if (inside) to_floats(*reinterpret_cast<const Vector<Source, kPerLane>*>(row + first), value);
    float scale = kLanes == 32 ? scale_for(warp_max(finite_amax(value)))
                               : block_scale<kPerLane, kLanes>(value);
    WireRegisters<kFormat, kPerLane> packed = quantized<kFormat>(value, scale);
    for (int32_t n = 0; n < count && inside; ++n) {
      *reinterpret_cast<WireRegisters<kFormat, kPerLane>*>(
          slots[n] + wire(kFormat).row_bytes(first, 0)) = packed;
      if (lane % kLanes == 0)
        reinterpret_cast<float*>(slots[n] + args.slot.scales)[i * kScales + lane / kLanes] = scale;
    }
  }
}

// Slots that no token uses have no experts, and the first slot says what the call is.
__device__ __forceinline__ void complete_slabs(const RailPackArgs& args) {
  constexpr uint32_t kWarps = kCopyThreads / 32;
  auto slab_rows = static_cast<uint32_t>(args.slab_rows);
  auto all = static_cast<uint32_t>(args.num_nodes) * slab_rows;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < all; i += gridDim.x * kWarps) {
    uint32_t node = i / slab_rows;
    uint32_t slot = i % slab_rows;
    uint32_t k = threadIdx.x % 32;
    if (slot >= static_cast<uint32_t>(args.rows_by_node[node]) && k < args.K)
      write_pair(args, slot_at(args, node, slot), k, -1, 0.0f);
  }
  if (blockIdx.x) return;
  for (int64_t node = threadIdx.x; node < args.num_nodes; node += kCopyThreads)
    *reinterpret_cast<RailTag*>(slot_at(args, node, 0) + args.slot.tag) = {
        static_cast<int32_t>(args.D), args.K, static_cast<int32_t>(args.dtype) | args.tag << 8,
        args.epoch};
}

// Source: the dtype that becomes kFormat; void where rows travel as they are.
template <WireFormat kFormat, typename Source>
__global__ void __launch_bounds__(kCopyThreads)
    copy_tokens(const __grid_constant__ RailPackArgs args) {
  __shared__ char* slots[kMaxTopK];
  __shared__ int32_t count;
  wait_for_predecessor();
  let_successor_start();
  int64_t tokens = real_tokens(args);
  for (int64_t t = blockIdx.x; t < args.T; t += gridDim.x) {
    if (threadIdx.x < 32) {
      int32_t n = write_pairs(args, t, t < tokens, slots);
      if (threadIdx.x == 0) count = n;
    }
    __syncthreads();
    if (count) {
      if constexpr (std::is_void_v<Source>)
        copy_row(args, t, slots, count);
      else
        quantize_row<kFormat, Source>(args, t, slots, count);
    }
    __syncthreads();
  }
  complete_slabs(args);
}

template <typename F>
auto with_variant(const RailPackArgs& args, F&& f) {
  return with_format(args.format, [&](auto of) {
    if constexpr (wire(of).has_scales())
      if (wire(of).quantizes(args.dtype))
        return visit(args.dtype, [&](auto source) { return f(copy_tokens<of, decltype(source)>); });
    return f(copy_tokens<WireFormat::kAuto, void>);
  });
}

}  // namespace

cudaError_t load_rail_pack() {
  if (cudaError_t error = load(assign_slots)) return error;
  for (WireFormat format : kWireFormats)
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3}) {
      RailPackArgs args{};
      args.dtype = dtype, args.format = format;
      if (cudaError_t error = with_variant(args, [](auto* kernel) { return load(kernel); }))
        return error;
    }
  return cudaSuccess;
}

cudaError_t rail_pack(const RailPackArgs& args, cudaStream_t stream) {
  Device device;
  if (cudaError_t error = current_device(device)) return error;
  if (cudaError_t error = launch(assign_slots, args.num_nodes, kSlotThreads, 0, stream, args))
    return error;
  int64_t items = std::max(args.T, ceil_div(args.num_nodes * args.slab_rows, kCopyThreads / 32));
  int64_t blocks = std::clamp<int64_t>(items, 1, 16 * device.multiprocessors);
  return with_variant(
      args, [&](auto* kernel) { return launch(kernel, blocks, kCopyThreads, 0, stream, args); });
}

}  // namespace epmoe::cuda
