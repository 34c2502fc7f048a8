"""Weights that a trainer of some ranks hands over to a server of others, while it serves: each
token's outputs, through two layers and their routers, are those of one version.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import randn, refuse_another_thread, slow
from interrupted_steps import of_all
from rank_groups import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from waits import LONG_S, SOON_S, until

from epmoe import ExpertParallel, MoELayer, WeightReceiver, WeightSender
from epmoe.group.errors import EPStateError
from epmoe.group.waiting import Worker
from epmoe.live import flip_words
from epmoe.live import receiver as receiver_module
from epmoe.live.held import FIRST, Held
from epmoe.live.versions import newest_version
from epmoe.local.quantize import quantize_weights
from epmoe.local.spread import local_view
from epmoe.native import ops
from epmoe.training import fully_shard

E = 12
K = 3
D = 128
F = 128
M = 32
TOKENS = 40
LAYERS = 2
KINDS = {
    "spare": ("float32", False, {}),
    "slow words": ("float32", False, {}),
    "no spare, other placement": ("float32", False, {"placement": {"strategy": "round_robin"}}),
    "loads": ("float32", False, {}),
    "bf16 to fp8": ("bfloat16", True, {}),
}


class Model(nn.Module):
    """Layers with the weights of a version."""

    def __init__(
        self, ep: ExpertParallel, version: int, fp8: bool = False, layers: int = LAYERS
    ) -> None:
        super().__init__()
        dtype = ep.config.model.torch_dtype
        self.layers = nn.ModuleList()
        for i in range(layers):
            router, gate_up, down = (each.to(ep.device) for each in weights(version, i))
            full = {"w_gate_up": gate_up.to(dtype), "w_down": down.to(dtype)}
            if fp8:
                pairs = {name: [quantize_weights(w) for w in value] for name, value in full.items()}
                full = {name: torch.stack([q for q, _ in pair]) for name, pair in pairs.items()}
                for name, pair in pairs.items():
                    full[f"{name.removeprefix('w_')}_scales"] = torch.stack(
                        [scales for _, scales in pair]
                    )
            self.layers.append(
                MoELayer.from_full(ep, router, **full, batch_invariant=ep.device.type == "cpu")
            )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def take_routers(self, dense: dict[str, Tensor]) -> None:
        for i, layer in enumerate(self.layers):
            with torch.inference_mode():
                layer.router_weight.copy_(dense[f"router.{i}"])


def weights(version: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = 10 * version + 3 * layer
    sizes = (E, D), (E, 2 * F, D), (E, D, F)
    return tuple(randn(*shape, seed=seed + i) / shape[-1] ** 0.5 for i, shape in enumerate(sizes))


@pytest.fixture
def folder(size) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        named = [made]
        dist.broadcast_object_list(named, 0)
        yield Path(named[0])
        dist.barrier()


@pytest.fixture
def ep(size) -> Iterator[ExpertParallel]:
    """Over all ranks, none of which leaves before the others have ended the test."""
    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D, max_tokens=M)) as ep:
        yield ep
        dist.barrier()


@contextlib.contextmanager
def side(
    rank: int,
    size: int,
    trainers: int,
    dtype: str,
    sections: dict,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[ExpertParallel, bool]]:
    """The `ExpertParallel` of the first ranks, who train, or of the others."""
    groups = [group_of(ranks, backend="gloo") for ranks in (range(trainers), range(trainers, size))]
    trains = rank < trainers
    config = make_config(
        trainers if trains else size - trainers,
        experts=E,
        top_k=K,
        hidden=D,
        dtype=dtype,
        max_tokens=M,
        timeout_s=LONG_S,
        **{} if trains else sections,
    )
    with ExpertParallel(config, groups[not trains], device=device) as ep:
        yield ep, trains


def send(model: Model, sender: WeightSender, version: int) -> None:
    """A step of the trainer, whose weights become those of a version."""
    routers = {}
    for i, layer in enumerate(model.layers):
        router, gate_up, down = weights(version, i)
        held = layer.ep.logical_experts(layer.tag)
        for parameter, full in ((layer.experts.w_gate_up, gate_up), (layer.experts.w_down, down)):
            local_view(parameter.data).copy_(full[held])
        routers[f"router.{i}"] = router.to(layer.ep.device)
    sender.send(version, routers if layer.ep.rank == 0 else None)


def wait_for(folder: Path, version: int) -> None:
    """So that this version is not passed over, which nothing but this test minds."""
    until((folder / f"seen{version}").exists, LONG_S)


def tick_or_load(receiver: WeightReceiver, random: Random, last: int) -> bool:
    """A step of all ranks."""
    if random.randrange(3):
        return receiver.tick()
    before = receiver.version
    with contextlib.suppress(MemoryError):
        receiver.load(min(before + 1, last))
    return receiver.version > before


def served(
    ep: ExpertParallel,
    model: Model,
    receiver: WeightReceiver,
    folder: Path,
    last: int,
    kind: str,
    least: int,
):
    """Serve until the last version; the tokens that were served, and the elements that are no
    version's.
    """
    fp8 = KINDS[kind][1]
    numbers = range(last + 1)
    tokens = randn(TOKENS, D, seed=9).to(ep.config.model.torch_dtype)
    # What each version gives for each token.
    wanted = []
    for version in numbers:
        one = Model(ep, version, fp8)
        wanted.append(torch.cat([one(part) for part in tokens.split(M)]))
    random = Random(ep.rank)
    count = 0
    wrong = 0
    longest = 0.0
    (folder / f"seen{receiver.version}").touch()  # the receiver may have begun with a version
    # Serve drawn tokens until the last version has come.
    step = partial(tick_or_load, receiver, Random(0), last) if kind == "loads" else receiver.tick
    while receiver.version < last or count < least:
        if step():
            longest = max(longest, receiver.pause_s)
            (folder / f"seen{receiver.version}").touch()
        drawn = [random.randrange(TOKENS) for _ in range(random.choice((0, 1, M // 2, M)))]
        wrong += int((model(tokens[drawn]) != wanted[max(receiver.version, 0)][drawn]).sum())
        count += M // 2  # on average, the same on all ranks
    return wrong, longest


def hand_over(
    rank: int, size: int, folder: Path, trainers: int, kind: str, last: int, least: int
) -> None:
    dtype, fp8, sections = KINDS[kind]
    with (
        side(rank, size, trainers, dtype, sections) as (ep, trains),
        torch.inference_mode(not trains),
    ):
        model = Model(ep, 0, fp8 and not trains)
        if trains:
            sender = WeightSender(model, folder, keep=2)
            dist.barrier()
            for version in range(1, last + 1):
                send(model, sender, version)
                if version % 5 or version == last:  # else the next one overtakes it
                    wait_for(folder, version)
            # The trainer that sends last removes the parts of all.
            dist.barrier(ep.group)
            assert len([*folder.glob(f"v*.{ep.rank}-of-*")]) == 2, "what nobody needs is removed"
        else:
            dist.barrier()
            receiver = WeightReceiver(
                ep, model, folder, spare="no spare" not in kind, dense=model.take_routers
            )
            wrong, longest = served(ep, model, receiver, folder, last, kind, least)
            receiver.close()
            assert wrong == 0 and (receiver.problem is None or kind == "loads")
            assert longest < SOON_S
        dist.barrier()


def fails_at_times(stage: Callable) -> Callable:
    random = Random(0)

    def staged(*arguments: object) -> object:
        if not random.randrange(3):
            raise MemoryError
        return stage(*arguments)

    return staged


def post_and_stop(*word: object) -> None:
    ops.post_word(*word)
    time.sleep(0.02)


# The last rank alone has nobody to agree with on a flip, so that kinds of flips repeat one another.
@pytest.mark.parametrize(
    ("trainers", "kind"),
    [
        *((1, kind) for kind in KINDS),
        *((-1, kind) if kind in ("spare", "loads") else slow(-1, kind) for kind in KINDS),
    ],
)
def test_a_token_meets_one_version(rank, size, folder, kind, trainers, monkeypatch):
    if size < 2:
        pytest.skip("a trainer and a server have a rank each")
    if kind == "loads" and rank == size - 1:
        monkeypatch.setattr(WeightReceiver, "_stage", fails_at_times(WeightReceiver._stage))
    if kind == "slow words":  # the ranks stop between any two of them
        slow_ops = SimpleNamespace(post_word=post_and_stop, read_words=ops.read_words)
        monkeypatch.setattr(flip_words, "ops", slow_ops)
    hand_over(rank, size, folder, trainers % size, kind, last=6, least=2000)


@torch.inference_mode()
def test_ranks_that_give_rounds_up_flip_with_the_others(ep, rank, size, folder):
    """Such a rank waits for nobody, so it may be a round behind or before the others."""
    model = Model(ep, 0, layers=1)
    x = randn(1, D)
    random = Random(rank)
    versions = [-1]
    sender = WeightSender(model, folder)
    receiver = WeightReceiver(ep, model, folder)
    for _ in range(400):
        # The next version is sent once the last one serves.
        if receiver.version == versions[0]:
            versions[0] += 1
            sender.send(versions[0])
        time.sleep(random.choice((0, 0, 0.003)))
        # A round with tokens, or one that this rank gives up.
        if random.randrange(2):
            model(x)
        else:
            ep.skip(tag=1)
        receiver.tick()
        versions.append(receiver.version)
    receiver.close()
    seen = of_all(versions)
    assert seen == [versions] * size and versions[-1] > 5


@torch.inference_mode()
def test_no_other_thread_has_a_round_while_weights_load(ep, rank, size, folder, monkeypatch):
    flip = WeightReceiver._flip
    refused = []
    inputs = (randn(1, D), torch.zeros(1, K).int(), torch.ones(1, K))

    def interrupted(*arguments: object) -> None:
        refuse_another_thread(lambda: ep.dispatch(*inputs))
        refused.append(True)
        flip(*arguments)

    model = Model(ep, 0)
    sender = WeightSender(model, folder)
    receiver = WeightReceiver(ep, model, folder)
    monkeypatch.setattr(WeightReceiver, "_flip", interrupted)
    sender.send(1)
    receiver.load(1)
    receiver.close()
    assert refused == [True] and receiver.version == 1


@torch.inference_mode()
def test_a_tick_that_was_interrupted_is_done_again(ep, rank, size, folder, monkeypatch):
    # The first piece of work of a tick is interrupted on each rank.
    submit = Worker.submit
    interrupts = []

    def interrupted(*arguments: object) -> object:
        if interrupts:
            return submit(*arguments)
        interrupts.append(True)
        raise KeyboardInterrupt

    model = Model(ep, 0)
    sender = WeightSender(model, folder)
    receiver = WeightReceiver(ep, model, folder)
    monkeypatch.setattr(Worker, "submit", interrupted)
    # Later ticks bring the version all the same.
    sender.send(1)
    for _ in range(2000):
        model(randn(1, D))
        with contextlib.suppress(KeyboardInterrupt):
            if receiver.tick():
                break
    receiver.close()
    assert interrupts and receiver.version == 1


@torch.inference_mode()
def test_a_load_that_one_rank_leaves_calls_a_flip_off_for_all(ep, rank, size, folder, monkeypatch):
    def interrupted(*_: object) -> None:
        raise RuntimeError("interrupted")

    model = Model(ep, 0, layers=1)
    versions = []
    sender = WeightSender(model, folder)
    receiver = WeightReceiver(ep, model, folder)
    sender.send(1)
    while receiver._words.read().flip_round < 0:  # until a flip is to come
        model(randn(1, D))
        receiver.tick()
        dist.barrier()
    # The last rank is interrupted in `load`, and no rank flips.
    sender.send(2)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="interrupted"):
        if rank == size - 1:
            patched.setattr(WeightReceiver, "_await_worker", interrupted)
        receiver.load(2)
    assert receiver.version == -1
    # Rounds bring the version to all at once.
    for _ in range(300):
        model(randn(1, D))
        receiver.tick()
        versions.append(receiver.version)
        time.sleep(0.001)
    receiver.close()
    seen = of_all(versions)
    assert seen == [versions] * size and versions[-1] == 2


@torch.inference_mode()
def test_a_load_whose_flip_fails_on_one_rank_is_done_again(ep, rank, size, folder):
    """The others have the version then."""
    fails = [True] if rank == size - 1 else []

    def take(_: dict[str, Tensor]) -> None:
        if fails:
            fails.pop()
            raise RuntimeError("interrupted")

    model = Model(ep, 0, layers=1)
    sender = WeightSender(model, folder)
    receiver = WeightReceiver(ep, model, folder, dense=take)
    send(model, sender, 1)
    with pytest.raises(RuntimeError, match="interrupted"):
        receiver.load(1)
    receiver.load(1)
    experts = model.layers[0].experts
    held = ep.logical_experts()
    assert receiver.version == 1 and torch.equal(experts.w_down, weights(1, 0)[2][held])
    receiver.close()


@torch.inference_mode()
def test_ranks_that_hold_different_versions_do_not_serve(ep, rank, size, folder):
    """A flip has failed on the last rank, and the version has gone. They say so, until the host or
    the trainer has given all ranks the same.
    """
    if size < 2:
        pytest.skip("one rank holds what it holds")
    last = rank == size - 1
    model = Model(ep, 0, layers=1)
    sender = WeightSender(model, folder)
    sender.send(1)
    receiver = WeightReceiver(ep, model, folder)
    assert receiver.version == 1
    # The last rank says that it holds another version, and the folder is empty.
    if last:
        ep.versions.put(model.layers, Held(2, "other"))  # as after a flip of this rank alone
    dist.barrier()
    for part in folder.glob("v*"):
        part.unlink(missing_ok=True)
    dist.barrier()
    # All hear who holds what, until the host says a version.
    said = f"rank 0 has version 1 of trainer .*, rank {size - 1} has version 2 of trainer other"
    with pytest.raises((EPStateError, RuntimeError), match=said):
        WeightReceiver(ep, model, folder)
    assert WeightReceiver(ep, model, folder, version=5).version == 5
    assert WeightReceiver(ep, model, folder).version == 5
    # The last rank has joined, and has weights of none.
    if last:  # as a rank that has joined
        ep.versions.put(model.layers, FIRST)
    with pytest.raises((EPStateError, RuntimeError), match="has the weights that it began w"):
        WeightReceiver(ep, model, folder)
    # A version of the trainer settles it, too.
    sender.send(6)
    dist.barrier()
    assert WeightReceiver(ep, model, folder).version == 6


@torch.inference_mode()
def test_a_version_that_is_not_finite_on_one_rank_is_passed_over_by_all(ep, rank, size, folder):
    model = Model(ep, 0, layers=1)
    sender = WeightSender(Model(ep, 1, layers=1), folder)
    receiver = WeightReceiver(ep, model, folder)
    sender.send(1)
    receiver.load(1)
    # Version 2 has a NaN in an expert of the last rank.
    sent = sender._layers["layers.0"].experts
    sent.w_down[-1, 0, 0] = torch.nan if rank == size - 1 else 0.0
    sender.send(2)
    stop = torch.zeros(1, dtype=torch.int32)
    while not stop:  # until all have heard of it
        receiver.tick()
        model(randn(1, D))
        stop.fill_(receiver.problem is not None)
        dist.all_reduce(stop, dist.ReduceOp.MIN)
    # It says where, and the others that it has not taken the version.
    last = f"rank {size - 1} has not taken version 2: its `problem` says why"
    where = f"version 2 .* not finite in float32: `w_down` of expert {E - 1} of 'layers.0'"
    assert re.match(where if rank == size - 1 else last, str(receiver.problem))
    with pytest.raises((TimeoutError, RuntimeError), match=where):
        receiver.load(2, 0.01)
    assert receiver.version == 1 and re.match(where, str(receiver.problem))
    # The next version is taken.
    sent.w_down[-1, 0, 0] = 0.0
    sender.send(3)
    receiver.load(3)
    assert receiver.version == 3 and receiver.problem is None
    receiver.close()


@torch.inference_mode()
@pytest.mark.parametrize("starts", [True, False])
def test_a_version_that_goes_while_it_is_read(ep, rank, size, folder, starts, monkeypatch):
    """The last rank comes too late, so all ranks take the newest one that is there then."""
    map_version = receiver_module.map_version

    def overtaken(*arguments: object) -> object:
        monkeypatch.setattr(receiver_module, "map_version", map_version)
        mapped = None if rank == size - 1 else map_version(*arguments)
        for version in (2, 3):
            dist.barrier()
            send(model, sender, version)
        dist.barrier()
        return mapped or map_version(*arguments)

    model = Model(ep, 0, layers=1)
    sender = WeightSender(model, folder, keep=2)
    receiver = None if starts else WeightReceiver(ep, model, folder, dense=model.take_routers)
    # Versions 2 and 3 push version 1 out while it is mapped.
    send(model, sender, 1)
    dist.barrier()
    monkeypatch.setattr(receiver_module, "map_version", overtaken)
    receiver = receiver or WeightReceiver(ep, model, folder, dense=model.take_routers)
    receiver.load(1)
    assert receiver.version == 3
    assert torch.equal(model.layers[0].experts.w_down, weights(3, 0)[2][ep.logical_experts()])
    receiver.close()


def test_no_version_has_parts_of_two_trainers(rank, size, folder):
    """One dies when rank 0 has sent a version, the next one when the other ranks have: the third
    one may send it.
    """
    if size < 2:
        pytest.skip("a version of one rank is complete at once")
    for trainer in range(3):
        with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D, max_tokens=M)) as ep:
            sender = WeightSender(Model(ep, trainer), folder)
            dist.barrier()
            if trainer == 2 or (rank == 0) == (trainer == 0):
                sender.send(1)
            dist.barrier()
            assert newest_version(folder) == (1 if trainer == 2 else -1)
            dist.barrier()


@pytest.mark.parametrize("sharded", [False, True])
def test_of_replicas_the_first_one_writes(rank, size, folder, sharded):
    if size < 2:
        pytest.skip("there are no replicas")
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "ep"))
    config = make_config(1, experts=E, top_k=K, hidden=D, max_tokens=M)
    with ExpertParallel(config, mesh["ep"] if sharded else mesh, device="cpu") as ep:
        model = Model(ep, 0)
        if sharded:
            torchs_fully_shard(model.layers[0].experts, mesh=mesh["replicate"])
        sender = WeightSender(model, folder)
        dense = {"a": torch.ones(2)}
        # Each version has one part.
        for version in () if sharded else (1, 2):
            sender.send(version, dense if rank == 0 else None)
            dist.barrier()
            assert newest_version(folder) == version == len([*folder.glob("v*")])
            dist.barrier()
        # Other replicas may not give dense weights, nor may sharded experts be sent.
        if sharded or rank:
            with pytest.raises(
                ValueError, match="give ExpertParallel the mesh" if sharded else "first replica"
            ):
                sender.send(3, dense)
        dist.barrier()


def test_a_trainer_of_other_ranks_goes_on(rank, size, folder):
    """Its versions must be larger, and what the former one has left goes."""
    if size < 2:
        pytest.skip("there are no other ranks")
    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D, max_tokens=M)) as ep:
        # A trainer of all ranks leaves two versions and a draft.
        sender = WeightSender(Model(ep, 0), folder)
        for version in (8, 9):
            sender.send(version)
        (folder / f".v0000000000010.{ep.origin}.0.{rank}-of-{size}").touch()  # it dies
        dist.barrier()
    alone = dist.new_group([0])
    # One of a single rank begins above them, and clears them away.
    if rank == 0:
        with ExpertParallel(
            make_config(1, experts=E, top_k=K, hidden=D, max_tokens=M), alone
        ) as ep:
            sender = WeightSender(Model(ep, 0), folder, keep=2)
            with pytest.raises(ValueError, match="`version` must be an integer above 9"):
                sender.send(9)
            assert len([*folder.glob("*v*")]) == 2 * size
            for version in (10, 11):
                sender.send(version)
            assert len([*folder.glob("*v*")]) == 2 and newest_version(folder) == 11
    dist.barrier()


def test_shards_of_dense_weights_are_refused(ep, rank, size, folder):
    if size < 2:
        pytest.skip("one rank has all of a tensor")
    model = fully_shard(Model(ep, 0))
    with pytest.raises(
        TypeError, match=r"`dense\['a'\]` must be a plain tensor, such as `full_tensor\(\)`"
    ):
        WeightSender(model, folder).send(1, {"a": model.layers[0].router_weight})
    assert newest_version(folder) == -1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_10_000_tokens_while_50_versions_pass(rank, size, folder, kind):
    hand_over(rank, size, folder, -(-size // 2), kind, last=50, least=10_000)
