"""Each example on GPUs, and `train.py` there beside the CPU.

Ranks are as many as each example needs: where NCCL is needed, one for each GPU, otherwise they
share GPUs.
"""

from __future__ import annotations

import pytest
import torch
from helpers import NO_CUDA
from launched import torchrun
from test_examples import EXAMPLES, printed
from test_rl_script import rewards
from test_train_script import train

import epmoe
from epmoe.native.build import build, ready

pytestmark = [pytest.mark.gpu, NO_CUDA]

GPUS = torch.cuda.device_count()
BF16 = 2**-7
"""Relative error of a loss or norm on GPUs: two units in the last place of bf16."""
# What several nodes of one rank print. With four GPUs and more a node has two.
NODES = {
    2: ["2 nodes of 1 ranks: y is x"],
    4: ["2 nodes of 2 ranks: y is x"],
}


def needs(gpus: int):
    return pytest.mark.skipif(gpus > GPUS, reason=f"NCCL needs {gpus} GPUs")


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Outside of the time that a rank may take."""
    ready() or build()


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"several_nodes"}))
def test_prints_what_it_says(name):
    """Ranks share GPUs where they are more."""
    ranks, lines = EXAMPLES[name]
    device, *found = printed(name, ranks)
    assert device.startswith("device: cuda, ")
    assert found == lines


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs(n)) for n in NODES])
def test_several_nodes(ranks):
    device, *found = printed("several_nodes", ranks)
    assert device.startswith("device: cuda, ")
    assert found == NODES[ranks]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs(2))])
def test_training_has_the_numbers_of_cpus(ranks, parallel):
    words = f"--steps 4 --parallel {parallel}"
    [got] = train(ranks, words, device="cuda")
    [want] = train(ranks, words)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=BF16, atol=0)


def test_training_goes_on_from_its_checkpoint(tmp_path):
    """Saved under DDP, resumed under FSDP, with recomputed activations."""
    whole, _, resumed = train(
        1,
        "--steps 4",
        f"--steps 2 --save {tmp_path}/saved",
        f"--steps 4 --resume {tmp_path}/saved --parallel fsdp --checkpoint-activations",
        device="cuda",
    )
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole[2:]), rtol=BF16, atol=0)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=needs(4))])
def test_reinforcement_learning(ranks):
    """With two ranks the rollout and the trainer may share a GPU."""
    pytest.importorskip("transformers")
    first, *_, last = rewards("bfloat16", 6, ranks, "cuda")
    assert last > first


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs(2))])
def test_generation(tmp_path, ranks):
    """The text is that of CPUs, of a model in fp32."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    from epmoe.cli.demo import generate as demo

    # A new checkpoint with a tokenizer.
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **demo.MODELS["qwen3_moe"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=demo.make_tokenizer())
    tokenizer.save_pretrained(tmp_path)

    # The same text from both.
    on_gpus = torchrun(ranks, "examples/generate.py", tmp_path)
    assert on_gpus.returncode == 0, on_gpus.stderr
    on_cpus = torchrun(ranks, "examples/generate.py", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert on_cpus.returncode == 0, on_cpus.stderr
    device, *text = on_gpus.stdout.splitlines()
    assert device.startswith("device: cuda, ")
    assert text == on_cpus.stdout.splitlines()[1:]


def test_a_server(tmp_path):
    """Two ranks serve, one dies and is replaced; tokens are those of one process on the CPU."""
    for module in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(module)
    from test_serve import WAIT_S, check, running, serve_rank

    with running(tmp_path, "examples/serve.py", ranks=2, on_gpus=True) as server:
        with server.load(seed=0):
            server.more(20)
            server.replace(1, WAIT_S)
            server.more(20)
        assert "has joined, device: cuda, " in server.log.read_text()
        with epmoe.ExpertParallel(serve_rank.configured(1)) as ep:
            check(server, serve_rank.Model(ep), most_lost=serve_rank.BATCH, gap_s=WAIT_S)
