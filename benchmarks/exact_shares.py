"""What shares from a batch's own counts gain over shares from the past: simulated, on a CPU.

    python benchmarks/exact_shares.py

256 experts, top-8, batches of 4096 tokens a rank; slots fit the loads of the past. Printed is the load of the busiest
rank over the mean, where copies share by the past, by the counts of all ranks, and where each rank divides its own
tokens evenly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epmoe.balance import balance, fresh, shares_of

E, K, T, SEEDS, BATCHES, DOMAINS, COPIES = 256, 8, 4096, 4, 3, 24, 8


def counts(popularity: Tensor, tokens: int, draw: torch.Generator) -> Tensor:
    """float64 [E] from log popularities [E], by Gumbel-top-k."""
    noise = -torch.log(-torch.log(torch.rand(tokens, E, generator=draw).clamp(1e-12)))
    return (popularity.float() + noise).topk(K, dim=1).indices.flatten().bincount(minlength=E).double()


def traffic(kind: str, ranks: int, draw: torch.Generator) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """Log popularities of the past, and a function that draws those of each rank's next batch."""
    if kind in ("zipf", "drift"):
        places = [torch.log1p(torch.randperm(E, generator=draw).double()) for _ in range(2)]
        past, later = (-1.2 * torch.log1p(torch.lerp(*places, at).argsort().argsort()) for at in (0.0, 0.05))
        return [past], lambda: [past if kind == "zipf" else later] * ranks
    domains = 0.5 * torch.randn(E, generator=draw) + torch.randn(DOMAINS, E, generator=draw)

    def batch() -> list[Tensor]:
        chosen = torch.randint(DOMAINS, (ranks,), generator=draw).tolist()
        return [domains[n] for n in (chosen if kind == "a domain a rank" else chosen[:1] * ranks)]

    return list(domains), batch


def busiest(counts_RE: Tensor, slots: Tensor, shares_RP: Tensor, ranks: int) -> float:
    rows = (counts_RE[:, slots.long().clamp(min=0)] * shares_RP).sum(0).view(ranks, -1).sum(1)
    return float(rows.max() / rows.mean())


def main() -> None:
    for ranks, spare in ((8, 1), (8, 4), (8, 8), (32, 1), (32, 4)):
        for kind in ("zipf", "drift", "one domain", "a domain a rank"):
            found = []
            for seed in range(SEEDS):
                draw = torch.Generator().manual_seed(100 * seed + ranks)
                past, batch = traffic(kind, ranks, draw)
                loads = sum(counts(p, 32 * T // len(past), draw) for p in past)
                slots = fresh(loads, ranks, E // ranks + spare, most_copies=COPIES)
                slots = balance(loads, slots, ep_size=ranks, most_copies=COPIES).slots
                for _ in range(BATCHES):
                    now = torch.stack([counts(p, T, draw) for p in batch()])
                    own = torch.stack([shares_of(mine, slots, ranks) for mine in now])
                    shares = shares_of(loads, slots, ranks), shares_of(now.sum(0), slots, ranks), own
                    found.append([busiest(now, slots, each, ranks) for each in shares])
            means = torch.tensor(found).mean(0).tolist()
            print(f"{ranks:2} ranks, {spare} spare, {kind:16}", *(f"{mean:.3f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
