"""Wrong calls in one process, as tables: call × mistake × kind of exchange. Each is one sentence that says what it must
be, before anything is sent, and the right call works before and after it.

Mistakes of one rank among several: tests/distributed/test_mistakes.py. Files and flags: tests/test_wrong_inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import expert_inputs
import pytest
import torch
import torch.distributed as dist
from expert_inputs import BF16, FP8, MXFP4
from helpers import alone, distinct_ids, randn
from torch import Tensor

import epmoe
from epmoe import GroupedExperts, MoELayer, Placement
from epmoe.balance import choices, fresh
from epmoe.native import ops

CPU = torch.device("cpu")
NO_GRADIENTS = r"forward only.*requires grad.*torch\.inference_mode"
A_PATH = "`config` must be an EPConfig or the path of its file, got"
A_GROUP = "`group` must be a process group of torch.distributed, got"
NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other processes
ON_THE_CPU, BY_NVLINK = (alone(exchange={"transport": transport}) for transport in ("shared_memory", "nvlink"))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def permuted() -> epmoe.Permuted:
    """Where finalize finds two rows of each of four slots."""
    return epmoe.Permuted(ints(0), ints(0), ints(0), ints(*[0] * 8).view(4, 2), None)


def experts_and_a_call(w_gate_up, w_down, rows, expert_offsets, scales) -> None:
    GroupedExperts(w_gate_up, w_down)(rows, expert_offsets, scales)


def opened(**arguments: Any) -> None:
    epmoe.ExpertParallel(**arguments).close()


def layer_made(bias_of_logits: bool = False, **arguments: Any) -> None:
    config = alone(12, 3, routing={"logit_bias": bias_of_logits})
    with epmoe.ExpertParallel(config) as ep:
        MoELayer(**{"ep": ep} | arguments)


L, X, ROWS, SLOTS = torch.zeros(4, 8), torch.zeros(4, 16), torch.zeros(3, 16), ints(0, 1, 2, 0)
UP, DOWN, ENDS = torch.zeros(2, 8, 4), torch.zeros(2, 4, 4), ints(0, 0, 0)
IDS, WEIGHTS = ints(*[0] * 8).view(4, 2), torch.zeros(4, 2)
LAYER = {"router_weight": torch.zeros(12, 64), "experts": GroupedExperts(torch.zeros(12, 64, 64), randn(12, 64, 32))}
RIGHT: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "route": (epmoe.route, {"logits": L, "top_k": 2}),
    "permute": (epmoe.permute, {"x": X, "ids": IDS, "expert_map": ints(*[0] * 8), "num_local_experts": 8}),
    "finalize": (epmoe.finalize, {"expert_rows": ROWS, "permuted": permuted(), "weights": WEIGHTS}),
    "quantize_fp8": (epmoe.quantize_fp8, {"x": torch.zeros(4, 128)}),
    "zero_padding_rows_": (lambda x, n: epmoe.zero_padding_rows_(x.clone(), n), {"x": X, "n": 2}),
    "gated_activation": (
        lambda **given: ops.gated_activation(*given.values(), False, torch.inf, 1.0, 0.0, False),
        {"gate_up": torch.zeros(4, 64), "offsets": ints(*[0] * 5), "tokens": None, "bias": None},
    ),
    "experts": (
        experts_and_a_call,
        {"w_gate_up": UP, "w_down": DOWN, "rows": torch.zeros(3, 4), "expert_offsets": ENDS, "scales": None},
    ),
    **{f"experts of {dtype}": (GroupedExperts, expert_inputs.weights(dtype, CPU)) for dtype in (BF16, FP8, MXFP4)},
    "Placement.build": (Placement.build, {"num_experts": 4, "ep_size": 2}),
    "explicit": (Placement.build, {"num_experts": 4, "ep_size": 2, "strategy": "explicit", "assignment": [0, 1, 1, 0]}),
    "balance": (epmoe.balance, {"loads": torch.ones(3), "slots": SLOTS, "ep_size": 2}),
    "choices": (
        choices,
        {"slots": SLOTS, "shares": torch.ones(4).double(), "source": 0, "ep_size": 2, "num_experts": 3},
    ),
    "fresh": (fresh, {"loads": torch.ones(9), "ep_size": 2, "slots_per_rank": 5}),
    "simulate_routing": (epmoe.simulate_routing, {"kind": "uniform", "num_tokens": 1, "num_experts": 8, "top_k": 2}),
    "ExpertParallel": (opened, {"config": alone()}),
    "MoELayer": (layer_made, LAYER),
    "with a bias of the logits": (layer_made, LAYER | {"bias_of_logits": True, "logit_bias": torch.zeros(12)}),
}
MISTAKES: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "route": [
        ({"logits": L.double()}, TypeError, r"`logits` must be .*float32.* \[T, E\], got float64 \[4, 8\]"),
        ({"logits": L[0]}, ValueError, r"`logits` must be .* \[T, E\], got float32 \[8\]"),
        ({"logits": torch.zeros(1, 4097)}, ValueError, r"`logits` must .*4096.*, got .*4097"),
        ({"logits": randn(4, 8).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"top_k": 9}, ValueError, r"`top_k` must be .*8.*, got 9"),
        ({"top_k": 0}, ValueError, r"`top_k` must be .*, got 0"),
        ({"scoring": "tanh"}, ValueError, r"`scoring` must be .*softmax.*sigmoid.*, got '?tanh"),
        ({"bias": torch.zeros(7)}, ValueError, r"`bias` must be .*float32.* \[8\], got float32 \[7\]"),
        ({"bias": torch.zeros(8).double()}, TypeError, r"`bias` must be .*float32.* \[8\], got float64 \[8\]"),
        ({"bias": torch.zeros(8).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"num_expert_groups": 3}, ValueError, r"`num_expert_groups` must .*8.*, got 3"),
        ({"num_expert_groups": 4, "top_groups": 5}, ValueError, r"`top_groups` must .*4.*, got 5"),
        ({"num_expert_groups": 4, "top_groups": 1, "top_k": 3}, ValueError, r"`top_groups` must .*, got 1"),
        (
            {"num_expert_groups": 4, "top_groups": 2, "scores_per_group": 3},
            ValueError,
            r"`scores_per_group` must .* 2 .*, got 3",
        ),
        ({"renormalize_epsilon": -1e-20}, ValueError, r"`renormalize_epsilon` must be from 0 to 1, got -1e-20"),
        ({"renormalize_epsilon": torch.nan}, ValueError, r"`renormalize_epsilon` must be from 0 to 1, got nan"),
        ({"id_dtype": torch.int16}, (TypeError, ValueError), r"`id_dtype` must be .*int32.*int64.*, got .*int16"),
        ({"num_tokens": ints(0, 0)}, (TypeError, ValueError), r"`num_tokens` must be .*int32.*, got int32 \[2\]"),
        ({"num_tokens": torch.tensor(2.0)}, TypeError, r"`num_tokens` must be .*int32.*, got float32"),
    ],
    "permute": [
        ({"x": X[0]}, ValueError, r"`x` must be .*, got float32 \[16\]"),
        ({"x": X.double()}, TypeError, r"`x` must be .*, got float64 \[4, 16\]"),
        ({"x": randn(4, 16).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"ids": IDS[:3]}, ValueError, r"`ids` must be int32 or int64 \[4, K\], got int32 \[3, 2\]"),
        ({"ids": IDS.float()}, TypeError, r"`ids` must be int32 or int64 \[4, K\], got float32 \[4, 2\]"),
        ({"expert_map": torch.zeros(8).long()}, TypeError, r"`expert_map` must be int32 \[P\], got int64 \[8\]"),
        ({"num_local_experts": -1}, ValueError, r"`num_local_experts` must be .*, got -1"),
        ({"alignment": 0}, ValueError, r"`alignment` must be .*, got 0"),
        ({"max_rows": -1}, ValueError, r"`max_rows` must be .*, got -1"),
        ({"counts_R": ints(0, 0, 0)}, ValueError, r"`x` must hold 3 slabs of equal size, got 4 slots"),
        ({"counts_R": torch.zeros(2)}, TypeError, r"`counts_R` must be int32 .*, got float32 \[2\]"),
    ],
    "finalize": [
        ({"expert_rows": ROWS[0]}, ValueError, r"`expert_rows` must be .*, got float32 \[16\]"),
        ({"expert_rows": ROWS.double()}, TypeError, r"`expert_rows` must be .*, got float64 \[3, 16\]"),
        ({"expert_rows": randn(3, 16).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"weights": torch.zeros(4, 3)}, ValueError, r"`weights` must be .* \[4, 2\], got float32 \[4, 3\]"),
        ({"weights": WEIGHTS.long()}, TypeError, r"`weights` must be .* \[4, 2\], got int64 \[4, 2\]"),
        ({"weights": randn(4, 2).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"permuted": None}, TypeError, "`permuted` must be what permute returned, got NoneType"),
    ],
    "quantize_fp8": [
        ({"x": torch.zeros(4)}, ValueError, r"`x` must be .*\[T, D\], got float32 \[4\]"),
        ({"x": torch.zeros(4, 4).long()}, TypeError, r"`x` must be .*, got int64 \[4, 4\]"),
        ({"x": randn(4, 128).requires_grad_()}, RuntimeError, NO_GRADIENTS),
        ({"granularity": "row"}, ValueError, "`granularity` must be 'tensor' or 'block', got 'row'"),
        ({"num_tokens": 1.5}, TypeError, "`num_tokens` must be an int or an int32 scalar tensor, got float"),
    ],
    "zero_padding_rows_": [({"x": randn(4, 16).requires_grad_()}, RuntimeError, NO_GRADIENTS)],
    "gated_activation": [
        ({"bias": torch.zeros(4, 8)}, RuntimeError, "bias must be contiguous"),
        ({"bias": torch.zeros(4, 64).half()}, RuntimeError, "bias must be contiguous"),
        ({"gate_up": torch.zeros(4, 63)}, RuntimeError, "as many gates as ups"),
        ({"gate_up": torch.zeros(4, 64).to(FP8)}, RuntimeError, "in float32, float16 or bfloat16"),
        ({"offsets": ints()}, RuntimeError, "expert_offsets is empty"),
        ({"offsets": torch.zeros(5).long()}, RuntimeError, "`expert_offsets` must be contiguous, of the right dtype"),
        ({"tokens": ints(0, 0, 0)}, RuntimeError, "`tokens_per_expert` must be contiguous.*at least 4 elements"),
    ],
    "experts": [
        ({"w_down": DOWN[0]}, ValueError, r"`w_down` must be float32 \[e, D, F\], got float32 \[4, 4\]"),
        ({"w_down": None}, TypeError, r"`w_down` must be float32 or .* \[e, D, F\], got NoneType"),
        ({"w_down": DOWN.int()}, TypeError, r"`w_down` must be float32 or .* \[e, D, F\], got int32 \[2, 4, 4\]"),
        ({"w_gate_up": UP[:, 1:]}, ValueError, r"`w_gate_up` must be float32 \[2, 8, 4\], got float32 \[2, 7, 4\]"),
        ({"w_gate_up": UP.half()}, TypeError, r"`w_gate_up` must be float32 \[2, 8, 4\], got float16 \[2, 8, 4\]"),
        ({"w_gate_up": None}, TypeError, r"`w_gate_up` must be float32 \[2, 8, 4\], got NoneType"),
        ({"rows": torch.zeros(3, 5)}, ValueError, r"`rows` must be float32 \[N, 4\], got float32 \[3, 5\]"),
        ({"rows": None}, TypeError, r"`rows` must be float32 \[N, 4\], got NoneType"),
        ({"rows": ENDS, "expert_offsets": X}, TypeError, r"`rows` must be float32 \[N, 4\], got int32 \[3\]"),
        ({"expert_offsets": ENDS[:2]}, ValueError, r"`expert_offsets` must be int32 \[3\], got int32 \[2\]"),
        ({"scales": torch.ones(3, 0)}, TypeError, r"`rows` must be float8_e4m3fn \[N, 4\], got float32 \[3, 4\]"),
    ],
    f"experts of {BF16}": [
        ({"gate_up_scales": torch.ones(4, 2, 2)}, ValueError, "must be None where the weights are bfloat16"),
    ],
    f"experts of {FP8}": [
        ({"gate_up_scales": None}, TypeError, r"`gate_up_scales` must be float32 \[4, 2, 2\], got NoneType"),
        ({"down_scales": torch.ones(4, 2, 2)}, ValueError, r"`down_scales` must be float32 \[4, 2, 1\], got float32"),
        ({"down_bias": torch.ones(4, 256)}, TypeError, r"`down_bias` must be bfloat16 \[4, 256\], got float32"),
        ({"gate_up_bias": torch.ones(4, 128).bfloat16()}, ValueError, r"`gate_up_bias` must be bfloat16 \[4, 256\]"),
        ({"gemm": "cublas"}, ValueError, "`gemm` must be 'auto', 'torch', 'deep_gemm' or 'hopper', got 'cublas'"),
    ],
    f"experts of {MXFP4}": [
        ({"w_down": torch.zeros(4, 256, 64, dtype=torch.uint8)}, TypeError, "or float4_e2m1fn_x2 .*, got uint8"),
        ({"w_down": torch.empty(4, 256, 40, dtype=MXFP4)}, ValueError, "must be multiples of 32, got 256 and 80"),
        ({"w_gate_up": torch.empty(4, 256, 256, dtype=MXFP4)}, ValueError, r"e2m1fn_x2 \[4, 256, 128\], got float4"),
        ({"gate_up_scales": None}, TypeError, r"`gate_up_scales` must be float8_e8m0fnu \[4, 256, 8\], got NoneType"),
        ({"down_scales": torch.ones(4, 256, 4)}, TypeError, r"`down_scales` must be float8_e8m0fnu \[4, 256, 4\], got"),
        ({"down_bias": torch.ones(4, 256)}, TypeError, r"`down_bias` must be bfloat16 \[4, 256\], got float32"),
    ],
    "Placement.build": [
        ({"num_experts": 0}, ValueError, "`num_experts` must be an integer of at least 1, got 0"),
        ({"num_experts": True}, ValueError, "`num_experts` must be .* got True"),
        ({"ep_size": 0}, ValueError, "`ep_size` must be .* got 0"),
        ({"num_redundant_experts": -1}, ValueError, "`num_redundant_experts` must be .* got -1"),
        ({"strategy": "spiral"}, ValueError, "`strategy` must be 'linear', 'round_robin' or 'explicit', got 'spiral'"),
        ({"assignment": [0, 0, 1, 1]}, ValueError, "`assignment` must be given with .* got 'linear' with one"),
        (
            {"num_redundant_experts": 1, "copied_experts": [0]},
            ValueError,
            "`copied_experts` may be given with strategy 'explicit' only, got 'linear'",
        ),
    ],
    "explicit": [
        ({"assignment": None}, ValueError, "`assignment` must be given with strategy 'explicit'"),
        ({"assignment": [0, 1]}, ValueError, "`assignment` must be 4 ranks, one per physical expert, got 2"),
        ({"assignment": [0, 1, 2, 0]}, ValueError, r"`assignment\[2\]` must be a rank from 0 to 1, got 2"),
        ({"assignment": [0, 1, -1, 0]}, ValueError, r"`assignment\[2\]` must be a rank from 0 to 1, got -1"),
        (
            {"num_experts": 3, "num_redundant_experts": 1, "copied_experts": [0, 1]},
            ValueError,
            "`copied_experts` must be 1 experts, got 2",
        ),
        (
            {"num_experts": 3, "num_redundant_experts": 1, "copied_experts": [3]},
            ValueError,
            r"`copied_experts\[0\]` must be an integer from 0 to 2, got 3",
        ),
    ],
    "balance": [
        ({"loads": torch.tensor([1.0, -1, 1])}, ValueError, "`loads` must be finite and at least 0"),
        ({"loads": torch.tensor([1.0, torch.nan, 1])}, ValueError, "`loads` must be finite and at least 0"),
        (
            {"loads": torch.full((3,), 1e308, dtype=torch.float64)},
            ValueError,
            "finite and at least 0, and so must their sum",
        ),
        ({"loads": torch.ones(2, 2, 2)}, ValueError, r"`loads` must be numbers \[L, E\] or \[E\], got float32 \[2, 2"),
        ({"slots": SLOTS.float()}, ValueError, r"`slots` must be int32 or int64 \[P\].* got float32 \[4\]"),
        ({"slots": SLOTS[:3]}, ValueError, "`slots` must be int32 or int64 .* 2 ranks have as many"),
        ({"slots": torch.tensor([0, 1, 3, 0])}, ValueError, "`slots` must hold experts from 0 to 2, or −1"),
        ({"slots": torch.tensor([0, 1, 1, 0])}, ValueError, "must hold every expert: layer 0 has no expert 2"),
        ({"slots": torch.tensor([0, 1, 2, 2])}, ValueError, "not hold an expert twice on a rank: layer 0, rank 1, exp"),
        ({"ep_size": 0}, ValueError, "`ep_size` must be an integer of at least 1, got 0"),
        ({"max_moves": -1}, ValueError, "`max_moves` must be an integer of at least 0, got -1"),
        ({"goal": 0.9}, ValueError, "`goal` must be a number of at least 1, got 0.9"),
        ({"most_copies": 0}, ValueError, "`most_copies` must be an integer of at least 1, got 0"),
    ],
    "choices": [
        ({"shares": torch.ones(3)}, ValueError, r"`shares` must be float64 \[4\], as `slots`"),
        ({"source": 2}, ValueError, "`source` must be a rank from 0 to 1, got 2"),
        ({"most_copies": 1}, ValueError, "`most_copies` must be at least 2"),
    ],
    "fresh": [
        ({"slots_per_rank": 4}, ValueError, "`slots_per_rank` must give 9 experts a slot on 2 ranks, got 4"),
        ({"ranks_per_node": 3}, ValueError, "`ranks_per_node` must divide 2 ranks, got 3"),
    ],
    "simulate_routing": [
        ({"kind": "poisson"}, ValueError, "`kind` must be one of uniform, zipf, .* got 'poisson'"),
        ({"kind": "drift", "step": -1}, ValueError, "`step` must be a number of at least 0, got -1"),
        ({"num_tokens": -1}, ValueError, "`num_tokens`.* got -1, 8"),
        ({"top_k": 9}, ValueError, "`top_k` must be 1 to 8.* got 9"),
        ({"top_k": 0}, ValueError, "`top_k` must be 1 to 8.* got 0"),
        ({"id_dtype": torch.int16}, ValueError, "`id_dtype` must be torch.int32 or torch.int64"),
        ({"kind": "group_limited", "num_expert_groups": 3}, ValueError, "`num_expert_groups` must divide 8"),
        ({"kind": "group_limited", "top_k": 5, "top_groups": 4}, ValueError, "`top_k` must be 1 to 4.* got 5"),
        ({"kind": "hot_rank", "hot_rank": 4}, ValueError, "`rank` must be an integer from 0 to 3, got 4"),
    ],
    "ExpertParallel": [
        ({"config": alone().model_dump()}, TypeError, rf"{A_PATH} dict: use EPConfig\(\*\*config\)"),
        ({"config": None}, TypeError, f"{A_PATH} NoneType"),
        ({"config": alone().model}, TypeError, f"{A_PATH} ModelConfig"),
        ({"config": "missing.yaml"}, epmoe.ConfigError, "missing.yaml: no such configuration file"),
        ({"config": alone(64, topology={"ep_size": 33}), "device": "cuda"}, ValueError, "size` must be at most 32 on"),
        ({"config": alone(64, top_k=33), "device": "cuda"}, ValueError, "per_tok` must be at most 32 on GPUs, got 33"),
        (
            {"config": alone(topology={"ep_size": 2})},
            ValueError,
            "the size of the group, 1, got 2; torch.distributed is",
        ),
        ({"config": ON_THE_CPU, "device": "cuda"}, ValueError, "`device` must be cpu with .*'shared_memory', got cuda"),
        ({"config": BY_NVLINK, "device": "cpu"}, ValueError, "must be cuda with exchange.transport='nvlink', got cpu"),
        ({"group": "cpu"}, TypeError, f"{A_GROUP} str"),
        ({"group": [0]}, TypeError, f"{A_GROUP} list"),
        ({"group": NO_MEMBER}, ValueError, "this process is no member of `group`"),
        ({"device": "gpu"}, ValueError, "`device` must be cpu or cuda with .*='auto', got gpu"),
        ({"device": {"type": "cpu"}}, TypeError, "`device` must be a torch.device or its name, got dict"),
    ],
    "MoELayer": [
        ({"ep": None}, TypeError, "`ep` must be an ExpertParallel, got NoneType"),
        ({"experts": None}, TypeError, r"`experts` must be callable on \(rows, expert_offsets, scales\), got NoneType"),
        ({"experts": torch.zeros(3)}, TypeError, r"`experts` must be callable on .*, got float32 \[3\]"),
        (
            {"experts": GroupedExperts(torch.zeros(11, 64, 64), torch.zeros(11, 64, 32))},
            ValueError,
            "`experts` must be the 12 of this rank, with D=64, got 11 with D=64",
        ),
        (
            {"experts": GroupedExperts(torch.zeros(12, 64, 128), torch.zeros(12, 128, 32))},
            ValueError,
            "`experts` must be the 12 of this rank, with D=64, got 12 with D=128",
        ),
        ({"router_weight": None}, TypeError, r"`router_weight` must be .* \[12, 64\], got NoneType"),
        ({"router_weight": torch.zeros(12, 64).int()}, TypeError, r"`router_weight` must be .*, got int32 \[12, 64\]"),
        ({"router_weight": torch.zeros(64)}, ValueError, r"`router_weight` must be \[12, 64\], got \[64\]"),
        ({"bias": torch.zeros(11)}, ValueError, r"`bias` must be .*float32.* \[12\], got float32 \[11\]"),
        ({"bias": torch.zeros(12).double()}, TypeError, r"`bias` must be .*float32.* \[12\], got float64 \[12\]"),
        ({"bias": 0.0}, TypeError, r"`bias` must be .*float32.* \[12\], got float"),
        ({"shared": 1}, TypeError, "`shared` must be callable on x"),
    ],
    "with a bias of the logits": [
        ({"logit_bias": None}, ValueError, "`logit_bias` must be given, since `routing.logit_bias` says that the logi"),
        ({"logit_bias": torch.zeros(11)}, ValueError, r"`logit_bias` must be float32 \[12\], got float32 \[11\]"),
        ({"logit_bias": torch.zeros(12).half()}, TypeError, r"`logit_bias` must be float32 \[12\], got float16 \[12\]"),
    ],
}


def rows_of(table: dict[Any, list[tuple]]) -> list:
    """A parameter for each mistake, whose id is the call and the sentence."""
    named = {call: call if isinstance(call, str) else " ".join(call) for call in table}
    return [pytest.param(call, *row, id=f"{named[call]}: {row[-1]}") for call, rows in table.items() for row in rows]


@pytest.mark.parametrize(("call", "wrong", "error", "says"), rows_of(MISTAKES))
def test_a_wrong_argument(call, wrong, error, says):
    """An argument that requires grad, of a stage without a backward pass, is right where nothing asks for gradients."""
    function, right = RIGHT[call]
    for _ in range(2):
        function(**right)
        with pytest.raises(error, match=says):
            function(**right | wrong)
    if says == NO_GRADIENTS:
        with torch.no_grad():
            function(**right | wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu():
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        epmoe.ExpertParallel(BY_NVLINK)


E, K, T, D, M = 12, 3, 5, 384, 16
KINDS = {
    "plain": alone(E, K, D, max_tokens=M),
    "fp8": alone(E, K, D, "bfloat16", M, exchange={"payload": "fp8"}),
    "with extra": alone(E, K, D, max_tokens=M, capacity={"extra_bytes": 24}),
}
"""The kinds of exchange."""


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[str, torch.device], epmoe.ExpertParallel]]:
    """One `ExpertParallel` for each kind of exchange and device: no mistake harms it."""
    made: dict[tuple[str, str], epmoe.ExpertParallel] = {}

    def group(kind: str, device: torch.device) -> epmoe.ExpertParallel:
        if (kind, device.type) not in made:
            made[kind, device.type] = epmoe.ExpertParallel(KINDS[kind], device=device)
        made[kind, device.type].abort()  # a round that a failed test has left open
        return made[kind, device.type]

    yield group
    for ep in made.values():
        ep.close()


def on(device: torch.device, value: Any) -> Any:
    """The value there, if it is a tensor of the CPU."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


