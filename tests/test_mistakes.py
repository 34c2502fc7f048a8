"""Wrong calls in one process, as tables: call × mistake × kind of exchange. Each is one sentence
that says what it must be, before anything is sent, and the right call works before and after it.

Mistakes of one rank among several: tests/distributed/test_mistakes.py. Files and flags:
tests/test_wrong_inputs.py.
"""

from __future__ import annotations

import re
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
from epmoe.balance import fresh
from epmoe.native import ops
from epmoe.native.arguments import describe

CPU = torch.device("cpu")
NO_GRADIENTS = r"forward only.*requires grad.*torch\.inference_mode"
A_PATH = "`config` must be an EPConfig or the path of its file, got"
A_GROUP = "`group` must be a process group of torch.distributed, got"
NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to other processes
ON_THE_CPU, BY_NVLINK = (
    alone(exchange={"transport": transport}) for transport in ("shared_memory", "nvlink")
)


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


L = torch.zeros(4, 8)
X = torch.zeros(4, 16)
ROWS = torch.zeros(3, 16)
SLOTS = ints(0, 1, 2, 0)
SEATED = alone(topology={"max_ranks": 33}, placement={"live": True, "slots_per_rank": 8})
CROWDED = alone(256, topology={"max_ranks": 17}, placement={"live": True, "slots_per_rank": 256})
COPIED = {"num_experts": 3, "num_redundant_experts": 1}
UP = torch.zeros(2, 8, 4)
DOWN = torch.zeros(2, 4, 4)
ENDS = ints(0, 0, 0)
IDS = ints(*[0] * 8).view(4, 2)
WEIGHTS = torch.zeros(4, 2)
LAYER = {
    "router_weight": torch.zeros(12, 64),
    "experts": GroupedExperts(torch.zeros(12, 64, 64), randn(12, 64, 32)),
}
RIGHT: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "route": (epmoe.route, {"logits": L, "top_k": 2}),
    "permute": (
        epmoe.permute,
        {"x": X, "ids": IDS, "expert_map": ints(*[0] * 8), "num_local_experts": 8},
    ),
    "finalize": (epmoe.finalize, {"expert_rows": ROWS, "permuted": permuted(), "weights": WEIGHTS}),
    "quantize_fp8": (epmoe.quantize_fp8, {"x": torch.zeros(4, 128)}),
    "zero_padding_rows_": (lambda x, n: epmoe.zero_padding_rows_(x.clone(), n), {"x": X, "n": 2}),
    "gated_activation": (
        lambda **given: ops.gated_activation(*given.values(), False, torch.inf, 1.0, 0.0, False),
        {"gate_up": torch.zeros(4, 64), "offsets": ints(*[0] * 5), "tokens": None, "bias": None},
    ),
    "experts": (
        experts_and_a_call,
        {
            "w_gate_up": UP,
            "w_down": DOWN,
            "rows": torch.zeros(3, 4),
            "expert_offsets": ENDS,
            "scales": None,
        },
    ),
    **{
        f"experts of {dtype}": (GroupedExperts, expert_inputs.weights(dtype, CPU))
        for dtype in (BF16, FP8, MXFP4)
    },
    "Placement.build": (Placement.build, {"num_experts": 4, "ep_size": 2}),
    "explicit": (
        Placement.build,
        {"num_experts": 4, "ep_size": 2, "strategy": "explicit", "assignment": [0, 1, 1, 0]},
    ),
    "balance": (epmoe.balance, {"loads": torch.ones(3), "slots": SLOTS, "ep_size": 2}),
    "fresh": (fresh, {"loads": torch.ones(9), "ep_size": 2, "slots_per_rank": 5}),
    "simulate_routing": (
        epmoe.simulate_routing,
        {"kind": "uniform", "num_tokens": 1, "num_experts": 8, "top_k": 2},
    ),
    "ExpertParallel": (opened, {"config": alone()}),
    "MoELayer": (layer_made, LAYER),
    "with a bias of the logits": (
        layer_made,
        LAYER | {"bias_of_logits": True, "logit_bias": torch.zeros(12)},
    ),
}
MISTAKES: dict[str, list[tuple]] = {
    "route": [
        ({"logits": torch.zeros(1, 4097)}, r"`logits` must .*4096.*, got .*4097"),
        ({"top_k": 9}, r"`top_k` must be .*8.*, got 9"),
        ({"top_k": 0}, r"`top_k` must be .*, got 0"),
        ({"scoring": "tanh"}, r"`scoring` must be .*softmax.*sigmoid.*, got '?tanh"),
        ({"num_expert_groups": 3}, r"`num_expert_groups` must .*8.*, got 3"),
        ({"num_expert_groups": 4, "top_groups": 5}, r"`top_groups` must .*4.*, got 5"),
        ({"num_expert_groups": 4, "top_groups": 1, "top_k": 3}, r"`top_groups` must .*, got 1"),
        (
            {"num_expert_groups": 4, "top_groups": 2, "scores_per_group": 3},
            r"`scores_per_group` must .* 2 .*, got 3",
        ),
        ({"renormalize_epsilon": -1e-20}, r"`renormalize_epsilon` must be from 0 to 1, got -1e-20"),
        *(
            ({"routed_scaling_factor": value}, "`routed_scaling_factor` must be a number that fp32")
            for value in (1e60, 1e-60, torch.inf, torch.nan)
        ),
        ({"renormalize_epsilon": torch.nan}, r"`renormalize_epsilon` must be from 0 to 1, got nan"),
        (
            {"id_dtype": torch.int16},
            (TypeError, ValueError),
            r"`id_dtype` must be .*int32.*int64.*, got .*int16",
        ),
        (
            {"num_tokens": ints(0, 0)},
            (TypeError, ValueError),
            r"`num_tokens` must be .*int32.*, got int32 \[2\]",
        ),
    ],
    "permute": [
        ({"num_local_experts": -1}, r"`num_local_experts` must be .*, got -1"),
        ({"alignment": 0}, r"`alignment` must be .*, got 0"),
        ({"max_rows": -1}, r"`max_rows` must be .*, got -1"),
        ({"counts_R": ints(0, 0, 0)}, r"`x` must hold 3 slabs of equal size, got 4 slots"),
    ],
    "finalize": [
        ({"permuted": None}, TypeError, "`permuted` must be what permute returned, got NoneType")
    ],
    "quantize_fp8": [
        ({"granularity": "row"}, "`granularity` must be 'tensor' or 'block', got 'row'"),
        (
            {"num_tokens": 1.5},
            TypeError,
            "`num_tokens` must be an int or an int32 scalar tensor, got float",
        ),
    ],
    "gated_activation": [
        ({"bias": torch.zeros(4, 8)}, RuntimeError, "bias must be contiguous"),
        ({"bias": torch.zeros(4, 64).half()}, RuntimeError, "bias must be contiguous"),
        ({"gate_up": torch.zeros(4, 63)}, RuntimeError, "as many gates as ups"),
        ({"gate_up": torch.zeros(4, 64).to(FP8)}, RuntimeError, "in float32, float16 or bfloat16"),
        ({"offsets": ints()}, RuntimeError, "expert_offsets is empty"),
        (
            {"offsets": torch.zeros(5).long()},
            RuntimeError,
            "`expert_offsets` must be contiguous, of the right dtype",
        ),
        (
            {"tokens": ints(0, 0, 0)},
            RuntimeError,
            "`tokens_per_expert` must be contiguous.*at least 4 elements",
        ),
    ],
    "experts": [
        (
            {"rows": ENDS, "expert_offsets": X},
            TypeError,
            r"`rows` must be float32 \[N, 4\], got int32 \[3\]",
        ),
        (
            {"scales": torch.ones(3, 0)},
            TypeError,
            r"`rows` must be float8_e4m3fn \[N, 4\], got float32 \[3, 4\]",
        ),
    ],
    f"experts of {BF16}": [
        ({"limit": 1e60}, "`limit` must be a number that fp32 holds, got 1e\\+60"),
        ({"limit": torch.nan}, "`limit` must be a number that fp32 holds, got nan"),
        ({"alpha": 1e-60}, "`alpha` must be a number that fp32 holds, got 1e-60"),
        ({"up_offset": torch.inf}, "`up_offset` must be a number that fp32 holds, got inf"),
        ({"gate_up_scales": torch.ones(4, 2, 2)}, "must be None where the weights are bfloat16"),
    ],
    f"experts of {FP8}": [
        (
            {"gemm": "cublas"},
            "`gemm` must be 'auto', 'torch', 'deep_gemm' or 'hopper', got 'cublas'",
        )
    ],
    f"experts of {MXFP4}": [
        (
            {"w_down": torch.zeros(4, 256, 64, dtype=torch.uint8)},
            TypeError,
            "or float4_e2m1fn_x2 .*, got uint8",
        ),
        (
            {"w_down": torch.empty(4, 256, 40, dtype=MXFP4)},
            "must be multiples of 32, got 256 and 80",
        ),
    ],
    "Placement.build": [
        ({"num_experts": 0}, "`num_experts` must be an integer of at least 1, got 0"),
        ({"num_experts": True}, "`num_experts` must be .* got True"),
        ({"ep_size": 0}, "`ep_size` must be .* got 0"),
        ({"num_redundant_experts": -1}, "`num_redundant_experts` must be .* got -1"),
        (
            {"strategy": "spiral"},
            "`strategy` must be 'linear', 'round_robin' or 'explicit', got 'spiral'",
        ),
        ({"assignment": [0, 0, 1, 1]}, "`assignment` must be given with .* got 'linear' with one"),
        (
            {"num_redundant_experts": 1, "copied_experts": [0]},
            "`copied_experts` may be given with strategy 'explicit' only, got 'linear'",
        ),
    ],
    "explicit": [
        ({"assignment": None}, "`assignment` must be given with strategy 'explicit'"),
        ({"assignment": [0, 1]}, "`assignment` must be 4 ranks, one per physical expert, got 2"),
        ({"assignment": [0, 1, 2, 0]}, r"`assignment\[2\]` must be a rank from 0 to 1, got 2"),
        ({"assignment": [0, 1, -1, 0]}, r"`assignment\[2\]` must be a rank from 0 to 1, got -1"),
        (COPIED | {"copied_experts": [0, 1]}, "`copied_experts` must be 1 experts, got 2"),
        (
            COPIED | {"copied_experts": [3]},
            r"`copied_experts\[0\]` must be an integer from 0 to 2, got 3",
        ),
    ],
    "balance": [
        ({"loads": torch.tensor([1.0, -1, 1])}, "`loads` must be finite and at least 0"),
        ({"loads": torch.tensor([1.0, torch.nan, 1])}, "`loads` must be finite and at least 0"),
        (
            {"loads": torch.full((3,), 1e308, dtype=torch.float64)},
            "finite and at least 0, and so must their sum",
        ),
        (
            {"loads": torch.ones(2, 2, 2)},
            r"`loads` must be numbers \[L, E\] or \[E\], got float32 \[2, 2",
        ),
        ({"slots": SLOTS.float()}, r"`slots` must be int32 or int64 \[P\].* got float32 \[4\]"),
        ({"slots": SLOTS[:3]}, "`slots` must be int32 or int64 .* 2 ranks have as many"),
        ({"slots": torch.tensor([0, 1, 3, 0])}, "`slots` must hold experts from 0 to 2, or −1"),
        ({"slots": torch.tensor([0, 1, 1, 0])}, "must hold every expert: layer 0 has no expert 2"),
        (
            {"slots": torch.tensor([0, 1, 2, 2])},
            "not hold an expert twice on a rank: layer 0, rank 1, exp",
        ),
        ({"ep_size": 0}, "`ep_size` must be an integer of at least 1, got 0"),
        ({"max_moves": -1}, "`max_moves` must be an integer of at least 0, got -1"),
        ({"goal": 0.9}, "`goal` must be a number of at least 1, got 0.9"),
        ({"most_copies": 0}, "`most_copies` must be an integer of at least 1, got 0"),
    ],
    "fresh": [
        ({"slots_per_rank": 4}, "`slots_per_rank` must give 9 experts a slot on 2 ranks, got 4"),
        ({"ranks_per_node": 3}, "`ranks_per_node` must divide 2 ranks, got 3"),
    ],
    "simulate_routing": [
        ({"kind": "poisson"}, "`kind` must be one of uniform, zipf, .* got 'poisson'"),
        ({"kind": "drift", "step": -1}, "`step` must be a number of at least 0, got -1"),
        ({"num_tokens": -1}, "`num_tokens`.* got -1, 8"),
        ({"top_k": 9}, "`top_k` must be 1 to 8.* got 9"),
        ({"top_k": 0}, "`top_k` must be 1 to 8.* got 0"),
        ({"id_dtype": torch.int16}, "`id_dtype` must be torch.int32 or torch.int64"),
        ({"kind": "group_limited", "num_expert_groups": 3}, "`num_expert_groups` must divide 8"),
        ({"kind": "group_limited", "top_k": 5, "top_groups": 4}, "`top_k` must be 1 to 4.* got 5"),
        ({"kind": "hot_rank", "hot_rank": 4}, "`rank` must be an integer from 0 to 3, got 4"),
    ],
    "ExpertParallel": [
        (
            {"config": alone().model_dump()},
            TypeError,
            rf"{A_PATH} dict: use EPConfig\(\*\*config\)",
        ),
        ({"config": None}, TypeError, f"{A_PATH} NoneType"),
        ({"config": alone().model}, TypeError, f"{A_PATH} ModelConfig"),
        ({"config": "missing.yaml"}, epmoe.ConfigError, "missing.yaml: no such configuration file"),
        (
            {"config": alone(64, topology={"ep_size": 33}), "device": "cuda"},
            "size` must be at most 32 on",
        ),
        ({"config": SEATED, "device": "cuda"}, "max_ranks` must be at most 32 on GPUs, got 33"),
        (
            {"config": CROWDED, "device": "cuda"},
            "`placement.slots_per_rank` of all seats must be at most 4096",
        ),
        (
            {"config": alone(64, top_k=33), "device": "cuda"},
            "per_tok` must be at most 32 on GPUs, got 33",
        ),
        (
            {"config": alone(topology={"ep_size": 2})},
            "the size of the group, 1, got 2; torch.distributed is",
        ),
        (
            {"config": ON_THE_CPU, "device": "cuda"},
            "`device` must be cpu with .*'shared_memory', got cuda",
        ),
        (
            {"config": BY_NVLINK, "device": "cpu"},
            "must be cuda with exchange.transport='nvlink', got cpu",
        ),
        ({"group": "cpu"}, TypeError, f"{A_GROUP} str"),
        ({"group": [0]}, TypeError, f"{A_GROUP} list"),
        ({"group": NO_MEMBER}, "this process is no member of `group`"),
        ({"device": "gpu"}, "`device` must be cpu or cuda with .*='auto', got gpu"),
        (
            {"device": {"type": "cpu"}},
            TypeError,
            "`device` must be a torch.device or its name, got dict",
        ),
    ],
    "MoELayer": [
        ({"ep": None}, TypeError, "`ep` must be an ExpertParallel, got NoneType"),
        (
            {"experts": None},
            TypeError,
            r"`experts` must be callable on \(rows, expert_offsets, scales\), got NoneType",
        ),
        (
            {"experts": torch.zeros(3)},
            TypeError,
            r"`experts` must be callable on .*, got float32 \[3\]",
        ),
        *(
            (
                {"experts": GroupedExperts(torch.zeros(e, 64, D), torch.zeros(e, D, 32))},
                f"12 .*, got {e} with D={D}",
            )
            for e, D in ((11, 64), (12, 128))
        ),
        ({"router_weight": torch.zeros(64)}, r"`router_weight` must be \[12, 64\], got \[64\]"),
        ({"shared": 1}, TypeError, "`shared` must be callable on x"),
        (
            {"logit_bias": torch.zeros(12)},
            "`logit_bias` must be None, unless `routing.logit_bias` says",
        ),
        (
            {"bias": torch.zeros(12)},
            "`bias` must be None, unless `routing.selection_bias` .*{selection_bias: true}` in the",
        ),
    ],
    "with a bias of the logits": [
        (
            {"logit_bias": None},
            "`logit_bias` must be given, since `routing.logit_bias` says that the logi",
        )
    ],
}

