"""Drawn configurations and rounds against the references: shapes, placements, copies, ids and
weights of any bits, T by rank, dtypes, layouts, phases.

All ranks draw the same. A failure names its seed: EPMOE_FUZZ_FIRST=<seed> EPMOE_FUZZ_CONFIGS=1
repeats it. EPMOE_FUZZ_CONFIGS and EPMOE_FUZZ_ROUNDS lengthen the run. On GPUs the first rounds of a
configuration are drawn and compared with the references; the others are replays of these, in one
graph, whose bits the device compares.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from checked_round import Checked, check_round
from exchanges import Tokens, make_tokens
from helpers import random_bits
from replayed_rounds import Again, InTurn

from epmoe import EPConfig, ExpertParallel

FIRST = int(os.environ.get("EPMOE_FUZZ_FIRST", 0))
CONFIGS = int(os.environ.get("EPMOE_FUZZ_CONFIGS", 30))
ROUNDS = int(os.environ.get("EPMOE_FUZZ_ROUNDS", 6))
SOAK_S = float(os.environ.get("EPMOE_SOAK_SECONDS", 20 if torch.cuda.is_available() else 3))
DRAWN_ON_GPUS = 4


def draw_options(random: Random, size: int) -> dict:
    """Options of `make_ep`, of any that a configuration may hold."""
    # Experts: one a rank, few or many, half of the time with copies.
    experts = random.choice([size, random.randint(size, 40), random.randint(41, 300)])
    redundant = random.choice([0, 0, random.randint(1, experts)])
    # Rows travel in fp8 in one direction, in both or in none.
    payload = random.choice(["auto", "auto", "fp8"])
    back = random.choice(["auto", "auto", "fp8"])
    fp8 = "fp8" in (payload, back)
    # Each rank has an expert. An explicit placement draws the owners of the others.
    placement = {
        "strategy": random.choice(["linear", "round_robin", "explicit"]),
        "num_redundant_experts": redundant,
    }
    if placement["strategy"] == "explicit":
        owners = [
            *range(size),
            *(random.randrange(size) for _ in range(experts + redundant - size)),
        ]
        random.shuffle(owners)
        placement["assignment"] = owners
    return {
        "experts": experts,
        "top_k": random.randint(1, min(experts, random.choice([2, 8, 32]))),
        "hidden": 128 * random.randint(1, 12) if fp8 else 8 * random.randint(1, 200),
        "dtype": random.choice(["float32", "bfloat16", "float16"]),
        "max_tokens": random.choice([1, random.randint(2, 20), random.randint(21, 90)]),
        "ll_max_tokens": random.choice([4, 32, 256]),
        "placement": placement,
        "capacity": {
            "alignment": random.choice([None, None, 1, 8, 128]),
            "gap_rows": random.choice(["undefined", "zero"]),
        },
        "exchange": {"payload": payload, "combine_payload": back},
    }


def draw_tokens(config: EPConfig, random: Random, size: int) -> list[Tokens]:
    """Draws the tokens of every rank. A part of the ids and of the weights has any bits.

    The bound of y is relative to its terms; with fp8 sums it holds only where the values of a block
    are alike. Weights that are too small or too large for it become 1 / K.
    """
    M = config.capacity.max_num_tokens_per_rank
    K = config.model.num_experts_per_tok
    # What the tokens of all ranks have in common.
    kind = random.choice(["uniform", "zipf", "adversarial"])
    id_dtype = random.choice([torch.int32, torch.int64])
    weight_dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    share = random.choice([0.0, 0.1, 0.9])
    tokens = []
    largest = 0.0 if config.exchange.combine_payload == "fp8" else 2.0**8
    # Each rank: so many tokens, of which some are padding.
    for rank in range(size):
        T = random.choice([0, 1, M, random.randint(0, M)])
        seed = random.getrandbits(20)
        kinds = {"kind": kind, "id_dtype": id_dtype, "weight_dtype": weight_dtype}
        mine = make_tokens(config, rank, T, seed=seed, padded=random.randint(0, T), **kinds)
        # Any bits, but for weights that the bound of y does not cover.
        bits = torch.Generator().manual_seed(seed)
        info = torch.iinfo(id_dtype)
        any_ids = torch.randint(info.min, info.max, (T, K), generator=bits, dtype=id_dtype)
        any_weights = random_bits(T, K, dtype=weight_dtype, seed=seed)
        size_of = any_weights.float().abs()
        usable = size_of.eq(0) | ~size_of.isfinite() | (size_of > 2**-10) & (size_of < largest)
        any_weights = any_weights.where(usable, 1 / K)
        # They take the place of a share of what was drawn.
        mine.ids = mine.ids.where(torch.rand(T, K, generator=bits) >= share, any_ids)
        mine.weights = mine.weights.where(torch.rand(T, K, generator=bits) >= share, any_weights)
        tokens.append(mine)
    return tokens


def drawn_round(ep: ExpertParallel, random: Random) -> Checked:
    tokens = draw_tokens(ep.config, random, ep.size)
    layout = random.choice(["expert", "rank"])
    phases = random.random() < 0.3
    padding = random.random()
    aligned = random.random() < 0.5
    num_tokens = tokens[ep.rank].real
    if padding < 0.5:
        num_tokens = torch.tensor(num_tokens, dtype=torch.int32, device=ep.device)
    return check_round(ep, tokens, layout, num_tokens=num_tokens, phases=phases, aligned=aligned)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CONFIGS))
def test_drawn_rounds(make_ep, rank, size, device, seed):
    random = Random(seed)
    ep = make_ep(**draw_options(random, size))
    if device.type == "cpu":
        for _ in range(ROUNDS):
            drawn_round(ep, random)
    else:
        drawn = min(ROUNDS, DRAWN_ON_GPUS)
        rounds = InTurn([Again(drawn_round(ep, random)) for _ in range(drawn)])
        rounds.play(-(-ROUNDS // drawn) - 1)
        assert rounds.wrong == 0
    ep.check()


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes: of this process on the host, and of torch's tensors on the device."""
    gc.collect()
    host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return host, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 120)