x, ids, weights = randn(T, D), distinct_ids(T, E, K), torch.full((T, K), 1 / K)
q, scales = epmoe.quantize_fp8(x)
number = torch.zeros(T, dtype=torch.int16)
SENT = {
    "plain": {"x": x, "ids": ids, "weights": weights},
    "fp8": {"x": q, "ids": ids, "weights": weights, "scales": scales},
    "with extra": {"x": x, "ids": ids, "weights": weights, "extra": number},
}
"""What dispatch takes, by kind of exchange."""
OF_5 = r"`ids` must be int32 or int64 \[5, K\], got"
TOO_MANY = {"x": x.repeat(4, 1)[:19], "ids": ids.repeat(4, 1)[:19], "weights": weights.repeat(4, 1)[:19]}
MANY_BYTES = number[:, None].expand(T, 13)
BY_COLUMNS = scales.T.contiguous().T
A_SMALLER_D = {"x": q[:, :200], "scales": scales[:, :2]}
WRONG_SENDS: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "plain": [
        ({"x": x.double()}, TypeError, r"`x` must be .*float32.* \[T, D\], got float64 \[5, 384\]"),
        ({"x": x.int()}, TypeError, r"`x` must be .*float32.* \[T, D\], got int32 \[5, 384\]"),
        ({"x": x[0]}, ValueError, r"`x` must be .* \[T, D\], got float32 \[384\]"),
        ({"x": x.repeat(1, 2)}, ValueError, r"`x` must be float32 \[T, 384\].*, got float32 \[5, 768\]"),
        ({"x": x[:, :63]}, ValueError, r"`x` must be float32 \[T, 384\].*16 bytes, got float32 \[5, 63\]"),
        ({"x": x.clone().requires_grad_()}, RuntimeError, r"forward only.*torch\.inference_mode"),
        ({"x": x.to("meta")}, ValueError, "`x` must be on (cpu|cuda:0), got meta"),
        ({"x": x.numpy()}, TypeError, "`x` must be .*, got ndarray"),
        ({"ids": ids[:4]}, ValueError, rf"{OF_5} int32 \[4, 3\]"),
        ({"ids": ids[0]}, ValueError, rf"{OF_5} int32 \[3\]"),
        ({"ids": ids.repeat(1, 2)}, ValueError, r"`ids` must be int32 or int64 \[5, 1\.\.3\], got int32 \[5, 6\]"),
        ({"ids": weights, "weights": ids}, TypeError, rf"{OF_5} float32 \[5, 3\]"),
        ({"ids": ids.short()}, TypeError, rf"{OF_5} int16 \[5, 3\]"),
        ({"weights": weights[:, :2]}, ValueError, r"`weights` must be .* \[5, 3\], got float32 \[5, 2\]"),
        ({"weights": weights.double()}, TypeError, r"`weights` must be .* \[5, 3\], got float64 \[5, 3\]"),
        ({"weights": weights.to("meta")}, ValueError, "`weights` must be on (cpu|cuda:0), got meta"),
        ({"weights": weights.flatten()}, ValueError, r"`weights` must be .* \[5, 3\]"),
        ({"weights": None}, TypeError, "`weights` must be .*, got NoneType"),
        ({"layout": "token"}, ValueError, r"`layout` must be 'expert' or 'rank', got 'token'"),
        ({"num_tokens": 2.0}, TypeError, r"`num_tokens` must be an int or .*, got float"),
        ({"num_tokens": torch.ones(2)}, TypeError, r"`num_tokens` must be int32 \[1\], got float32 \[2\]"),
        (TOO_MANY, ValueError, r"19 tokens, but capacity\.max_num_tokens_per_rank is 16: set it to at least 19"),
        ({"scales": scales, "x": q}, ValueError, "`scales` need an `exchange.payload` with scales"),
        ({"apply_router_weight_on_input": "yes"}, TypeError, "`apply_router_weight_on_input` must be a bool, got str"),
        (
            {"layout": "rank", "apply_router_weight_on_input": True},
            ValueError,
            r"`apply_router_weight_on_input` .* must be False with layout='rank'",
        ),
        ({"extra": number}, ValueError, "from 1 to 0 bytes a token, as `capacity.extra_bytes` says, got 2"),
    ],
    "fp8": [
        ({"scales": None}, ValueError, r"`scales` must be float32 \[T, D/128\] where `x` is float8_e4m3fn, got NoneTy"),
        ({"scales": scales.double()}, TypeError, r"`scales` must be float32 \[5, 3\], got float64 \[5, 3\]"),
        ({"scales": scales.tolist()}, TypeError, r"`scales` must be float32 \[5, 3\], got list"),
        ({"scales": scales[:4]}, ValueError, r"`scales` must be float32 \[5, 3\], got float32 \[4, 3\]"),
        ({"scales": scales[:, :2]}, ValueError, r"`scales` must be float32 \[5, 3\], got float32 \[5, 2\]"),
        ({"scales": BY_COLUMNS}, ValueError, r"contiguous rows, got strides \(1, 5\): use `.contiguous\(\)`"),
        ({"scales": scales.to("meta")}, ValueError, "`scales` must be on (cpu|cuda:0), got meta"),
        ({"scales": scales.clone().requires_grad_()}, RuntimeError, "forward only, but an input requires grad"),
        ({"x": q.float()}, TypeError, r"`x` must be float8_e4m3fn \[T, D\], got float32 \[5, 384\]"),
        ({"x": q.to(torch.float8_e5m2)}, TypeError, r"`x` must be float8_e4m3fn \[T, D\], got float8_e5m2"),
        (A_SMALLER_D, ValueError, r"`x` must be float8_e4m3fn \[T, 384\], or a smaller D of whole blocks of 128, got"),
        ({"x": x.bfloat16()[:, :192], "scales": None}, ValueError, r"whole blocks of 128, got bfloat16 \[5, 192\]"),
    ],
    "with extra": [
        ({"extra": number[:4]}, ValueError, r"`extra` must be \[5, …\], a row for each token, got int16 \[4\]"),
        ({"extra": number[0]}, ValueError, r"got int16 \[\]"),
        ({"extra": MANY_BYTES}, ValueError, "from 1 to 24 bytes a token.*, got 26"),
        ({"extra": number[:, None][:, :0]}, ValueError, "got 0"),
        ({"extra": [0] * T}, TypeError, "`extra` must be a tensor"),
        ({"extra": number.float().requires_grad_()}, RuntimeError, "requires grad"),
        ({"extra": number.to("meta")}, ValueError, "`extra` must be on"),
        ({"apply_router_weight_on_input": True}, ValueError, "`extra` must be None with apply"),
    ],
}