GROUPS_OF_32 = ("gate_up", 8), ("down", 4)
FLOAT = "float32 or float16 or bfloat16"
INT = "int32 or int64"
WEIGHT = f"{FLOAT} or float64 or float8_e4m3fn or float4_e2m1fn_x2 [e, D, F]"
TENSORS = [
    ("route", "logits", f"{FLOAT} [T, E]"),
    ("route", "bias", f"{FLOAT} [8]"),
    ("permute", "ids", f"{INT} [4, K]"),
    ("permute", "x", f"{FLOAT} or float8_e4m3fn [S, D]"),
    ("permute", "expert_map", "int32 [P]"),
    ("permute", "counts_R", "int32 [R]"),
    ("finalize", "expert_rows", f"{FLOAT} [N, D]"),
    ("finalize", "weights", f"{FLOAT} [4, 2]"),
    ("quantize_fp8", "x", f"{FLOAT} [T, D]"),
    ("experts", "w_down", WEIGHT),
    ("experts", "w_gate_up", "float32 [2, 8, 4]"),
    ("experts", "rows", "float32 [N, 4]"),
    ("experts", "expert_offsets", "int32 [3]"),
    ("MoELayer", "bias", f"{FLOAT} [12]"),
    ("with a bias of the logits", "logit_bias", "float32 [12]"),
    *(
        (f"experts of {FP8}", f"{name}_scales", f"float32 [4, 2, {n}]")
        for name, n in (("gate_up", 2), ("down", 1))
    ),
    *(
        (f"experts of {MXFP4}", f"{name}_scales", f"float8_e8m0fnu [4, 256, {n}]")
        for name, n in GROUPS_OF_32
    ),
    (f"experts of {FP8}", "gate_up_bias", "bfloat16 [4, 256]"),
    (f"experts of {MXFP4}", "down_bias", "bfloat16 [4, 256]"),
    (f"experts of {MXFP4}", "w_gate_up", "float4_e2m1fn_x2 [4, 256, 128]"),
]
"""What a tensor of a call must be."""


