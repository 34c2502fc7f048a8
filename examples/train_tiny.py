"""A tiny MoE layer learns from another one, its experts spread over the ranks; so does one process in plain torch.

Run: torchrun --standalone --nproc-per-node 4 examples/train_tiny.py
Prints, on rank 0: "150 steps: the loss falls below a fifth" and "the losses are those of one process".
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import epmoe
from epmoe import GroupedExperts, MoELayer

E, K, D, WIDTH, T, STEPS = 8, 2, 16, 16, 64, 150


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        for shape in ((E, D), (E, 2 * WIDTH, D), (E, D, WIDTH))
    ]


def plain(x, router, gate_up, down):
    """The layer in plain torch: every expert on every token."""
    weights, ids = F.linear(x, router).softmax(1).topk(K, 1)
    gate, up = torch.einsum("td,efd->tef", x, gate_up).chunk(2, 2)
    outputs = torch.einsum("tef,edf->ted", F.silu(gate) * up, down)
    chosen = outputs.gather(1, ids[:, :, None].expand(-1, -1, D))
    return (chosen * weights[:, :, None]).sum(1)


def tokens(step, rank):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1000 * step + rank))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": size},
        capacity={"max_num_tokens_per_rank": T},
    )
    router, gate_up, down = drawn(2)
    teacher = router, *drawn(1)[1:]
    with epmoe.ExpertParallel(config) as ep:
        held = ep.placement.logical_experts(rank)
        layer = MoELayer(ep, router.clone(), GroupedExperts(gate_up[held], down[held]))
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
        alone = [w.clone().requires_grad_() for w in (router, gate_up, down)]  # one process, the tokens of all ranks
        reference = torch.optim.Adam(alone, lr=0.01)
        losses = []
        for step in range(STEPS):
            x = tokens(step, rank)
            loss = (layer(x) - plain(x, *teacher)).square().sum() / (size * T * D)
            loss.backward()
            dist.all_reduce(layer.router_weight.grad)  # every rank has a router; an expert is on one rank
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)

            x = torch.cat([tokens(step, r) for r in range(size)])
            wanted = (plain(x, *alone) - plain(x, *teacher)).square().mean()
            wanted.backward()
            reference.step()
            reference.zero_grad()
            losses.append((total.item(), wanted.item()))
    if rank == 0:
        first, last = losses[0][0], losses[-1][0]
        print(f"{STEPS} steps: the loss falls below a fifth" if last < first / 5 else f"{first} to {last}")
        close = all(abs(ours - theirs) <= 1e-3 * theirs for ours, theirs in losses)
        print("the losses are those of one process" if close else losses)
    dist.destroy_process_group()


main()
