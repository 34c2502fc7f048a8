"""Runs a model of transformers twice: in a single process, and with its experts spread over the
ranks. Both runs must generate the same tokens.

The model is a tiny one with random weights, or a local checkpoint.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import epmoe.integrations.transformers as integration
from epmoe.cli.clock import StageClock
from epmoe.cli.demo.checkpoint import Decode, Encode, tokenizer_of
from epmoe.cli.demo.tiny import MODELS, VOCABULARY
from epmoe.cli.result import Baseline, Check, Result
from epmoe.config.placement import Placement
from epmoe.exchange.health import Health
from epmoe.group.peers import Peers

PROMPTS = (
    "The mixture of experts sends every token to",
    "Once upon a time, in a village at the foot of the mountains, there lived an old clockmaker "
    "who",
    "A fox",
    "To bake good bread you need flour, water, salt, yeast and above all",
    "When the train left the station the rain had already stopped, and over the river",
    "Why is the sky blue?",
    "Four processes share one model: each of them keeps some of the experts, and the tokens travel",
    "Dear reader,",
)
"""Rank r takes the prompt of number r mod 8, so that ranks have batches of different lengths."""

# How much a logit of a tiny model may differ. The models run in fp32.
LOGIT_TOLERANCE = 1e-5
# How much a logit of a checkpoint may differ, as a part of the largest logit. Checkpoints have many
# more layers, and larger logits.
CHECKPOINT_TOLERANCE = 1e-4
_RANDOM = "Weights are random and the model is tiny: the words have no meaning, the agreement has."


class _Generated(NamedTuple):
    """The text that a model has generated from this rank's prompt."""

    tokens: torch.Tensor
    """the n new tokens [n]"""
    logits: torch.Tensor
    """the logits of each of them [n, V], where V is the size of the vocabulary"""
    clock: StageClock
    """the times of the stages"""


def run_model(name: str, *, max_new_tokens: int = 24, seed: int = 0) -> Result:
    """Generate text from this rank's prompt, in a single process and with the experts spread over
    all ranks, and compare the two.

    Every rank of the default process group calls this function with the same arguments. Where
    torch.distributed is not initialized, this process is the only rank. The model runs in fp32: on
    GPUs if the group has NCCL, and otherwise on the CPU. Every `ExpertParallel` of the integration
    is closed before and after the run.

    `name` is one of `MODELS`, or a folder with a checkpoint. `max_new_tokens` is how many tokens
    each rank generates, and `seed` draws the weights of a tiny model. Raises ValueError for an
    unknown `name`.
    """
    is_ours = name in MODELS
    if not is_ours and not Path(name).is_dir():
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}, got {name!r}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    device = "cuda" if size > 1 and "cuda:nccl" in dist.get_backend_config() else "cpu"
    prompt = PROMPTS[rank % len(PROMPTS)]
    integration.close()
    # Run the model in a single process. The ranks do so one after the other, so that memory holds
    # one whole model at a time.
    with saved_model(name, seed=seed) if is_ours else nullcontext(name) as path:
        encode, decode = _tokenizer(name, path)
        ids = torch.tensor([encode(prompt)], device=device)
        for turn in range(size):
            if turn == rank:
                single = _load(path).to(device)
                architecture = type(single).__name__
                alone = _watched(single, ids, max_new_tokens, StageClock(device))
                del single
            _ranks().all_gather(None)
        # Load the model that all ranks share.
        spread = _load_distributed(path, size, device)
    # Wait until all ranks have loaded it. Otherwise the first stage would include that wait.
    _ranks().all_gather(None)
    # Run the model on all ranks together.
    clock = StageClock(device)
    integration.configure(clock=clock.now)
    together = _watched(spread, ids, max_new_tokens, clock, synced_gpus=size > 1)
    (layers,) = integration.shared()
    health = layers.ep.health()
    config = layers.ep.config
    clock.divide("experts", layers.seconds, rest="other layers")
    integration.configure(clock=time.perf_counter)
    # Tell every rank what all ranks have measured.
    mine = {
        "text": (prompt, decode(together.tokens.tolist())),
        "equal": torch.equal(alone.tokens, together.tokens),
        "errors": (alone.logits - together.logits).abs().amax(dim=1).tolist(),
        "largest": alone.logits.abs().max().item(),
        "stages": clock.seconds,
        "elapsed": clock.elapsed,
        "alone_text": decode(alone.tokens.tolist()),
        "alone_stages": alone.clock.seconds,
        "alone_elapsed": alone.clock.elapsed,
        "health": health.as_dict(),
    }
    of_ranks = _ranks().all_gather(mine)
    # Each quantity becomes a list with the value of each rank.
    by_rank: dict[str, list[Any]] = {key: [measured[key] for measured in of_ranks] for key in mine}
    experts = config.model.num_experts
    placement = Placement.build(experts, size)
    return Result(
        name=name if is_ours else Path(path).resolve().name,
        config=config,
        facts={
            "architecture": architecture,
            "experts": f"{experts} on {size} ranks, {config.model.num_experts_per_tok} per token",
            "generated": f"{max_new_tokens} tokens a rank",
        },
        checks=_checks(by_rank, is_ours),
        placement=placement,
        **Result.counts(placement, [Health(**counts) for counts in by_rank["health"]]),
        stages=by_rank["stages"],
        elapsed=by_rank["elapsed"],
        rounds=max_new_tokens,
        unit="token",
        texts=by_rank["text"],
        note=_RANDOM if is_ours else "",
        baseline=Baseline(
            texts=by_rank["alone_text"],
            stages=by_rank["alone_stages"],
            elapsed=by_rank["alone_elapsed"],
            logit_errors=by_rank["errors"],
        ),
    )