def no_such_tensor(name: str, right: Tensor | None, must_be: str) -> Iterator[tuple]:
    """The mistakes of any tensor: another type or dtype, a dimension more, one less of a number in
    `must_be`.
    """
    # The dtypes, and of the sizes those that are numbers. A right tensor has them.
    dtypes, sizes = must_be.removesuffix("]").split(" [")
    numbers = [(i, int(size)) for i, size in enumerate(sizes.split(", ")) if size.isdecimal()]
    if right is None:
        right = torch.zeros(
            [size for _, size in numbers] or 1, dtype=getattr(torch, dtypes.split()[0])
        )
    # No tensor, another dtype, another number of dimensions, and other sizes.
    wrong = [
        ([0], TypeError),
        (right.contiguous().view(torch.int8).clone(), TypeError),
        (right[None], ValueError),
    ]
    for value, error in wrong + [(right.narrow(i, 0, size - 1), ValueError) for i, size in numbers]:
        wanted = re.escape(must_be if error is TypeError else f" [{sizes}]")
        yield {name: value}, error, f"`{name}` must be .*{wanted}, got {re.escape(describe(value))}"


for call, name, must_be in TENSORS:
    MISTAKES.setdefault(call, []).extend(no_such_tensor(name, RIGHT[call][1].get(name), must_be))
