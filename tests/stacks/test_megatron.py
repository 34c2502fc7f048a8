"""epmoe carries the tokens of Megatron-Core's own MoE layers, as its all-to-all does. `make
stacks-megatron` runs it.

Experts are SequentialMLP, since its grouped GEMM needs TransformerEngine. One rank a GPU where
there are GPUs. On CPUs Megatron's all-to-all dispatcher makes a stream of CUDA and leaves it
unused, so streams are stubs there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

if "RANK" not in os.environ:
    pytest.skip(
        "needs Megatron-Core and 2 or 4 ranks: make stacks-megatron", allow_module_level=True
    )

ON_GPUS = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPUS else torch.device("cpu")


class _Stream:
    """A stream or an event. Work on a CPU is done when its call returns."""

    def wait_stream(self, *_: object) -> _Stream:
        return self

    wait_event = synchronize = record_event = wait_stream


torch.compiler.set_stance("force_eager")  # Megatron compiles small functions; minutes here
if ON_GPUS:
    torch.cuda.set_device(DEVICE)
else:
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()  # for checkpoints
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]

from interrupted_steps import steps_until_whole  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.moe import moe_utils, router_replay, token_dispatcher  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from epmoe.integrations import megatron  # noqa: E402
from epmoe.integrations.megatron import EpmoeMoELayer, exchanged  # noqa: E402
from epmoe.training import exchange  # noqa: E402

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 reads it without TransformerEngine, too


def _on_host(tensor: Any, as_numpy: bool = False, **_: bool) -> Any:
    """Megatron's own leaves a tensor of the CPU as it is, which gloo does not take for sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


if not ON_GPUS:
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host

# In the seat, and in its context managers.
FILES = {module.__file__ for module in (contextlib, exchange, megatron)}
D = 64
WIDTH = 96
E = 8
K = 3
S = 12
B = 2


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    os.environ |= {"EPMOE_EXCHANGE__TIMEOUT_S": "60", "EPMOE_EXCHANGE__WARMUP_TIMEOUT_S": "120"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPUS else "gloo")
    yield
    megatron.close()
    dist.destroy_process_group()


@contextlib.contextmanager
def parallel(
    tp: int = 1, ep: int | None = None, etp: int = 1, pp: int = 1
) -> Iterator[dict[str, int]]:
    ep = dist.get_world_size() // (etp * pp) if ep is None else ep
    sizes = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    sizes["pipeline_model_parallel_size"] = pp
    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield sizes
    finally:
        megatron.close()
        parallel_state.destroy_model_parallel()
        # Megatron keeps one for all layers. Its schedules write a tensor of another shape into one
        # that a layer made.
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


def config_of(sizes: dict[str, int], **options: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": D,
        "num_attention_heads": 4,
        "ffn_hidden_size": WIDTH,
        "moe_ffn_hidden_size": WIDTH,
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "sequence_parallel": sizes["tensor_model_parallel_size"] > 1,
        "moe_router_dtype": "fp32",
    }
    return TransformerConfig(**sizes, **(values | options))


def layer_of(
    config: TransformerConfig, ours: bool, dtype: torch.dtype = torch.float32, group: Any = None
) -> MoELayer:
    """The layer has the same parameters, whatever carries the tokens. The ranks of `group` have the
    same router.
    """
    mlp = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False).submodules.mlp
    mlp = exchanged(mlp) if ours else mlp
    if hasattr(mlp, "module"):
        layer = mlp.module(config, submodules=mlp.submodules, layer_number=1)
    else:
        layer = mlp(config, layer_number=1)
    assert isinstance(layer, EpmoeMoELayer) is ours
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "local_experts" not in name:
                dist.broadcast(parameter, group=group, group_src=0)
    return layer.to(DEVICE, dtype).train()


