"""Training: experts against the gradients of plain torch in fp64."""

from __future__ import annotations

import adapter_models
import pytest
import torch
from helpers import FLOATS, alone, assert_close, full_layer, poisoned_memory, randn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import epmoe
from epmoe import GroupedExperts
from epmoe.native import ops
from epmoe.training import TrainingExchange, route

OFFSETS = [0, 3, 3, 16, 16]  # an expert without rows; gaps of segments are rows of zeros
N = 24
E = 4
D = 32
GPT_OSS = {"interleaved": True, "limit": 1.0, "alpha": 1.702, "up_offset": 1.0}


def experts_of(dtype, device, **options) -> GroupedExperts:
    F = options.pop("F", 16)
    shapes = [(E, 2 * F, D), (E, D, F), (E, 2 * F), (E, D)]
    *weights, gate_up_bias, down_bias = (
        randn(*s, seed=i).to(dtype).to(device) / 4 for i, s in enumerate(shapes)
    )
    if options.pop("biased", False):
        options |= {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return GroupedExperts(*weights, **options)


def plain(experts, rows, offsets, weights):
    """In fp64, with gradients, of the real rows: weighted outputs, as combine makes them."""
    # Leaves in fp64.
    parameters = [p.detach().double().cpu().requires_grad_() for p in experts.parameters()]
    gate_up, down, *biases = parameters
    rows_ND = rows.detach().double().cpu().requires_grad_()
    weights_N = weights.detach().double().cpu().requires_grad_()
    outs = []
    # Each expert with its rows.
    for i in range(E):
        mine = slice(offsets[i], offsets[i + 1])
        both = rows_ND[mine] @ gate_up[i].T + (biases[0][i] if biases else 0.0)
        gate_nF, up_nF = both.chunk(2, 1)
        if experts.interleaved:
            gate_nF = both[:, ::2]
            up_nF = both[:, 1::2]
        if experts.limit is not None:
            gate_nF = gate_nF.clamp(max=experts.limit)
            up_nF = up_nF.clamp(-experts.limit, experts.limit)
        hidden_nF = gate_nF * torch.sigmoid(experts.alpha * gate_nF) * (up_nF + experts.up_offset)
        out_nD = hidden_nF @ down[i].T + (biases[1][i] if biases else 0.0)
        outs.append(weights_N[mine, None] * out_nD)
    return torch.cat(outs), (rows_ND, weights_N, *parameters)


def weighted(experts, checkpoints=False, **options):
    """A call with row weights."""

    def call(rows, offsets, row_weights):
        inputs = {"row_weights": row_weights, **options}
        return (
            checkpoint(experts, rows, offsets, use_reentrant=False, **inputs)
            if checkpoints
            else experts(rows, offsets, **inputs)
        )

    return call


@pytest.mark.parametrize(
    "options", [{}, {"F": 6}, GPT_OSS, {"F": 6, "biased": True}, GPT_OSS | {"biased": True}]
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_experts(device, dtype, options):
    experts = experts_of(dtype, device, **options)
    real = OFFSETS[-1]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    rows = randn(N, D, seed=5).to(dtype)
    weights = randn(N, seed=6)
    grad = randn(N, D, seed=7).to(dtype)
    # Nobody may read these.
    rows[real:] = torch.nan
    weights[real:] = torch.nan
    grad[real:] = torch.nan

    # In plain torch, fp64.
    unweighted, _ = plain(experts, rows, OFFSETS, torch.ones(N))
    want, leaves = plain(experts, rows, OFFSETS, weights)
    (want * grad[:real].double()).sum().backward()

    # Twice, and with a checkpoint.
    results = []
    for call in (weighted(experts), weighted(experts), weighted(experts, checkpoints=True)):
        x = rows.to(device, copy=True).requires_grad_()
        w = weights.to(device, copy=True).requires_grad_()
        experts.zero_grad()
        with poisoned_memory():
            out = call(x, offsets, w)
            out.backward(grad.to(device))
        assert_close(out[:real].detach(), unweighted.detach(), slack=4)
        assert not out[real:].any() and not x.grad[real:].any() and not w.grad[real:].any()
        with torch.no_grad():
            assert torch.equal(experts(x, offsets)[:real], out[:real]), "the bits of serving"
        results.append(
            [x.grad[:real], w.grad[:real], *(p.grad.clone() for p in experts.parameters())]
        )

    # The same bits each time, and near the plain ones.
    for got, again, kept, leaf in zip(*results, leaves, strict=True):
        assert torch.equal(got, again) and torch.equal(got, kept)
        assert_close(got, leaf.grad[: len(got)], dtype, slack=4)
    assert not experts.w_down.grad[1].any() and not experts.w_gate_up.grad[1].any(), (
        "no rows, no gradients"
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows, e", [(0, E), (5, 0), (0, 0), (5, E)])
def test_no_rows_and_no_experts(device, rows, e, biased):
    biases = {
        "gate_up_bias": torch.randn(e, 32, device=device),
        "down_bias": torch.randn(e, D, device=device),
    }
    experts = GroupedExperts(
        torch.randn(e, 32, D, device=device),
        torch.randn(e, D, 16, device=device),
        **biases if biased else {},
    )
    # All rows lie behind the last segment, and are NaN.
    x = torch.full((rows, D), torch.nan, device=device, requires_grad=True)
    offsets = torch.zeros(e + 1, dtype=torch.int32, device=device)
    with poisoned_memory():
        experts(
            x, offsets, row_weights=torch.ones(rows, device=device, requires_grad=True)
        ).sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gaps(device, dtype, weighted, biased):
    """Segments with gaps have the gradients of the same rows without them."""
    experts = experts_of(dtype, device, **GPT_OSS, biased=biased)
    tokens = [3, 0, 5, 2]
    offsets = [0, 4, 4, 12, 16]
    # Rows that are a pair's; NaN lies behind the last segment.
    real = [t for i, n in enumerate(tokens) for t in range(offsets[i], offsets[i] + n)]
    rows, grad, weights = (torch.zeros(N, n) for n in (D, D, 1))
    for seed, given in enumerate((rows, grad, weights)):
        given[real] = randn(len(real), given.shape[1], seed=seed)
        given[offsets[-1] :] = torch.nan

    # Without gaps, with gaps, and with gaps of which nobody says how long they are.
    dense = torch.tensor([0, *torch.tensor(tokens).cumsum(0)])
    results = []
    for at, starts, counts in (
        (real, dense, None),
        (range(N), offsets, tokens),
        (range(N), offsets, None),
    ):
        at = list(at)
        starts, counts = (
            None if v is None else torch.as_tensor(v).int().to(device) for v in (starts, counts)
        )
        x = rows[at].to(dtype).to(device).requires_grad_()
        w = weights[at, 0].to(device).requires_grad_() if weighted else None
        experts.zero_grad()
        with poisoned_memory():
            out = experts(x, starts, row_weights=w, tokens_per_expert=counts)
            out.backward(grad[at].to(dtype).to(device))

        # What the rows of pairs give, wherever they lie. Gaps give nothing.
        place = [at.index(t) for t in real]
        by_weights = [w.grad[place]] if weighted else []
        results.append(
            [
                out.detach()[place],
                x.grad[place],
                *by_weights,
                *(p.grad for p in experts.parameters()),
            ]
        )
        if counts is not None:
            gaps = [t for t in range(offsets[-1]) if t not in real]
            assert not x.grad[gaps].any() and (not weighted or not w.grad[gaps].any())
    for others in results[1:]:
        for got, want in zip(others, results[0], strict=True):
            assert_close(got, want, dtype)


@pytest.mark.parametrize("F", [6, 128])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_activation_writes_zeros_into_gaps_and_nothing_past_the_end(
    device, dtype, interleaved, F
):
    """Whatever lies there: gradients of weights read gaps."""
    offsets, tokens = (
        torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 4, 4, 12], [3, 0, 10**6])
    )
    gate_up, grad = (randn(16, n).to(dtype).to(device) for n in (2 * F, F))
    weights = randn(16, seed=1).to(device)
    gating = (interleaved, 7.0, 1.702, 1.0)
    # What both directions give without gaps.
    want = [ops.weighted_gates(gate_up, weights, offsets, None, *gating)]
    want += ops.weighted_gates_backward(grad, gate_up, weights, offsets, None, *gating, True)
    # A gap in the first segment, and rows past the last one.
    for given in (gate_up, grad, weights):
        given[3] = torch.nan
        given[12:] = torch.nan
    with poisoned_memory():
        got = [ops.weighted_gates(gate_up, weights, offsets, tokens, *gating)]
        got += ops.weighted_gates_backward(grad, gate_up, weights, offsets, tokens, *gating, True)
    # Rows of pairs are as before, gaps are zeros, and what follows is untouched.
    real = [t for t in range(12) if t != 3]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[real], b[real]) and not a[3].any() and a[12:].isnan().all()
    outputs = got[-1]
    assert torch.equal(got[0][:12], outputs[:12])


