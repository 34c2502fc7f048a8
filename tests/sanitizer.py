"""compute-sanitizer over the kernels: `make sanitize` prints the errors of each tool in each part.

`python -m sanitizer "few rows"` runs the named parts only.

It comes with the CUDA toolkit: it is on the PATH, or in CUDA_HOME/bin. A part runs a few small
rounds, since every access costs up to 100 times as much. initcheck runs where one process writes
all that its kernels read, and, since it follows bulk copies (TMA) from CUDA 13.1 on only, where no
kernel writes by them or all was written before.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from epmoe.native.build import build

ROOT = Path(__file__).parent.parent
TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path=str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))
)
# In this order, since two files are named test_moves.py.
SOURCES = [str(ROOT), str(ROOT / "tests" / "distributed"), str(ROOT / "tests")]
TIMEOUT_S = 200.0
# The local pipeline with duplicate, foreign and invalid ids and with stale rows. Unwritten memory
# holds the largest integer or NaN. Every tensor is a separate allocation.
LOCAL = """
import torch, epmoe
torch.use_deterministic_algorithms(True, warn_only=True)
identity_map = torch.arange(128, dtype=torch.int32, device="cuda")
for T in (200, 288):
    logits = torch.randn(T, 128, device="cuda").bfloat16()
    logits[1] = torch.nan
    num_tokens = torch.tensor(T - 7, dtype=torch.int32, device="cuda")
    routing = epmoe.route(logits, 8, num_tokens=num_tokens)
    ids = [5, 88, 88, 65, -1, 5, 127, 128]
    routing.ids[:4] = torch.tensor(ids, dtype=torch.int32, device="cuda")
    x = torch.randn(T, 512, device="cuda").bfloat16()
    permuted = epmoe.permute(x, routing.ids, identity_map, 128, alignment=4)
    segments = permuted.expert_offsets, permuted.tokens_per_expert
    epmoe.native.ops.gated_activation(permuted.rows, *segments, None, False, 7.0, 1.0, 0.0, T > 200)
    partial = epmoe.finalize(permuted.rows, permuted, torch.ones(T, 8, device="cuda"))
    real = epmoe.zero_padding_rows_(partial, T - 7)
    q = epmoe.quantize_fp8(real, granularity="tensor", num_tokens=T - 7)
    torch.cuda.synchronize()
print("done")
"""
# The kernels for experts with few rows, also where there are many, with NaN around the rows; of
# MXFP4 and NVFP4 also the GEMM.
FEW_ROWS = """
import sys, torch
sys.modules["deep_gemm"] = None  # it writes by TMA
from test_few_rows import COUNTS, MXFP4, Rows, built
torch.set_grad_enabled(False)
device = torch.device("cuda")
for dtype in (torch.bfloat16, torch.float8_e4m3fn, MXFP4):
    experts, rows = built(dtype, device, gpt_oss=True), Rows(COUNTS, dtype, device)
    for rows_per_expert in (1.0, 8.0, 64.0, None) if dtype == MXFP4 else (0.1, 6.0, 32.0):
        assert rows.outputs(experts, rows_per_expert).isfinite().all()
import test_nvfp4
experts = test_nvfp4.Drawn((256, 128), gpt_oss=True).experts(device)
rows = test_nvfp4.Rows(256, device, in_fp8=False)
for rows_per_expert in (1.0, 8.0, 64.0, None):
    assert rows.outputs(experts, rows_per_expert).isfinite().all()
print("done")
"""
# The experts in one kernel, with tiles of up to 144 rows, of which some are full or overfull, and
# of up to 80.
ONE_KERNEL = """
import torch
from test_few_rows import COUNTS, FP8, Rows
from test_fused_experts import FULL, OVERFULL, SMALL, fused
torch.set_grad_enabled(False)
device = torch.device("cuda")
for counts in (COUNTS, FULL, OVERFULL, SMALL):
    rows = Rows(counts, FP8, device, width=640)
    for gpt_oss in (False, True):
        experts = fused(device, gpt_oss, sizes=(640, 384))
        assert rows.outputs(experts, None).isfinite().all()
