"""A rank of examples/serve.py, in a process of its own: the model, and what the front orders.

Each step computes its sequences anew, without a cache of keys and values. Ranks take GPUs where
there are any, and share them where they are more.
"""

import fcntl
import multiprocessing
import os
import re
import signal
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import describe, take_device
from prometheus_client import CollectorRegistry, start_http_server
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import epmoe
from epmoe.integrations.prometheus import HealthCollector

# The model without a checkpoint.
E = 8
K = 2
D = 32
WIDTH = 32
HEADS = 4
BLOCKS = 2
VOCABULARY = 64
LENGTH = 32

SPARE = 2  # slots of a rank beyond E / R
BATCH = 4  # requests of a rank in a step
EVERY = 20  # steps from one plan of the balancer to the next
MOST_LENGTH = 256  # of a checkpoint's sequences: each step computes them anew
DEADLINE_S = 10.0  # of a round, and of a group that opens


@dataclass(frozen=True)
class Served:
    """The model that is served: of a checkpoint, or a small one with random weights."""

    folder: str | None = None
    experts: int = E
    layers: int = BLOCKS  # that have experts
    vocabulary: int = VOCABULARY
    length: int = LENGTH  # most tokens of a prompt and its answer
    ends: tuple[int, ...] = ()  # tokens that end an answer
    # Importing these takes long.
    modules: tuple[str, ...] = (
        "torch",
        "epmoe.integrations.prometheus",
        "starlette.applications",
        "uvicorn",
    )

    @classmethod
    def checkpoint(cls, folder):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        names = epmoe.SafetensorsFolder(folder)
        blocks = (re.match(r"(.*)\.experts\.", name) for name in names)
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        code = (
            "transformers.models.auto.modeling_auto",
            f"transformers.models.{config.model_type}.modeling_{config.model_type}",
        )
        return cls(
            folder=folder,
            experts=epmoe.EPConfig.from_hf(folder, ep_size=1).model.num_experts,
            layers=len({block[1] for block in blocks if block}),
            vocabulary=text.vocab_size,
            length=min(text.max_position_embeddings, MOST_LENGTH),
            ends=tuple(ends),
            modules=cls.modules + code,
        )


SMALL = Served()


def configured(size, served=SMALL):
    """The config of the first group. Further ones keep the slots of a rank."""
    slots = min(served.experts, -(-served.experts // size) + SPARE)
    sections = {
        "placement": {
            "live": True,
            "slots_per_rank": slots,
            "layers": served.layers,
            "staging_mb": 1,
        },
        "capacity": {"max_num_tokens_per_rank": BATCH * served.length},
        "exchange": {"timeout_s": DEADLINE_S, "warmup_timeout_s": DEADLINE_S},
    }
    if served.folder is not None:
        return epmoe.EPConfig.from_hf(served.folder, ep_size=size, **sections)
    model = {"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"}
    return epmoe.EPConfig(
        model=model, topology={"ep_size": size}, routing={"renormalize": True}, **sections
    )


def load_experts(ep, layer, moves, read):
    """After a death or another size: `read` makes the experts of a layer anew where others are to
    be here.
    """
    held = ep.logical_experts(layer.tag)
    if len(held) != len(layer.experts.w_down) or any(move.tag == layer.tag for move in moves):
        layer.experts = read([max(expert, 0) for expert in held])  # an empty slot may hold any


class Block(nn.Module):
    def __init__(self, ep, router, gate_up, down):
        super().__init__()
        self.norm1 = nn.RMSNorm(D)
        self.norm2 = nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        # It keeps what this rank's slots hold.
        self.moe = epmoe.MoELayer.from_full(ep, router, gate_up, down)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)  # in place of a checkpoint: the same weights in all processes
        shapes = (E, D), (E, 2 * WIDTH, D), (E, D, WIDTH)
        self.full = [
            [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes] for _ in range(BLOCKS)
        ]
        self.ep = ep
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.positions = nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(ep, *weights) for weights in self.full)
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        self.to(ep.device)

    def embed(self, batch):
        device = self.ep.device
        rows = [torch.zeros(0, D, device=device)]
        if batch:
            rows = [
                self.embedding(torch.tensor(tokens, device=device))
                + self.positions.weight[: len(tokens)]
                for tokens in batch
            ]
        return pad_sequence(rows, batch_first=True)

    @torch.inference_mode()
    def forward(self, batch):
        """The next token of each sequence. Collective: a rank without requests computes for the
        others.
        """
        x = None
        for block in self.blocks:
            # An exception inside takes this rank's place in the round.
            with self.ep.giving_up(block.moe.tag):
                x = block(self.embed(batch) if x is None else x)
                # On a GPU the host runs ahead. A rank that leaves the step leaves it in the layer
                # in which the others do.
                self.ep.check()
        ends = torch.tensor([len(tokens) - 1 for tokens in batch], dtype=torch.int64)
        return self.head(self.norm(x[torch.arange(len(batch)), ends])).argmax(1).tolist()

    def load(self, moves):
        for block, (_, gate_up, down) in zip(self.blocks, self.full, strict=True):
            load_experts(self.ep, block.moe, moves, partial(self.read, gate_up, down))

    def read(self, gate_up, down, held):
        device = self.ep.device
        return epmoe.GroupedExperts(gate_up[held].to(device), down[held].to(device))


