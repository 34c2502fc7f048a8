// Arguments of the operators of the rail, the same for CPU and CUDA. A rail is the ranks of one
// local index, one on each node. Letters as in args.h; a slab is what one node gets. The slab of
// this rank's own node does not travel. Slabs of the other nodes lie behind one another, in the
// order of the nodes.
#pragma once
#include "wire_format.h"

namespace epmoe {

// One slot: the row, its scales if the format has some, K ids, K weights, and the tag. Each part
// begins at a multiple of 4 bytes.
struct RailSlot {
  int64_t bytes;    // between slots; a multiple of 16
  int64_t scales;   // offset in bytes, like the next three
  int64_t ids;      // int32 [K]: experts of the receiving node, -1 where there is none
  int64_t weights;  // float [K]
  int64_t tag;      // RailTag, which counts in the first slot of a slab only
};

// What the source says of its call: receivers compare it with their own. On GPUs, whose graphs
// replay a call in other rounds, the length of a slab takes the place of the epoch.
struct RailTag {
  int32_t D, K;
  int32_t dtype;  // DType | the call's tag << 8
  int32_t epoch;
};

struct RailPackArgs {
  const void* x_TD;
  DType dtype;             // of x
  int64_t x_stride_bytes;  // between rows
  const float* scales_TB;  // of rows that are quantized already, else null
  int64_t scales_stride;   // between rows
  const void* ids_TK;      // logical experts
  bool wide_ids;           // ids are int64, else int32
  int64_t ids_stride;      // between rows
  const void* weights_TK;
  DType weights_dtype;
  int64_t weights_stride;     // between rows
  const int32_t* num_tokens;  // as in DispatchArgs
  int64_t T, num_rows, D;
  int32_t K;
  // Tables of the whole placement.
  int64_t E, copies, rank, node, num_nodes;
  const int32_t* copies_EC;     // physical experts of each logical expert
  const int32_t* copies_E;      // how many it has
  const int32_t* node_of_P;     // node of each physical expert
  const int32_t* node_local_P;  // its number among the physical experts of that node
  // The slabs.
  RailSlot slot;
  WireFormat format;  // of the rows in slots
  int64_t slab_rows;  // slots of a slab, unused ones without experts; further rows are dropped
  int32_t epoch;      // of the round
  int32_t tag;        // of the call
  char* own;          // out: the slab of the own node
  char* sent;         // out: the slabs of the other nodes
  // Out: [T, num_nodes] slot of token t in the slab of each node, -1 if it does not go there.
  int32_t* slots_by_node;
  int32_t* rows_by_node;  // out: [num_nodes] rows in each slab
  int32_t* needed;    // out: the most rows that a node needed; never falls. On CUDA in host memory
  int64_t* counters;  // kNumCounters, added to
  int64_t* rows_sent_by_node;  // added to
};

struct RailSumArgs {
  const void* own;       // partial rows of the own node, in dtype, contiguous
  const void* returned;  // partial rows of the other nodes, in dtype, contiguous
  DType dtype;
  const int32_t* slots_by_node;
  int64_t slab_rows, node, num_nodes;
  void* y_TD;  // out, in dtype, contiguous
  int64_t T, D;
  // CUDA only, all or none: what makes y zeros, as a void slab does.
  const int64_t* missed_G;  // not 0: this rank of the node misses one of another node
  int32_t G;
  int32_t* latched;  // not 0: this rank has failed. Gets 1 where y becomes zeros
  int64_t* noticed;  // out, in host memory: kZeroSums where y becomes zeros, unless it is not 0
};
constexpr int64_t kZeroSums = -1;

// In host memory. A transfer that must not start waits until the host has cut the rail.
struct RailStop {
  int64_t wanted;  // by the GPU
  int64_t done;    // by the host
  int64_t
      cut;  // by the host, before it cuts the rail: from then on a transfer may end with leftovers
};

// CUDA only: counts transfers that have started, or that have ended.
struct RailMarkArgs {
  int64_t* count;
  int64_t* shown;  // out: the count, in host memory
  // Null, or not 0: this rank has failed. A start then waits for the host, and an end sets it after
  // a cut.
  int32_t* latched;
  RailStop* stop;  // with `latched`
  bool ends;
  // At a start, null or partial rows in so many slabs, which become void if this rank has failed.
  char* sent;
  int32_t slabs;
  int64_t slab_bytes;
};

// CUDA only: compares the calls of other nodes with this rank's.
struct RailTagsArgs {
  const char* first_tag;  // of the first slab
  int64_t slab_bytes;     // between tags
  int32_t slabs;
  RailTag want;
  // Out, in host memory: the number + 1 of the first slab that differs, otherwise as it was.
  int64_t* differing;
};

// What all calls of one rank share, in a host tensor of int64 that `RailMemory` in
// epmoe/rail/memory.py writes.
struct RailDescriptor {
  int64_t E, copies, rank, node, num_nodes;
  WireFormat format;
  RailSlot slot;
};

}  // namespace epmoe
