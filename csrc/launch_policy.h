// The launch policy of the exchange: which variant of the dispatch or combine kernel a call takes,
// with how many blocks, threads and bytes of shared memory. Every measured threshold of the
// exchange stands in this file. "Measured" names a round in µs, or one stage if it says so, of
// DeepSeek-V3's shape on four GPUs unless it names others; docs/experiments.md has the commits. A
// threshold without a figure has none there. docs/kernels.md lists the variants. No CUDA header:
// `epmoe plan` prints the policy, and its table is tested, on machines without a GPU.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "exchange.h"

namespace epmoe {

// --- What kernels and policy share ---

constexpr int kThreads = 512;  // the largest block of the exchange
constexpr int kWarps = kThreads / 32;

// Simple protocol, dispatch: each warp of a sending block moves chunks of rows through a buffer of
// its own in shared memory. Three KiB are what a GPU with 100 KiB leaves.
constexpr int64_t kMinChunkBytes = 3 << 10;
constexpr int64_t kMaxChunkBytes = 4 << 10;
// Tokens that a sending block moves at once, and whose flags it publishes after one release.
constexpr int kMaxBatchTokens = kWarps;
// Simple protocol, combine: a block's shared memory for sums on their way out. Half of it holds
// scales, if there are any.
constexpr int kSendBufferBytes = 32 << 10;
// And for rows on their way in: what its threads have in flight. Measured, two H200: 48 or 64 KiB
// are no faster, and two blocks of 64 KiB in all find room on a GPU with 164.
constexpr int kPlaceBytes = 32 << 10;

// LL protocol: the most lines of a row that a lane moves at once.
template <WireFormat kFormat>
constexpr int kMaxLines = wire(kFormat).has_scales() ? 2 : 4;  // dispatch
constexpr int kMaxSumLines = 2;                                // combine
// LL protocol, dispatch: these send blocks begin with the first tokens, so that rows arrive in the
// order in which receivers wait for them. 32 blocks saturate NVLink.
constexpr int32_t kEarlyBlocks = 32;

// Up to two ranks, rows of the LL protocol wait for this GPU's own memory more than for the wire.
// Measured, two GPUs, 512 tokens: the rows cross in 24 µs each way, and the GPU's own reads and
// writes take 25 to 32 µs.
constexpr int64_t kLocalBoundRanks = 2;

// Blocks that share a multiprocessor, by the lines that a lane moves at once (0: Simple protocol).
// Stores that wait for the wire delay the loads of a block on the same multiprocessor. Where rows
// fill the wire (2 lines and more), each block therefore has a multiprocessor to itself. It then
// takes more registers than two blocks can have, which keeps a second block away. A launch of one
// phase alone takes one line: a waiting block must leave registers to the blocks of every other
// stage. Measured: dispatch with all registers at 8 tokens 11.6 (12.5 without); a load takes up to
// 8 µs where stores wait for the wire. Simple protocol at 4096 tokens: 941 with two blocks, 1065
// with one.
constexpr EPMOE_HD int blocks_per_sm(int lines) { return lines > 1 ? 1 : 2; }

// With two blocks of 384 threads a thread has 80 registers, so that waiting for a line spills
// little; of 512, 64.
constexpr EPMOE_HD int threads_per_block(int lines) { return lines == 1 ? 384 : kThreads; }
// The Simple protocol's buffers in shared memory assume it.
static_assert(threads_per_block(0) == kThreads);

// Registers of a thread of combine where its block has a multiprocessor to itself. Each of its four
// parts has 16,384 registers and a fourth of the warps: 1,024 remain there, for a warp of another
// kernel with 32 a thread.
constexpr int kMostRegisters = 120;
constexpr int kPartsOfSM = 4;
constexpr int kRegistersOfPart = 16 << 10;
constexpr int kForeignRegisters = 32 * 32;
static_assert(kThreads / kPartsOfSM * kMostRegisters + kForeignRegisters <= kRegistersOfPart);

// Chunks of a row, of `lines` lines of 16 bytes for each of a warp's 32 lanes.
constexpr EPMOE_HD int32_t num_chunks(int64_t row_bytes, int lines) {
  return static_cast<int32_t>((row_bytes + lines * 512 - 1) / (lines * 512));
}

// Shared memory that a kernel of the exchange declares statically, at most, and what CUDA takes of
// each block's.
constexpr int64_t kDeclaredSharedBytes = 12 << 10;
constexpr int64_t kSystemSharedBytes = 1 << 10;

// --- Measured thresholds, a value of this struct for each architecture ---

// The values here are those of sm_90; T is in tokens, shares are of a launch's blocks, in
// thousandths.
struct Thresholds {
  // LL protocol, dispatch: up to so many tokens a lane moves one line; up to so many, two where
  // some warps would go twice. Two lines from 9 tokens on take 12.6 at 16 tokens (13.4 with one).
  int64_t dispatch_one_line = 8;
  int64_t dispatch_uneven = 128;
  // Send blocks, if rows are quantized and if not; between these numbers of tokens receivers are
  // the bottleneck. A quarter is too few for 64 or 512 tokens; a fifth takes 42.0 at 128 (40.5 with
  // a quarter).
  int64_t dispatch_send_quantized = 375;
  int64_t dispatch_send = 300;
  int64_t dispatch_send_middle = 250;
  int64_t middle_above = 64;
  int64_t middle_up_to = 256;
  // The same up to two ranks: what a row costs a sender, where a receiver's reads, re-arming and
  // writes cost 1 each. By cost 26.5 at 128 tokens on two GPUs (29.2 with a fixed share).
  int64_t local_send_quantized = 8;
  int64_t local_send = 3;
  // Simple protocol, two ranks: more for rows of up to so many bytes. Two H200 at 4096 tokens: 5/8
  // for expert-major bf16 rows. Of fp8 rows 205 of 264 blocks have five batches each: dispatch of
  // DeepSeek-V3 takes 159, with 198 senders 167, with 256 163.
  int64_t simple_send = 625;
  int64_t simple_send_rank_major = 750;
  int64_t simple_send_short_row = 155;
  int64_t short_row_bytes = 8 << 10;
  // LL protocol, combine: up to so many chunks of one line (two ranks) or tokens, a lane moves one
  // line. Two lines from 35 tokens on, of 28 chunks each, take 13.1 at 48 tokens (14.6 with one up
  // to 64).
  int64_t combine_one_line_chunks = 960;
  int64_t combine_one_line = 64;
  int64_t combine_one_line_scaled = 128;
  // Send blocks of combine with several lines; in one phase alone; and with one line: scaled, up to
  // so many tokens, and from there on. With fp8 back, two lines and seven tenths take 49.2 at 256
  // tokens (52.4 before).
  struct Share {
    int64_t scaled;       // with scales, up to 96 tokens
    int64_t scaled_more;  // with scales, from there on
    int64_t few_tokens;   // without scales, up to `up_to` tokens
    int64_t up_to;
    int64_t more;  // without scales, from there on

