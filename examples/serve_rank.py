"""A rank of examples/serve.py, in a process of its own: the model, and what the front orders.

Each step computes its sequences anew, without a cache of keys and values.
"""

import multiprocessing
import os
import re
import signal
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from prometheus_client import CollectorRegistry, start_http_server
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import epmoe
from epmoe.integrations.prometheus import HealthCollector

E, K, D, WIDTH, HEADS, BLOCKS, VOCABULARY, LENGTH = (
    8,
    2,
    32,
    32,
    4,
    2,
    64,
    32,
)  # of the model without a checkpoint
SPARE, BATCH, EVERY = (
    2,
    4,
    20,
)  # of a rank: slots beyond E / R, and requests; steps from one plan to the next
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
    modules: tuple[str, ...] = (
        "torch",
        "epmoe.integrations.prometheus",
        "starlette.applications",
        "uvicorn",
    )  # slow

    @classmethod
    def checkpoint(cls, folder, length=256):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        text = config.get_text_config()
        name = config.model_type
        experts = epmoe.EPConfig.from_hf(folder, ep_size=1).model.num_experts
        found = (re.match(r"(.*)\.experts\.", name) for name in epmoe.SafetensorsFolder(folder))
        layers = len({block[1] for block in found if block})
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        code = (
            "transformers.models.auto.modeling_auto",
            f"transformers.models.{name}.modeling_{name}",
        )
        return cls(
            folder, experts, layers, text.vocab_size, length, tuple(ends), cls.modules + code
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
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.moe = epmoe.MoELayer.from_full(
            ep, router, gate_up, down
        )  # keeps what this rank's slots hold

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)  # in place of a checkpoint: the same weights in all processes
        shapes = (E, D), (E, 2 * WIDTH, D), (E, D, WIDTH)
        self.full = [
            [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes] for _ in range(BLOCKS)
        ]
        self.ep, self.embedding, self.positions = (
            ep,
            nn.Embedding(VOCABULARY, D),
            nn.Embedding(LENGTH, D),
        )
        self.blocks = nn.ModuleList(Block(ep, *weights) for weights in self.full)
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def embed(self, batch):
        rows = [
            self.embedding(torch.tensor(tokens)) + self.positions.weight[: len(tokens)]
            for tokens in batch
        ]
        return pad_sequence(rows or [torch.zeros(0, D)], batch_first=True)

    @torch.inference_mode()
    def forward(self, batch):
        """The next token of each sequence. Collective: a rank without requests computes for the
        others.
        """
        x = None
        for block in self.blocks:
            with self.ep.giving_up(
                block.moe.tag
            ):  # an exception inside takes this rank's place in the round
                x = block(self.embed(batch) if x is None else x)
        ends = torch.tensor([len(tokens) - 1 for tokens in batch], dtype=torch.int64)
        return self.head(self.norm(x[torch.arange(len(batch)), ends])).argmax(1).tolist()

    def load(self, moves):
        for block, (_, gate_up, down) in zip(self.blocks, self.full, strict=True):
            load_experts(self.ep, block.moe, moves, partial(self.read, gate_up, down))

    def read(self, gate_up, down, held):
        return epmoe.GroupedExperts(gate_up[held], down[held])


class Checkpoint(nn.Module):
    """A model of transformers with MoELayers; `dense` is its part without them."""

    def __init__(self, folder, dense, ep):
        from generate import with_layers

        super().__init__()
        self.ep, self.folder, self.model = (
            ep,
            epmoe.SafetensorsFolder(folder),
            with_layers(dense, folder, ep),
        )
        self.layers = {
            name: layer
            for name, layer in dense.named_modules()
            if isinstance(layer, epmoe.MoELayer)
        }
        for layer in self.layers.values():
            layer.register_forward_hook(lambda *_: self.next_round())

    @torch.inference_mode()
    def forward(self, batch):
        self.tags = iter([layer.tag for layer in self.layers.values()])
        with ExitStack() as self.round:
            self.next_round()
            tokens = pad_sequence(
                [torch.tensor(tokens) for tokens in batch or [[0]]], batch_first=True
            )
            logits = self.model(input_ids=tokens.to(self.ep.device), use_cache=False).logits
        return (
            logits[torch.arange(len(batch)), [len(tokens) - 1 for tokens in batch]]
            .argmax(1)
            .tolist()
        )

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
        self.running, self.suspects = (
            {},
            [],
        )  # tokens by request; requests of a step that raised, each to step alone
        self.balancer = epmoe.Balancer(ep, every=EVERY)

    def step(self, new, ended):
        """Whether the round was complete here; then by request the next token, or else the error
        that it raises.
        """
        self.running |= new
        for number in ended:
            self.running.pop(number, None)
        self.suspects = [number for number in self.suspects if number in self.running]
        batch = self.suspects[:1] or list(self.running)
        try:
            tokens = dict(
                zip(batch, self.model([self.running[number] for number in batch]), strict=True)
            )
            self.balancer.tick()
        except epmoe.EPAbortedError:
            return "aborted", {}, {}
        except epmoe.EPTimeoutError:
            return "lost", {}, {}
        except Exception as error:  # the others get an EPAbortedError, and all do the step again
            if isinstance(error, epmoe.EPError) or not batch:  # no request is at fault
                raise
            self.suspects = batch if len(batch) > 1 else []
            return (
                "aborted",
                {},
                {} if self.suspects else {batch[0]: f"{type(error).__name__}: {error}"},
            )
        self.suspects = self.suspects[1:]
        for number, token in tokens.items():
            self.running[number].append(token)
        return "complete", tokens, {}

    def recover(self):
        epmoe.recover(self.ep, self.folder, self.model.load)
        return self.ep.rank, self.ep.size

    def resize(self, size):
        if epmoe.resize(
            self.ep, self.folder, size, self.model.load, balancer=self.balancer, wait_s=0.2
        ):
            return self.ep.rank, self.ep.size
        return None, 0  # this rank has left


def run_rank(pipe, folder, rank, size, served=SMALL):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends
    threading.Thread(target=end_with_front, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo"
    )  # nobody else on the network reaches the ranks
    metrics = CollectorRegistry()
    port = start_http_server(0, "127.0.0.1", metrics)[0].server_port
    make = Model
    if served.folder is not None:
        from generate import load_dense

        make = partial(Checkpoint, served.folder, load_dense(served.folder))
    if rank is None:
        with epmoe.ExpertParallel(
            configured(1)
        ) as alone:  # what is slow the first time delays no other rank then
            Model(alone)([])
        pipe.send("ready")
        ep = epmoe.join_group(folder)
    else:
        store = dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ep = epmoe.ExpertParallel(configured(size, served))
    metrics.register(HealthCollector(ep))
    own = Rank(folder, ep, make(ep))
    pipe.send((ep.rank, port))
    with suppress(EOFError):  # the front has ended
        while True:
            order, *arguments = pipe.recv()
            pipe.send(getattr(own, order)(*arguments))


def end_with_front():
    """Ends this process, which may wait for other ranks and read no order, when the front does."""
    multiprocessing.parent_process().join()
    os._exit(0)