for call, name in (
    ("route", "logits"),
    ("route", "bias"),
    ("permute", "x"),
    ("finalize", "expert_rows"),
    ("finalize", "weights"),
    ("quantize_fp8", "x"),
    ("zero_padding_rows_", "x"),
):
    wrong = RIGHT[call][1].get(name, torch.zeros(8)).clone().requires_grad_()
    MISTAKES.setdefault(call, []).append(({name: wrong}, RuntimeError, NO_GRADIENTS))


def rows_of(table: dict[Any, list[tuple]]) -> list:
    """A parameter for each mistake, whose id is the call and the sentence. The error is a
    ValueError by default.
    """
    named = {call: call if isinstance(call, str) else " ".join(call) for call in table}
    rows = [(call, *row) for call, rows in table.items() for row in rows]
    return [
        pytest.param(call, wrong, *error or [ValueError], says, id=f"{named[call]}: {says}")
        for call, wrong, *error, says in rows
    ]


@pytest.mark.parametrize(("call", "wrong", "error", "says"), rows_of(MISTAKES))
def test_a_wrong_argument(call, wrong, error, says):
    """An argument that requires grad, of a stage without a backward pass, is right where nothing
    asks for gradients.
    """
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


E = 12
K = 3
T = 5
D = 384
M = 16
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


