"""Weights whose memory goes and comes back while an `ExpertParallel` sleeps."""

from __future__ import annotations

import _thread
import io
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from helpers import (
    NO_CUDA,
    Interrupted,
    alone,
    bytes_of,
    full_layer,
    interrupted_at,
    randn,
    stopped_at,
)
from torch import Tensor, nn

import epmoe
from epmoe import EPStateError, checkpoint, service
from epmoe.exchange import addresses, cpu, node, places, window
from epmoe.group import deaths, join
from epmoe.life import life, membership
from epmoe.live import sleeping

NBYTES = 2 << 20  # more than torch and the driver round to
FILES = {
    module.__file__
    for module in (
        addresses,
        cpu,
        deaths,
        join,
        life,
        membership,
        node,
        places,
        service,
        sleeping,
        window,
    )
}


def buffers(*tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        module.register_buffer(str(number), tensor)
    return module


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_layer_is_right_after_its_weights_were_gone(device, level, inference):
    config = alone(
        hidden=128,
        dtype="bfloat16" if device.type == "cuda" else "float32",
        max_tokens=16,
        routing={"selection_bias": True},
    )
    with (
        epmoe.ExpertParallel(config, device=device) as ep,
        torch.inference_mode(inference),
        torch.no_grad(),
    ):
        # What the layer computes, also as a graph.
        layer, _ = full_layer(ep, bias=True)
        kept = {name: value.cpu() for name, value in layer.state_dict().items()}
        state = [*layer.parameters(), layer.bias]
        weights = epmoe.SleepingWeights(layer)
        x = torch.randn(8, 128, device=device, dtype=config.model.torch_dtype)
        want = layer(x).clone()
        run = None
        y = torch.empty(0)
        if device.type == "cuda" and layer.experts.gemm != "loop":
            run = torch.cuda.CUDAGraph()
            with torch.cuda.graph(run):
                y = layer(x)

        # Twice asleep: the memory goes and comes back at the same addresses.
        at = [value.data_ptr() for value in state]
        for _ in range(2):
            ep.sleep(weights.offload if level == 1 else weights.discard)
            if device.type == "cpu":
                assert not any(value.any() for value in state), "the memory has gone"
            ep.wake(weights.restore)
            if level == 2:
                layer.load_state_dict(kept)
            assert torch.equal(layer(x), want)
            if run is not None:
                y.zero_()
                run.replay()
                assert torch.equal(y, want)
        assert [value.data_ptr() for value in [*layer.parameters(), layer.bias]] == at


@pytest.mark.gpu
@NO_CUDA
def test_their_memory_is_free_meanwhile():
    module = nn.Linear(NBYTES // 64, 16, bias=False, device="cuda", dtype=torch.float32)
    weights = epmoe.SleepingWeights(module)
    torch.cuda.empty_cache()

    def free_bytes() -> int:
        return torch.cuda.mem_get_info()[0]

    def changes() -> tuple[int, int]:
        """What the weights have freed, and what is missing once they are back."""
        before = free_bytes()
        weights.offload()
        freed = free_bytes() - before
        weights.restore()
        return freed, before - free_bytes()

    # Other processes may take and free memory of the GPU meanwhile.
    assert any(changes() == (NBYTES, 0) for _ in range(100))


def test_what_has_gone_or_is_here_already():
    module = nn.Linear(3, 2)
    want = module.weight.clone()
    weights = epmoe.SleepingWeights(module)
    weights.restore()
    for _ in range(2):
        weights.offload()
    weights.restore()
    assert torch.equal(module.weight, want)
    module.weight.sum().backward()  # they train on
    assert bool((module.weight.grad == 1).all())


def test_what_sleeps_is_not_saved_or_loaded(tmp_path):
    """On CPUs it reads as zeros, which would replace a good checkpoint."""
    with epmoe.ExpertParallel(alone()) as ep:
        layer, _ = full_layer(ep)
        model = nn.Sequential(layer)
        kept = {name: value.clone() for name, value in layer.state_dict().items()}
        whole = checkpoint.full_state_dict(model)
        checkpoint.save(model, tmp_path / "saved")
        sender = epmoe.WeightSender(model, tmp_path / "versions")
        weights = epmoe.SleepingWeights(model)
        calls = [
            lambda: checkpoint.save(model, tmp_path / "saved"),
            lambda: checkpoint.load(model, tmp_path / "saved"),
            lambda: checkpoint.full_state_dict(model),
            lambda: checkpoint.sharded_state_dict(layer),
            lambda: checkpoint.load_full_state_dict(model, whole),
            lambda: sender.send(1),
        ]

        ep.sleep(weights.offload)
        for call in calls:
            with pytest.raises(epmoe.EPStateError, match="has no memory while the weights sleep"):
                call()
        assert not [*(tmp_path / "versions").glob("v*")]

        # Nothing has changed, and the same calls are right again.
        ep.wake(weights.restore)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, kept[name])
        with torch.no_grad():
            layer.router_weight.zero_()
        checkpoint.load(model, tmp_path / "saved")
        assert torch.equal(layer.router_weight, kept["router_weight"])
        for call in calls:
            call()


@pytest.mark.parametrize("free", ["offload", "discard"])
@torch.no_grad()
def test_weights_that_are_loaded_before_their_memory_is_back(free):
    """Into a group that has formed anew: refused. After `restore` they are right."""
    with epmoe.ExpertParallel(alone()) as ep:
        layer, _ = full_layer(ep)
        kept = {name: value.clone() for name, value in layer.state_dict().items()}
        new = {
            name: value + 1 if value.is_floating_point() else value for name, value in kept.items()
        }
        weights = epmoe.SleepingWeights(layer)
        for _ in range(2):
            # Weights are loaded while they have no memory.
            ep.sleep(getattr(weights, free))
            assert len(ep.resume()) == ep.num_local_experts
            layer.load_state_dict(new)
            # It is refused, and kept ones are back.
            with pytest.raises(EPStateError, match="written while their memory was gone, and are"):
                weights.restore()
            if free == "offload":
                assert all(map(torch.equal, layer.state_dict().values(), kept.values()))
            layer.load_state_dict(new)
            weights.restore()
            assert all(map(torch.equal, layer.state_dict().values(), new.values()))
            layer.load_state_dict(kept)


@pytest.mark.parametrize(
    "tensors",
    [
        [randn(4, 8).t()],
        [randn(6)[:4], randn(6)[2:], torch.empty(0)],
        [torch.ones(1).expand(1000), torch.tensor(3.0, dtype=torch.float64)],
        [torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2)],
        [torch.empty(0)],
    ],
)
def test_tensors_keep_their_strides(tensors):
    module = buffers(*tensors)
    strides = [one.stride() for one in tensors]
    want = [bytes_of(one).clone() for one in tensors]
    weights = epmoe.SleepingWeights(module)
    for _ in range(2):
        assert [one.stride() for one in module.buffers()] == strides
        assert all(map(torch.equal, map(bytes_of, module.buffers()), want))
        weights.offload()
        weights.restore()


