"""What ranks save, groups of other sizes and placements load: full state dicts and
torch.distributed.checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exchanges import make_config
from helpers import randn, slow
from interrupted_steps import FILES, of_all, settled_steps
from rank_groups import group_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from waits import LONG_S

from epmoe import EPStateError, ExpertParallel, MoELayer, checkpoint
from epmoe.checkpoint import folders, state_dicts, whole
from epmoe.local.spread import is_spread, local_view
from epmoe.local.weight_formats import take_rows
from epmoe.native.arguments import MXFP4

pytestmark = pytest.mark.usefixtures("serving")

E = 13
F = 128
D = 128
K = 2
COPIES = {"num_redundant_experts": 5, "strategy": "round_robin"}
# The last: twice on a rank.
PLACEMENTS = [
    {},
    {"strategy": "round_robin"},
    COPIES,
    {"num_redundant_experts": 2 * E},
]


@pytest.fixture
def ep_over(rank: int, size: int) -> Iterator[Callable[..., ExpertParallel]]:
    """An ExpertParallel over `ranks` ranks: rank r is in group r // ranks, of which the last may be
    smaller.
    """
    made = []

    def make(ranks: int, kind: str = "plain", **options: object) -> ExpertParallel:
        # All groups are made by all ranks. This rank has one of them.
        firsts = range(0, size, ranks)
        groups = [group_of(range(first, min(first + ranks, size))) for first in firsts]
        group = groups[rank // ranks]
        routing = {"logit_bias": kind == "gpt_oss", "selection_bias": True}
        config = make_config(
            dist.get_world_size(group), experts=E, top_k=K, hidden=D, routing=routing, **options
        )
        made.append(ExpertParallel(config, group, device="cpu"))
        return made[-1]

    yield make
    for ep in made:
        ep.close()


def full(kind: str = "plain", seed: int = 0) -> dict[str, object]:
    """Arguments of `MoELayer.from_full`: what a checkpoint has."""
    tensors = {
        "router_weight": randn(E, D, seed=seed),
        "bias": randn(E, seed=seed + 1),
        "w_gate_up": randn(E, 2 * F, D, seed=seed + 2) / 8,
        "w_down": randn(E, D, F, seed=seed + 3) / 8,
    }
    # Weights of e4m3, with a scale for each block.
    if kind == "fp8":
        scales = {
            "gate_up_scales": randn(E, 2, 1, seed=seed + 4).abs(),
            "down_scales": randn(E, 1, 1, seed=seed + 5).abs(),
        }
        fp8 = {name: tensors[name].to(torch.float8_e4m3fn) for name in ("w_gate_up", "w_down")}
        return tensors | fp8 | scales
    # Random codes, with scales near 1 in MXFP4.
    if kind in ("mxfp4", "nvfp4"):
        generator = torch.Generator().manual_seed(seed + 4)
        group = 32 if kind == "mxfp4" else 16
        scale = torch.float8_e8m0fnu if kind == "mxfp4" else torch.float8_e4m3fn
        shapes = {
            "w_gate_up": (2 * F, D // 2),
            "w_down": (D, F // 2),
            "gate_up_scales": (2 * F, D // group),
        }
        shapes["down_scales"] = (D, F // group)
        tensors |= {
            name: torch.randint(100, 127, (E, *shape), generator=generator, dtype=torch.uint8).view(
                MXFP4 if name.startswith("w_") else scale
            )
            for name, shape in shapes.items()
        }
        if kind == "nvfp4":
            tensors["tensor_scales"] = torch.rand(E, 3, generator=generator)
        return tensors
    # Biases everywhere, and weights transposed in memory.
    if kind == "gpt_oss":
        biases = {
            "gate_up_bias": randn(E, 2 * F, seed=seed + 6),
            "down_bias": randn(E, D, seed=seed + 7),
        }
        biases["logit_bias"] = randn(E, seed=seed + 8)
        # As its checkpoints are.
        transposed = {name: tensors[name].mT.contiguous().mT for name in ("w_gate_up", "w_down")}
        return (
            tensors
            | transposed
            | biases
            | {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
        )
    return tensors


def expected(kind: str = "plain", seed: int = 0) -> dict[str, torch.Tensor]:
    """The state dict of all experts."""
    tensors = {
        name: value for name, value in full(kind, seed).items() if isinstance(value, torch.Tensor)
    }
    router = ("router_weight", "bias", "logit_bias")
    named = {
        name if name in router else f"experts.{name}": value for name, value in tensors.items()
    }
    return named | {"_extra_state": torch.arange(E, dtype=torch.int32)}


def assert_same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].device.type == "cpu", name
        assert got[name].shape == value.shape, name
        assert torch.equal(
            got[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)
        ), name


def assert_holds(layer: MoELayer, kind: str = "plain", seed: int = 0) -> None:
    """Each local expert has the weights of its logical expert, copies too."""
    held = layer.ep.placement.logical_experts(layer.ep.rank)
    local = {
        n: take_rows(t, held) if n.startswith("experts.") else t
        for n, t in expected(kind, seed).items()
    }
    listed = list(range(E)) if is_spread(layer.experts.w_down) else held
    got = {name: local_view(value) for name, value in layer.state_dict().items()}
    assert_same_bits(got, local | {"_extra_state": torch.tensor(listed, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        *((placement, "plain") for placement in PLACEMENTS),
        *((COPIES, kind) for kind in ("fp8", "mxfp4", "nvfp4", "gpt_oss")),
    ],
)
def test_a_rank_takes_its_experts_of_all_and_ranks_together_give_all(
    ep_over, rank, size, placement, kind
):
    layer = MoELayer.from_full(ep_over(size, kind, placement=placement), **full(kind))
    assert_holds(layer, kind)
    assert layer.experts.interleaved == (kind == "gpt_oss")
    assert_same_bits(layer.full_state_dict(), expected(kind))
    on_rank_0 = layer.full_state_dict(cpu_offload=True)
    if rank == 0:
        assert_same_bits(on_rank_0, expected(kind))
    else:
        assert on_rank_0 == {}


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(1, "plain"), *((2, kind) for kind in ("plain", "fp8", "mxfp4", "nvfp4", "gpt_oss"))],
)
def test_a_full_state_dict_loads_on_any_number_of_ranks(ep_over, size, ranks, kind):
    saved = MoELayer.from_full(
        ep_over(size, kind, placement=COPIES), **full(kind)
    ).full_state_dict()
    ep = ep_over(ranks, kind, placement={"num_redundant_experts": 1})
    layer = MoELayer.from_full(ep, **full(kind, seed=50))
    layer.load_full_state_dict(saved)
    assert_holds(layer, kind)
    # One that somebody has made of tensors has no list of experts.
    by_hand = {key: value for key, value in saved.items() if "_extra_state" not in key}
    other = MoELayer.from_full(ep, **full(kind, seed=51))
    other.load_full_state_dict(by_hand)
    assert_holds(other, kind)
    alone = MoELayer.from_full(ep_over(1, kind), **full(kind, seed=50))
    # To a group of one rank it is an ordinary state dict.
    alone.load_state_dict(saved)
    assert_holds(alone, kind)


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "kind"),
    [
        ({}, COPIES, "plain"),
        (COPIES, {}, "fp8"),
        (COPIES, {}, "mxfp4"),
        (COPIES, {}, "nvfp4"),
        (COPIES, {}, "gpt_oss"),
        (PLACEMENTS[3], PLACEMENTS[3], "plain"),
    ],
)
def test_torchs_checkpoint_loads_on_any_number_of_ranks(
    ep_over, folder, size, saved_with, loaded_with, kind
):
    saved = MoELayer.from_full(ep_over(size, kind, placement=saved_with), **full(kind))
    checkpoint.save(saved, folder / "saved")
    for ranks in (size, 2, 1):
        layer = MoELayer.from_full(
            ep_over(ranks, kind, placement=loaded_with), **full(kind, seed=50)
        )
        checkpoint.load(layer, folder / "saved")
        assert_holds(layer, kind)


def test_the_logits_of_any_number_of_ranks_are_bitwise_the_same(ep_over, folder, rank, size):
    """A token has two experts, whose sum has one order. Every GEMM has 128 rows, because libraries
    sum in another order for another number of rows.
    """

    def model(ep: ExpertParallel, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        first, second = (MoELayer.from_full(ep, **full(seed=seed + n)) for n in (0, 20))
        return torch.nn.Sequential(
            first, torch.nn.LayerNorm(D), second, torch.nn.Linear(D, 32)
        ).requires_grad_(False)

    x = randn(9 + rank, D, seed=rank)
    aligned = {"capacity": {"alignment": 128}}
    # What the saved model gives.
    want = (first := model(ep_over(size, **aligned), seed=0))(x)
    checkpoint.save(first, folder / "saved")
    torch.save(checkpoint.full_state_dict(first), folder / f"full{rank}.pt")
    # Groups of other sizes load it, sharded and whole.
    for ranks in (size, 2, 1):
        second = model(ep := ep_over(ranks, **aligned), seed=50)
        assert not torch.equal(second(x), want)
        checkpoint.load(second, folder / "saved")
        assert torch.equal(second(x), want)
        third = model(ep, seed=90)
        checkpoint.load_full_state_dict(third, torch.load(folder / f"full{rank}.pt", mmap=True))
        assert torch.equal(third(x), want)


def test_meshes_in_every_order(folder, rank, size):
    """What one saves loads over any other, with the same bits of each expert, or the mesh is
    refused on all ranks. It is where a rank's number would not be its place.
    """
    shapes = [(1, size)] if size % 2 else [(1, size), (2, size // 2)]
    experts = 12  # which 2, 3 and 4 ranks divide, so that they are DTensors
    given = {name: value[:experts] for name, value in full().items()}
    want = {name: value[:experts] for name, value in expected().items()}
    layers = list[MoELayer]()
    # A layer over each mesh that ascends along "ep"; the others are refused.
    for shape in shapes:
        config = make_config(
            shape[1], experts=experts, top_k=K, hidden=D, routing={"selection_bias": True}
        )
        for order in itertools.permutations(range(size)):
            ranks = torch.tensor(order).view(shape)
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "ep"))
            if ranks.tolist() != ranks.sort(1).values.tolist():
                with pytest.raises(ValueError, match="must ascend along 'ep'"):
                    ExpertParallel(config, mesh, device="cpu")
                continue
            ep = ExpertParallel(config, mesh, device="cpu")
            assert ep.rank == mesh.get_local_rank("ep")
            layers.append(MoELayer.from_full(ep, **given))

    # Each of them saves.
    for i, layer in enumerate(layers):
        checkpoint.save(layer, folder / f"saved{i}")
        state = checkpoint.full_state_dict(layer, cpu_offload=True)
        holders = torch.tensor(int(bool(state)))
        dist.all_reduce(holders)
        assert holders == 1, "one rank of all replicas writes the file"
        if state:
            assert_same_bits(state, want)

    # Each of them loads what each has saved.
    for i, layer in itertools.product(range(len(layers)), layers):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        checkpoint.load(layer, folder / f"saved{i}")
        held = layer.ep.logical_experts()
        for name in ("w_gate_up", "w_down"):
            rows = local_view(getattr(layer.experts, name).detach())
            assert torch.equal(rows, given[name][held])
    for layer in layers:
        layer.ep.close()


def test_a_part_of_the_ranks_saves_and_loads(ep_over, folder, rank, size):
    """The others do something else meanwhile."""
    first = dist.new_group(list(range(size - 1)))
    ep = ep_over(size - 1)
    layer = MoELayer.from_full(ep, **full())
    if rank < size - 1:
        checkpoint.save(layer, folder / "saved", group=first)
        other = MoELayer.from_full(ep, **full(seed=50))
        checkpoint.load(other, folder / "saved", group=first)
        assert_holds(other)
    dist.barrier()


PLACES = FILES | {folders.__file__, state_dicts.__file__}
"""Where a rank is in a call of `epmoe.checkpoint`."""


def one_value(folder: Path) -> float:
    """What all weights of a layer have in a folder, as torch reads it."""
    state = {
        name: torch.full((E, *shape), -1.0)
        for name, shape in (("experts.w_gate_up", (2 * F, D)), ("experts.w_down", (D, F)))
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    (value,) = {value for each in state.values() for value in each.flatten().tolist()}
    return value


@pytest.mark.parametrize(
    ("call", "victim", "stride"),
    [
        *((call, victim, 41) for call in ("save", "load", "full") for victim in (0, 1)),
        *(slow(call, victim, 1) for call in ("save", "load", "full") for victim in (0, 1)),
    ],
)
def test_all_ranks_raise_wherever_a_handler_raises(
    ep_over, folder, rank, size, call, victim, stride
):
    """In a group that goes on: the others hear of it at once. The folder has the new checkpoint
    where the step has succeeded, on all ranks, and the old one otherwise.
    """
    ep = ep_over(size, timeout_s=LONG_S)
    assert ep.group is not None
    layer = MoELayer.from_full(ep, **full()).requires_grad_(False)
    path = folder / "saved"
    number = 1.0
    layer.experts.w_down.fill_(number)
    layer.experts.w_gate_up.fill_(number)
    checkpoint.save(layer, path, group=ep.group)

    def step(begun: Callable[[], None]) -> None:
        # A handler that raises before a rank is in the step changes nothing: others wait for it.
        agree = state_dicts._state_of

        def in_the_step(*arguments: object) -> object:
            state_dicts._state_of = agree
            begun()
            return agree(*arguments)

        state_dicts._state_of = in_the_step
        if call == "save":
            checkpoint.save(layer, path, group=ep.group)
        elif call == "load":
            checkpoint.load(layer, path, group=ep.group)
        else:
            checkpoint.full_state_dict(layer)

    # The victim's handler raises at one line after the other, until a step runs without.
    held = number
    for succeeded in settled_steps(rank, step, victim=victim, files=PLACES, stride=stride):
        if call == "save":
            # The folder has one checkpoint or the other, whole.
            if succeeded:
                held = number
            found = of_all(one_value(path) if rank == 0 else None)[0]
            assert found == held
            number += 1
            layer.experts.w_down.fill_(number)
            layer.experts.w_gate_up.fill_(number)

    # The ranks are still in step.
    assert of_all(rank) == list(range(size))


def test_one_copy_of_each_expert_is_written(ep_over, folder, size):
    layer = MoELayer.from_full(ep_over(size, placement=PLACEMENTS[3]), **full())
    checkpoint.save(layer, folder / "saved")
    metadata = dcp.FileSystemReader(folder / "saved").read_metadata()
    names = {"router_weight", "bias", "_extra_state", "experts.w_gate_up", "experts.w_down"}
    assert metadata.state_dict_metadata.keys() == names
    assert metadata.state_dict_metadata["experts.w_down"].size == (E, D, F)
    tensors = sum(t.nbytes for t in expected().values())
    assert sum(file.stat().st_size for file in (folder / "saved").rglob("*")) < 1.3 * tensors


def test_the_state_dict_of_another_rank_is_refused(ep_over, rank, size):
    """Without the list of experts it would load silently: the keys and, with 2 and 4 ranks, the
    shapes are equal.
    """
    ep = ep_over(size, placement={"num_redundant_experts": -E % size})
    layer = MoELayer.from_full(ep, **full())
    # Each rank tries the state dicts of all ranks, and takes its own alone.
    for source, state in enumerate(of_all(layer.state_dict())):
        if source == rank:
            layer.load_state_dict(state)
            continue
        with pytest.raises(
            ValueError, match=rf"has the weights of .*, but rank {rank} of {size} holds \["
        ):
            layer.load_state_dict(state)
        with pytest.raises(ValueError, match=rf"`\S+` must (hold|list) all {E} experts, got"):
            layer.load_full_state_dict(state)
    assert_holds(layer)


def test_torchs_checkpoint_of_a_plain_state_dict_is_refused_when_it_is_loaded(
    ep_over, folder, rank, size
):
    """torch saves the value of any one rank for a key that all ranks have. So all ranks but one
    raise.
    """
    ep = ep_over(size, placement={"num_redundant_experts": -E % size})
    dcp.save(get_model_state_dict(MoELayer.from_full(ep, **full())), checkpoint_id=folder / "saved")
    other = MoELayer.from_full(ep, **full(seed=50))
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder / "saved")
    # Only the rank whose values torch has saved can take them.
    refused = torch.zeros(size, dtype=torch.int32)
    try:
        set_model_state_dict(other, state)
    except ValueError as error:
        assert "the state dict has the weights of the logical experts" in str(error)
        refused[rank] = 1
    dist.all_reduce(refused)
    assert refused.sum() == size - 1


def test_a_folder_of_other_shapes_or_names_is_refused_on_all_ranks(ep_over, folder, size):
    layer = MoELayer.from_full(ep_over(size), **full())
    other = MoELayer.from_full(
        layer.ep, **full() | {"w_gate_up": randn(E, F, D), "w_down": randn(E, D, F // 2)}
    )
    checkpoint.save(other, folder / "saved")
    for module in (layer, torch.nn.Sequential(layer)):
        with pytest.raises(
            ValueError,
            match="saved: has no checkpoint of this model and optimizer: (Size mism|Missing k)",
        ):
            checkpoint.load(module, folder / "saved")


def test_a_part_of_a_larger_dict_and_async(ep_over, folder, size):
    layer = MoELayer.from_full(ep_over(size), **full())
    step = torch.tensor(7)
    dcp.async_save(
        {"model": checkpoint.sharded_state_dict(layer), "step": step},
        checkpoint_id=folder / "saved",
    ).result()
    other = MoELayer.from_full(ep_over(2), **full(seed=50))
    whole = {"model": checkpoint.sharded_state_dict(other), "step": torch.tensor(0)}
    dcp.load(whole, checkpoint_id=folder / "saved")  # in place
    assert_holds(other)
    assert whole["step"] == 7


def test_a_rank_whose_experts_move_is_named_on_all(ep_over, folder, rank, size):
    """It begins alone here. One that is a poll behind the others is in the same state."""
    live = {"live": True, "slots_per_rank": min(E, -(-E // size) + 1)}
    layer = MoELayer.from_full(ep := ep_over(size, placement=live), **full())
    slots = (ep.slots + 1) % E
    # The last rank has begun to move.
    if rank == size - 1:
        ep.replace(slots)
    calls = (
        layer.full_state_dict,
        lambda: layer.full_state_dict(cpu_offload=True),
        lambda: checkpoint.save(layer, folder / "saved"),
        lambda: checkpoint.load(layer, folder / "saved"),
    )
    # No call of all goes through.
    for call in calls:
        named = "experts are moving" if rank == size - 1 else f"rank {size - 1}: experts are moving"
        with pytest.raises(EPStateError, match=f"^{named}"):
            call()
    # All move, and it does.
    if rank != size - 1:
        ep.replace(slots)
    ep.apply()
    assert_same_bits(layer.full_state_dict(), expected())
    checkpoint.save(layer, folder / "saved")
    other = MoELayer.from_full(ep_over(size), **full(seed=50))
    checkpoint.load(other, folder / "saved")
    assert_holds(other)


def test_ranks_without_experts(ep_over, folder, size):
    owners = {"strategy": "explicit", "assignment": [size - 1] * E}
    layer = MoELayer.from_full(ep_over(size, placement=owners), **full())
    assert_same_bits(layer.full_state_dict(), expected())
    checkpoint.save(layer, folder / "saved")
    other = MoELayer.from_full(ep_over(size, placement=owners), **full(seed=50))
    checkpoint.load(other, folder / "saved")
    assert_holds(other)


def test_experts_of_the_user_are_refused(ep_over, size):
    experts = torch.nn.Linear(D, D).requires_grad_(False)
    layer = MoELayer(ep_over(size), randn(E, D), experts, bias=randn(E))
    for call in (
        layer.full_state_dict,
        lambda: checkpoint.sharded_state_dict(torch.nn.Sequential(layer)),
    ):
        with pytest.raises(
            ValueError, match=r"`(0.)?experts.weight` must have a row for each of the \d experts"
        ):
            call()


def test_experts_of_another_placement_and_a_closed_group_are_refused(ep_over, size):
    layer = MoELayer.from_full(ep := ep_over(size), **full())
    whole = layer.experts
    layer.experts = MoELayer.from_full(ep_over(1), **full()).experts  # as after a resume
    with pytest.raises(
        ValueError, match=rf"each of the \d experts of this rank, got \[{E}, .*after `resume`"
    ):
        layer.full_state_dict()
    layer.experts = whole
    ep.close()
    with pytest.raises(EPStateError, match="closed"):
        layer.full_state_dict()


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 1)])
def test_whole_tensors_by_cpus(size, shape):
    """The way of DTensors on GPUs whose groups have gloo alone."""
    mesh = init_device_mesh("cpu", tuple(size if n < 0 else n for n in shape))
    placements = [Replicate()] * (len(shape) - 1) + [Shard(0)]
    values = randn(2 * size + 1, 3)
    parts = distribute_tensor(values, mesh, placements)
    assert torch.equal(whole._by_cpu(parts), values)
    assert torch.equal(whole.whole_tensor(parts), values)
    assert whole.whole_tensor(values) is values