print("done")
"""
# The same in bf16, where half of a tile's rows leave at a time; served, and in training, whose
# forward pass keeps gates and ups.
ONE_KERNEL_IN_BF16 = """
import torch
from test_fused_experts_bf16 import FUSED, Call
from test_few_rows import COUNTS
from epmoe.native import ops
torch.set_grad_enabled(False)
device = torch.device("cuda")
for counts in (COUNTS, [95, 96, 0, 111, 112, 113, 1, 300]):
    for gpt_oss in (False, True):
        call = Call.of(device, gpt_oss, counts, (320, 192))
        call.served(FUSED)
        call.trained(ops.fused_experts_of_training)
torch.cuda.synchronize()
print("done")
"""
# The same of MXFP4 over rows in fp8, which have a stride, by the kernel for so many rows of an
# expert; also with scales so small that they have a loop of their own.
ONE_KERNEL_OF_MXFP4 = """
import torch
from expert_inputs import GPT_OSS
from test_drawn_mxfp4 import Case, Options
torch.set_grad_enabled(False)
small = -40, -36
for activation, spaces, exponents in (
    (GPT_OSS, (48, 16), (-3, 2)), ({}, (0, 0), (-3, 2)), ({}, (0, 0), small)
):
    options = Options([3, 0, 17, 170, 1], 192, 320, activation, (bool(activation),) * 2)
    options = options._replace(spaces=spaces, exponents=exponents, rows_per_expert=SAID)
    case = Case(options, torch.device("cuda"))
    experts = case.experts()
    assert case.keeps_fp8(experts) and case.outputs(experts).isfinite().all()
print("done")
"""
# Slabs for each node, with more rows than they hold and without, and their sums.
RAIL = """
import torch
from test_rail import D, T, Packed, inputs
from epmoe.native import ops
count = torch.zeros(1, dtype=torch.int64, device="cuda")
shown = torch.zeros(1, dtype=torch.int64).pin_memory()
ops.rail_mark(count, shown, None, None, False, None, 0)
for payload in ("auto", "fp8"):
    for slots in (T, 3):
        real = torch.tensor(T - 2, dtype=torch.int32)
        got = Packed(torch.device("cuda"), *inputs(), slots, real, payload)
        rows, y = torch.ones(3 * slots, D, device="cuda"), torch.empty(T, D, device="cuda")
        ops.rail_sum(rows, rows, got.slots_of.cuda(), slots, 1, None, None, None, y)
        assert torch.equal(y[:, 0].cpu(), got.slots_of.ge(0).sum(1).float())
