"""`examples/generate.py`: from checkpoints of transformers to tokens over 4 ranks; saved by 4
ranks, loaded by 2.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched import load_example, torchrun

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from epmoe.cli.demo import generate as demo

NAMES = ["qwen3_moe", "deepseek_v3"]
PROGRAM = """
import runpy, sys
import torch, torch.distributed as dist
import epmoe

sys.path.append("examples")
example, (action, *folders) = runpy.run_path("examples/generate.py"), sys.argv[1:]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for folder in folders:
    example["main"](torch.device("cpu"), folder, action, folder + "/saved")
    capacity = {"max_num_tokens_per_rank": 32, "alignment": 128}
    config = epmoe.EPConfig.from_hf(folder, ep_size=size, capacity=capacity)
    with epmoe.ExpertParallel(config) as ep, torch.inference_mode():
        model = example["load_model"](folder, ep)
        if action == "load":
            for tensor in model.state_dict().values():
                tensor.zero_()
            epmoe.checkpoint.load(model, folder + "/saved")
        torch.save(model(torch.arange(20 + rank)[None]).logits, f"{folder}/{rank}-of-{size}.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name in NAMES:
        torch.manual_seed(0)
        # Two experts for each token: their sum has one order, so that its bits are those of any
        # number of ranks.
        config = AutoConfig.for_model(name, **demo.MODELS[name] | {"num_experts_per_tok": 2})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=demo.make_tokenizer()).save_pretrained(
            tmp_path / name
        )
    return [tmp_path / name for name in NAMES]


def in_one_process(folder: Path, prompt: str) -> tuple[str, torch.Tensor]:
    """What follows the prompt, and logits for 20 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        tokens = model.generate(
            **tokenizer(prompt, return_tensors="pt"), max_new_tokens=16, do_sample=False
        )
        return tokenizer.decode(tokens[0]), model(torch.arange(20)[None]).logits


@pytest.mark.slow
def test_checkpoints_generate_and_load_on_another_number_of_ranks(folders):
    """Expert GEMMs have 128 rows, and each rank a batch of its own: no library has another number
    of rows to sum in.
    """
    prompt, *_ = load_example("generate")["PROMPTS"]
    texts = []
    # Four ranks save, and two load.
    for ranks, action in ((4, "save"), (2, "load")):
        done = torchrun(ranks, "-c", PROGRAM, action, *folders)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout.splitlines())
    # Texts are those of one process, and logits have the same bits.
    want = [in_one_process(folder, prompt) for folder in folders]
    assert texts == [[text for text, _ in want]] * 2
    for folder, (_, logits) in zip(folders, want, strict=True):
        for rank in range(2):
            of_four, of_two = (torch.load(folder / f"{rank}-of-{ranks}.pt") for ranks in (4, 2))
            assert torch.equal(of_four, of_two)
        assert (torch.load(folder / "0-of-2.pt") - logits).abs().max() < 1e-5