x = randn(T, D)
ids = distinct_ids(T, E, K)
weights = torch.full((T, K), 1 / K)
q, scales = epmoe.quantize_fp8(x)
number = torch.zeros(T, dtype=torch.int16)
SENT = {
    "plain": {"x": x, "ids": ids, "weights": weights},
    "fp8": {"x": q, "ids": ids, "weights": weights, "scales": scales},
    "with extra": {"x": x, "ids": ids, "weights": weights, "extra": number},
}
"""What dispatch takes, by kind of exchange."""
OF_5 = r"`ids` must be int32 or int64 \[5, K\], got"
TOO_MANY = {
    "x": x.repeat(4, 1)[:19],
    "ids": ids.repeat(4, 1)[:19],
    "weights": weights.repeat(4, 1)[:19],
}
MANY_BYTES = number[:, None].expand(T, 13)
BY_COLUMNS = scales.T.contiguous().T
A_SMALLER_D = {"x": q[:, :200], "scales": scales[:, :2]}
WRONG_SENDS: dict[str, list[tuple]] = {
    "plain": [
        ({"x": x.repeat(1, 2)}, r"`x` must be float32 \[T, 384\].*, got float32 \[5, 768\]"),
        ({"x": x[:, :63]}, r"`x` must be float32 \[T, 384\].*16 bytes, got float32 \[5, 63\]"),
        (
            {"ids": ids.repeat(1, 2)},
            r"`ids` must be int32 or int64 \[5, 1\.\.3\], got int32 \[5, 6\]",
        ),
        ({"ids": weights, "weights": ids}, TypeError, rf"{OF_5} float32 \[5, 3\]"),
        ({"layout": "token"}, r"`layout` must be 'expert' or 'rank', got 'token'"),
        ({"num_tokens": 2.0}, TypeError, r"`num_tokens` must be an int or .*, got float"),
        (
            {"num_tokens": torch.ones(2)},
            TypeError,
            r"`num_tokens` must be int32 \[1\], got float32 \[2\]",
        ),
        (
            TOO_MANY,
            ValueError,
            r"19 tokens, but capacity\.max_num_tokens_per_rank is 16: set it to at least 19",
        ),
        ({"scales": scales, "x": q}, "`scales` need an `exchange.payload` with scales"),
        (
            {"apply_router_weight_on_input": "yes"},
            TypeError,
            "`apply_router_weight_on_input` must be a bool, got str",
        ),
        (
            {"layout": "rank", "apply_router_weight_on_input": True},
            r"`apply_router_weight_on_input` .* must be False with layout='rank'",
        ),
        ({"extra": number}, "from 1 to 0 bytes a token, as `capacity.extra_bytes` says, got 2"),
    ],
    "fp8": [
        (
            {"scales": None},
            r"`scales` must be float32 \[T, D/128\] where `x` is float8_e4m3fn, got NoneTy",
        ),
        ({"scales": BY_COLUMNS}, r"contiguous rows, got strides \(1, 5\): use `.contiguous\(\)`"),
        (
            {"x": q.float()},
            TypeError,
            r"`x` must be float8_e4m3fn \[T, D\], got float32 \[5, 384\]",
        ),
        (
            {"x": q.to(torch.float8_e5m2)},
            TypeError,
            r"`x` must be float8_e4m3fn \[T, D\], got float8_e5m2",
        ),
        (
            A_SMALLER_D,
            ValueError,
            r"`x` must be float8_e4m3fn \[T, 384\], or a smaller D of whole lines of 16 elements",
        ),
        (
            {"x": x.bfloat16()[:, :200], "scales": None},
            r"whole lines of 16 elements, got bfloat16 \[5, 200\]",
        ),
    ],
    "with extra": [
        ({"extra": number[:4]}, r"`extra` must be \[5, …\], a row for each token, got int16 \[4\]"),
        ({"extra": number[0]}, r"got int16 \[\]"),
        ({"extra": MANY_BYTES}, "from 1 to 24 bytes a token.*, got 26"),
        ({"extra": number[:, None][:, :0]}, "got 0"),
        ({"extra": [0] * T}, TypeError, "`extra` must be a tensor"),
        ({"extra": number.float().requires_grad_()}, RuntimeError, "requires grad"),
        ({"apply_router_weight_on_input": True}, "`extra` must be None with apply"),
    ],
}