print("done")
"""
# The parts below get their rank, a store, the number of ranks and the device. They run on CPUs,
# too.
BEGIN = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
store = sys.argv[2]
size = int(sys.argv[3])
device = torch.device(sys.argv[4])
if device.type == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
"""
END = """
print("done")
dist.destroy_process_group()
"""
# Rounds by both protocols, in both layouts, with rows as they are and as fp8, checked; also by LL
# with more tokens than three ranks send so.
EXCHANGE = f"""{BEGIN}
from exchanges import assert_round, assert_y, make_config, make_tokens, run_round
import epmoe, epmoe.exchange.memory
for ll_max_tokens, M in ((1024, 40), (8, 40), (2048, 1200)):
    epmoe.exchange.memory.most_ll_tokens = lambda *_: ll_max_tokens
    for payload in ("auto", "fp8"):
        exchange = {{"payload": payload, "combine_payload": payload}}
        sizes = {{"hidden": 256, "dtype": "bfloat16", "max_tokens": M}}
        config = make_config(size, **sizes, timeout_s=60.0, exchange=exchange)
        with epmoe.ExpertParallel(config, device=device) as ep:
            for layout in ("expert", "rank"):
                for T in (M, 3):
                    tokens = make_tokens(ep.config, rank, T, kind="adversarial")
                    assert_round(ep, tokens, layout)
            ep.check()
{END}"""
# Rounds by both protocols among empty seats, and again after a sleep.
SEATS = f"""{BEGIN}
from exchanges import assert_y, gains, given, make_config, make_tokens
from slot_tables import times_slots
import epmoe, epmoe.exchange.memory
live = {{"live": True, "slots_per_rank": 8, "staging_mb": 1}}
sizes = {{"experts": 8, "hidden": 256, "dtype": "bfloat16", "max_tokens": 40}}
config = make_config(size, max_ranks=size + 2, **sizes, timeout_s=60.0, placement=live)
for ll_max_tokens in (1024, 8):
    epmoe.exchange.memory.most_ll_tokens = lambda *_: ll_max_tokens
    with epmoe.ExpertParallel(config, device=device) as ep:
        gains_SD = gains(ep.config, 256)[ep.logical_experts(1)].bfloat16().to(device)
        for seed in range(4):
            tokens = make_tokens(ep.config, rank, (40, 3)[seed % 2], seed=seed, kind="adversarial")
            d = ep.dispatch(*given(ep, tokens), tag=1)
            y = ep.combine(times_slots(d, gains_SD), d)
            ep.check()
            assert_y(y, ep.config, tokens)
            if seed == 1:
                ep.sleep()
                ep.wake()
{END}"""
# Experts that move between rounds, also to other seats, until drawn tables are in use on both
# ranks.
MOVES = f"""{BEGIN}
from exchanges import make_config
from test_moves import D, E, K, L, M, begin, play, slots_of
import epmoe
torch.set_grad_enabled(False)
slots_per_rank = E // size + 1
live = {{"live": True, "slots_per_rank": slots_per_rank, "layers": L, "staging_mb": 1}}
live["most_copies"] = 4
sizes = {{"experts": E, "top_k": K, "hidden": D, "max_tokens": M}}
config = make_config(size, max_ranks=size + 1, **sizes, timeout_s=60.0, placement=live)
with epmoe.ExpertParallel(config, device=device) as ep:
    slots = slots_of(ep)
    for number in range(2):
        moves = begin(slots, number)
        going = torch.ones(1)
        rounds = 0
        while going:
            play(ep, slots, rounds, rounds % L, T=(rank + rounds) % (M + 1))
            ep.poll()
            rounds += 1
            going = torch.tensor([1 - int(moves.done)])
            dist.all_reduce(going)
        slots.check()
    ep.check()
{END}"""
# Two versions of weights that a trainer hands over to a server in the same process.
HAND_OVER = f"""{BEGIN}
import tempfile
from exchanges import make_config
from helpers import randn
from test_hand_over import D, E, K, M, Model, send
import epmoe
sizes = {{"experts": E, "top_k": K, "hidden": D, "dtype": "bfloat16", "max_tokens": M}}
config = make_config(size, **sizes, timeout_s=60.0)
folder = tempfile.TemporaryDirectory(dir="/dev/shm")
with epmoe.ExpertParallel(config, device=device) as ep, folder, torch.inference_mode():
    trained = Model(ep, 0)
    served = Model(ep, 0)
    x = randn(M, D).bfloat16().to(device)
    sender = epmoe.WeightSender(trained, folder.name)
    receiver = epmoe.WeightReceiver(ep, served, folder.name, dense=served.take_routers)
    for version in (1, 2):
        send(trained, sender, version)
        receiver.load(version)
        assert torch.equal(served(x), Model(ep, version)(x))
    receiver.close()
{END}"""
# Training: the GEMMs of Hopper, the activation, gradients of rows, rows packed as fp8, and the
# router in one order.
TRAINING = f"""{BEGIN}
from helpers import randn
from test_hopper_gemm import Case
import test_training_experts, test_training_rows
from epmoe.local.logits import router_logits
torch.use_deterministic_algorithms(True, warn_only=True)
for counts in ([3, 0, 13], [1, 0, 17, 33, 64, 285, 0]) * (device.type == "cuda"):
    Case(counts, 136, 520, device).assert_right()
for interleaved in (False, True):
    test_training_experts.test_the_activation_writes_zeros_into_gaps_and_nothing_past_the_end(
        device, torch.bfloat16, interleaved, 128
    )
test_training_rows.test_gradients_of_weighted_rows(device, torch.bfloat16, True, 1288)
test_training_rows.test_packed_rows_hold_what_quantize_says(device, torch.bfloat16, 896)
calls = [(T, torch.float32) for T in (17, 200)] + [(T, torch.bfloat16) for T in (9, 200, 1200)]
for T, dtype in calls:
    x = randn(T, 520, dtype=dtype).to(device).requires_grad_()
    router_logits(x, randn(70, 520, dtype=dtype).to(device), None, invariant=True).sum().backward()
{END}"""
ALL = "memcheck", "racecheck", "synccheck", "initcheck"
# racecheck does not see that the lanes of a warp, which have met in __syncwarp, let one of them
# arrive for all. So it is asked of a build in which each of them arrives.
RACECHECK = "racecheck"
EACH_LANE_ARRIVES = "EPMOE_EACH_LANE_ARRIVES"
PARTS = {
    "training": (TRAINING, 1, ALL),
    "seats": (SEATS, 1, ALL[:3]),
    "moves": (MOVES, 2, ALL[:2]),
    "hand-over": (HAND_OVER, 1, ALL[:1]),
    "few rows": (FEW_ROWS, 1, ALL),
    "one kernel": (ONE_KERNEL, 1, ALL),
    "one kernel in bf16": (ONE_KERNEL_IN_BF16, 1, ALL),
    "MXFP4": (ONE_KERNEL_OF_MXFP4.replace("SAID", "8.0"), 1, ALL),
    "MXFP4 many": (ONE_KERNEL_OF_MXFP4.replace("SAID", "200.0"), 1, ALL),
    "exchange": (EXCHANGE, 2, ALL[:3]),
    "local stages": (LOCAL, 1, ALL),
    "rail": (RAIL, 1, ALL),
}


