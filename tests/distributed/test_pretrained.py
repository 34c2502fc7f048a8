"""Ranks write their experts into one folder of Hugging Face: with copies, of each expert or fused,
or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import long, randn, slow
from interrupted_steps import FILES, check_folder_of_steps
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from waits import LONG_S

import epmoe
from epmoe import ExpertParallel, MoELayer, SafetensorsFolder
from epmoe.checkpoint import folders, pretrained, save_pretrained, state_dicts

pytestmark = pytest.mark.usefixtures("serving")

E = 7
F = 128
D = 128
K = 2
BLOCK = "model.layers.0.mlp"
PLACEMENTS = [{}, {"num_redundant_experts": 5, "strategy": "round_robin"}]


def tensors_of(kind: str) -> dict[str, Tensor]:
    tensors = {f"{BLOCK}.gate.weight": randn(E, D), "model.norm.weight": randn(D, seed=1)}
    if kind == "fused":
        # As in gpt-oss.
        experts = {
            "gate_up_proj": randn(E, D, 2 * F, seed=2),
            "down_proj": randn(E, F, D, seed=3),
        }
        biases = {
            "gate_up_proj_bias": randn(E, 2 * F, seed=4),
            "down_proj_bias": randn(E, D, seed=5),
        }
        return tensors | {
            f"{BLOCK}.experts.{name}": tensor for name, tensor in (experts | biases).items()
        }
    for x in range(E):
        for i, (name, shape) in enumerate(
            {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items()
        ):
            tensors[f"{BLOCK}.experts.{x}.{name}.weight"] = randn(*shape, seed=10 + 3 * x + i)
    return tensors


def start(folder: Path, kind: str, rank: int) -> SafetensorsFolder:
    """The source that all ranks load."""
    if rank == 0:
        (folder / "start").mkdir()
        save_file(tensors_of(kind), folder / "start" / "model.safetensors")
    dist.barrier()
    return SafetensorsFolder(folder / "start")


def model_of(ep: ExpertParallel, source: SafetensorsFolder, **options: object) -> nn.Module:
    model = nn.Module()
    model.model = nn.Module()
    model.model.norm = nn.Module()
    model.model.norm.weight = nn.Parameter(source["model.norm.weight"])
    block = nn.Module()
    block.mlp = MoELayer.from_safetensors(ep, source, BLOCK, **options)
    model.model.layers = nn.ModuleList([block])
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("kind", "dtype"), [("each", None), ("fused", torch.bfloat16)])
def test_every_rank_writes_its_experts(folder, rank, size, placement, kind, dtype):
    source = start(folder, kind, rank)
    with ExpertParallel(
        make_config(size, experts=E, top_k=K, hidden=D, placement=placement), device="cpu"
    ) as ep:
        # Weights that differ from those of the source.
        model = model_of(ep, source, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        # Each tensor comes back, in the dtype of the experts where one was asked for.
        files = {}
        for max_shard_bytes, name in ((10**9, "one"), (150_000, "several")):
            save_pretrained(model, folder / name, source, max_shard_bytes=max_shard_bytes)
            saved = SafetensorsFolder(folder / name)
            assert saved.keys() == source.keys()
            files[name] = len(list((folder / name).iterdir()))
            for key, tensor in tensors_of(kind).items():
                want = (
                    (tensor * 2).to(dtype)
                    if dtype is not None and ".experts." in key
                    else tensor * 2
                )
                assert saved[key].dtype == want.dtype and torch.equal(saved[key], want), key
    # Nothing else is left in the folder, and small shards make more files.
    dist.barrier()
    assert {file.name for file in folder.iterdir()} == {"start", "one", "several"} and files[
        "several"
    ] > files["one"]


@pytest.mark.parametrize("kind", ["each", "fused"])
def test_parameters_that_fsdp_shards_are_gathered_one_by_one(folder, rank, size, kind):
    source = start(folder, kind, rank)
    chunks = {"strategy": "explicit", "assignment": [x // -(-E // size) for x in range(E)]}
    with ExpertParallel(
        make_config(size, experts=E, top_k=K, hidden=D, placement=chunks), device="cpu"
    ) as ep:
        model = epmoe.training.fully_shard(
            model_of(ep, source), mesh=init_device_mesh("cpu", (size,))
        )
        assert hasattr(model.model.norm.weight, "full_tensor")
        save_pretrained(model, folder / "end", source)
        saved = SafetensorsFolder(folder / "end")
        assert all(torch.equal(saved[key], tensor) for key, tensor in tensors_of(kind).items())


@pytest.mark.parametrize(
    ("victim", "stride"), [(0, 211), (1, 211), slow(0, 5), slow(1, 5), long(0, 1), long(1, 1)]
)
def test_all_ranks_raise_wherever_a_handler_raises(folder, rank, size, victim, stride, monkeypatch):
    """Also in the group of the experts, which goes on. The folder is there where all have
    succeeded.
    """
    source = start(folder, "fused", rank)
    files = FILES | {folders.__file__, pretrained.__file__, state_dicts.__file__}
    describe = pretrained._tensors
    config = make_config(size, experts=E, top_k=K, hidden=D, timeout_s=LONG_S)
    with ExpertParallel(config, device="cpu") as ep:
        model = model_of(ep, source)

        # The handler may raise from where this rank begins to describe its tensors.
        def step(begun: Callable[[], None]) -> None:
            def in_the_step(*arguments: object) -> object:
                begun()
                return describe(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(pretrained, "_tensors", in_the_step)
                save_pretrained(model, folder / "end", source)

        check_folder_of_steps(rank, step, folder / "end", victim=victim, files=files, stride=stride)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_cannot_write_fails_on_all_and_leaves_nothing(
    folder, rank, size, guilty, monkeypatch
):
    source = start(folder, "each", rank)

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D), device="cpu") as ep:
        model = model_of(ep, source)
        # One rank has no space: all raise, and the folder is not there.
        with monkeypatch.context() as patch:
            if rank == guilty:
                patch.setattr("safetensors.torch.save_file", no_space)
            with pytest.raises(
                OSError if rank == guilty else RuntimeError, match="No space left on device"
            ):
                save_pretrained(model, folder / "end", source)
        dist.barrier()
        assert {file.name for file in folder.iterdir()} == {"start"}
        dist.barrier()
        # One rank has another model.
        if rank == guilty:
            model.model.norm.weight = nn.Parameter(torch.ones(D).half())
        with pytest.raises(ValueError, match="ranks must have the same model"):
            save_pretrained(model, folder / "end", source)
        # Then all is right.
        model.model.norm.weight = nn.Parameter(torch.ones(D))
        save_pretrained(model, folder / "end", source)
        assert SafetensorsFolder(folder / "end").keys() == source.keys()