    int64_t of(int64_t blocks, int64_t T, bool has_scales) const {
      return blocks * thousandths(T, has_scales) / 1000;
    }
    int64_t thousandths(int64_t T, bool has_scales) const {
      if (has_scales) return T <= 96 ? scaled : scaled_more;
      return T <= up_to ? few_tokens : more;
    }
  };
  Share combine_lines{
      .scaled = 700, .scaled_more = 700, .few_tokens = 420, .up_to = 128, .more = 500};
  Share combine_phase{
      .scaled = 560, .scaled_more = 560, .few_tokens = 500, .up_to = 128, .more = 620};
  Share combine_one{.scaled = 560, .scaled_more = 680, .few_tokens = 500, .up_to = 16, .more = 400};
  // Expert-major with own sums (see CombineLaunch): two fifths, since senders look at empty slots,
  // too. Two H100, Llama 4 (top-1), 1024 tokens: 32 / 40 / 48 / 56 / 64 / 80 of 132 blocks take
  // 55.3 / 53.4 / 52.5 / 51.6 / 52.0 / 52.1. On four GPUs two fifths take 24.7 at 64 tokens
  // (26.2 with half).
  int64_t combine_own = 400;
  // Simple protocol, combine, two ranks: 7/8 expert-major, 3/4 rank-major with a warp for each 4
  // KiB of a row. Two H200 at 4096 tokens.
  int64_t combine_simple = 875;
  int64_t combine_simple_rank_major = 750;
  int64_t warp_bytes = 4 << 10;
  // Expert-major, so many rows of a team share a release, and a team has two warps for rows of up
  // to two times `warp_bytes`, four for longer ones. Two H200, combine of 4096 tokens: Qwen3-30B
  // takes 75.7, with a release for each row 81.6, with four warps 79.7; DeepSeek-V3 206, with a
  // release for each row 216, with two warps 217.
  int64_t combine_rows_per_release = 2;
  // Simple protocol, combine, one rank: own sums (see CombineLaunch) from so many tokens on.
  // Between one and one and a half items a warp they take longer. One H200, one rank, 7168: combine
  // of 1100 / 2048 / 4096 tokens takes 73.3 / 100 / 177 with them, and 63.8 / 109 / 194 without.
  int64_t combine_own_tokens = 1536;
};
constexpr Thresholds kSm90{};

// Those of a compute capability with this major number.
constexpr const Thresholds& thresholds_of([[maybe_unused]] int major) { return kSm90; }

// --- The GPU, and the shares that every launch has in common ---

struct Gpu {
  int64_t multiprocessors;
  int major;             // of the compute capability that the kernels were compiled for
  int64_t shared_bytes;  // of a multiprocessor

