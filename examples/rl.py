"""Reinforcement learning: a small Qwen3-MoE writes on some ranks and learns on others, with one
value for each token.

Run: torchrun --standalone --nproc-per-node 4 examples/rl.py [--steps N] [--dtype float32|bfloat16]
Half of the ranks write answers, the other half trains by FSDP2 and hands its weights over after
each step. The trainer replays the experts that the rollout has chosen. The reward of a token is 1
where it is even, else 0. Prints, on rank 0: the mean reward of each step, and how many
log-probabilities of the trainer have other bits than those of the rollout.
"""

import argparse
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import epmoe
from epmoe.training import fully_shard

E = 8
K = 2
D = 64
WIDTH = 32
BLOCKS = 2
VOCABULARY = 32
SEQUENCES, PROMPT, LENGTH = 8, 4, 12  # of a rank; tokens of a prompt, and with its answer
LEARNING_RATE = 3e-3


def configured(ranks, dtype):
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": dtype},
        topology={"ep_size": ranks},
        capacity={"max_num_tokens_per_rank": SEQUENCES * LENGTH},
        routing={"renormalize": True},
        experts={"batch_invariant": True},  # a token has the same bits on both sides
    )


def built(ep):
    """The same model on all ranks, whose MoE blocks are MoELayers."""
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
    for name, block in list(model.named_modules()):
        if hasattr(block, "experts"):
            dtype = ep.config.model.torch_dtype
            experts = (
                block.experts.gate_up_proj.data.to(dtype),
                block.experts.down_proj.data.to(dtype),
            )
            model.set_submodule(
                name, epmoe.MoELayer.from_full(ep, block.gate.weight.data, *experts)
            )
    return model.to(ep.config.model.torch_dtype)  # routers stay in fp32


def log_probabilities(model, tokens):
    """Those of all tokens but the first, [B, T − 1, vocabulary]."""
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def write(model, step):
    """Answers, the log-probabilities with which each token was drawn, and the experts of all tokens
    but the last.

    Each forward pass has the shape that the trainer's has, since attention and dense layers choose
    by shape.
    """
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    tokens[:, :PROMPT] = torch.randint(VOCABULARY, (SEQUENCES, PROMPT), generator=generator)
    drawn_with = torch.zeros(SEQUENCES, LENGTH - PROMPT)
    routes = []
    for t in range(PROMPT, LENGTH):
        with epmoe.recording(model) as record:
            scores = log_probabilities(model, tokens)[:, t - 1]
        known = epmoe.pack_routes(record, E, batch=SEQUENCES)[:, :t]
        routes.append(known if t == PROMPT else known[:, -1:])
        tokens[:, t] = scores.exp().multinomial(1, generator=generator)[:, 0]
        drawn_with[:, t - PROMPT] = scores.gather(1, tokens[:, t, None])[:, 0]
    return tokens, drawn_with, epmoe.pad_routes(torch.cat(routes, 1), LENGTH)


def roll_out(ep, folder, steps):
    """The first half of the ranks."""
    model = built(ep).eval()
    receiver = epmoe.WeightReceiver(
        ep, model, folder, dense=lambda dense: model.load_state_dict(dense, strict=False)
    )
    for step in range(steps):
        # Wait for the weights of the step before. A server that serves meanwhile calls `tick`
        # instead.
        receiver.load(step)
        for tensor in write(model, step):
            dist.send(tensor.contiguous(), dist.get_rank() + ep.size)
        if ep.rank == 0:
            dist.recv(result := torch.zeros(3), ep.size)
            reward, differing, count = result.tolist()
            print(
                f"step {step}: reward {reward:.3f}, {differing:.0f} of {count:.0f} "
                "log-probabilities differ"
            )
    receiver.close()


def train(ep, group, folder, steps):
    """The other half. Its ranks replay what was written by the ranks of the first half."""
    model = built(ep)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.model.layers:
        fully_shard(block.mlp, mesh=mesh)  # by itself: routers are in fp32
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=False)
    sender = epmoe.WeightSender(model, folder)
    shapes = (
        ((LENGTH,), torch.int64),
        ((LENGTH - PROMPT,), torch.float32),
        ((LENGTH, BLOCKS, K), torch.uint8),
    )
    for step in range(steps):
        hand_over(model, sender, step)
        tokens, drawn_with, routes = (
            torch.empty(SEQUENCES, *shape, dtype=dtype) for shape, dtype in shapes
        )
        for tensor in (tokens, drawn_with, routes):
            dist.recv(tensor, dist.get_rank() - ep.size)
        with epmoe.replay(model, routes):
            scores = log_probabilities(model, tokens)[:, PROMPT - 1 :]
        answers = tokens[:, PROMPT:]
        scores = scores.gather(2, answers[..., None])[..., 0]
        reward = (answers % 2 == 0).float()
        (
            -(reward - reward.mean()) * (scores - drawn_with).exp()
        ).mean().backward()  # a ratio of 1, exactly
        optimizer.step()
        optimizer.zero_grad()
        result = torch.tensor(
            [reward.mean() / ep.size, (scores != drawn_with).sum(), scores.numel()]
        )
        dist.reduce(result, ep.size, group=group)
        if ep.rank == 0:
            dist.send(result, 0)


def hand_over(model, sender, version):
    """All ranks of the trainer: their own experts, and one rank all that FSDP shards."""
    experts = {name for name, value in model.named_parameters() if ".experts." in name}
    dense = {
        name: value.full_tensor() for name, value in model.named_parameters() if name not in experts
    }
    sender.send(version, dense if dist.get_rank() == dist.get_world_size() // 2 else None)


def shared_folder():
    """A folder in memory that rank 0 makes. Its name travels as bytes: torch would unpickle an
    object.
    """
    name = torch.zeros(64, dtype=torch.uint8)
    if dist.get_rank() == 0:
        made = tempfile.mkdtemp(dir="/dev/shm").encode()
        name[: len(made)] = torch.tensor(list(made))
    dist.broadcast(name, 0)
    return bytes(name.tolist()).rstrip(b"\0").decode()


def main(steps, dtype):
    rank = dist.get_rank()
    half = dist.get_world_size() // 2
    folder = shared_folder()
    groups = [
        dist.new_group(list(ranks), backend="gloo")
        for ranks in (range(half), range(half, 2 * half))
    ]
    try:
        with epmoe.ExpertParallel(configured(half, dtype), groups[rank >= half], "cpu") as ep:
            if rank < half:
                roll_out(ep, folder, steps)
            else:
                train(ep, groups[1], folder, steps)
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    dist.init_process_group("gloo")
    main(**vars(parser.parse_args()))
    dist.destroy_process_group()