@pytest.mark.parametrize("weights_on", ["both", "rows", "combine"])
def test_rows_past_the_last_segment_reach_no_module_around_the_experts(device, weights_on):
    """Gains in front of the experts and behind them have the gradients of exactly the rows that
    arrive.
    """
    options = {"weights_on": weights_on, "tag": 1}
    results = []
    with epmoe.ExpertParallel(alone(), device=device) as ep:
        exchange = TrainingExchange(ep)
        layer = full_layer(ep)[0]
        x = randn(3, 64).to(device).requires_grad_()
        # As many rows as arrive, and more.
        for num_rows in ("exact", 32):
            gains = torch.ones(2, 64, device=device, requires_grad=True)
            with poisoned_memory(), torch.autograd.detect_anomaly(check_nan=True):
                routed = exchange.dispatch(
                    x, *route(layer.logits(x), 2), num_rows=num_rows, **options
                )
                weights = {"row_weights": routed.row_weights} if weights_on == "both" else {}
                rows = (
                    layer.experts(routed.rows * gains[0], routed.expert_offsets, **weights)
                    * gains[1]
                )
                rows = rows * routed.row_weights[:, None] if weights_on == "rows" else rows
                y = exchange.combine(rows, routed)
                results.append(
                    torch.autograd.grad(y.square().sum(), (x, gains, *layer.parameters()))
                )
    for exact, got in zip(*results, strict=True):
        assert_close(got, exact)


