"""FlashInfer's expert-parallel layers over 2 ranks, their tokens carried by epmoe
(docs/serving.md).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Interrupted, assert_close, is_right_in_a_fork

if "RANK" not in os.environ:
    pytest.skip("needs FlashInfer and 2 ranks: make stacks-flashinfer", allow_module_level=True)
import flashinfer_host as host
from flashinfer.fused_moe.api import QuantFormat
from flashinfer.moe_ep import (
    MoEEpCommParams,
    MoEEpDispatchResult,
    MoEEpTensors,
    available_communication_backends,
    create_communication,
)
from interrupted_steps import steps_until_whole
from torch import Tensor

from epmoe import EPAbortedError, EPTimeoutError, quantize_fp8, service
from epmoe.integrations import flashinfer, session
from epmoe.integrations.flashinfer import EpmoeCommunication, EpmoeConfig
from epmoe.local.reference import moe_reference

E = host.E
K = host.K
D = host.D
M = host.M
INVALID = -7
# In the seat, and in its context managers. Other tests hold the rounds below.
FILES = {module.__file__ for module in (flashinfer, contextlib)}
# In a destroy, which releases the windows.
FILES_OF_DESTROY = FILES | {module.__file__ for module in (session, service)}
TIMEOUT_S = 120


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    flashinfer.close()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _lockstep() -> Iterator[None]:
    """No rank begins a test before all ranks have passed the previous one."""
    yield
    dist.barrier()


@pytest.fixture(scope="module")
def comm(_group: None) -> EpmoeCommunication:
    return make()


def make(comm: Any = "epmoe", **others: Any) -> EpmoeCommunication:
    """As FlashInfer's layers make it."""
    sizes = {"num_experts": E, "top_k": K, "max_tokens_per_rank": M, "hidden_size": D}
    params = MoEEpCommParams(**sizes | {"invalid_expert_id": INVALID} | others)
    made = create_communication(host.bootstrap(), params, comm)
    assert isinstance(made, EpmoeCommunication)
    return made


def run(comm: EpmoeCommunication, *arguments: Any, **options: Any) -> Tensor:
    """One step: dispatch, the experts of this rank, combine."""
    return compute(comm, comm.dispatch(*arguments, **options))


def compute(comm: EpmoeCommunication, got: MoEEpDispatchResult) -> Tensor:
    weights = got.topk_weights
    if weights is None:
        weights = torch.ones_like(got.topk_ids, dtype=torch.float32)
    rows = got.hidden_states
    if got.hidden_states_scale is not None:
        # As FlashInfer's kernels see bytes.
        values = rows.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
        scales = got.hidden_states_scale.view(torch.float32)
        rows = (values * scales[..., None]).flatten(1)
    return comm.combine(host.local_experts(rows, got.topk_ids, weights, host.own_weights()))


def test_flashinfer_knows_the_name() -> None:
    assert "epmoe" in available_communication_backends()


def test_every_number_of_tokens(comm: EpmoeCommunication) -> None:
    """From none to all of M, unequal on the ranks."""
    for T in range(M + 1):
        mine = host.tokens(dist.get_rank(), (T, M - T)[dist.get_rank()], seed=T)
        assert_close(run(comm, *mine), moe_reference(*mine, host.weights()))


def test_what_arrives(comm: EpmoeCommunication) -> None:
    """FlashInfer's contract: a token comes once to a rank, with the ids of this rank's experts, and
    a row without a token has no id.
    """
    batches = [host.tokens(rank, T) for rank, T in enumerate((5, 0))]
    got = comm.dispatch(*batches[dist.get_rank()])
    assert got.tokens_per_rank == M and len(got.hidden_states) == 2 * M
    assert got.topk_ids.dtype == torch.int32 and got.topk_weights.dtype == torch.float32
    x_TD, ids_TK, weights_TK = batches[0]
    is_here = ids_TK // (E // 2) == dist.get_rank()
    came = is_here.any(1)
    rows = (got.topk_ids != INVALID).any(1)
    assert torch.equal(got.hidden_states[rows], x_TD[came])
    assert torch.equal(got.topk_ids[rows], ids_TK.masked_fill(~is_here, INVALID)[came])
    assert torch.equal(got.topk_weights[rows], weights_TK[came])
    compute(comm, got)


