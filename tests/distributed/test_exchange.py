"""dispatch and combine against the dense reference, with all pairs of the factors that can vary."""

from __future__ import annotations

import pytest
import torch
from checked_round import check_round, make_extra
from exchanges import expected_y, make_config, make_tokens, run_experts, run_round
from factors import all_pairs
from helpers import ON_GPUS, assert_close, poison_

from epmoe.exchange.memory import most_ll_tokens

CASES = all_pairs(
    {
        "max_tokens": [12, 70],
        "ll_max_tokens": [32, 256],
        "experts": [12, 13, 23],  # 12: the same number on each of 2, 3 or 4 ranks
        "placement": ["linear", "round_robin", "explicit"],
        "redundant": [0, 2, 30],
        "top_k": [1, 2, 6, 8],
        "hidden": [64, 1000, 7168],
        "payload": ["float32", "bfloat16", "float16", "fp8"],
        "combine_payload": ["auto", "fp8"],
        "tokens": ["full", "ragged", "one", "none"],
        "kind": ["uniform", "zipf", "adversarial"],
        "id_dtype": [torch.int32, torch.int64],
        "weight_dtype": [torch.float32, torch.bfloat16, torch.float16],
        "alignment": [None, 1, 128],
        "aligned": [False, True],
        "gap_rows": ["undefined", "zero"],
        "layout": ["expert", "rank"],
        "padding": [None, int, torch.tensor],
        "extra": [None, (torch.int16, ()), (torch.float32, (3,)), (torch.uint8, (5, 8))],
        "num_sms": [None, 20],  # has an effect on GPUs only
    }
)


def _name(case: dict) -> str:
    return "-".join(getattr(v, "__name__", str(v).removeprefix("torch.")) for v in case.values())


