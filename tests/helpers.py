"""Helpers that several test files share: random inputs, comparisons, and builds
without one guard.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epmoe
from epmoe.native.build import build

ROOT = Path(__file__).parent.parent
NO_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)
RANKS_SHARE_GPUS = (
    torch.cuda.is_available()
    and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()
)
ON_GPUS = pytest.mark.parametrize(
    "device", [pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, NO_CUDA])]
)
ON_THE_CPU = pytest.mark.parametrize("device", [torch.device("cpu")])
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
WEIGHT_TOLERANCE = 2e-6
"""Relative error of a routing weight against fp64."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Error of a sum that is sent in this dtype, relative to max(1, the largest |value| of the
reference).
"""


def slow(*values: object):
    """These values of a parameter, for `make slow` and `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: object):
    """These values of a parameter, for `make test-all`."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Uniform random bit patterns: about 1 value in 256 (bf16, fp32) or 32 (fp16) is NaN or Inf."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(bits)
    return torch.randint(info.min, info.max + 1, shape, dtype=bits, generator=generator(seed)).view(
        dtype
    )


def distinct_ids(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    """ids [T, K] int32, unique in each row."""
    return torch.rand(tokens, experts, generator=generator(seed)).argsort(1)[:, :top_k].int()


def listening(processes: Iterable[int]) -> set[str]:
    """The addresses on which processes of this machine wait for connections over IP."""
    # The sockets that the processes hold,
    sockets = set[str]()
    for process in processes:
        for path in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(FileNotFoundError):  # it has been closed
                sockets.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    # and those of the machine that listen.
    found = set[str]()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for _, local, _, state, *rest in map(
            str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        ):
            # The kernel writes addresses as words in the order of bytes of this machine.
            words = bytes.fromhex(local.partition(":")[0])
            listens = state == "0A"
            if listens and rest[5] in sockets:
                bytes_ = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, bytes_))
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def poison_(x: Tensor) -> Tensor:
    """Fills every byte with 0xFF: NaN as a float, −1 as an integer."""
    x.view(-1).view(torch.uint8).fill_(0xFF)
    return x


def assert_close(
    got: Tensor, want: Tensor, dtype: torch.dtype | None = None, slack: float = 1.0
) -> None:
    """`got` agrees with the fp64 `want` as closely as `dtype` (default: that of `got`) allows."""
    assert got.shape == want.shape
    if want.numel() == 0:
        return
    error = (got.double().cpu() - want.double().cpu()).abs().max().item()
    limit = slack * TOLERANCE[dtype or got.dtype] * max(1.0, want.abs().max().item())
    assert error <= limit, f"off by {error:.3g}, allowed {limit:.3g}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside it, torch fills uninitialised tensors with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def captured(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A function that replays a call, and what the call returns, which each replay writes. It is
    called once before.
    """
    # Kernels load in a call that no graph has.
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def build_without(*guards: str) -> str:
    """Path of a library without these guards."""
    return str(build(defines=guards))


def alone(
    num_experts: int = 8,
    top_k: int = 2,
    hidden: int = 64,
    dtype: str = "float32",
    max_tokens: int = 4,
    **sections: dict,
) -> epmoe.EPConfig:
    """A config of one rank; `sections` replace or extend those that follow from the other
    arguments.
    """
    config = {
        "model": {
            "num_experts": num_experts,
            "num_experts_per_tok": top_k,
            "hidden_size": hidden,
            "dtype": dtype,
        },
        "topology": {"ep_size": 1},
        "capacity": {"max_num_tokens_per_rank": max_tokens},
    }
    return epmoe.EPConfig(
        **config | {name: config.get(name, {}) | keys for name, keys in sections.items()}
    )


class SeenOperators(TorchDispatchMode):
    """The names of the operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def full_layer(
    ep: epmoe.ExpertParallel, seed: int = 0, bias: bool = False, **options: object
) -> tuple[epmoe.MoELayer, tuple[Tensor, Tensor]]:
    """A layer with this rank's experts, of an inner size of 24, and all experts' weights."""
    E = ep.config.model.num_experts
    D = ep.config.model.hidden_size
    F = 24
    dtype = ep.config.model.torch_dtype
    # All ranks draw the weights of all experts, and take their own.
    router, up, down = (
        randn(*s, seed=seed + i) for i, s in enumerate(((E, D), (E, 2 * F, D), (E, D, F)))
    )
    weights = (up / D**0.5).to(dtype), (down / F**0.5).to(dtype)
    held = ep.placement.logical_experts(ep.rank)
    experts = epmoe.GroupedExperts(*(w[held].to(ep.device) for w in weights))
    bias_E = (randn(E, seed=seed + 3) * 9).to(ep.device) if bias else None
    return epmoe.MoELayer(ep, router.to(ep.device), experts, bias=bias_E, **options), weights


def continued(
    model: Callable[[list[list[int]]], list[int]],
    asked: Sequence[tuple[list[int], int]],
    batch: int,
) -> list[list[int]]:
    """Prompts, and behind each as many tokens as it asks for. `model` continues up to `batch`
    sequences by one.
    """
    sequences = [list(prompt) for prompt, _ in asked]
    left = [most for _, most in asked]
    # The first that want more, in the order of the prompts.
    while now := [i for i, most in enumerate(left) if most][:batch]:
        for i, token in zip(now, model([sequences[i] for i in now]), strict=True):
            sequences[i].append(token)
            left[i] -= 1
    return sequences


TINY_MODEL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
}
"""Sizes of small models of transformers, under the names of all MoE types: a config takes those it
knows.
"""


def tiny_model(
    model_type: str, path: Path, dtype: torch.dtype = torch.float32, **changes: object
) -> torch.nn.Module:
    """A small model of transformers, whose biases are drawn, saved at a path. `changes` replace
    values of `TINY_MODEL`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    # Of all sizes the type takes those that it knows.
    known = CONFIG_MAPPING[model_type]()
    keys = {key: value for key, value in (TINY_MODEL | changes).items() if hasattr(known, key)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys), dtype=dtype)
    # Biases would be zeros, and a wrong one would not show.
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.normal_(std=0.3)
    model.save_pretrained(path)
    return model


class Interrupted(BaseException):
    """What a signal handler raises."""


@contextmanager
def stopped_at(
    step: int, files: Container[str | None], call: Callable[[], object]
) -> Iterator[SimpleNamespace]:
    """Makes a call once this many steps have run in these files; `came` says whether so many did.

    Steps are where CPython runs signal handlers and other threads: the start of a function, and the
    end of one in C.
    """
    found = SimpleNamespace(left=step, came=False)

    def profile(frame: FrameType, what: str, _: object) -> None:
        if frame.f_code.co_filename in files and what in ("call", "c_return"):
            found.left -= 1
            if found.left < 0:
                sys.setprofile(None)
                found.came = True
                call()

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def interrupted_at(step: int, files: Container[str | None]) -> Iterator[SimpleNamespace]:
    """Raises `Interrupted` at a step, and takes it; see `stopped_at`."""

    def interrupt() -> None:
        raise Interrupted

    with suppress(Interrupted), stopped_at(step, files, interrupt) as found:
        yield found


def fork(call: Callable[[], object]) -> int:
    """A child that makes a call and ends, with an exit status of 0 unless the call raises."""
    child = os.fork()
    if child:
        return child
    try:
        call()
        os._exit(0)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def is_right_in_a_fork(call: Callable[[], object]) -> bool:
    """Whether a child makes a call that does not raise."""
    return os.waitpid(fork(call), 0)[1] == 0


def refuse_another_thread(call: Callable[[], object]) -> None:
    """Another thread makes a call while this one is in one, and is refused."""
    with (
        ThreadPoolExecutor(1) as other,
        pytest.raises(RuntimeError, match="another thread is in a call"),
    ):
        other.submit(call).result()