@pytest.mark.parametrize("t", [1, 9])
def test_a_step_with_fewer_slots(comm: EpmoeCommunication, t: int) -> None:
    """`runtime_max_tokens_per_rank`, for which FlashInfer's kernels compute."""
    mine = host.tokens(dist.get_rank(), (t, t - 1)[dist.get_rank()])
    got = comm.dispatch(*mine, runtime_max_tokens_per_rank=t)
    assert got.tokens_per_rank == t and len(got.hidden_states) == 2 * t
    assert_close(compute(comm, got), moe_reference(*mine, host.weights()))


def test_tokens_that_are_odd(comm: EpmoeCommunication) -> None:
    """An expert twice, no expert, a weight of NaN, an id of int64, a token of NaN beside others."""
    x_TD, ids_TK, weights_TK = host.tokens(dist.get_rank(), 6)
    ids_TK[0] = 3
    ids_TK[1] = torch.tensor([-1, E])
    weights_TK[2, 0] = torch.nan
    x_TD[5] = torch.nan
    y_TD = run(comm, x_TD, ids_TK.long(), weights_TK)
    ids_TK[1] = -1
    want = moe_reference(x_TD, ids_TK, weights_TK, host.weights())
    assert_close(y_TD[:5], want[:5])
    assert y_TD[5].isnan().all()


def test_without_weights_each_pair_counts_as_one(comm: EpmoeCommunication) -> None:
    x_TD, ids_TK, weights_TK = host.tokens(dist.get_rank(), 4)
    got = comm.dispatch(x_TD, ids_TK)
    assert got.topk_weights is None
    want = moe_reference(x_TD, ids_TK, torch.ones_like(weights_TK), host.weights())
    assert_close(compute(comm, got), want)


def test_rows_in_fp8_come_as_bytes() -> None:
    comm = make(dispatch_format=QuantFormat.DeepSeekFp8)
    x_TD, ids_TK, weights_TK = host.tokens(dist.get_rank(), 7)
    values, scales = quantize_fp8(x_TD, granularity="block")
    for given in ((values, scales), (values.view(torch.uint8), scales.view(torch.uint8))):
        got = comm.dispatch(given[0], ids_TK, weights_TK, hidden_states_scale=given[1])
        assert got.hidden_states.dtype == given[0].dtype
        assert got.hidden_states_scale.dtype == given[1].dtype
        dequantized = (values.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
        want = moe_reference(dequantized, ids_TK, weights_TK, host.weights())
        assert_close(compute(comm, got), want)
    comm.destroy()


def test_a_layer_of_flashinfer() -> None:
    """Two layers share their windows, and the last one to go releases them."""
    # Settings of their own, so that no other test shares these windows.
    layers = [host.make_layer(EpmoeConfig({"timeout_s": 61})) for _ in range(2)]
    mine = host.tokens(dist.get_rank(), (16, 3)[dist.get_rank()])
    for layer in layers:
        for longest in (None, 16):
            batch = MoEEpTensors(*mine, runtime_max_tokens_per_rank=longest)
            assert_close(layer(batch), moe_reference(*mine, host.weights()))
    ep = layers[0]._communication._windows.ep
    assert layers[1]._communication._windows.ep is ep
    layers[0].destroy()
    assert_close(layers[1](MoEEpTensors(*mine)), moe_reference(*mine, host.weights()))
    dist.barrier()
    layers[1].destroy()
    with pytest.raises(RuntimeError, match="is closed"):
        ep.poll()


def test_one_rank_fails_alone(comm: EpmoeCommunication) -> None:
    """Before its dispatch and in its combine: the other one hears of it, and both go on."""
    mine = host.tokens(dist.get_rank(), 3)
    fails = [
        (lambda: comm.dispatch(*host.tokens(1, M + 1)), "17 tokens on this rank, but no rank may"),
        (lambda: comm.combine(comm.dispatch(*mine).hidden_states[1:]), r"must be \[32, 256\], got"),
    ]
    for fail, said in fails:
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match=said):
                fail()
        else:
            with pytest.raises(EPAbortedError, match=r"\[1\]"):
                run(comm, *mine)
        assert_close(run(comm, *mine), moe_reference(*mine, host.weights()))


