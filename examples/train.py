"""A transformer with MoE layers trains over any number of ranks, with the losses and norms of one
process.

Run: torchrun --standalone --nproc-per-node 4 examples/train.py

    --parallel ddp|fsdp         how ranks share all but the experts
    --checkpoint-activations    compute blocks again in the backward pass
    --replicas N                N parts of the ranks have all experts each
    --steps N                   train up to this step
    --save FOLDER               at the end; any number of ranks goes on with it
    --resume FOLDER             that was saved
    --from-hf FOLDER            fine-tune a local checkpoint, as generate.py takes it

Each rank has its own experts. A step has the same tokens on 1 to 8 ranks. It runs on GPUs where
each rank has one, else on CPUs.
Prints, on rank 0: the device; then of each step the loss, the norm of the gradients, and the speed
of all ranks together.
"""

import argparse
import math
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import meet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import clip_grad_norm_, fully_shard, ignore_experts

# The model.
E = 8  # experts
K = 2  # experts of a token
D = 32  # hidden size
WIDTH = 32  # of an expert
HEADS = 4
BLOCKS = 2
VOCABULARY = 64

# A step.
MICRO_BATCHES = 2
SEQUENCES = 8  # of a micro-batch, over all ranks
LENGTH = 16  # tokens of a sequence
LEARNING_RATE = 5e-3
MAX_NORM = 0.3  # of gradients, by clipping

# Balance of the experts.
BALANCE = 1e-2  # factor of the load balancing loss
Z = 1e-3  # factor of the z-loss
BIAS_RATE = 1e-3  # of the bias of the choice, in each step

# Of a product with a parameter: a multiplication and an addition, forward and twice backward.
FLOP_PER_PARAMETER = 6


def drawn(*shape):
    return torch.randn(shape) / shape[-1] ** 0.5


class Block(nn.Module):
    def __init__(self, ep):
        super().__init__()
        # Attention.
        self.norm1 = nn.RMSNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)

        # The MoE layer. All ranks draw the weights of all experts; `from_full` keeps this rank's.
        self.norm2 = nn.RMSNorm(D)
        router = drawn(E, D)
        gate_up = drawn(E, 2 * WIDTH, D)
        down = drawn(E, D, WIDTH)
        self.moe = epmoe.MoELayer.from_full(ep, router, gate_up, down, bias=torch.zeros(E))

    def forward(self, x):
        # From [batch, length, D] to three times [batch, HEADS, length, D / HEADS], and back.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.positions = nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(ep) for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_config(from_hf, replicas):
    size = dist.get_world_size()
    ep_size = size // replicas
    # The most tokens of a rank in a micro-batch: some ranks have one sequence more than others.
    most_sequences = math.ceil(SEQUENCES / size)
    capacity = {"max_num_tokens_per_rank": most_sequences * LENGTH}
    if from_hf:
        return epmoe.EPConfig.from_hf(from_hf, ep_size=ep_size, capacity=capacity)
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": ep_size},
        capacity=capacity,
        routing={"renormalize": True, "selection_bias": True},
    )


def make_model(ep, from_hf):
    if from_hf:
        from generate import load_model

        # Each rank reads its own experts only.
        model = load_model(from_hf, ep, dtype=ep.config.model.torch_dtype).train()
        # A block that is computed again would fill a cache twice.
        model.config.use_cache = False
    else:
        # The seed gives all ranks the same weights.
        torch.manual_seed(0)
        model = Transformer(ep).to(ep.device)
    # The number of steps is a buffer, so that it goes into checkpoints.
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=ep.device))
    return model


def parallelize(model, parallel, checkpoint_activations, device):
    """The model under DDP or FSDP2, which leave each rank its own experts."""
    # The first list of modules in a transformer is that of its blocks.
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    if checkpoint_activations:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if parallel == "ddp":
        return DistributedDataParallel(ignore_experts(model))
    # Over all ranks. Without a mesh torch takes GPUs where there are any.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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
    # One token more than LENGTH: the model predicts each token but the first.
    of_all_ranks = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return of_all_ranks.tensor_split(dist.get_world_size())[dist.get_rank()]


def flop_of_step(model, config):
    """Of all ranks, in products with parameters. A token meets the experts that it has chosen, and
    the others not. Attention's own products are left out: they are few at this length.
    """
    met = 0
    for name, parameter in model.named_parameters():
        share = 1.0
        if ".experts." in name:
            share = config.num_experts_per_tok / config.num_experts
        # An embedding is looked up. A DTensor has the elements of all ranks.
        if parameter.dim() > 1 and "embed" not in name and "positions" not in name:
            met += parameter.numel() * share
    return FLOP_PER_PARAMETER * met * MICRO_BATCHES * SEQUENCES * LENGTH