def sanitize(
    tool: str | None,
    script: str,
    *,
    ranks: int = 1,
    library: str | None = None,
    caching: bool = False,
    device: str = "cuda",
) -> list[subprocess.CompletedProcess[str]]:
    """Runs the script on each rank under a tool of compute-sanitizer, which exits with 3 where it
    finds an error; None: under no tool.

    A `library` that is not given is that of EPMOE_LIBRARY, or is built.

    Without `caching` every tensor is an allocation of its own, whose end the tool sees, and no
    graph can be captured.
    """
    library = library or os.environ.get("EPMOE_LIBRARY") or str(build())  # not under the tool
    # The environment and the command of a rank.
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*SOURCES, *sys.path]),
        "EPMOE_LIBRARY": library,
    }
    if not caching:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command: list[str] = []
    if tool is not None:
        assert TOOL is not None, "there is no compute-sanitizer"
        command = [TOOL, "--tool", tool, "--error-exitcode", "3"]
    if tool == "memcheck":  # torch looks for features by calls that may be refused
        command += ["--report-api-errors", "no"]

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        program = [
            *command,
            sys.executable,
            "-c",
            script,
            str(rank),
            f"{folder}/store",
            str(ranks),
            device,
        ]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            program, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            texts = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the program, which holds the pipes
            texts = process.communicate()
        return subprocess.CompletedProcess(program, process.returncode, *texts)

    # All ranks at the same time.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@cache
def library_of_racecheck() -> str:
    return str(build(defines=(EACH_LANE_ARRIVES,)))


def errors_of(run: subprocess.CompletedProcess[str]) -> int | None:
    """What the tool counted; None where it did not get to its end."""
    counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", run.stdout)
    return int(counted[-1]) if counted and "done" in run.stdout else None


def main() -> int:
    import torch

    if TOOL is None:
        print("sanitize: there is no compute-sanitizer on the PATH or in CUDA_HOME/bin")
        return 1
    # Each part under each of its tools, a line for each.
    failed = []
    print("tool        part                ranks  errors      s")
    for part in sys.argv[1:] or PARTS:
        script, ranks, tools = PARTS[part]
        for tool in tools:
            if ranks > torch.cuda.device_count():
                print(f"{tool:12}{part:20}{ranks:5}  needs {ranks} GPUs")
                continue
            library = library_of_racecheck() if tool == RACECHECK else None
            # All ranks have to come to their end.
            started = time.monotonic()
            runs = sanitize(tool, script, ranks=ranks, library=library)
            counts = [errors_of(run) for run in runs]
            total = None if None in counts else sum(counts)
            errors = "no end" if total is None else total
            took = time.monotonic() - started
            print(f"{tool:12}{part:20}{ranks:5}{errors:>8}{took:7.0f}", flush=True)
            if total != 0:
                for rank, run in enumerate(runs):
                    failed.append(
                        f"{tool}, {part}, rank {rank}:\n{run.stdout[-3000:]}\n{run.stderr[-2000:]}"
                    )
    print(*failed, sep="\n", end="\n" if failed else "")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
