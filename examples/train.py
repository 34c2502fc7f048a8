"""A transformer with MoE layers trains over any number of ranks, with the losses and norms of one
process.

Run: torchrun --standalone --nproc-per-node 4 examples/train.py [--parallel ddp|fsdp]
[--checkpoint-activations] [--replicas N] [--steps N] [--save FOLDER] [--resume FOLDER] [--from-hf
FOLDER] Each rank has its own experts; all ranks share the rest of the model by DDP or FSDP2. With
--replicas 2, two halves of the ranks have all experts each. A step has the same tokens on 1 to 8
ranks. A run that 4 ranks have saved goes on over
3. The FOLDER of --from-hf is a local checkpoint, which
generate.py takes as well, to fine-tune in place of the small model below.
Prints, on rank 0: the loss and the norm of the gradients of each step.
"""

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import clip_grad_norm_, fully_shard, ignore_experts

E = 8
K = 2
D = 32
WIDTH = 32
HEADS = 4
BLOCKS = 2
VOCABULARY = 64
# Micro-batches of a step, sequences of a micro-batch over all ranks, tokens of a sequence.
MICRO_BATCHES = 2
SEQUENCES = 8
LENGTH = 16
LEARNING_RATE = 5e-3
MAX_NORM = 0.3
BALANCE = 1e-2
Z = 1e-3
BIAS_RATE = 1e-3


def drawn(*shape):
    return torch.randn(shape) / shape[-1] ** 0.5


class Block(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        router = drawn(E, D)
        gate_up = drawn(E, 2 * WIDTH, D)
        down = drawn(E, D, WIDTH)
        # `from_full` keeps this rank's experts.
        self.moe = epmoe.MoELayer.from_full(ep, router, gate_up, down, bias=torch.zeros(E))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.moe(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(ep) for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def configured(from_hf, replicas):
    size = dist.get_world_size()
    capacity = {"max_num_tokens_per_rank": -(-SEQUENCES // size) * LENGTH}
    if from_hf:
        return epmoe.EPConfig.from_hf(from_hf, ep_size=size // replicas, capacity=capacity)
    model = {"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"}
    topology = {"ep_size": size // replicas}
    routing = {"renormalize": True}
    return epmoe.EPConfig(model=model, topology=topology, capacity=capacity, routing=routing)


def built(ep, from_hf):
    torch.manual_seed(0)  # the same weights on all ranks
    if from_hf:
        from generate import load_model  # each rank reads its own experts only

        model = load_model(from_hf, ep, dtype=ep.config.model.torch_dtype).train()
        model.config.use_cache = False  # which a block that is computed again would fill twice
    else:
        model = Transformer(ep).to(ep.device)
    # The number of steps goes into checkpoints.
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=ep.device))
    return model


def wrapped(model, parallel, checkpoint_activations):
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    if checkpoint_activations:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if parallel == "ddp":
        return DistributedDataParallel(ignore_experts(model))
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def accumulating(model, last):
    """In its context, gradients are reduced over ranks in the last micro-batch of a step only."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def sequences(number):
    """This rank's tokens of a micro-batch. Each sequence has a stride of its own, which the model
    has to find.
    """
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 8, (SEQUENCES, 1), generator=generator)
    of_all_ranks = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return of_all_ranks.tensor_split(dist.get_world_size())[dist.get_rank()]


def count_tokens(layers, routes):
    """Tokens of all ranks by layer and expert [layers, E]."""
    ep = layers[0].ep
    counts = torch.zeros(len(layers), ep.config.model.num_experts, device=ep.device)
    for row, chosen in zip(counts, routes, strict=True):
        row[ep.placement.logical_experts(ep.rank)] = chosen.tokens_per_expert.float()
    dist.all_reduce(counts)
    return counts


def auxiliary_loss(routes, counts):
    """Load balancing and z-loss: means over this rank's tokens."""
    losses = []
    for chosen, tokens in zip(routes, counts, strict=True):
        logits = chosen.logits.float()
        balance = tokens / tokens.mean() @ logits.softmax(1).mean(0)
        losses.append(BALANCE * balance + Z * logits.logsumexp(1).square().mean())
    return sum(losses) / len(losses)


def train_step(model, optimizer, layers, step):
    """The loss and the norm of gradients, over all tokens of the step."""
    loss_sum = 0
    counts_sum = 0
    for micro in range(MICRO_BATCHES):
        tokens = sequences(step * MICRO_BATCHES + micro).to(layers[0].ep.device)
        with accumulating(model, last=micro == MICRO_BATCHES - 1):
            with epmoe.recording(model) as record:
                output = model(tokens[:, :-1])
            logits = getattr(output, "logits", output)  # transformers' models return more
            routes = [calls[0] for calls in record.values()]
            counts = count_tokens(layers, routes)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + auxiliary_loss(
                routes, counts
            )
            # Scale the loss so that its mean over ranks is that of all tokens.
            loss = loss * len(tokens) * dist.get_world_size() / SEQUENCES
            (loss / MICRO_BATCHES).backward()
        loss_sum = loss_sum + loss.detach()
        counts_sum = counts_sum + counts
    norm = clip_grad_norm_(model, MAX_NORM)  # of all ranks' experts
    optimizer.step()
    optimizer.zero_grad()
    for layer, tokens in zip(layers, counts_sum, strict=True):
        # Balance without a loss: experts with few tokens are chosen more often.
        if layer.bias is not None:
            layer.bias += BIAS_RATE * (tokens.mean() - tokens).sign()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / MICRO_BATCHES / dist.get_world_size(), norm.item()


def main(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    for folder in ("--save", "--resume", "--from-hf"):
        parser.add_argument(folder)
    arguments = parser.parse_args(words)
    replicas = arguments.replicas
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "ep")
    )
    with epmoe.ExpertParallel(configured(arguments.from_hf, replicas), mesh) as ep:
        model = built(ep, arguments.from_hf)
        layers = [module for module in model.modules() if isinstance(module, epmoe.MoELayer)]
        steps = model.steps
        model = wrapped(model, arguments.parallel, arguments.checkpoint_activations)
        # With eps=1e-8 the sign of a gradient that is all but zero, a matter of rounding, would
        # move a weight.
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
        if arguments.resume:
            epmoe.checkpoint.load(model, arguments.resume, optimizer)
        while steps < arguments.steps:
            loss, norm = train_step(model, optimizer, layers, int(steps))
            steps += 1
            if dist.get_rank() == 0:
                print(f"step {steps}: loss {loss:.7f}, norm {norm:.7f}", flush=True)
        if arguments.save:
            epmoe.checkpoint.save(model, arguments.save, optimizer)


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