def _watched(
    model: PreTrainedModel,
    ids: torch.Tensor,
    max_new_tokens: int,
    clock: StageClock,
    **options: Any,
) -> _Generated:
    """Call `generate` while `clock` measures the stages of the model."""
    with clock.watch(model):
        tokens, logits = generate(model, ids, max_new_tokens, **options)
    return _Generated(tokens, logits, clock)


def _checks(by_rank: dict[str, list[Any]], is_ours: bool) -> list[Check]:
    """Check that the model on all ranks has generated the tokens of the single process, with its
    logits. `by_rank` has what each rank has measured, and `is_ours` says whether the model is a
    tiny one.
    """
    # If any error is NaN, so is the largest value of a tensor, and the check fails.
    error = torch.tensor(by_rank["errors"]).max().item()
    limit = LOGIT_TOLERANCE
    if not is_ours:
        limit = CHECKPOINT_TOLERANCE * max(1.0, *by_rank["largest"])
    same = all(by_rank["equal"])
    return [
        Check("same tokens as one process", "yes" if same else "no", same),
        Check(f"logit error ≤ {limit:.0e}", f"{error:.1e}", error <= limit),
    ]


def _tokenizer(name: str, path: str) -> tuple[Encode, Decode]:
    """Make the tokenizer of the model `name` in the folder `path`. Returns two functions: one from
    text to ids, and one back.
    """
    if name in MODELS:
        tokenizer = make_tokenizer()
        return lambda text: tokenizer.encode(text).ids, tokenizer.decode
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return tokenizer_of(Path(path), config.get_text_config().vocab_size)


def make_tokenizer() -> Tokenizer:
    """Train a BPE tokenizer for ASCII text on `PROMPTS`, for the tiny models.

    All its tokens can be printed, since random weights may choose any of them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    printable = [chr(code) for code in range(33, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=printable,
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROMPTS, trainer)
    return tokenizer


@contextmanager
def saved_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[str]:
    """Make a checkpoint of the tiny model `name`, and yield its folder.

    All ranks call it, and get the same folder. They must be on one machine. The folder is removed
    at the end.
    """
    # Draw the weights, without changing what this process draws later.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **MODELS[name]), dtype=dtype
        )
        for key, tensor in model.state_dict().items():
            # A new model has biases of zero. Nobody would notice one that is left out.
            if key.endswith("bias"):
                tensor.normal_(std=0.1)
    # Save the model in a folder of rank 0, which stays until all ranks have left this context.
    with tempfile.TemporaryDirectory() as folder:
        of_rank_0 = _ranks().all_gather(folder)[0]
        # All ranks must call `save_pretrained`, in which only rank 0 writes.
        model.save_pretrained(of_rank_0)
        _ranks().all_gather(None)
        yield of_rank_0
        _ranks().all_gather(None)


def _load_distributed(path: str, size: int, device: str) -> PreTrainedModel:
    """Load the model in `path` on `device`, with its experts spread over `size` ranks. Each rank
    will have a batch of its own.

    If possible, a rank holds only its share of the experts' weights. There are two cases in which
    each rank holds all weights: this version of transformers has no EP implementations, or it would
    put the model on another device than `device`, since a DistributedConfig always chooses the
    accelerator of the machine.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    default_device = accelerator.type if accelerator else "cpu"
    if size == 1 or device != default_device or not hasattr(integration, "EpmoeEP"):
        return _load(path, experts_implementation="epmoe").to(device)
    parallel = DistributedConfig(tp_size=1, fsdp_size=size, ep_size=size, ep_implementation="epmoe")
    return _load(path, distributed_config=parallel)


def _load(path: str, **options: Any) -> PreTrainedModel:
    """Load the model in the folder `path` in fp32. Nothing is downloaded."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, **options
    )


def generate(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate text greedily, which means that each step takes the most likely token.

    `ids` [1, T] is a prompt of T tokens, and `options` go to transformers' `generate`. Returns the
    n new tokens [n], and the logits of each step [n, V], where V is the size of the vocabulary.
    """
    # `min_new_tokens` lets the model continue behind the end of its text, so that all runs have
    # equally many steps.
    lengths = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    returned = {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths | returned | options
    )
    return output.sequences[0, ids.shape[1] :], torch.cat(output.logits)


def _ranks() -> Peers:
    """The ranks of the default process group, or this process alone without one."""
    return Peers.of(dist.group.WORLD if dist.is_initialized() else None)