def count_tokens(layers, routes):
    """Tokens of all ranks by layer and expert [layers, E]."""
    ep = layers[0].ep
    counts = torch.zeros(len(layers), ep.config.model.num_experts, device=ep.device)
    # A rank knows how many tokens its own experts got, of all ranks.
    mine = ep.placement.logical_experts(ep.rank)
    for row, chosen in zip(counts, routes, strict=True):
        row[mine] = chosen.tokens_per_expert.float()
    dist.all_reduce(counts)
    return counts


def auxiliary_loss(routes, counts):
    """Load balancing and z-loss: means over this rank's tokens."""
    losses = []
    for chosen, tokens in zip(routes, counts, strict=True):
        logits = chosen.logits.float()
        # An expert's share of the tokens of all ranks, by its mean probability on this rank.
        balance = tokens / tokens.mean() @ logits.softmax(1).mean(0)
        # Large logits cost, too.
        z = logits.logsumexp(1).square().mean()
        losses.append(BALANCE * balance + Z * z)
    return sum(losses) / len(losses)


def train_step(model, optimizer, layers, step):
    """The loss and the norm of gradients, over all tokens of the step."""
    loss_sum = 0
    counts_sum = 0
    for micro in range(MICRO_BATCHES):
        tokens = sequences(step * MICRO_BATCHES + micro).to(layers[0].ep.device)
        with accumulating(model, last=micro == MICRO_BATCHES - 1):
            # The forward pass, with a record of the experts that each layer has chosen.
            with epmoe.recording(model) as record:
                output = model(tokens[:, :-1])
            logits = getattr(output, "logits", output)  # transformers' models return more
            routes = [calls[0] for calls in record.values()]

            # The loss of the next tokens, and that of the balance.
            counts = count_tokens(layers, routes)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss + auxiliary_loss(routes, counts)

            # Ranks differ by a sequence. Scaled so, the mean over ranks is that of all tokens.
            loss = loss * len(tokens) * dist.get_world_size() / SEQUENCES
            (loss / MICRO_BATCHES).backward()
        loss_sum = loss_sum + loss.detach()
        counts_sum = counts_sum + counts

    # The norm is over the experts of all ranks, too.
    norm = clip_grad_norm_(model, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()

    # Balance without a loss: experts with few tokens are chosen more often from now on.
    for layer, tokens in zip(layers, counts_sum, strict=True):
        if layer.bias is not None:
            layer.bias += BIAS_RATE * (tokens.mean() - tokens).sign()

    # The loss is a mean over ranks and micro-batches.
    dist.all_reduce(loss_sum)
    loss = loss_sum.item() / MICRO_BATCHES / dist.get_world_size()
    return loss, norm.item()


def parse(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    parser.add_argument("--from-hf")
    return parser.parse_args(words)


def main(device, words=None):
    arguments = parse(words)

    # Ranks of a row have all experts together. Gradients of replicas are added over rows.
    replicas = arguments.replicas
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "ep"))

    config = make_config(arguments.from_hf, replicas)
    with epmoe.ExpertParallel(config, mesh, device) as ep:
        model = make_model(ep, arguments.from_hf)
        layers = [module for module in model.modules() if isinstance(module, epmoe.MoELayer)]
        steps = model.steps
        flop = flop_of_step(model, config.model)
        model = parallelize(model, arguments.parallel, arguments.checkpoint_activations, device)

        # With eps=1e-8 the sign of a gradient that is all but zero, a matter of rounding, would
        # move a weight.
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-6)
        if arguments.resume:
            epmoe.checkpoint.load(model, arguments.resume, optimizer)

        while steps < arguments.steps:
            began = time.perf_counter()
            loss, norm = train_step(model, optimizer, layers, int(steps))
            took_s = time.perf_counter() - began
            steps += 1
            if dist.get_rank() == 0:
                tokens_per_s = MICRO_BATCHES * SEQUENCES * LENGTH / took_s
                tflop_per_s = flop / took_s / 1e12
                print(
                    f"step {steps}: loss {loss:.7f}, norm {norm:.7f}, "
                    f"{tokens_per_s:.0f} tokens/s, {tflop_per_s:.2g} TFLOP/s",
                    flush=True,
                )

        if arguments.save:
            epmoe.checkpoint.save(model, arguments.save, optimizer)


if __name__ == "__main__":
    main(meet())
    dist.destroy_process_group()
