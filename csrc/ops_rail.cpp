// The operators of the rail: they check and unwrap tensors. Schemas and fakes are in
// epmoe/native/ops.py.
#include "cpu/stages.h"
#include "unwrap.h"

namespace epmoe {
namespace {

const RailDescriptor& parsed(const Tensor& descriptor) {
  constexpr int64_t kFields = sizeof(RailDescriptor) / sizeof(int64_t);
  STD_TORCH_CHECK(!descriptor.is_cuda(), "`descriptor` must be on the host");
  return *reinterpret_cast<const RailDescriptor*>(
      pointer<int64_t>(descriptor, kFields, "descriptor"));
}

void rail_pack(const Tensor& x, const Tensor& ids, const Tensor& weights, const MaybeTensor& scales,
               const MaybeTensor& num_tokens, int64_t num_rows, const Tensor& copies,
               const Tensor& num_copies, const Tensor& node_of, const Tensor& node_local,
               const Tensor& descriptor, int64_t slab_rows, int64_t epoch, int64_t tag,
               const Tensor& own, const Tensor& sent, const Tensor& slots_of, const Tensor& counts,
               const Tensor& needed, const Tensor& counters, const Tensor& rows_sent) {
  const RailDescriptor& d = parsed(descriptor);
  RailPackArgs args{};
  take_tokens(args, x, ids, weights, scales, num_tokens, num_rows, d.format);
  WireTraits traits = wire(d.format);
  int64_t row_bytes = args.D * itemsize(args.dtype);
  int64_t num_nodes = d.num_nodes;
  int64_t P = node_of.numel();
  STD_TORCH_CHECK(
      !x.is_cuda() || (args.K <= cuda::kMaxTopK && !needed.is_cuda() && is_aligned(x) &&
                       args.x_stride_bytes % 16 == 0 && row_bytes % 16 == 0 &&
                       (!traits.has_scales() || args.D % traits.block == 0)),
      "on CUDA, K must be at most 32, `needed` on the host, and rows whole words of 16 bytes");
  STD_TORCH_CHECK(wire_row_bytes(d.format, args.D, args.dtype) <= d.slot.scales &&
                      d.slot.ids + args.K * 4 <= d.slot.weights &&
                      d.slot.weights + args.K * 4 <= d.slot.tag &&
                      d.slot.tag + int64_t{sizeof(RailTag)} <= d.slot.bytes,
                  "a row and its pairs must fit the slot");
  args.E = d.E, args.copies = d.copies, args.rank = d.rank, args.node = d.node,
  args.num_nodes = num_nodes;
  args.copies_EC = pointer<int32_t>(copies, d.E * d.copies, "copies");
  args.copies_E = pointer<int32_t>(num_copies, d.E, "num_copies");
  args.node_of_P = pointer<int32_t>(node_of, P, "node_of");
  args.node_local_P = pointer<int32_t>(node_local, P, "node_local");
  args.slot = d.slot, args.format = d.format, args.slab_rows = slab_rows;
  args.epoch = static_cast<int32_t>(epoch), args.tag = static_cast<int32_t>(tag);
  args.own = reinterpret_cast<char*>(pointer<uint8_t>(own, slab_rows * d.slot.bytes, "own"));
  args.sent = reinterpret_cast<char*>(
      pointer<uint8_t>(sent, (num_nodes - 1) * slab_rows * d.slot.bytes, "sent"));
  args.slots_by_node = pointer<int32_t>(slots_of, args.T * num_nodes, "slots_of");
  args.rows_by_node = pointer<int32_t>(counts, num_nodes, "counts");
  args.needed = pointer<int32_t>(needed, 1, "needed");
  args.counters = pointer<int64_t>(counters, kNumCounters, "counters");
  args.rows_sent_by_node = pointer<int64_t>(rows_sent, num_nodes, "rows_sent");
  launch(x, args, cpu::rail_pack, &cuda::Api::rail_pack);
}

void rail_sum(const Tensor& own, const Tensor& returned, const Tensor& slots_of, int64_t slab_rows,
              int64_t node, const MaybeTensor& missed, const MaybeTensor& latched,
              const MaybeTensor& noticed, const Tensor& y) {
  STD_TORCH_CHECK(
      missed.has_value() == latched.has_value() && latched.has_value() == noticed.has_value(),
      "`missed`, `latched` and `noticed` go together");
  STD_TORCH_CHECK(!noticed || !noticed->is_cuda(), "`noticed` must be on the host");
  STD_TORCH_CHECK(
      y.dim() == 2 && y.is_contiguous() && own.is_contiguous() && returned.is_contiguous(),
      "y and the partial rows must be contiguous");
  STD_TORCH_CHECK(dtype_of(own) == dtype_of(y) && dtype_of(returned) == dtype_of(y),
                  "partial rows must be like y");
  int64_t T = y.size(0);
  int64_t num_nodes = slots_of.size(1);
  RailSumArgs args{
      .own = own.data_ptr(),
      .returned = returned.data_ptr(),
      .dtype = dtype_of(y),
      .slots_by_node = pointer<int32_t>(slots_of, T * num_nodes, "slots_of"),
      .slab_rows = slab_rows,
      .node = node,
      .num_nodes = num_nodes,
      .y_TD = y.data_ptr(),
      .T = T,
      .D = y.size(1),
      .missed_G = pointer<int64_t>(missed, 0, "missed"),
      .G = missed ? static_cast<int32_t>(missed->numel()) : 0,
      .latched = pointer<int32_t>(latched, 1, "latched"),
      .noticed = pointer<int64_t>(noticed, 1, "noticed"),
  };
  launch(y, args, cpu::rail_sum, &cuda::Api::rail_sum);
}

void rail_mark(const Tensor& count, const Tensor& shown, const MaybeTensor& latched,
               const MaybeTensor& stop, bool ends, const MaybeTensor& sent, int64_t slabs) {
  STD_TORCH_CHECK(!shown.is_cuda() && !(stop && stop->is_cuda()),
                  "`shown` and `stop` must be on the host");
  STD_TORCH_CHECK(latched.has_value() == stop.has_value(), "`latched` and `stop` go together");
  int64_t slab_bytes = sent && slabs > 0 ? sent->numel() / slabs : 0;
  STD_TORCH_CHECK(!sent || slab_bytes >= 16, "a slab of `sent` must have 16 bytes");
  RailMarkArgs args{
      .count = pointer<int64_t>(count, 1, "count"),
      .shown = pointer<int64_t>(shown, 1, "shown"),
      .latched = pointer<int32_t>(latched, 1, "latched"),
      .stop = reinterpret_cast<RailStop*>(pointer<int64_t>(stop, 3, "stop")),
      .ends = ends,
      .sent = reinterpret_cast<char*>(pointer<uint8_t>(sent, slabs * slab_bytes, "sent")),
      .slabs = static_cast<int32_t>(slabs),
      .slab_bytes = slab_bytes,
  };
  launch(count, args, &cuda::Api::rail_mark);
}

void rail_tags(const Tensor& received, int64_t slab_rows, const Tensor& descriptor, int64_t D,
               int64_t K, int64_t dtype, int64_t epoch, const Tensor& differing) {
  const RailDescriptor& d = parsed(descriptor);
  STD_TORCH_CHECK(!differing.is_cuda(), "`differing` must be on the host");
  int64_t slabs = d.num_nodes - 1;
  int64_t slab_bytes = slab_rows * d.slot.bytes;
  RailTagsArgs args{
      .first_tag =
          reinterpret_cast<char*>(pointer<uint8_t>(received, slabs * slab_bytes, "received")) +
          d.slot.tag,
      .slab_bytes = slab_bytes,
      .slabs = static_cast<int32_t>(slabs),
      .want = {static_cast<int32_t>(D), static_cast<int32_t>(K), static_cast<int32_t>(dtype),
               static_cast<int32_t>(epoch)},
      .differing = pointer<int64_t>(differing, 1, "differing"),
  };
  launch(received, args, &cuda::Api::rail_tags);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(epmoe, CPU, library) {
  library.impl("rail_pack", TORCH_BOX(&rail_pack));
  library.impl("rail_sum", TORCH_BOX(&rail_sum));
}
STABLE_TORCH_LIBRARY_IMPL(epmoe, CUDA, library) {
  library.impl("rail_pack", TORCH_BOX(&rail_pack));
  library.impl("rail_sum", TORCH_BOX(&rail_sum));
  library.impl("rail_mark", TORCH_BOX(&rail_mark));
  library.impl("rail_tags", TORCH_BOX(&rail_tags));
}

}  // namespace epmoe