def _options(case: dict, size: int) -> dict:
    """Options of `make_ep`. fp8 needs a multiple of 128 as hidden size. Explicit placement gives
    rank 1 one expert.
    """
    fp8 = "fp8" in (case["payload"], case["combine_payload"])
    # Rank 0 gets the experts that would be rank 1's, but for the last one.
    placement = {"strategy": case["placement"], "num_redundant_experts": case["redundant"]}
    if case["placement"] == "explicit":
        owners = [
            p % size if p % size != 1 else 0 for p in range(case["experts"] + case["redundant"])
        ]
        placement["assignment"] = owners[:-1] + [min(1, size - 1)]
    return {
        "experts": case["experts"],
        "top_k": case["top_k"],
        "hidden": -(-case["hidden"] // 128) * 128 if fp8 else case["hidden"],
        "dtype": "bfloat16" if case["payload"] == "fp8" else case["payload"],
        "max_tokens": case["max_tokens"],
        "ll_max_tokens": case["ll_max_tokens"],
        "placement": placement,
        "capacity": {key: case[key] for key in ("alignment", "gap_rows")} | {"extra_bytes": 40},
        "exchange": {
            "payload": "fp8" if case["payload"] == "fp8" else "auto",
            "combine_payload": case["combine_payload"],
            "num_sms": case["num_sms"],
        },
    }


def _num_tokens(case: dict, rank: int, size: int) -> int:
    most = case["max_tokens"]
    ragged = 0 if rank == 0 else most if rank == size - 1 else min(5 * rank, most)
    return {"full": most, "ragged": ragged, "one": int(rank == size - 1), "none": 0}[case["tokens"]]


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_agrees_with_the_dense_reference(make_ep, rank, size, case):
    ep = make_ep(**_options(case, size))
    kinds = {name: case[name] for name in ("kind", "id_dtype", "weight_dtype")}
    padded = 3 if case["padding"] else 0
    for seed in range(2):
        # The tokens of all ranks.
        counts = [_num_tokens(case, r, size) for r in range(size)]
        tokens = [
            make_tokens(ep.config, r, T, seed=seed, padded=padded, **kinds)
            for r, T in enumerate(counts)
        ]
        # How padding is said, and what rides with tokens.
        num_tokens = case["padding"] and case["padding"](tokens[rank].real)
        if isinstance(num_tokens, torch.Tensor):
            num_tokens = num_tokens.to(ep.device, torch.int32)
        extras = case["extra"] and [
            make_extra(case["extra"], r, T, seed) for r, T in enumerate(counts)
        ]
        # A round by calls, then one by phases.
        options = {
            "num_tokens": num_tokens,
            "phases": bool(seed),
            "aligned": case["aligned"],
            "extras": extras,
        }
        assert check_round(ep, tokens, case["layout"], **options).has_the_bits_of_other_phases()


@ON_GPUS
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_the_most_tokens_of_the_ll_protocol(make_ep, rank, size, layout):
    """Also beside a source of one token, and one that brings some ranks no rows."""
    ep = make_ep(experts=2 * size, top_k=2, hidden=256, dtype="bfloat16", max_tokens=2100)
    most = ep.memory_plan().sizes["ll_max_tokens"]
    assert most == most_ll_tokens(size, 256 * 2)
    for seed, (first, others) in enumerate(
        [(most, most), (most, 1), (1, most), (most - 1, most + 1)]
    ):
        tokens = [make_tokens(ep.config, r, others if r else first, seed=seed) for r in range(size)]
        check_round(ep, tokens, layout)
        # Both experts of rank 0 for every token of rank 0: the other ranks get none of its rows.
        tokens[0].ids[:] = torch.arange(2, dtype=tokens[0].ids.dtype)
        check_round(ep, tokens, layout)


@pytest.mark.parametrize("ll_max_tokens", [4, 32])
@pytest.mark.parametrize("experts", [600, 4000])
def test_many_experts(make_ep, rank, size, experts, ll_max_tokens):
    """On GPUs a block awaits more counts than it has threads. With 4000 experts it has no table by
    source.
    """
    ep = make_ep(ll_max_tokens, experts=experts, top_k=8, max_tokens=24)
    for seed in range(2):
        check_round(
            ep, [make_tokens(ep.config, r, 24 - 3 * r, seed=seed) for r in range(size)], "expert"
        )


@ON_GPUS
@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ll_max_tokens", [32, 256])
def test_long_rows_on_few_multiprocessors(make_ep, rank, size, ll_max_tokens, layout, payload):
    """A row has several chunks, and each block sends many tokens, to final rows once it knows the
    offsets.
    """
    ep = make_ep(
        ll_max_tokens,
        hidden=20480,
        dtype="float32",
        max_tokens=60,
        exchange={"payload": payload, "num_sms": 2},
    )
    for seed in range(3):
        check_round(
            ep, [make_tokens(ep.config, r, 60 - 7 * r, seed=seed) for r in range(size)], layout
        )


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("team", [0, 1, 16])
def test_scales_not_a_multiple_of_16_bytes(make_ep, rank, size, team, layout):
    """fp8 in dispatch and combine, with 20 or 12 bytes of scales a row. On GPUs `team` warps send a
    row (0: policy).
    """
    options = {
        "top_k": 6,
        "dtype": "bfloat16",
        "exchange": {"payload": "fp8", "combine_payload": "fp8"},
    }
    ep = make_ep(ll_max_tokens=8, hidden=640, max_tokens=60, **options)
    ep.memory_plan().sizes["combine_team"] = team
    # Rows of the hidden size of the config, and shorter ones.
    for D in (640, 384):
        calls = make_config(size, hidden=D, max_tokens=60, **options)
        check_round(
            ep,
            [make_tokens(calls, r, 60 - 3 * r, seed=D) for r in range(size)],
            layout,
            calls=calls,
        )


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ll_max_tokens", [8, 256])
@pytest.mark.parametrize("senders", [1, 1024])
def test_any_number_of_send_blocks(make_ep, rank, size, senders, ll_max_tokens, layout):
    """On GPUs one block sends, or as many as there are, so that no block only receives."""
    ep = make_ep(ll_max_tokens, top_k=6, hidden=1152, max_tokens=90)
    ep.memory_plan().sizes.update(dispatch_senders=senders, combine_senders=senders)
    for seed in range(2):
        check_round(
            ep, [make_tokens(ep.config, r, 90 - 7 * r, seed=seed) for r in range(size)], layout
        )


@ON_GPUS
@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("senders", [0, 1, 3, 1024])
def test_blocks_count_parts_for_one_another(make_ep, rank, size, senders, layout, payload):
    """More tokens than a block counts by itself, in one batch a block or in many. Among up to two
    ranks, combine of 1700 tokens sums a rank's own rows where it writes y.
    """
    ep = make_ep(
        ll_max_tokens=8,
        experts=37,
        top_k=6,
        hidden=640,
        dtype="bfloat16",
        max_tokens=1700,
        exchange={"payload": payload},
    )
    ep.memory_plan().sizes.update(dispatch_senders=senders)
    for seed, T in enumerate((1700, 431, 257, 256)):
        tokens = [make_tokens(ep.config, r, max(T - 90 * r, 0), seed=seed) for r in range(size)]
        check_round(ep, tokens, layout)


def test_smaller_hidden_size_top_k_and_dtype(make_ep, rank, size):
    """A call may use smaller values than the config. The strides between slots remain those of the
    config.
    """
    ep = make_ep(hidden=512, top_k=8, dtype="float32")
    calls = make_config(size, hidden=128, top_k=3, dtype="bfloat16")
    for layout in ("expert", "rank"):
        check_round(
            ep, [make_tokens(calls, r, 2 * r + 1) for r in range(size)], layout, calls=calls
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_token_leaves_other_tokens_unchanged(make_ep, rank, size, dtype):
    """All bits of the NaN are ones, which on GPUs marks a line that has not arrived."""
    ep = make_ep(dtype=dtype)
    tokens = [make_tokens(ep.config, r, 12) for r in range(size)]
    mine = tokens[rank]
    want = expected_y(ep.config, mine)
    poison_(mine.x[5])
    d = ep.dispatch(mine.x.to(ep.device), mine.ids.to(ep.device), mine.weights.to(ep.device))
    y = ep.combine(run_experts(ep, d), d)
    others = torch.arange(12) != 5
    assert y[5].isnan().all()
    assert_close(y[others.to(y.device)], want[others])


WEIGHTED = all_pairs(
    {
        "phases": [False, True],
        "payload": ["float32", "bfloat16", "float16", "fp8"],
        # T, ll_max_tokens, num_sms. With 2 multiprocessors and up to 2 ranks, 40 tokens take the
        # coarse LL kernel. It does not send a rank's own rows.
        "shape": [(5, 256, None), (40, 32, None), (40, 256, None), (40, 256, 2)],
    }
)


@pytest.mark.parametrize("case", WEIGHTED, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_are_weighted_and_y_is_their_sum(make_ep, rank, size, device, case):
    """`apply_router_weight_on_input`: rows arrive weighted and rounded once, and
    combine only adds.
    """
    fp8 = case["payload"] == "fp8"
    T, ll_max_tokens, num_sms = case["shape"]
    if device.type == "cpu" and (ll_max_tokens, num_sms) != (256, None):
        pytest.skip("differs on GPUs only")
    # Copies of experts, aligned segments and the payload of the case.
    placement = {"strategy": "round_robin", "num_redundant_experts": 3}
    dtype, payload = ("bfloat16", "fp8") if fp8 else (case["payload"], "auto")
    options = {"top_k": 6, "hidden": 256, "dtype": dtype, "max_tokens": 40, "placement": placement}
    exchange = {"payload": payload, "num_sms": num_sms}
    ep = make_ep(ll_max_tokens, capacity={"alignment": 8}, exchange=exchange, **options)
    # Wild tokens, of which ranks have different parts.
    for n in range(3):
        tokens = [
            make_tokens(ep.config, r, T, seed=n, kind="adversarial", padded=r % 3)
            for r in range(size)
        ]
        real = tokens[rank].real
        check_round(ep, tokens, "expert", num_tokens=real, phases=case["phases"], weighted=True)
        run_round(ep, tokens[rank], num_tokens=real)  # on the same windows, with weights in combine