def assert_whole(ep: epmoe.ExpertParallel, kind: str) -> None:
    """A round of experts that return their input."""
    given = {name: on(ep.device, value) for name, value in SENT[kind].items()}
    d = ep.dispatch(**given)
    rows = d.rows
    if kind == "fp8":
        rows = (d.rows.float() * d.scales.repeat_interleave(128, 1)).to(d.dtype)
    assert torch.allclose(ep.combine(rows, d).float().cpu(), x, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("kind", "wrong", "error", "says"), rows_of(WRONG_SENDS))
def test_a_wrong_send(groups, device, kind, wrong, error, says):
    """Twice: a call like one that has passed skips most checks, but none that could still fail."""
    ep = groups(kind, device)
    given = {name: on(device, value) for name, value in (SENT[kind] | wrong).items()}
    for _ in range(2):
        before = ep.health()
        for call in (ep.dispatch, ep.dispatch_send):
            with pytest.raises(error, match=says):
                call(**given)
        after = ep.health()
        assert (before.rounds, before.rows_sent) == (after.rounds, after.rows_sent)
        assert_whole(ep, kind)


OTHERS = {"NoneType": None, "str": "round 1", r"float32 \[3\]": torch.zeros(3), "tuple": (x, ids)}
"""What is no handle, by what a message calls it."""
IS_NO_HANDLE = "`dispatched` must be what dispatch returned, got"
ENDS_IN_FP8 = r"got float8.*count with their `scales`"
Arguments = Callable[[Any], tuple]
WRONG_IN_A_ROUND: dict[tuple[str, str, str], list[tuple[Arguments, type[Exception], str]]] = {
    **{
        ("plain", "expert", call): [
            (lambda d: (d, d.rows), TypeError, rf"{IS_NO_HANDLE} float32 \[.*\]: {call} takes the rows first"),
            (lambda d: (d, d), TypeError, r"`expert_rows` must be float32 \[N, 384\], got Dispatched"),
            (lambda d: (d.rows[:14], d), ValueError, "`expert_rows` must hold at least 15 rows, got 14"),
            (lambda d: (d.rows.double(), d), TypeError, r"`expert_rows` must be float32 \[N, 384\], got float64"),
            (lambda d: (d.rows[:, :32], d), ValueError, r"`expert_rows` must be float32 \[N, 384\], got float32"),
            (lambda d: (d.rows[0], d), ValueError, r"`expert_rows` must be float32 \[N, 384\], got float32 \[384\]"),
            (lambda d: (d.rows.to("meta"), d), ValueError, "`expert_rows` must be on (cpu|cuda:0), got meta"),
            (lambda d: (d.rows.clone().requires_grad_(), d), RuntimeError, "forward only"),
            (lambda d: (d.rows.cpu().numpy(), d), TypeError, "`expert_rows` must be .*, got ndarray"),
            *(
                (lambda d, other=other: (d.rows, other), TypeError, f"{IS_NO_HANDLE} {name}")
                for name, other in OTHERS.items()
            ),
        ]
        for call in ("combine", "combine_send")
    },
    ("plain", "expert", "combine_partial"): [
        (lambda d: (d, d.rows), TypeError, rf"{IS_NO_HANDLE} float32 \[.*\]: combine_partial takes the rows first"),
        (lambda d: (torch.zeros(1, M, D, device=d.rows.device), d), ValueError, "layout='expert' ends with combine"),
    ],
    ("plain", "rank", "combine"): [
        (lambda d: (torch.zeros(15, D, device=d.recv.x.device), d), ValueError, "layout='rank'.*combine_partial"),
    ],
    ("plain", "rank", "combine_partial"): [
        (
            lambda d: (d.recv.x[:, :7], d),
            ValueError,
            r"`partial` must be float32 \[1, 16, 384\], got float32 \[1, 7, 384\]",
        ),
    ],
    ("fp8", "expert", "combine"): [
        (lambda d: (torch.zeros(d.rows.shape, device=d.rows.device), d), TypeError, "`expert_rows` must be bfloat16"),
        (lambda d: (d.rows, d), TypeError, f"`expert_rows` must be bfloat16, {ENDS_IN_FP8}"),
    ],
    ("fp8", "rank", "combine_partial"): [
        (lambda d: (d.recv.x, d), TypeError, f"`partial` must be bfloat16, {ENDS_IN_FP8}"),
    ],
    ("plain", "expert", "dispatch_recv"): [
        (lambda _, other=other: (other,), TypeError, f"`sent` must be what dispatch_send returned, got {name}")
        for name, other in OTHERS.items()
    ],
    ("plain", "expert", "combine_recv"): [
        (lambda _, other=other: (other,), TypeError, f"{IS_NO_HANDLE} {name}") for name, other in OTHERS.items()
    ],
}