for kind, name, must_be in (
    ("plain", "x", f"{FLOAT} [T, D]"),
    ("plain", "ids", f"{INT} [5, K]"),
    ("plain", "weights", f"{FLOAT} [5, 3]"),
    ("fp8", "scales", "float32 [5, 3]"),
):
    right = SENT[kind][name]
    elsewhere = {name: right.to("meta")}, f"`{name}` must be on (cpu|cuda:0), got meta"
    WRONG_SENDS[kind] += [*no_such_tensor(name, right, must_be), elsewhere]
    if right.is_floating_point():
        WRONG_SENDS[kind].append(
            ({name: right.clone().requires_grad_()}, RuntimeError, "forward only, but an input")
        )


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
WRONG_IN_A_ROUND: dict[tuple[str, str, str], list[tuple]] = {
    **{
        ("plain", "expert", call): [
            (
                lambda d: (d, d.rows),
                TypeError,
                rf"{IS_NO_HANDLE} float32 \[.*\]: {call} takes the rows first",
            ),
            (
                lambda d: (d, d),
                TypeError,
                r"`expert_rows` must be float32 \[N, 384\], got Dispatched",
            ),
            (lambda d: (d.rows[:14], d), "`expert_rows` must hold at least 15 rows, got 14"),
            (
                lambda d: (d.rows.double(), d),
                TypeError,
                r"`expert_rows` must be float32 \[N, 384\], got float64",
            ),
            (
                lambda d: (d.rows[:, :32], d),
                r"`expert_rows` must be float32 \[N, 384\], got float32",
            ),
            (
                lambda d: (d.rows[0], d),
                r"`expert_rows` must be float32 \[N, 384\], got float32 \[384\]",
            ),
            (lambda d: (d.rows.to("meta"), d), "`expert_rows` must be on (cpu|cuda:0), got meta"),
            (lambda d: (d.rows.clone().requires_grad_(), d), RuntimeError, "forward only"),
            (
                lambda d: (d.rows.cpu().numpy(), d),
                TypeError,
                "`expert_rows` must be .*, got ndarray",
            ),
            *(
                (lambda d, other=other: (d.rows, other), TypeError, f"{IS_NO_HANDLE} {name}")
                for name, other in OTHERS.items()
            ),
        ]
        for call in ("combine", "combine_send")
    },
    ("plain", "expert", "combine_partial"): [
        (
            lambda d: (d, d.rows),
            TypeError,
            rf"{IS_NO_HANDLE} float32 \[.*\]: combine_partial takes the rows first",
        ),
        (
            lambda d: (torch.zeros(1, M, D, device=d.rows.device), d),
            "layout='expert' ends with combine",
        ),
    ],
    ("plain", "rank", "combine"): [
        (
            lambda d: (torch.zeros(15, D, device=d.recv.x.device), d),
            "layout='rank'.*combine_partial",
        )
    ],
    ("plain", "rank", "combine_partial"): [
        (
            lambda d: (d.recv.x[:, :7], d),
            r"`partial` must be float32 \[1, 16, 384\], got float32 \[1, 7, 384\]",
        )
    ],
    ("fp8", "expert", "combine"): [
        (
            lambda d: (torch.zeros(d.rows.shape, device=d.rows.device), d),
            TypeError,
            "`expert_rows` must be bfloat16",
        ),
        (lambda d: (d.rows, d), TypeError, f"`expert_rows` must be bfloat16, {ENDS_IN_FP8}"),
    ],
    ("fp8", "rank", "combine_partial"): [
        (lambda d: (d.recv.x, d), TypeError, f"`partial` must be bfloat16, {ENDS_IN_FP8}")
    ],
    ("plain", "expert", "dispatch_recv"): [
        (
            lambda _, other=other: (other,),
            TypeError,
            f"`sent` must be what dispatch_send returned, got {name}",
        )
        for name, other in OTHERS.items()
    ],
    ("plain", "expert", "combine_recv"): [
        (lambda _, other=other: (other,), TypeError, f"{IS_NO_HANDLE} {name}")
        for name, other in OTHERS.items()
    ],
}