def test_tensors_that_share_memory_still_do():
    whole = torch.arange(300.0)
    module = buffers(whole[100:200], whole[150:], whole)
    # The second has a part of the first one's memory.
    for part in (module, buffers(*list(module.buffers())[:2])):
        epmoe.SleepingWeights(part)
        first, second, third = module.buffers()
        assert third.tolist() == [*range(300)] and torch.equal(first[50:], second[:50])
        second.fill_(7)
        assert bool((first[50:] == 7).all())
        second.copy_(torch.arange(150.0, 300.0))


def test_a_checkpoint_has_each_weight_once():
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    sizes = []
    for _ in range(2):
        torch.save(module.state_dict(), saved := io.BytesIO())
        sizes.append(len(saved.getvalue()))
        _ = epmoe.SleepingWeights(module)
    assert sizes[1] <= sizes[0] + 8 * 256


def test_a_signal_handler_raises_right_behind_what_frees_the_weights():
    """They have gone, so the rank sleeps."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    with epmoe.ExpertParallel(alone()) as ep:
        # The handler comes with the first line of Python behind it.
        with pytest.raises(Interrupted):
            ep.sleep(partial(_thread.interrupt_main, signal.SIGALRM))
        assert ep.asleep
        ep.wake()
    signal.signal(signal.SIGALRM, former)


def test_an_interrupted_call_loses_no_weights():
    """By a signal handler, at any step: after `offload` weights are there, and `restore` may be
    repeated.
    """
    module = nn.Linear(3, 2)
    want = module.weight.clone()
    weights = epmoe.SleepingWeights(module)
    interrupted = 0
    # Each call is interrupted at its first step, its second one, and so on.
    for name in ("offload", "restore"):
        for event in itertools.count():
            if name == "restore":
                weights.offload()
            with interrupted_at(
                event, {sleeping.__file__, cpu.__file__, places.__file__}
            ) as interrupts:
                getattr(weights, name)()
            interrupted += interrupts.came
            if name == "restore" or not interrupts.came:
                weights.restore()
            assert torch.equal(module.weight, want), (name, event)
            if not interrupts.came:
                break
    assert interrupted > 20


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # some steps are those of finalizers
def test_a_signal_during_sleep_and_wake():
    """Where `sleep` is interrupted this rank is awake with its weights, or asleep; never closed.
    Graphs go on.
    """
    asleep = 0
    with epmoe.ExpertParallel(alone()) as ep, torch.inference_mode():
        layer, _ = full_layer(ep)
        weights = epmoe.SleepingWeights(layer)
        x = randn(4, ep.config.model.hidden_size)
        want = layer(x).clone()
        # Each call is interrupted at its first step, its second one, and so on.
        for call in (partial(ep.sleep, weights.offload), partial(ep.wake, weights.restore)):
            for event in itertools.count():
                if call.func == ep.wake:
                    ep.sleep(weights.offload)
                with interrupted_at(event, FILES) as interrupts:
                    call()
                # It may sleep, or have lost its group, or be awake.
                if "asleep" in repr(ep):
                    asleep += 1
                    ep.wake(weights.restore)
                elif ep.life.opened is None:
                    assert call.func == ep.wake and interrupts.came
                    assert len(ep.resume()) == ep.config.model.num_experts, "all are loaded again"
                    weights.restore()
                assert torch.equal(layer(x), want) and ep.capture_is_valid(0), event
                if not interrupts.came:
                    break
    assert asleep > 100


@pytest.mark.parametrize("what", ["sleep", "wake", "close"])
def test_another_thread_at_any_step(what):
    """It resumes, or is refused; in no case do rounds run on memory that goes."""
    with (
        epmoe.ExpertParallel(alone()) as ep,
        torch.inference_mode(),
        ThreadPoolExecutor(1) as other,
    ):
        layer, _ = full_layer(ep)
        x = randn(4, ep.config.model.hidden_size)
        want = layer(x).clone()
        # The other thread comes at the first step, at the second one, and so on.
        for step in itertools.count():
            if what == "wake":
                ep.sleep()
            with (
                suppress(RuntimeError),
                stopped_at(step, FILES, lambda: other.submit(ep.resume).exception()) as stops,
            ):
                getattr(ep, what)()
            if ep.life.opened is None:
                ep.resume()
            assert torch.equal(layer(x), want), step
            if not stops.came:
                break


@pytest.mark.parametrize("what", ["sleep", "wake", "close"])
def test_another_thread_reads_health_at_any_step(what):
    """Also while the group sleeps; once it is closed it is refused."""
    with (
        epmoe.ExpertParallel(alone()) as ep,
        torch.inference_mode(),
        ThreadPoolExecutor(1) as other,
    ):
        layer, _ = full_layer(ep)
        x = randn(4, ep.config.model.hidden_size)
        layer(x)
        read = partial(ep.health, wait=False)
        found = list[epmoe.Health | None]()

        def reads() -> None:
            error = (asked := other.submit(read)).exception(10)
            assert error is None or isinstance(error, epmoe.EPStateError), error
            found.append(None if error else asked.result())

        # Stop at the first step of the call, at the second one, and so on to its end.
        before = ep.health()
        if what == "wake":
            ep.sleep()
        for step in itertools.count():
            with stopped_at(step, {service.__file__, life.__file__}, reads) as stops:
                getattr(ep, what)()
            if not stops.came:
                break
            if what == "sleep":
                assert found[-1] == before == ep.health()
                ep.wake()
                layer(x)
                before = ep.health()
            elif what == "wake":
                assert found[-1] is None or found[-1].rounds in (0, before.rounds)
                ep.sleep()
            else:
                ep.resume()
        assert len(found) > 5


@pytest.mark.parametrize(
    "module", [nn.Identity(), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])]
)
def test_what_cannot_sleep(module):
    with pytest.raises(ValueError, match="must have tensors on one device"):
        epmoe.SleepingWeights(module)


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
)
def test_tensors_that_are_not_plain_memory(tensor):
    with pytest.raises(TypeError, match="must have dense tensors"):
        epmoe.SleepingWeights(buffers(tensor))
