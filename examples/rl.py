"""Reinforcement learning: a small Qwen3-MoE writes on some ranks and learns on others, with one
value for each token.

Run: torchrun --standalone --nproc-per-node 4 examples/rl.py [--steps N] [--dtype float32|bfloat16]
Half of the ranks write answers, the other half trains by FSDP2 and hands its weights over after
each step. The trainer replays the experts that the rollout has chosen. The reward of a token is 1
where it is even, else 0. It runs on GPUs where each rank has one, or where two ranks share one. The
dtype is by default bfloat16 on GPUs, where batch invariance needs it, and float32 on CPUs.
Prints, on rank 0: the device; the mean reward of each step, and how many log-probabilities of the
trainer have other bits than those of the rollout.
"""

import argparse
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from devices import meet
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import epmoe
from epmoe.training import fully_shard

E = 8  # experts, over the ranks of a half
K = 2  # experts of a token
D = 64  # hidden size
WIDTH = 32  # of an expert
BLOCKS = 2
VOCABULARY = 32
SEQUENCES = 8  # of a rank
PROMPT = 4  # tokens of a prompt
LENGTH = 12  # tokens of a prompt and its answer
LEARNING_RATE = 3e-3


def make_config(ranks, dtype):
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": dtype},
        topology={"ep_size": ranks},
        capacity={"max_num_tokens_per_rank": SEQUENCES * LENGTH},
        routing={"renormalize": True},
        # A token has the same bits on both sides, whatever else is in its batch.
        experts={"batch_invariant": True},
    )


def make_model(ep):
    """A model whose MoE blocks are MoELayers. All but the experts is equal on all ranks."""
    # Every rank draws the weights of all experts, from the same seed.
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=D,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=WIDTH,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Put a MoELayer in place of each MoE block. `from_full` keeps this rank's experts.
    dtype = ep.config.model.torch_dtype
    for name, block in list(model.named_modules()):
        if hasattr(block, "experts"):
            router_ED = block.gate.weight.data
            gate_up_E2FD = block.experts.gate_up_proj.data.to(dtype)
            down_EDF = block.experts.down_proj.data.to(dtype)
            layer = epmoe.MoELayer.from_full(ep, router_ED, gate_up_E2FD, down_EDF)
            model.set_submodule(name, layer)
    # The cast leaves the routers of MoELayers in fp32.
    return model.to(dtype).to(ep.device)


def log_probabilities(model, tokens):
    """Those of each next token: from `tokens` [B, T] to [B, T − 1, vocabulary]."""
    mask = torch.ones_like(tokens)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def write(model, step):
    """Prompts with their answers, and what a trainer needs to know of them.

    Returns `tokens` [SEQUENCES, LENGTH], `drawn_with` [SEQUENCES, LENGTH − PROMPT], the
    log-probabilities with which the tokens of answers were drawn, and `routes` [SEQUENCES, LENGTH,
    BLOCKS, K], the experts of all tokens but the last.
    """
    # Each rank has other prompts in each step. Tokens are drawn on the CPU, where all is kept.
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    tokens[:, :PROMPT] = torch.randint(VOCABULARY, (SEQUENCES, PROMPT), generator=generator)

    drawn_with = torch.zeros(SEQUENCES, LENGTH - PROMPT)
    routes = []
    for t in range(PROMPT, LENGTH):
        # Each forward pass has all tokens, as the trainer's has: attention and dense layers choose
        # their kernels by shape, and other kernels have other bits.
        with epmoe.recording(model) as record:
            scores = log_probabilities(model, tokens.to(model.device))[:, t - 1].cpu()

        # Keep the experts of tokens that are new: at first those of the prompt, then of one token.
        known = epmoe.pack_routes(record, E, batch=SEQUENCES)[:, :t].cpu()
        routes.append(known if t == PROMPT else known[:, -1:])

        # Draw the next token, and keep its log-probability.
        tokens[:, t] = scores.exp().multinomial(1, generator=generator)[:, 0]
        drawn_with[:, t - PROMPT] = scores.gather(1, tokens[:, t, None])[:, 0]
    return tokens, drawn_with, epmoe.pad_routes(torch.cat(routes, 1), LENGTH)