@pytest.mark.parametrize(("call", "wrong", "error", "says"), rows_of(WRONG_IN_A_ROUND))
def test_a_wrong_call_in_a_round(groups, device, call, wrong, error, says):
    """The round stays open, and its right calls end it."""
    kind, layout, name = call
    if device.type == "cuda" and "must hold at least" in str(says):
        pytest.skip("GPUs skip rows that are missing")
    ep = groups(kind, device)
    given = {key: on(device, value) for key, value in SENT[kind].items()}
    # Bring the round to the call.
    handle = ep.dispatch_send(**given, layout=layout)
    if name != "dispatch_recv":
        handle = ep.dispatch_recv(handle)
        rows = (handle.recv.x if layout == "rank" else handle.rows).to(handle.dtype)
    if name == "combine_recv":
        ep.combine_send(rows, handle)
    # Twice the wrong call, which leaves it open.
    with torch.enable_grad():
        arguments = wrong(handle)
    for _ in range(2):
        with pytest.raises(error, match=says):
            getattr(ep, name)(*arguments)
        with pytest.raises(epmoe.EPStateError, match="round .* is still open"):
            ep.dispatch(**given)
    # The right calls end it.
    if name == "dispatch_recv":
        handle = ep.dispatch_recv(handle)
        rows = handle.rows
    if name == "combine_recv":
        ep.combine_recv(handle)
    else:
        (ep.combine_partial if layout == "rank" else ep.combine)(rows, handle)
    assert_whole(ep, kind)