def test_a_handler_raises_at_any_place(comm: EpmoeCommunication) -> None:
    """Whatever raises on one rank, the other one has its sums or hears of it, and both go on."""
    mine = host.tokens(dist.get_rank(), 3)
    want = moe_reference(*mine, host.weights())
    rounds = comm._windows.ep.exchange.rounds

    def a_round(arm: Any) -> None:
        try:
            with beginning(comm, arm):
                y_TD = run(comm, *mine)
            assert_close(y_TD, want)
        except Interrupted:
            # A round that is open still is held: the next dispatch gives it up.
            if rounds.state:
                with pytest.raises(RuntimeError, match="is given up"):
                    comm.dispatch(*mine)
            raise

    outcomes = set[tuple[str, ...]]()
    for found in steps_until_whole(dist.get_rank(), a_round, files=FILES):
        outcomes.add(tuple(found))
        assert_close(run(comm, *mine), want)
    # Behind its combine a rank may be interrupted in a round that is whole.
    possible = {(end, Interrupted.__name__) for end in ("EPAbortedError", "whole")}
    possible.add(("whole", "whole"))
    assert possible - {("whole", Interrupted.__name__)} <= outcomes <= possible


@contextlib.contextmanager
def beginning(comm: EpmoeCommunication, arm: Any) -> Iterator[None]:
    """Call `arm` where dispatch begins."""
    find = comm._ep

    def armed() -> Any:
        comm._ep = find
        ep = find()
        arm()
        return ep

    comm._ep = armed
    try:
        yield
    finally:
        comm._ep = find


def test_a_fork_and_a_sleeper_are_refused() -> None:
    """Both by name, and neither costs the other rank a round."""
    comm = make(EpmoeConfig({"timeout_s": 63}))
    mine = host.tokens(dist.get_rank(), 3)
    assert_close(run(comm, *mine), moe_reference(*mine, host.weights()))
    # A fork is told so.
    child = os.fork()
    if child == 0:
        try:
            comm.dispatch(*mine)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    # So is a rank whose group sleeps. The round after it is whole.
    ep = comm._windows.ep
    ep.sleep()
    with pytest.raises(RuntimeError, match="sleeps: call `wake`"):
        comm.dispatch(*mine)
    ep.wake()
    assert_close(run(comm, *mine), moe_reference(*mine, host.weights()))
    dist.barrier()
    comm.destroy()


def test_a_handler_raises_at_any_place_of_destroy() -> None:
    """The windows are released all the same, once it has begun, and all ranks open new ones."""
    rank = dist.get_rank()
    mine = host.tokens(rank, 3)
    want = moe_reference(*mine, host.weights())
    own = EpmoeConfig({"timeout_s": 64})
    comm = make(own)

    def destroy(arm: Any) -> None:
        arm()
        comm.destroy()

    ep = comm._windows.ep
    has_begun = False
    for found in steps_until_whole(rank, destroy, files=FILES_OF_DESTROY):
        assert found[0] == "whole"
        # At the first place it has not begun.
        if not has_begun:
            comm.destroy()
            has_begun = True
        with pytest.raises(RuntimeError, match="is closed"):
            ep.poll()
        comm.destroy()
        comm = make(own)
        ep = comm._windows.ep
        assert_close(run(comm, *mine), want)
        dist.barrier()
    comm.destroy()


def test_layers_that_are_gone_do_not_keep_windows() -> None:
    """One that nobody has destroyed, as after an exception of a framework."""
    own = EpmoeConfig({"timeout_s": 65})
    comm = make(own)
    ep = comm._windows.ep
    gone = make(own)
    assert gone._windows.ep is ep
    del gone
    dist.barrier()
    comm.destroy()
    with pytest.raises(RuntimeError, match="is closed"):
        ep.poll()