  const Thresholds& thresholds() const { return thresholds_of(major); }

  // Blocks of a launch of both phases on `count` multiprocessors, by the lines that a lane moves at
  // once. Where two blocks find no room for their shared memory on a multiprocessor, as in the 100
  // KiB of sm_86, sm_89 and sm_120, one is there at a time: a launch that counts on two would have
  // send blocks that start when others have ended.
  int64_t resident_blocks(int64_t count, int lines, int64_t block_bytes) const {
    int64_t fit = shared_bytes / (block_bytes + kDeclaredSharedBytes + kSystemSharedBytes);
    return count * std::clamp<int64_t>(fit, 1, blocks_per_sm(lines));
  }

  // Dynamic shared memory of a block where a multiprocessor has `blocks` of them.
  int64_t room_of_block(int64_t blocks) const {
    return shared_bytes / blocks - kDeclaredSharedBytes - kSystemSharedBytes;
  }

  // Whether `count` multiprocessors are at most half of the GPU.
  bool is_scarce(int64_t count) const { return count * 2 <= multiprocessors; }

  // Blocks of a launch of one phase, on `count` multiprocessors: one on each, so that another
  // launch finds room beside it. A launch that waits for ranks takes at most three quarters of the
  // GPU: what the ranks wait for may need more shared memory than a waiting block leaves, and an SM
  // divides its shared memory anew only when it is idle. Measured on 132 multiprocessors: 132
  // waiting blocks of 4 KiB keep out a block of 16 KiB; 99 do not.
  int64_t phase_blocks(int64_t count, bool waits) const {
    return waits ? std::clamp<int64_t>(multiprocessors * 3 / 4, 1, count) : count;
  }
};

// --- Dispatch ---

struct DispatchLaunch {
  // Lines of a row that a receiving lane moves at once (LL); 0: Simple protocol.
  int64_t recv_lines;
  bool coarse;     // senders also move recv_lines lines at once, otherwise one
  bool exclusive;  // every block has a multiprocessor to itself, also where two would fit
  int64_t blocks;
  int64_t threads;  // of a block
  int64_t send_blocks;
  // After the send blocks: block 0 of them counts, the others send the LL pairs.
  int64_t notify_blocks;
  // Tables in shared memory; 0: too large for it.
  int64_t send_offset_entries;
  int64_t source_offset_entries;
  // Of a row of x (Simple).
  int64_t row_chunks;
  int64_t chunk_bytes;   // a warp moves a chunk
  int64_t batch_tokens;  // that a send block moves at once (Simple)
  int64_t shared_bytes;  // dynamic, of a block
};

inline bool dispatch_uses_ll(const ExchangePlan& plan, const DispatchArgs& args) {
  return args.T <= plan.ll_max_tokens;
}
inline int64_t wire_row_bytes(const ExchangePlan& plan, const DispatchArgs& args) {
  return epmoe::wire_row_bytes(plan.payload_format, args.D, args.dtype);
}

// Few tokens, in launches of one phase and on one multiprocessor: one line. More tokens: as many
// lines as the registers hold, or two where warps would idle or some would go twice. Measured: of
// fp8 rows four lines take 53 at 512 tokens, two lines 50 (two GPUs, rank-major).
inline int dispatch_recv_lines(const ExchangePlan& plan, const DispatchArgs& args, int64_t T,
                               int64_t sms, const Thresholds& at) {
  if (!dispatch_uses_ll(plan, args)) return 0;
  if (T <= at.dispatch_one_line || sms < 2 || !(args.send && args.receive)) return 1;
  int most = with_format(plan.payload_format, [](auto format) { return kMaxLines<format>; });
  if (wire(plan.payload_format).has_scales()) return most;
  int64_t receiving_warps = sms * kWarps * 2 / 3;  // roughly
  auto items = [&](int lines) {
    return plan.R * T * num_chunks(wire_row_bytes(plan, args), lines);
  };
  bool idle = items(2) <= receiving_warps;
  bool uneven = items(most) > receiving_warps && T <= at.dispatch_uneven;
  return idle || uneven ? 2 : most;
}

// Of `blocks`, those that send first (LL). Up to two ranks, by what a token's row costs a receiver,
// which reads R rows, re-arms R slots and writes K rows, rank-major R; a sender also quantizes, for
// its own rank too, unless the rows are in the format already. Measured: with fp8 3/8 here and 9/16
// in combine take 33.0 at 128 tokens (34.5 before).
inline int64_t dispatch_send_share(const ExchangePlan& plan, const DispatchArgs& args,
                                   int64_t blocks, const Thresholds& at) {
  bool quantizes = wire(plan.payload_format).quantizes(args.dtype);
  int64_t T = args.T;
  int64_t sending = quantizes ? at.local_send_quantized : at.local_send;
  if (plan.R <= kLocalBoundRanks)
    return blocks * sending / (sending + 2 * plan.R + (args.expert_major ? args.K : plan.R));
  bool middle = args.send && args.receive && T > at.middle_above && T <= at.middle_up_to;
  int64_t share = quantizes ? at.dispatch_send_quantized : at.dispatch_send;
  if (middle) share = at.dispatch_send_middle;
  return blocks * share / 1000;
}

inline DispatchLaunch dispatch_launch(const ExchangePlan& plan, const DispatchArgs& args,
                                      const Gpu& gpu) {
  constexpr int64_t kMaxSendOffsets = 8192;
  constexpr int64_t kMaxSourceOffsets = 4096;
  const Thresholds& at = gpu.thresholds();
  int64_t sms = std::min<int64_t>(plan.num_sms, gpu.multiprocessors);
  int64_t T = std::max<int64_t>(args.T, 1);
  int64_t send_offsets = plan.R * plan.most_local_experts;
  int64_t source_offsets = (plan.R + 1) * plan.num_local_experts;
  bool both_phases = args.send && args.receive;
  int lines = dispatch_recv_lines(plan, args, T, sms, at);
  DispatchLaunch launch{
      .recv_lines = lines,
      .coarse = false,
      .exclusive = false,
      .blocks = 0,
      .threads = threads_per_block(lines),
      .send_blocks = 0,
      .notify_blocks = 0,
      .send_offset_entries = send_offsets <= kMaxSendOffsets && !args.to_caller ? send_offsets : 0,
      .source_offset_entries = source_offsets <= kMaxSourceOffsets ? source_offsets : 0,
      .row_chunks = 0,
      .chunk_bytes = 0,
      .batch_tokens = 1,
      .shared_bytes = 0};
  int64_t table_entries =
      2 * plan.P + 1 + launch.send_offset_entries + launch.source_offset_entries;
  if (plan.copies > 1) table_entries += plan.E;
  int64_t table_bytes = table_entries * int64_t{sizeof(int32_t)};
  if (args.send && !lines) {
    constexpr int64_t kStep = 512;  // bytes: a multiple of 128 elements of every dtype
    int64_t room = gpu.room_of_block(blocks_per_sm(lines)) - table_bytes;
    int64_t most = std::clamp(room / kWarps / kStep * kStep, kMinChunkBytes, kMaxChunkBytes);
    int64_t x_bytes = args.D * itemsize(args.dtype);
    int64_t chunks = ceil_div(x_bytes, most);
    launch.chunk_bytes = ceil_div(ceil_div(x_bytes, chunks), kStep) * kStep;
    launch.row_chunks = ceil_div(x_bytes, launch.chunk_bytes);
  }
  launch.shared_bytes = kWarps * launch.chunk_bytes + table_bytes;
  int64_t warps = launch.threads / 32;
  int64_t most = both_phases ? gpu.resident_blocks(sms, lines, launch.shared_bytes)
                             : gpu.phase_blocks(sms, args.receive);
  int64_t senders = T;
  int64_t receivers = most;
  int64_t share = most * 3 / 4;
  if (lines) {
    int64_t row_bytes = wire_row_bytes(plan, args);
    int64_t items = T * num_chunks(row_bytes, 1);
    share = std::max<int64_t>(dispatch_send_share(plan, args, most, at), 1);
    // Below 1.4 items a sending warp, most warps have one item anyway.
    launch.coarse = lines > 1 && plan.R <= kLocalBoundRanks && items * 5 > share * warps * 7;
    senders = ceil_div(launch.coarse ? T * num_chunks(row_bytes, lines) : items, warps);
    receivers = ceil_div(plan.R * T * num_chunks(row_bytes, lines), warps);
  }
  if (!lines && both_phases && plan.R == kLocalBoundRanks && !gpu.is_scarce(sms)) {
    // Rank-major, receivers move no rows; short rows need more senders.
    int64_t more = wire_row_bytes(plan, args) <= at.short_row_bytes ? at.simple_send_short_row : 0;
    share = most * ((args.expert_major ? at.simple_send : at.simple_send_rank_major) + more) / 1000;
  }
  int64_t most_at_once =
      launch.row_chunks ? std::max<int64_t>(kMaxBatchTokens / launch.row_chunks, 1) : 1;
  if (!lines && both_phases && plan.R <= kLocalBoundRanks) {
    // A block that counts and one that receives remain.
    int64_t longest = std::max<int64_t>(most - 2, 1);
    // Without another rank senders write final rows, and there is nothing else to do. With two,
    // all have one batch rather than some a second one. Two H200, dispatch of 4096 tokens of
    // Qwen3-30B: 69 with 256 senders, 75 with 198.
    bool one_batch = T > share * most_at_once && T <= longest * most_at_once;
    if (plan.R == 1 || (one_batch && !gpu.is_scarce(sms))) share = longest;
  }
  senders =
      plan.dispatch_senders ? std::min(plan.dispatch_senders, most - 1) : std::min(senders, share);
  senders = args.send ? std::max<int64_t>(senders, 1) : 0;
  // Rank-major, the receivers also fill the ids and weights of unused slots, whatever T is.
  constexpr int64_t kFillBytes = 16 << 10;
  if (!args.expert_major)
    receivers = std::max(receivers, ceil_div(plan.R * plan.M * plan.K * 8, kFillBytes));
  if (!args.receive) receivers = 0;
  if (senders && !lines) {
    // As many tokens as the warps of a block move at once, unless some blocks would have none.
    launch.batch_tokens = std::clamp<int64_t>(ceil_div(T, senders), 1, most_at_once);
    if (!plan.dispatch_senders) senders = std::min(senders, ceil_div(T, launch.batch_tokens));
  }
  // One block counts, and with LL others send the pairs; where there is no room for them, the
  // counting block does both.
  int64_t groups = lines ? ceil_div(args.T, warps) : 0;
  launch.send_blocks = senders;
  launch.notify_blocks = args.send ? std::clamp<int64_t>(most - senders, 1, groups + 1) : 0;
  launch.blocks = std::max(std::min(senders + launch.notify_blocks + receivers, most),
                           senders + std::max<int64_t>(launch.notify_blocks, 1));
  launch.exclusive = both_phases && launch.blocks <= sms;
  return launch;
}

// --- Combine ---

struct CombineLaunch {
  int64_t send_lines;  // lines of a row that a sending lane moves at once (LL); 0: Simple protocol
  // Receivers also sum send_lines lines at once, otherwise one; senders have four pairs in flight.
  bool coarse;
  bool own;  // receivers make the sums for tokens of this rank, so that these do not travel
  int64_t blocks, threads, send_blocks;  // threads of a block
  int64_t team;                          // warps that send a row together (Simple)
  int64_t rows_per_release;  // of a team: their flags follow one release (Simple); at most 32
  int64_t shared_bytes;      // dynamic, of a block
};

inline int combine_send_lines(const ExchangePlan& plan, const CombineArgs& args, int64_t row_bytes,
                              const Thresholds& at) {
  if (args.T > plan.ll_max_tokens) return 0;
  int64_t chunks = args.T * num_chunks(row_bytes, 1);
  int64_t tokens =
      wire(plan.combine_format).has_scales() ? at.combine_one_line_scaled : at.combine_one_line;
  bool one = plan.R <= kLocalBoundRanks ? chunks <= at.combine_one_line_chunks : args.T <= tokens;
  return one || !(args.send && args.receive) ? 1 : kMaxSumLines;
}

// Of `blocks`, those that send first (LL). Up to two ranks, by what a token's row costs the sender,
// which reads K rows and writes R sums, and the receiver, which reads and re-arms R sums and writes
// one row. `own` as in CombineLaunch.
inline int64_t combine_send_share(const ExchangePlan& plan, const CombineArgs& args, int64_t blocks,
                                  int lines, bool own, const Thresholds& at) {
  bool scaled = wire(plan.combine_format).has_scales();
  if (lines > 1 && plan.R <= kLocalBoundRanks) {
    int64_t rows = args.expert_major ? plan.K : plan.R;
    int64_t others = plan.R - 1;
    if (own && args.expert_major) return blocks * at.combine_own * others / 1000;
    int64_t sending = 10 * (rows + plan.R);
    int64_t receiving = (scaled ? 5 : 9) * (2 * plan.R + 1);
    if (own) {
      sending = 20 * others;
      receiving = 12 * (2 * others + 1) + 10;
    }
    return blocks * sending / (sending + receiving);
  }
  if (lines > 1) return at.combine_lines.of(blocks, args.T, scaled);
  bool both_phases = args.send && args.receive;
  const Thresholds::Share& share = both_phases ? at.combine_one : at.combine_phase;
  return share.of(blocks, args.T, scaled);
}

inline CombineLaunch combine_launch(const ExchangePlan& plan, const CombineArgs& args, DType dtype,
                                    const Gpu& gpu) {
  int64_t sms = std::min<int64_t>(plan.num_sms, gpu.multiprocessors);
  int64_t T = std::max<int64_t>(args.T, 1);
  WireTraits traits = wire(plan.combine_format);
  int64_t row_bytes = traits.row_bytes(args.D, itemsize(dtype));
  bool both_phases = args.send && args.receive;
  const Thresholds& at = gpu.thresholds();
  int lines = combine_send_lines(plan, args, row_bytes, at);
  // Not with scales: 256 tokens lose what 1024 gain.
  bool local = plan.R <= kLocalBoundRanks && !traits.has_scales();
  bool coarse = lines > 1 && local;
  // Own sums spare the senders more than they cost the receivers, except from one to 2.5 items a
  // warp. Measured on two H200, rank-major bf16, at 64 / 128 / 512 tokens: 14.1 / 20.0 / 53.0,
  // and 14.2 / 20.1 / 57.8 without. Within one to two items (128 tokens) own sums take 1.1 to 1.4
  // more.
  int64_t items = coarse ? 2 * T * num_chunks(row_bytes, lines) : 0;
  int64_t all_warps = sms * kWarps;
  bool own = coarse && (items <= all_warps || items * 2 > all_warps * 5);
  // Beside another rank, a receiver that has made an own sum waits for the other's, and sends
  // nothing meanwhile. Two H200, combine of 4096 tokens: Qwen3-30B takes 82 without own sums, 96
  // with them; DeepSeek-V3 213 and 244.
  if (!lines) own = local && both_phases && plan.R == 1 && T >= at.combine_own_tokens;
  // Slots whose sums this rank sends. Only the device knows how many it has received. The policy
  // assumes as many as the rank sends.
  int64_t num_slots = T * (plan.R - own);
  int64_t threads = threads_per_block(lines);
  int64_t warps = threads / 32;
  int64_t shared_bytes = args.send ? kSendBufferBytes + kPlaceBytes : 0;
  int64_t most = both_phases ? gpu.resident_blocks(sms, lines, shared_bytes)
                             : gpu.phase_blocks(sms, args.receive);
  int64_t team = 4;
  int64_t rows_per_release = 1;
  int64_t senders = num_slots;
  int64_t receivers = most;
  int64_t share = std::max<int64_t>(most * 3 / 4, 1);
  if (lines) {
    senders = ceil_div(num_slots * num_chunks(row_bytes, lines), warps);
    receivers = ceil_div(T * num_chunks(row_bytes, coarse ? lines : 1), warps);
    share = combine_send_share(plan, args, most, lines, own, at);
  } else {
    // As many warps a row as send all rows at once; four where a team sends several rows, or fewer.
    while (team < warps && num_slots * team * 2 <= share * warps) team *= 2;
    int64_t rows_per_team = ceil_div(num_slots * team, share * warps);
    if (num_slots <= most) share = most * 5 / 6;
    if (rows_per_team > 1) share = most * 5 / 8;
    // Summing takes longer than the wire.
    bool sums_dominate = args.expert_major && plan.K > 2 * plan.R;
    if (rows_per_team > 64) share = most * 11 / 12;
    if (rows_per_team > 64 || sums_dominate) team = 2;
    if (rows_per_team > 1 && plan.R == kLocalBoundRanks && !gpu.is_scarce(sms)) {
      share = most * (args.expert_major ? at.combine_simple : at.combine_simple_rank_major) / 1000;
      if (args.expert_major && !traits.has_scales()) {
        team = row_bytes <= 2 * at.warp_bytes ? 2 : 4;
        rows_per_release = at.combine_rows_per_release;
      }
      if (!args.expert_major) {
        team = 4;
        if (row_bytes <= 2 * at.warp_bytes) team = 2;
        if (row_bytes <= at.warp_bytes) team = 1;
      }
    }
    // Measured, fp8, 4096 tokens, combine: one warp a row takes 305, four warps that wait for each
    // other 330.
    if (traits.has_scales() && num_slots > share * warps * 4) team = 1;
  }
  if (plan.combine_team)
    team =
        std::min<int64_t>(std::bit_floor(static_cast<uint64_t>(plan.combine_team)), warps & -warps);
  while (warps / team * traits.padded_scale_bytes(args.D) > kSendBufferBytes / 2) team *= 2;
  senders = plan.combine_senders ? std::min(plan.combine_senders, most) : std::min(senders, share);
  senders = args.send ? std::max<int64_t>(senders, 1) : 0;
  if (!args.receive) receivers = 0;
  return {.send_lines = lines,
          .coarse = coarse,
          .own = own,
          .blocks = std::clamp<int64_t>(senders + receivers, 1, most),
          .threads = threads,
          .send_blocks = senders,
          .team = team,
          .rows_per_release = rows_per_release,
          .shared_bytes = shared_bytes};
}

// What a round takes, for Python.
struct LaunchPolicy {
  DispatchLaunch dispatch;
  CombineLaunch combine;
};

// --- What a GPU must have ---

// Bytes of shared memory that a block of any kernel of the exchange needs, at most. Fewer blocks
// than the launch policy counts on may be resident: the others run later.
inline int64_t shared_bytes_per_block(const ExchangePlan& plan) {
  DispatchArgs args{};
  args.T = plan.ll_max_tokens + 1, args.D = kMaxChunkBytes, args.dtype = DType::kFloat32;
  args.K = 1, args.expert_major = args.send = args.receive = true;
  int64_t dispatch =
      dispatch_launch(plan, args, Gpu{.multiprocessors = 2, .major = 9, .shared_bytes = 0})
          .shared_bytes;
  return std::max<int64_t>(dispatch, kSendBufferBytes + kPlaceBytes) + kDeclaredSharedBytes;
}

}  // namespace epmoe