@pytest.mark.parametrize(("call", "wrong", "error", "says"), rows_of(WRONG_IN_A_ROUND))
def test_a_wrong_call_in_a_round(groups, device, call, wrong, error, says):
    """The round stays open, and its right calls end it."""
    kind, layout, name = call
    ep = groups(kind, device)
    given = {key: on(device, value) for key, value in SENT[kind].items()}
    handle = ep.dispatch_send(**given, layout=layout)
    if name != "dispatch_recv":
        handle = ep.dispatch_recv(handle)
        rows = (handle.recv.x if layout == "rank" else handle.rows).to(handle.dtype)
    if name == "combine_recv":
        ep.combine_send(rows, handle)
    with torch.enable_grad():
        arguments = wrong(handle)
    for _ in range(2):
        with pytest.raises(error, match=says):
            getattr(ep, name)(*arguments)
        with pytest.raises(epmoe.EPStateError, match="round .* is still open"):
            ep.dispatch(**given)
    if name == "dispatch_recv":
        handle = ep.dispatch_recv(handle)
        rows = handle.rows
    if name == "combine_recv":
        ep.combine_recv(handle)
    else:
        (ep.combine_partial if layout == "rank" else ep.combine)(rows, handle)
    assert_whole(ep, kind)


@pytest.mark.parametrize(
    ("logits", "error", "says"),
    [  # 16 columns for 12 experts would give ids 12 to 15, which dispatch takes for "no expert": zeros in y
        (torch.zeros(T, 16), ValueError, r"`logits` must be .* \[T, 12\], got float32 \[5, 16\]"),
        (torch.zeros(12), ValueError, r"`logits` must be .* \[T, 12\], got float32 \[12\]"),
        (torch.zeros(T, 12, device="meta"), ValueError, "`logits` must be on cpu, got meta"),
        ([[0.0] * 12], TypeError, r"`logits` must be .* \[T, 12\], got list"),
    ],
)
def test_wrong_logits(groups, logits, error, says):
    with pytest.raises(error, match=says):
        groups("plain", CPU).route(logits)