def test_wrong_logits(groups):
    """16 columns for 12 experts would give ids 12 to 15, which dispatch takes for "no expert":
    zeros in y.
    """
    wide = (
        {"logits": torch.zeros(T, 16)},
        ValueError,
        r"`logits` must be .* \[T, 12\], got float32 \[5, 16\]",
    )
    for wrong, error, says in (
        wide,
        *no_such_tensor("logits", torch.zeros(T, E), f"{FLOAT} [T, 12]"),
    ):
        with pytest.raises(error, match=says):
            groups("plain", CPU).route(**wrong)


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
    # Fields of the other layout raise by name,
    for name in absent:
        owner = name if "." in name else f"dispatched.{name}"
        with pytest.raises(
            AttributeError, match=f"`{owner}` does not exist with layout='{layout}'"
        ):
            getattr(lacks, name.rpartition(".")[2])
    with pytest.raises(AttributeError, match="^'Dispatched' object has no attribute 'row'$"):
        _ = d.row
    # and those of this one are there.
    assert all(
        hasattr(has, name)
        for name in ("rows", "expert_offsets", "tokens_per_expert")
        if layout == "expert"
    )
    assert all(hasattr(has, name) for name in ("x", "ids", "weights") if layout == "rank")
    assert (
        has.scales is None
        if kind != "fp8"
        else (has.scales.dtype, has.scales.shape[-1]) == (torch.float32, 3)
    )
    assert has.extra is None if kind != "with extra" else has.extra.dtype == torch.int16
    assert "extra" not in repr(d.recv)
    assert d.recv.counts.tolist() == [T]
    ep.abort(d)


def test_the_operator_checks_what_would_be_a_wild_pointer(groups):
    """Scales of rows that are fp8 already."""
    ep = groups("fp8", CPU)
    given = SENT["fp8"]
    ep.abort(d := ep.dispatch(**given))
    rest = (None, T, *ep.exchange.memory, d.sent.descriptor)
    for x, wrong in ((q, None), (q.bfloat16(), scales), (q, scales[:, :2]), (q, scales.double())):
        with pytest.raises(RuntimeError, match="scales"):
            ops.dispatch(x, ids, weights, wrong, *rest)