def step(layer: MoELayer, seed: int = 0, tokens: int = S) -> dict[str, Tensor]:
    """y, and the gradients of x and of all parameters."""
    dtype = next(layer.parameters()).dtype
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x, grad_y = (torch.randn(tokens, B, D, generator=generator).to(DEVICE, dtype) for _ in range(2))
    x.requires_grad_()
    layer.zero_grad()
    y, bias = layer(x)
    assert bias is None
    y.backward(grad_y)
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def compare(got: dict[str, Tensor], want: dict[str, Tensor], exact: bool = True) -> None:
    assert got.keys() == want.keys()
    assert any("router" in name for name in got) and any("local_experts" in name for name in got)
    for name, tensor in want.items():
        if exact and name not in ("y", "x"):  # sums over experts, in another order
            assert torch.equal(got[name], tensor), name
        most = float(tensor.abs().max()) * (1e-5 if tensor.dtype == torch.float32 else 2e-2)
        torch.testing.assert_close(got[name], tensor, rtol=0.0, atol=most, msg=name)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aux loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "capacity drops": {"moe_expert_capacity_factor": 0.75},
    "sigmoid with a bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "shared experts": {"moe_shared_expert_intermediate_size": 64},
    "shared experts beside": {
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_overlap": True,
    },
    "one expert a token": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_experts_and_router_are_those_of_all_to_all(
    case: str, dtype: torch.dtype
) -> None:
    with parallel() as sizes:
        config = config_of(sizes, **CASES[case])
        want = step(layer_of(config, False, dtype))
        ours = layer_of(config, True, dtype)
        compare(step(ours), want)
        compare(step(ours), want)


def test_steps_have_the_same_bits_with_other_tokens_between_them() -> None:
    with parallel() as sizes:
        layer = layer_of(config_of(sizes), True)
        first = step(layer, tokens=S + 4)
        step(layer, seed=1, tokens=3 + dist.get_rank())
        for name, tensor in step(layer, tokens=S + 4).items():
            assert torch.equal(tensor, first[name]), name


def test_a_rank_without_rows_takes_part() -> None:
    with parallel() as sizes:
        config = config_of(sizes, **CASES["sigmoid with a bias"])
        layers = [layer_of(config, ours) for ours in (False, True)]
        for layer in layers:
            layer.router.expert_bias[E // 2 :] = -100.0
        want, got = map(step, layers)
        compare(got, want)
        idle = [want[name] for name in want if "local_experts" in name]
        assert dist.get_rank() < dist.get_world_size() // 2 or not any(
            tensor.any() for tensor in idle
        )


def test_recomputation_has_the_same_bits_in_three_rounds() -> None:
    with parallel() as sizes:
        plain = layer_of(config_of(sizes), True)
        want = step(plain)
        layer = layer_of(
            config_of(sizes, recompute_granularity="selective", recompute_modules=["moe"]), True
        )
        rounds = plain.token_dispatcher._exchange.ep.exchange.rounds
        before = rounds.count
        got = step(layer)
        assert rounds.count - before == 3
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("ep", [2, None], ids=["EP of 2", "EP of all"])
def test_two_micro_batches_are_in_flight(ep: int | None) -> None:
    """As in the 1F1B schedule of a pipeline: the second forward pass runs before the first backward
    pass.
    """
    with parallel(ep=ep) as sizes:
        results = []
        for ours in (False, True):
            layer = layer_of(config_of(sizes), ours)
            generator = torch.Generator().manual_seed(dist.get_rank())
            batches = [
                torch.randn(tokens, B, D, generator=generator).to(DEVICE)
                for tokens in (S, S - 4, S)
            ]
            # Each forward pass, and then the backward pass of the batch before.
            outputs = [layer(batches[0])[0]]
            for before, batch in itertools.pairwise(batches):
                outputs.append(layer(batch)[0])
                outputs[-2].backward(before)
            outputs[-1].backward(batches[-1])
            gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
            results.append({"y": torch.cat(outputs).detach()} | gradients)
        compare(results[1], results[0])


def test_routes_of_megatron_are_replayed() -> None:
    """Its `moe_enable_routing_replay`: what one layer recorded, another with a router of its own
    follows.
    """
    actions = router_replay.RouterReplayAction
    with parallel() as sizes:
        config = config_of(sizes, moe_enable_routing_replay=True)
        results = []
        for ours in (False, True):
            layer = layer_of(config, ours)
            replay = layer.router.router_replay
            # Record the routes of a step.
            replay.set_router_replay_action(actions.RECORD)
            step(layer)
            routes = replay.get_recorded_indices().clone()
            # Replay them with a router that would choose others.
            with torch.no_grad():
                layer.router.weight.neg_()
            replay.set_target_indices(routes)
            replay.set_router_replay_action(actions.REPLAY_FORWARD)
            results.append(step(layer))
            chosen = layer.token_dispatcher.ids if ours else routes.sort().values
            assert torch.equal(chosen.long(), routes.sort().values)
        compare(results[1], results[0])