@pytest.mark.parametrize(
    ("layout", "absent"),
    [
        ("expert", ["recv.x", "recv.scales", "recv.ids", "recv.weights", "recv.extra"]),
        ("rank", ["rows", "scales", "expert_offsets", "tokens_per_expert", "extra"]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_the_other_layout(groups, kind, layout, absent):
    """It raises by name; `scales` is None without an fp8 payload, and `extra` without one."""
    ep = groups(kind, CPU)
    d = ep.dispatch(**SENT[kind], layout=layout)
    has, lacks = (d, d.recv) if layout == "expert" else (d.recv, d)
    for name in absent:
        owner = name if "." in name else f"dispatched.{name}"
        with pytest.raises(AttributeError, match=f"`{owner}` does not exist with layout='{layout}'"):
            getattr(lacks, name.rpartition(".")[2])
    with pytest.raises(AttributeError, match="^row$"):
        _ = d.row
    assert all(hasattr(has, name) for name in ("rows", "expert_offsets", "tokens_per_expert") if layout == "expert")
    assert all(hasattr(has, name) for name in ("x", "ids", "weights") if layout == "rank")
    assert has.scales is None if kind != "fp8" else (has.scales.dtype, has.scales.shape[-1]) == (torch.float32, 3)
    assert has.extra is None if kind != "with extra" else has.extra.dtype == torch.int16
    assert "extra" not in repr(d.recv)
    assert d.recv.counts.tolist() == [T]
    ep.abort(d)