def test_a_layer_goes_in_the_middle_of_its_round() -> None:
    """On one rank. The other one hears of it at once, and other layers go on."""
    rank = dist.get_rank()
    mine = host.tokens(rank, 3)
    want = moe_reference(*mine, host.weights())
    own = EpmoeConfig({"timeout_s": 66})
    first = make(own)
    last = make(own)
    for comm, named in ((first, EPAbortedError), (last, EPTimeoutError)):
        got = comm.dispatch(*mine)
        if rank == 1:
            comm.destroy()
        else:
            with pytest.raises(named, match=r"\[1\]"):
                compute(comm, got)
            comm.destroy()
        # The next layer finds the same windows, or makes new ones.
        last = last if comm is first else make(own)
        assert_close(run(last, *mine), want)
        dist.barrier()
    last.destroy()


def test_a_fork_may_destroy() -> None:
    """Its own layers alone: the windows are those of its parent."""
    comm = make(EpmoeConfig({"timeout_s": 67}))
    mine = host.tokens(dist.get_rank(), 3)
    want = moe_reference(*mine, host.weights())
    got = comm.dispatch(*mine)
    assert is_right_in_a_fork(comm.destroy)
    assert is_right_in_a_fork(flashinfer.close)
    assert_close(compute(comm, got), want)
    assert_close(run(comm, *mine), want)
    dist.barrier()
    comm.destroy()


AT_THE_END = """
import atexit

import flashinfer_host as host
import torch.distributed as dist
from flashinfer.moe_ep import MoEEpTensors

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = [host.make_layer() for _ in range(2)]
for layer in layers:
    layer(MoEEpTensors(*host.tokens(0, host.M)))
    layer.itself = layer
atexit.register(layers[0].destroy)
print("ends")
"""


@pytest.mark.timeout(TIMEOUT_S)
def test_a_process_ends_with_layers() -> None:
    """One is destroyed as Python ends, one is never."""
    if dist.get_rank() == 1:
        return
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name}
    path = os.pathsep.join((*sys.path, str(Path(host.__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END],
        env=environment | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "ends" in done.stdout and "Traceback" not in done.stdout, done.stdout[-6000:]


def test_a_round_without_a_combine_is_given_up(comm: EpmoeCommunication) -> None:
    """As where the kernel of one rank has raised."""
    mine = host.tokens(dist.get_rank(), 3)
    comm.dispatch(*mine)
    with pytest.raises(RuntimeError, match="dispatch without a combine"):
        comm.dispatch(*mine)
    with pytest.raises(RuntimeError, match="combine without a dispatch"):
        comm.combine(mine[0])
    assert_close(run(comm, *mine), moe_reference(*mine, host.weights()))


def test_what_is_refused(comm: EpmoeCommunication) -> None:
    x_TD, ids_TK, weights_TK = host.tokens(dist.get_rank(), 3)
    # What is known when a communicator is made,
    refused = [
        (lambda: make(dispatch_format=QuantFormat.NVFP4), "got the dispatch format NVFP4"),
        (lambda: make(EpmoeConfig({"payload": "fp8"})), "`payload` follows from"),
        (lambda: make(EpmoeConfig({"timeout": 1})), "timeout"),
    ]
    for call, said in refused:
        with pytest.raises(ValueError, match=said):
            call()
    # and what only a dispatch knows.
    for options, said in (
        ({"eplb_local_stats": torch.zeros(E)}, "epmoe gathers no statistics"),
        ({"runtime_max_tokens_per_rank": 2}, "3 tokens on this rank"),
        ({"hidden_states_scale": torch.ones(3, 2)}, "needs `MoEEpCommParams.dispatch_format`"),
    ):
        with pytest.raises(ValueError, match=said):
            comm.dispatch(x_TD, ids_TK, weights_TK, **options)
    with pytest.raises(ValueError, match="takes no kernel that packs its rows"):
        comm.dispatch(x_TD[:, :128], ids_TK, weights_TK)
    assert_close(
        run(comm, x_TD, ids_TK, weights_TK), moe_reference(x_TD, ids_TK, weights_TK, host.weights())
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_a_rank_is_killed_between_dispatch_and_combine() -> None:
    """The other one names it at once."""
    if dist.get_rank() == 1:
        return
    script = Path(host.__file__)
    path = os.pathsep.join((*sys.path, str(script.parent)))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert f"exit codes [-{signal.SIGKILL:d}, 0]" in done.stdout, done.stdout[-6000:]
    assert "missed rank(s) [1] of the group" in done.stdout
    assert "whose process has ended" in done.stdout