def test_a_soak(make_ep, rank, size, device):
    """Drawn rounds by both protocols again and again, without a barrier, while each rank stalls
    where it likes.
    """
    shared = Random(size)
    own = Random(f"rank {rank}")
    on_gpu = device.type == "cuda"
    # Rounds of both protocols, and what they must give.
    eps = [make_ep(**draw_options(shared, size) | {"ll_max_tokens": most}) for most in (256, 4)]
    drawn = [[Again(drawn_round(ep, shared)) for _ in range(DRAWN_ON_GPUS)] for ep in eps]
    kinds = [InTurn(rounds, own.randrange(1, 20_000) if on_gpu else 0) for rounds in drawn]
    # Which kind comes next all ranks draw alike; where a rank stalls is its own.
    memory = []
    begin = time.monotonic()
    turns = 0
    goes_on = torch.ones(1)
    while goes_on:
        for _ in range(200 if on_gpu else 20):
            if own.random() < 0.01:
                time.sleep(own.random() * 0.01)
            if own.random() < 0.05 and on_gpu:
                torch.cuda._sleep(own.randrange(2_000_000))
            number = shared.randrange(2)
            kinds[number].play()
            eps[number].poll()
            turns += 1
        # Nothing was wrong so far. Rank 0 says whether it goes on.
        for ep, rounds in zip(eps, kinds, strict=True):
            ep.check()
            assert rounds.wrong == 0
        memory.append(memory_of(device))
        goes_on.fill_(time.monotonic() - begin < SOAK_S)
        dist.broadcast(goes_on, 0)
    # Memory has not grown.
    host, tensors = (last - first for first, last in zip(memory[0], memory[-1], strict=True))
    print(
        f"\n{turns * DRAWN_ON_GPUS:,} rounds; bytes more than at first: host {host:,}, tensors "
        f"{tensors:,}"
    )
    assert host < 16 << 20 and tensors <= 0