def test_strides_and_addresses_that_no_vector_fits(device):
    experts = experts_of(torch.bfloat16, device)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    beside, grad = (randn(N, D + 3, seed=s).bfloat16().to(device) for s in range(2))
    results = []
    # As they are, and as copies that vectors fit.
    for copied in (False, True):
        x = (
            (beside[:, 1 : D + 1].clone() if copied else beside[:, 1 : D + 1])
            .detach()
            .requires_grad_()
        )
        by = grad[:, 1 : D + 1].clone() if copied else grad[:, 1 : D + 1]
        experts.zero_grad()
        experts(x, offsets).backward(by)
        results.append(
            [x.grad[: OFFSETS[-1]].clone(), *(p.grad.clone() for p in experts.parameters())]
        )
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("gemm", ["torch", "loop"])
@pytest.mark.parametrize("transposed", [False, True])
def test_compilers_know_the_strides_of_gradients(gemm, transposed):
    """A checkpoint may have weights transposed; fake kernels then say what the real ones return."""
    # The operands of the operators.
    weights = randn(E, D, 32).transpose(1, 2) if transposed else randn(E, 32, D)
    rows = randn(16, D, seed=1).requires_grad_()
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    bias, down_bias, factors = (
        t.requires_grad_() for t in (randn(E, 32), randn(E, D), torch.rand(16))
    )
    down = randn(E, D, 16).requires_grad_()
    by = randn(16, 32)
    gating = (False, 7.0, 1.702, 1.0)
    kept = [t.detach() for t in (rows, randn(16, 32), factors, weights, down, bias, down_bias)]
    # The arguments of each operator.
    for name, given in {
        "train_gemm": (rows, weights.requires_grad_(), offsets, gemm),
        "train_gemm_weights": (by, rows.detach(), offsets, gemm),
        "train_bias": (bias, offsets, 16, gemm),
        "train_experts": (
            rows,
            factors,
            weights,
            down,
            bias,
            down_bias,
            offsets,
            None,
            *gating,
            gemm,
        ),
        "train_experts_backward": (by, *kept, offsets, None, *gating, gemm, [True] * 6),
    }.items():
        torch.library.opcheck(getattr(torch.ops.epmoe, name), given)


def test_selective_checkpoints(device):
    """What a policy saves is not computed again, and the gradients have the same bits."""
    experts = experts_of(torch.bfloat16, device)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    rows = randn(N, D).bfloat16().to(device)
    weights = randn(N, seed=1).to(device)
    runs = 0

    def policy(context, op, *arguments, **options):
        nonlocal runs
        saves = op is torch.ops.epmoe.train_experts.default
        runs += saves and not context.is_recompute
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def saving(x, w):
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(
            experts, x, offsets, row_weights=w, use_reentrant=False, context_fn=contexts
        )

    # Without a checkpoint, and with one that saves what the experts compute.
    results = []
    for call in (lambda x, w: experts(x, offsets, row_weights=w), saving):
        x = rows.clone().requires_grad_()
        w = weights.clone().requires_grad_()
        experts.zero_grad()
        call(x, w)[: OFFSETS[-1]].float().square().sum().backward()
        real = slice(OFFSETS[-1])
        results.append(
            [x.grad[real], w.grad[real], *(p.grad.clone() for p in experts.parameters())]
        )
    assert runs == 1 and all(map(torch.equal, *results))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_gradients_raise(frozen):
    experts = experts_of(torch.float32, "cpu").requires_grad_(not frozen)
    x = randn(N, D).requires_grad_()
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    y = experts(x, offsets)[: OFFSETS[-1]]
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients|no autograd formula"):
        grad[: OFFSETS[-1]].square().sum().backward()


