"""Ranks write their experts into one folder of Hugging Face: with copies, of each expert or fused, or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exchanges import make_config
from helpers import randn
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import epmoe
from epmoe import ExpertParallel, MoELayer, SafetensorsFolder
from epmoe.checkpoint import save_pretrained

pytestmark = pytest.mark.usefixtures("serving")

E, F, D, K = 7, 128, 128, 2
BLOCK = "model.layers.0.mlp"
PLACEMENTS = [{}, {"num_redundant_experts": 5, "strategy": "round_robin"}]


@pytest.fixture
def path(rank: int) -> Iterator[Path]:
    """A folder for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        of_rank_0 = [mine]
        dist.broadcast_object_list(of_rank_0)
        yield Path(of_rank_0[0])
        dist.barrier()


def tensors_of(kind: str) -> dict[str, Tensor]:
    tensors = {f"{BLOCK}.gate.weight": randn(E, D), "model.norm.weight": randn(D, seed=1)}
    if kind == "fused":
        experts = {"gate_up_proj": randn(E, D, 2 * F, seed=2), "down_proj": randn(E, F, D, seed=3)}  # as in gpt-oss
        biases = {"gate_up_proj_bias": randn(E, 2 * F, seed=4), "down_proj_bias": randn(E, D, seed=5)}
        return tensors | {f"{BLOCK}.experts.{name}": tensor for name, tensor in (experts | biases).items()}
    for x in range(E):
        for i, (name, shape) in enumerate({"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items()):
            tensors[f"{BLOCK}.experts.{x}.{name}.weight"] = randn(*shape, seed=10 + 3 * x + i)
    return tensors


def start(path: Path, kind: str, rank: int) -> SafetensorsFolder:
    """The folder that all ranks load."""
    if rank == 0:
        (path / "start").mkdir()
        save_file(tensors_of(kind), path / "start" / "model.safetensors")
    dist.barrier()
    return SafetensorsFolder(path / "start")


def model_of(ep: ExpertParallel, folder: SafetensorsFolder, **options: object) -> nn.Module:
    model = nn.Module()
    model.model = nn.Module()
    model.model.norm = nn.Module()
    model.model.norm.weight = nn.Parameter(folder["model.norm.weight"])
    block = nn.Module()
    block.mlp = MoELayer.from_safetensors(ep, folder, BLOCK, **options)
    model.model.layers = nn.ModuleList([block])
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("kind", "dtype"), [("each", None), ("fused", torch.bfloat16)])
def test_every_rank_writes_its_experts(path, rank, size, placement, kind, dtype):
    folder = start(path, kind, rank)
    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D, placement=placement), device="cpu") as ep:
        model = model_of(ep, folder, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        for max_shard_bytes, name in ((10**9, "one"), (150_000, "several")):
            save_pretrained(model, path / name, folder, max_shard_bytes=max_shard_bytes)
            saved = SafetensorsFolder(path / name)
            assert saved.keys() == folder.keys() and (len(list((path / name).iterdir())) > 2) == (name == "several")
            for key, tensor in tensors_of(kind).items():
                want = (tensor * 2).to(dtype) if dtype is not None and ".experts." in key else tensor * 2
                assert saved[key].dtype == want.dtype and torch.equal(saved[key], want), key
    dist.barrier()
    assert {file.name for file in path.iterdir()} == {"start", "one", "several"}


@pytest.mark.parametrize("kind", ["each", "fused"])
def test_parameters_that_fsdp_shards_are_gathered_one_by_one(path, rank, size, kind):
    folder = start(path, kind, rank)
    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D), device="cpu") as ep:
        model = epmoe.training.fully_shard(model_of(ep, folder), mesh=init_device_mesh("cpu", (size,)))
        assert hasattr(model.model.norm.weight, "full_tensor")
        save_pretrained(model, path / "end", folder)
        saved = SafetensorsFolder(path / "end")
        assert all(torch.equal(saved[key], tensor) for key, tensor in tensors_of(kind).items())


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_cannot_write_fails_on_all_and_leaves_nothing(path, rank, size, guilty, monkeypatch):
    folder = start(path, "each", rank)

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with ExpertParallel(make_config(size, experts=E, top_k=K, hidden=D), device="cpu") as ep:
        model = model_of(ep, folder)
        with monkeypatch.context() as patch:
            if rank == guilty:
                patch.setattr("os.pwrite", no_space)
            with pytest.raises(OSError if rank == guilty else RuntimeError, match="No space left on device"):
                save_pretrained(model, path / "end", folder)
        dist.barrier()
        assert {file.name for file in path.iterdir()} == {"start"}
        dist.barrier()
        if rank == guilty:
            model.model.norm.weight = nn.Parameter(torch.ones(D).half())
        with pytest.raises(ValueError, match="ranks must have the same model"):
            save_pretrained(model, path / "end", folder)
        model.model.norm.weight = nn.Parameter(torch.ones(D))
        save_pretrained(model, path / "end", folder)
        assert SafetensorsFolder(path / "end").keys() == folder.keys()
