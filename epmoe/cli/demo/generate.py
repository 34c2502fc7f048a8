"""A model of transformers whose experts are spread over the ranks, compared with the same model in
a single process.

Models are tiny ones with random weights, or local checkpoints.
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
"""Rank r takes prompt r mod 8, so ranks bring batches of different lengths."""

# Absolute. The models run in fp32.
LOGIT_TOLERANCE = 1e-5
# Relative to the largest logit: a checkpoint has many more layers.
CHECKPOINT_TOLERANCE = 1e-4
_RANDOM = "Weights are random and the model is tiny: the words have no meaning, the agreement has."


class _Generated(NamedTuple):
    """What a model has made of this rank's prompt."""

    tokens: torch.Tensor
    """[n]"""
    logits: torch.Tensor
    """[n, V]"""
    clock: StageClock


def run_model(name: str, *, max_new_tokens: int = 24, seed: int = 0) -> Result:
    """Generate greedily from this rank's prompt, in a single process and with the experts spread
    over all ranks.

    `name` is one of `MODELS`, or a folder with a checkpoint. Every rank of the default process
    group calls it with the same arguments; without torch.distributed, a single process does. Models
    are fp32, on GPUs if the group has NCCL, otherwise on the CPU. The ranks take turns with the
    single process, so that one is in memory at a time. Every `ExpertParallel` of the integration is
    closed before and after the run. Raises ValueError for an unknown `name`.
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
    # One process at a time, then load the model of all ranks.
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
        spread = _load_distributed(path, size, device)
    # Otherwise the first stage would include waiting for the slowest to load.
    _ranks().all_gather(None)
    # All ranks together.
    clock = StageClock(device)
    integration.configure(clock=clock.now)
    together = _watched(spread, ids, max_new_tokens, clock, synced_gpus=size > 1)
    (layers,) = integration.shared()
    health = layers.ep.health()
    config = layers.ep.config
    clock.divide("experts", layers.seconds, rest="other layers")
    integration.configure(clock=time.perf_counter)
    # Every rank learns what all have measured.
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
    """`generate`, whose stages a clock measures."""
    with clock.watch(model):
        tokens, logits = generate(model, ids, max_new_tokens, **options)
    return _Generated(tokens, logits, clock)


def _checks(by_rank: dict[str, list[Any]], is_ours: bool) -> list[Check]:
    """Compare what the model says on all ranks with what it says in one process."""
    # `max` of a tensor is NaN if any error is.
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
    """Its two functions: from text to ids, and back."""
    if name in MODELS:
        tokenizer = make_tokenizer()
        return lambda text: tokenizer.encode(text).ids, tokenizer.decode
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    return tokenizer_of(Path(path), config.get_text_config().vocab_size)


def make_tokenizer() -> Tokenizer:
    """Train a BPE tokenizer of ASCII text on `PROMPTS`. All its tokens can be printed."""
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
    """Make a new checkpoint of model `name`, and return its folder: the same one on all ranks,
    which must be on one machine.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **MODELS[name]), dtype=dtype
        )
        for key, tensor in model.state_dict().items():
            # Biases are zeros at first, which would hide one that is left out.
            if key.endswith("bias"):
                tensor.normal_(std=0.1)
    with tempfile.TemporaryDirectory() as folder:
        of_rank_0 = _ranks().all_gather(folder)[0]
        # All ranks call it, and in transformers only rank 0 writes.
        model.save_pretrained(of_rank_0)
        _ranks().all_gather(None)
        yield of_rank_0
        _ranks().all_gather(None)


def _load_distributed(path: str, size: int, device: str) -> PreTrainedModel:
    """Load the model in `path` on `device`, with its experts spread over `size` ranks. Each rank
    brings its own batch.

    A rank holds its share of the expert weights. It holds all of them where transformers has no EP
    implementations yet, or would choose another device: with a DistributedConfig it takes the
    accelerator, if there is one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    default_device = accelerator.type if accelerator else "cpu"
    if size == 1 or device != default_device or not hasattr(integration, "EpmoeEP"):
        return _load(path, experts_implementation="epmoe").to(device)
    parallel = DistributedConfig(tp_size=1, fsdp_size=size, ep_size=size, ep_implementation="epmoe")
    return _load(path, distributed_config=parallel)


def _load(path: str, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, **options
    )


def generate(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode greedily. Returns the tokens [n] that follow `ids` [1, T], and the logits [n, V] of
    each step.
    """
    # With `min_new_tokens` it goes past the end of a text, so that runs can be compared.
    lengths = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    returned = {"output_logits": True, "return_dict_in_generate": True}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths | returned | options
    )
    return output.sequences[0, ids.shape[1] :], torch.cat(output.logits)


def _ranks() -> Peers:
    return Peers.of(dist.group.WORLD if dist.is_initialized() else None)