def test_frozen_parameters_take_no_gemm():
    experts = experts_of(torch.float32, "cpu").requires_grad_(False)
    x = randn(N, D).requires_grad_()
    with torch.profiler.profile() as profile:
        experts(x, torch.tensor(OFFSETS, dtype=torch.int32))[: OFFSETS[-1]].sum().backward()
    calls = [event.name for event in profile.events()]
    assert x.grad[: OFFSETS[-1]].all(1).any()
    assert calls.count("aten::_grouped_mm") == 4  # with the gradients of weights 6


@pytest.mark.parametrize(
    "trains, kept",
    [
        ("all", {"rows", "gate_up", "w_gate_up", "w_down"}),
        ("rows", {"gate_up", "w_gate_up", "w_down"}),
        ("row_weights", {"gate_up", "w_down"}),
        ("w_down", {"gate_up"}),
        ("w_gate_up", {"rows", "gate_up", "w_down"}),
    ],
)
def test_the_backward_pass_keeps_what_it_needs(trains, kept):
    """Never outputs, nor what a frozen part alone would need."""
    experts = experts_of(torch.float32, "cpu", F=8).requires_grad_(trains == "all")
    x = randn(N, D).requires_grad_(trains in ("all", "rows"))
    w = torch.rand(N).requires_grad_(trains == "row_weights")
    if trains.startswith("w_"):
        getattr(experts, trains).requires_grad_()
    # Shapes tell what is kept.
    names = {(N, D): "rows", (N, 16): "gate_up", (E, 16, D): "w_gate_up", (E, D, 8): "w_down"}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    ):
        experts(x, torch.tensor(OFFSETS, dtype=torch.int32), row_weights=w)
    assert {names[shape] for shape in saved if shape in names} == kept


@pytest.mark.parametrize("biased", [False, True])
def test_experts_compiled(biased):
    experts = experts_of(torch.bfloat16, "cpu", biased=biased)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    rows = torch.randn(N, D).bfloat16()
    weights = torch.rand(N)
    results = []
    for call in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        experts.zero_grad()
        call(rows, offsets, row_weights=weights)[: OFFSETS[-1]].sum().backward()
        results.append([p.grad.clone() for p in experts.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_weights_that_only_serve_do_not_train_in_silence(dtype):
    scales = {"gate_up_scales": torch.ones(2, 1, 1), "down_scales": torch.ones(2, 1, 1)}
    options = scales if dtype.itemsize == 1 else {}
    experts = GroupedExperts(
        torch.ones(2, 8, 16).to(dtype), torch.ones(2, 16, 4).to(dtype), **options
    )
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    rows = torch.ones(3, 16, dtype=experts.dtype)
    assert not any(p.requires_grad for p in experts.parameters())
    assert not experts(rows, offsets).requires_grad
    with pytest.raises(RuntimeError, match="have no gradients.*inference_mode"):
        experts(rows.requires_grad_(), offsets)


def test_forward_mode_is_refused():
    """It would get derivatives of zero."""
    experts = experts_of(torch.float32, "cpu")
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: experts(x, offsets), (randn(N, D),), (randn(N, D),))


def test_weights_that_a_parametrization_makes(device):
    """Adapters of PEFT are outside of the experts, whose own parameters are frozen; rows need no
    gradient either.
    """
    experts = experts_of(torch.float32, device)
    before = experts.w_gate_up.detach().clone(), experts.w_down.detach().clone()
    factors = adapter_models.parametrize(experts, "w_gate_up", "w_down")
    rows = randn(N, D, seed=5).to(device)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    grad = randn(OFFSETS[-1], D, seed=6).to(device)
    # Gradients of the factors through the experts,
    experts(rows, offsets)[: OFFSETS[-1]].backward(grad)
    got = [factor.grad.clone() for factor in factors]
    # and through a plain layer of the merged weights.
    merged = [
        weight + torch.bmm(b, a)
        for weight, (a, b) in zip(before, (factors[:2], factors[2:]), strict=True)
    ]
    outs = []
    for i in range(E):
        gate, up = (rows[OFFSETS[i] : OFFSETS[i + 1]] @ merged[0][i].T).chunk(2, 1)
        outs.append((torch.nn.functional.silu(gate) * up) @ merged[1][i].T)
    for factor in factors:
        factor.grad = None
    torch.cat(outs).backward(grad)
    for gradient, factor in zip(got, factors, strict=True):
        assert_close(gradient, factor.grad.double(), slack=4)
