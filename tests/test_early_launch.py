"""Programmatic dependent launch: a kernel may start early only where its code waits for its
predecessor.

Code for sm_80 does not wait. A GPU of sm_90 runs it too, compiled from its PTX, and must not start
it early. Here the predecessor lets its successor start at once and writes x late.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import NO_CUDA, ROOT
from launched import run_python

from epmoe.native.build import CUDA_FLAGS

pytestmark = [
    pytest.mark.gpu,
    NO_CUDA,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU of sm_90",
    ),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
LATE = r"""
extern "C" __global__ void write_late(int* x, int n, int value, int milliseconds) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < milliseconds * 1000000ull);
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}
"""
COPY = r"""
#include "cuda/device/common.cuh"
#include "cuda/device/launch.cuh"

struct Copy {
  const int* from;
  int *to, n;
};

__global__ void copy(const __grid_constant__ Copy c) {
  epmoe::cuda::wait_for_predecessor();
  epmoe::cuda::let_successor_start();
  for (int i = threadIdx.x; i < c.n; i += blockDim.x) c.to[i] = c.from[i];
}

extern "C" int run_copy(const int* from, int* to, int n, void* stream) {
  return epmoe::cuda::launch(copy, 1, 256, 0, static_cast<cudaStream_t>(stream), Copy{from, to, n});
}
"""
DECISION = "compiled.ptxVersion / 10"
N = 4096
MILLISECONDS = 20
# As `copied_late`, for a stage of the library: the rows of x [8, D] as int32.
PERMUTE = f"""
import torch, epmoe
late = torch.cuda._compile_kernel({LATE!r}, "write_late")
x = torch.zeros(8, {N} // 8, device="cuda")
ids = torch.arange(8, dtype=torch.int32, device="cuda").view(8, 1)
identity_map = torch.arange(8, dtype=torch.int32, device="cuda")
assert epmoe.permute(x, ids, identity_map, 8).rows.eq(0).all()  # loads the kernels
torch.cuda.synchronize()
for value in (1, 2, 3):
    late((1, 1, 1), (256, 1, 1), [x.view(torch.int32), {N}, value, {MILLISECONDS}])
    rows = epmoe.permute(x, ids, identity_map, 8).rows
    assert rows.view(torch.int32).eq(value).all(), value
print("done")
"""
# Rounds by LL and by Simple, in which each expert returns its rows.
ROUNDS = """
import torch, epmoe
config = epmoe.EPConfig(
    model={"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 512, "dtype": "bfloat16"},
    topology={"ep_size": 1},
    capacity={"max_num_tokens_per_rank": 1500},
    exchange={"transport": "nvlink", "warmup_timeout_s": 200, "timeout_s": 20},
)
with epmoe.ExpertParallel(config, device=torch.device("cuda")) as ep, torch.inference_mode():
    for T in (1, 40, 700, 1500):
        x = torch.randn(T, 512, dtype=torch.bfloat16, device="cuda")
        routing = ep.route(torch.randn(T, 8, device="cuda"))
        for _ in range(2):
            d = ep.dispatch(x, routing.ids, routing.weights)
            y = ep.combine(d.rows, d)
            want = x.float() * routing.weights.sum(1, keepdim=True)
            assert (y.float() - want).abs().max() <= 0.02 * want.abs().max(), T
    ep.check()
print("done")
"""


def copied_late(folder: Path, sources: Path, codes: list[str]) -> bool:
    """Whether a kernel that is launched as those of the library copies what its predecessor has
    written late.
    """
    # A library with a kernel that copies, and one that writes late.
    (folder / "copy.cu").write_text(COPY)
    library = folder / "copy.so"
    command = [
        "nvcc",
        *CUDA_FLAGS,
        *codes,
        "-Xcompiler=-fPIC",
        "-shared",
        "-cudart=static",
        f"-I{sources}",
    ]
    subprocess.run([*command, "-o", library, folder / "copy.cu"], check=True)
    run_copy = ctypes.CDLL(str(library)).run_copy
    run_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    late = torch.cuda._compile_kernel(LATE, "write_late")
    x, y = (torch.zeros(N, dtype=torch.int32, device="cuda") for _ in range(2))

    def copy() -> None:
        error = run_copy(x.data_ptr(), y.data_ptr(), N, torch.cuda.current_stream().cuda_stream)
        assert error == 0, f"cudaError {error}"

    # Both are loaded. Then the write takes a while, and the copy follows at once.
    copy()  # loads it, from PTX by a compiler
    late((1, 1, 1), (256, 1, 1), [x, N, 0, 0])
    torch.cuda.synchronize()
    late((1, 1, 1), (256, 1, 1), [x, N, 7, MILLISECONDS])
    copy()
    return bool(y.eq(7).all())


def ptx_of(number: str) -> list[str]:
    return [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in ("sm", "compute")]


@pytest.mark.parametrize("number", ["80", "90"])
def test_a_kernel_waits_for_its_predecessor(tmp_path, number):
    assert copied_late(tmp_path, ROOT / "csrc", ptx_of(number))


def test_the_compiled_architecture_decides(tmp_path):
    """With a decision by the GPU instead, the same kernel does not wait, and this test would see
    it.
    """
    sources = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    header = sources / "cuda" / "device" / "launch.cuh"
    assert header.read_text().count(DECISION) == 1
    header.write_text(header.read_text().replace(DECISION, "9"))
    assert not copied_late(tmp_path, sources, ptx_of("80"))


@pytest.fixture(scope="module")
def library_of_sm_80() -> str:
    """The whole library, compiled from its PTX on this GPU."""
    library = os.environ.get("EPMOE_SM80_LIBRARY")  # one that was built before
    if library:
        return library
    code = "from epmoe.native.build import build; print(build())"
    built = run_python("-c", code, TORCH_CUDA_ARCH_LIST="8.0+PTX")
    assert built.returncode == 0, built.stderr
    return built.stdout.split()[-1]


def test_a_library_of_sm_80_on_sm_90(library_of_sm_80):
    run = run_python("-c", PERMUTE, EPMOE_LIBRARY=library_of_sm_80)
    assert run.returncode == 0 and "done" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow  # the driver compiles every variant of dispatch and combine
def test_rounds_of_a_library_of_sm_80(library_of_sm_80):
    """It has neither TMA nor an early start. Both protocols."""
    run = run_python("-c", ROUNDS, EPMOE_LIBRARY=library_of_sm_80)
    assert run.returncode == 0 and "done" in run.stdout, run.stdout + run.stderr