@pytest.mark.parametrize("saves", [False, True], ids=["of Megatron", "with epmoe"])
def test_a_checkpoint_of_megatron(saves: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its distributed checkpoint of a layer, loaded over fewer ranks of EP by the other kind of
    layer.
    """
    folder = [str(tmp_path_factory.mktemp("checkpoint"))]
    dist.broadcast_object_list(folder)
    # One kind of layer saves over all ranks.
    with parallel() as sizes:
        layer = layer_of(config_of(sizes), saves)
        want = step(layer)
        dist_checkpointing.save(layer.sharded_state_dict("layer."), folder[0])
    # The other kind loads over two, and its step is the same.
    with parallel(ep=2) as sizes:
        other = layer_of(config_of(sizes), not saves)
        state = other.sharded_state_dict("layer.")
        loaded = dist_checkpointing.load(state, folder[0])
        other.load_state_dict(
            {name.removeprefix("layer."): tensor for name, tensor in loaded.items()}
        )
        got = step(other)
        for name in ("y", "x"):
            torch.testing.assert_close(
                got[name], want[name], rtol=0.0, atol=float(want[name].abs().max()) * 1e-5
            )


@pytest.mark.parametrize("tp, etp", [(2, 1), (2, 2), (1, 2)])
def test_tensor_parallel_attention_and_experts(tp: int, etp: int) -> None:
    with parallel(tp=tp, etp=etp) as sizes:
        # With ETP, Megatron's all-to-all gathers rows of unequal numbers, which gloo cannot.
        reference = "alltoall" if etp == 1 else "allgather"
        want = step(layer_of(config_of(sizes, moe_token_dispatcher_type=reference), False))
        compare(step(layer_of(config_of(sizes), True)), want)


def test_stages_work_one_by_one() -> None:
    """In a layer that has never run a forward pass of its own."""
    with parallel() as sizes:
        config = config_of(sizes, **CASES["shared experts beside"])
        want = step(layer_of(config, False))
        layer = layer_of(config, True)
        dispatcher = layer.token_dispatcher

        def stages(x: Tensor) -> tuple[Tensor, None]:
            probs, routing_map = layer.router(x)
            tokens, probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
            rows, counts, probs = dispatcher.dispatch_postprocess(
                *dispatcher.token_dispatch(tokens, probs)
            )
            outputs, _ = layer.experts(rows, counts, probs)
            sums = dispatcher.token_combine(dispatcher.combine_preprocess(outputs))
            return dispatcher.combine_postprocess(sums), None

        layer.forward = stages
        compare(step(layer), want)


@pytest.mark.parametrize(
    "stage, arguments, before",
    [
        ("token_dispatch", 2, "dispatch_preprocess"),
        ("dispatch_postprocess", 2, "token_dispatch"),
        ("token_combine", 1, "token_dispatch"),
        ("combine_postprocess", 1, "dispatch_preprocess"),
    ],
)
def test_a_stage_names_the_one_that_is_missing(stage: str, arguments: int, before: str) -> None:
    with parallel() as sizes:
        call = getattr(layer_of(config_of(sizes), True).token_dispatcher, stage)
        with pytest.raises(RuntimeError, match=f"`{stage}` without a `{before}` before"):
            call(*[torch.zeros(S, D, device=DEVICE)] * arguments)


def test_more_tokens_than_the_windows_hold() -> None:
    with parallel() as sizes:
        layer = layer_of(config_of(sizes), True)
        want = step(layer)
        with pytest.raises(
            ValueError, match="set EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK, now 24, to 26"
        ):
            layer(torch.randn(S + 1, B, D, device=DEVICE))
        for name, tensor in step(layer).items():
            assert torch.equal(tensor, want[name]), name


def test_a_handler_raises_at_any_place_of_a_forward_pass() -> None:
    """Whatever raises on one rank, the others have their sums or hear of it, and all go on."""
    with parallel() as sizes:
        layer = layer_of(config_of(sizes), True)
        want = step(layer)
        x = torch.randn(S, B, D, device=DEVICE)
        dispatcher = layer.token_dispatcher
        find = dispatcher._open

        def forward(begun: Callable[[], None]) -> None:
            # From where the pass has found its exchange.
            def begin(*arguments: Any) -> Any:
                dispatcher._open = find
                exchange = find(*arguments)
                begun()
                return exchange

            dispatcher._open = begin
            layer(x)

        outcomes = set[str]()
        for found in steps_until_whole(dist.get_rank(), forward, files=FILES):
            others = {outcome for rank, outcome in enumerate(found) if rank != 1}
            assert len(others) == 1, found
            outcomes |= others
            for name, tensor in step(layer).items():
                assert torch.equal(tensor, want[name]), name
        assert outcomes == {"EPAbortedError", "whole"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"moe_token_dispatcher_type": "allgather"}, "must be 'alltoall' with epmoe"),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "without padding",
        ),
    ],
)
def test_what_epmoe_does_not_do_says_so(options: dict[str, Any], message: str) -> None:
    with parallel() as sizes, pytest.raises(ValueError, match=message):
        layer_of(config_of(sizes, **options), True)


@pytest.mark.parametrize(
    "name", ["overlap_moe_expert_parallel_comm", "moe_router_padding_for_quantization"]
)
def test_what_megatron_admits_on_gpus_only_says_so(name: str) -> None:
    with parallel() as sizes:
        config = config_of(sizes)
        setattr(config, name, True)
        with pytest.raises(ValueError, match=f"`{name}` must be False with epmoe"):
            layer_of(config, True)


def test_other_layers_are_not_exchanged() -> None:
    with pytest.raises(TypeError, match="partial of Megatron's MoELayer"):
        exchanged(get_gpt_layer_local_spec().submodules.mlp)


class OnHost(TorchFunctionMode):
    """Where Megatron asks for "cuda" by name, tensors are of the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = DEVICE
        return function(*args, **kwargs)


class Stage(torch.nn.Module):
    """A layer and what Megatron's schedule asks of a model."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer
        self.config = layer.config
        self.received = None
        self.model_type = ModelType.encoder_or_decoder  # 0.16 asks for it

    def set_input_tensor(self, received: Any) -> None:
        [self.received] = received if isinstance(received, list) else [received]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.received is None else self.received
        return x + self.layer(x)[0]


def loss_of(y: Tensor) -> tuple[Tensor, Tensor]:
    loss = y.square().mean()
    return loss, loss.detach()


@pytest.mark.parametrize("recomputes", [False, True])
def test_its_pipeline(recomputes: bool) -> None:
    """1F1B of Megatron over two stages, each a layer over half of the ranks.

    It comes last: its first stage is in a group more than its second, and torch names the groups
    that the exchange makes by how many a rank is in.
    """
    options = (
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if recomputes else {}
    )
    generator = torch.Generator().manual_seed(dist.get_rank() % (dist.get_world_size() // 2))
    # As embeddings have gradients: Megatron's recomputation needs those of its inputs.
    batches = [
        torch.randn(S, B, D, generator=generator).to(DEVICE).requires_grad_() for _ in range(4)
    ]
    results = []
    with parallel(pp=2) as sizes:
        config = config_of(sizes, num_layers=2, pipeline_dtype=torch.float32, **options)
        for ours in (False, True):
            stage = Stage(
                layer_of(config, ours, group=parallel_state.get_expert_model_parallel_group())
            )
            run = schedules.get_forward_backward_func()
            assert run is schedules.forward_backward_pipelining_without_interleaving
            with OnHost():
                losses = run(
                    forward_step_func=lambda data, model: (model(next(data)), loss_of),
                    data_iterator=iter(batches),
                    model=stage,
                    num_microbatches=4,
                    seq_length=S,
                    micro_batch_size=B,
                )
            assert len(losses) == 4 * parallel_state.is_pipeline_last_stage()
            y = torch.stack(losses) if losses else torch.zeros(1)
            gradients = {
                name: p.grad for name, p in stage.layer.named_parameters() if p.grad is not None
            }
            results.append({"losses": y} | gradients)
    compare(results[1], results[0], exact=False)