class Checkpoint(nn.Module):
    """A model of transformers with MoELayers; `dense` is its part without them."""

    def __init__(self, folder, dense, ep):
        from generate import with_layers

        super().__init__()
        self.ep = ep
        self.folder = epmoe.SafetensorsFolder(folder)
        self.model = with_layers(dense, folder, ep)
        self.layers = {
            name: layer
            for name, layer in dense.named_modules()
            if isinstance(layer, epmoe.MoELayer)
        }
        for layer in self.layers.values():
            layer.register_forward_hook(self.end_round)

    @torch.inference_mode()
    def forward(self, batch):
        self.tags = iter([layer.tag for layer in self.layers.values()])
        with ExitStack() as self.round:
            self.next_round()
            tokens = pad_sequence(
                [torch.tensor(tokens) for tokens in batch or [[0]]], batch_first=True
            )
            logits = self.model(input_ids=tokens.to(self.ep.device), use_cache=False).logits
        ends = [len(tokens) - 1 for tokens in batch]
        return logits[torch.arange(len(batch)), ends].argmax(1).tolist()

    def end_round(self, *_):
        """Behind a layer. On a GPU the host runs ahead: the failure of a round is raised in it."""
        self.ep.check()
        self.next_round()

    def next_round(self):
        """An exception up to the end of the next layer takes this rank's place in the layer's
        round.
        """
        self.round.pop_all().close()
        tag = next(self.tags, None)
        if tag is not None:
            self.round.enter_context(self.ep.giving_up(tag))

    def load(self, moves):
        for name, layer in self.layers.items():
            load_experts(self.ep, layer, moves, partial(self.read, name))

    def read(self, name, held):
        return epmoe.GroupedExperts(
            **self.folder.experts(name, held, self.ep.device) | self.ep.config.experts.options
        )


class Rank:
    """Does what the front orders: `step`, `recover`, `resize`."""

    def __init__(self, folder, ep, model):
        self.folder = folder
        self.ep = ep
        self.model = model
        self.running = {}  # tokens by request
        self.suspects = []  # requests of a step that raised: each does the next one alone
        self.balancer = epmoe.Balancer(ep, every=EVERY)

    def step(self, new, ended):
        """Whether the round was complete here; then by request the next token, or else the error
        that it raises.
        """
        # Take over what the front says.
        self.running |= new
        for number in ended:
            self.running.pop(number, None)
        self.suspects = [number for number in self.suspects if number in self.running]

        # One step of the model, in which every rank takes part.
        batch = self.suspects[:1] or list(self.running)
        try:
            found = self.model([self.running[number] for number in batch])
            self.balancer.tick()
        except epmoe.EPAbortedError:
            return "aborted", {}, {}
        except epmoe.EPTimeoutError:
            return "lost", {}, {}
        except Exception as error:  # the others get an EPAbortedError, and all do the step again
            if isinstance(error, epmoe.EPError) or not batch:  # no request is at fault
                raise
            if len(batch) > 1:
                self.suspects = batch
                return "aborted", {}, {}
            self.suspects = []
            return "aborted", {}, {batch[0]: f"{type(error).__name__}: {error}"}

        # Keep the tokens: where a death ends the step on others, this rank does not repeat it.
        tokens = dict(zip(batch, found, strict=True))
        self.suspects = self.suspects[1:]
        for number, token in tokens.items():
            self.running[number].append(token)
        return "complete", tokens, {}

    def recover(self):
        epmoe.recover(self.ep, self.folder, self.model.load)
        return self.ep.rank, self.ep.size

    def resize(self, size):
        stays = epmoe.resize(
            self.ep, self.folder, size, self.model.load, balancer=self.balancer, wait_s=0.2
        )
        return (self.ep.rank, self.ep.size) if stays else (None, 0)


def free_device(folder):
    """The device of this process. Of GPUs it is that of the first place that no other process has:
    a process that dies leaves its place at once.
    """
    for place in count():
        device = take_device(place, place + 1, needs_nccl=False)
        if device.type == "cpu":
            return device
        # It stays locked until this process ends.
        lock = os.open(Path(folder, f"place-{place}"), os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return device
        except BlockingIOError:
            os.close(lock)


def run_rank(pipe, folder, rank, size, served=SMALL):
    # Ctrl-C and SIGTERM are for the front, which ends the ranks once no request is open.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_front, daemon=True).start()
    torch.set_num_threads(1)
    device = free_device(folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine reaches the ranks
    metrics = CollectorRegistry()
    port = start_http_server(0, "127.0.0.1", metrics)[0].server_port
    make = Model
    if served.folder is not None:
        from generate import load_dense

        make = partial(Checkpoint, served.folder, load_dense(served.folder))

    # Into the first group, or into one that serves already.
    if rank is None:
        # What is slow the first time delays no other rank then.
        with epmoe.ExpertParallel(configured(1), device=device) as alone:
            Model(alone)([])
        pipe.send("ready")
        ep = epmoe.join_group(folder, device=device)
    else:
        store = epmoe.folder_store(folder)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ep = epmoe.ExpertParallel(configured(size, served), device=device)
    metrics.register(HealthCollector(ep))
    own = Rank(folder, ep, make(ep))
    pipe.send((ep.rank, port, describe(device)))

    # Do what the front orders, until it ends.
    with suppress(EOFError):
        while True:
            order, *arguments = pipe.recv()
            pipe.send(getattr(own, order)(*arguments))


def end_with_front():
    """Ends this process, which may wait for other ranks and read no order, when the front does."""
    multiprocessing.parent_process().join()
    os._exit(0)