def roll_out(ep, folder, steps):
    """The first half of the ranks. Each writes for one rank of the other half."""
    model = make_model(ep).eval()

    def load_dense(dense):
        model.load_state_dict(dense, strict=False)

    receiver = epmoe.WeightReceiver(ep, model, folder, dense=load_dense)
    for step in range(steps):
        # Wait for the weights of this step. A server that serves meanwhile calls `tick` instead.
        receiver.load(step)

        # Write, and send all that the trainer needs.
        for tensor in write(model, step):
            dist.send(tensor.contiguous(), dist.get_rank() + ep.size)

        # Rank 0 hears how it went from the first rank of the trainer.
        if ep.rank == 0:
            result = torch.zeros(3)
            dist.recv(result, ep.size)
            reward, differing, count = result.tolist()
            print(
                f"step {step}: reward {reward:.3f}, {differing:.0f} of {count:.0f} "
                "log-probabilities differ"
            )
    receiver.close()


def shard(model, group):
    """FSDP2 over the ranks of the trainer. Experts stay where they are."""
    mesh = DeviceMesh.from_group(group, model.device.type)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(ep, group, folder, steps):
    """The other half. Each rank learns from what one rank of the first half has written."""
    model = make_model(ep)
    shard(model, group)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=False)
    sender = epmoe.WeightSender(model, folder)
    tokens = torch.empty(SEQUENCES, LENGTH, dtype=torch.int64)
    drawn_with = torch.empty(SEQUENCES, LENGTH - PROMPT)
    routes = torch.empty(SEQUENCES, LENGTH, BLOCKS, K, dtype=torch.uint8)
    for step in range(steps):
        # The rollout writes with these weights.
        hand_over(model, sender, step)
        for tensor in (tokens, drawn_with, routes):
            dist.recv(tensor, dist.get_rank() - ep.size)

        # The log-probabilities of the answers, by the experts that the rollout has chosen.
        answers = tokens[:, PROMPT:].to(ep.device)
        with epmoe.replay(model, routes.to(ep.device)):
            scores = log_probabilities(model, tokens.to(ep.device))[:, PROMPT - 1 :]
        scores = scores.gather(2, answers[..., None])[..., 0]
        old_scores = drawn_with.to(ep.device)

        # Policy gradient. The bits are those of the rollout, so each ratio is exactly 1.
        reward = (answers % 2 == 0).float()
        advantage = reward - reward.mean()
        ratio = (scores - old_scores).exp()
        (-advantage * ratio).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        # Tell rank 0 of the rollout how it went, over all ranks of the trainer.
        differing = (scores != old_scores).sum()
        mean_reward = reward.mean().item() / ep.size
        result = torch.tensor([mean_reward, differing.item(), scores.numel()])
        dist.reduce(result, ep.size, group=group)
        if ep.rank == 0:
            dist.send(result, 0)


def hand_over(model, sender, version):
    """Every rank of the trainer sends its own experts. The first one also sends all the rest, which
    FSDP shards.
    """
    dense = {}
    for name, value in model.named_parameters():
        if ".experts." not in name:
            # All ranks take part in collecting the shards.
            dense[name] = value.full_tensor()
    is_first = dist.get_rank() == dist.get_world_size() // 2
    sender.send(version, dense if is_first else None)


def shared_folder():
    """The name of a folder in memory that rank 0 makes, on all ranks."""
    # The name travels as bytes, since torch would unpickle an object.
    name = torch.zeros(64, dtype=torch.uint8)
    if dist.get_rank() == 0:
        made = tempfile.mkdtemp(dir="/dev/shm").encode()
        name[: len(made)] = torch.tensor(list(made))
    dist.broadcast(name, 0)
    return bytes(name.tolist()).rstrip(b"\0").decode()


def main(device, steps, dtype):
    if dtype is None:
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    rank = dist.get_rank()
    half = dist.get_world_size() // 2
    folder = shared_folder()

    # Each half is a group with an exchange of its own. All ranks make both groups.
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    writers = dist.new_group(list(range(half)), backend=backends)
    learners = dist.new_group(list(range(half, 2 * half)), backend=backends)
    config = make_config(half, dtype)
    try:
        if rank < half:
            with epmoe.ExpertParallel(config, writers, device) as ep:
                roll_out(ep, folder, steps)
        else:
            with epmoe.ExpertParallel(config, learners, device) as ep:
                train(ep, learners, folder, steps)
        # The folder stays until all ranks have ended.
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    # A half of one rank needs no NCCL: FSDP has nobody to talk to.
    is_pair = os.environ["WORLD_SIZE"] == "2"
    main(meet(needs_nccl=not is_pair), **vars(arguments))
    dist.destroy_process_group()
