"""Which feature works in which stack: the one source of docs/where.md and of README's table.

Each cell names a test, a message or a reason. `python tests/where.py` writes both, and
tests/test_where.py holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import tried
from helpers import ROOT

PAGE = ROOT / "docs" / "where.md"
README = ROOT / "README.md"
STACKS = ("library", "vLLM", "SGLang", "transformers", "torchtitan", "Megatron")


@dataclass(frozen=True)
class Cell:
    """`says` is a test by its id, a message and the file that raises it, or a reason."""

    sign: Literal["yes", "no", "–"]
    says: str
    file: str = ""

    @property
    def shown(self) -> str:
        """What stands in the table. A `yes` leads to its test, whose name is the link's title."""
        if self.sign != "yes":
            return self.sign
        path, _, name = self.says.partition("::")
        return f'[yes](../tests/{path} "{name}")'

    @property
    def reason(self) -> str:
        """Why there is no `yes`: the words of a message, or a sentence."""
        return f"“{self.says}” (`epmoe/{self.file}`)" if self.file else self.says


def yes(test: str) -> Cell:
    """A test holds it."""
    return Cell("yes", test)


def refused(message: str, file: str) -> Cell:
    """epmoe refuses it, with this message."""
    return Cell("no", message, file)


def missing(why: str) -> Cell:
    """It could be there, and is not: nobody has built it or tried it."""
    return Cell("no", why)


def foreign(why: str) -> Cell:
    """The stack has no such thing, or leaves no room for it."""
    return Cell("–", why)


D = "distributed/"
TRAINS = foreign("The stack trains and does not serve.")
SERVES = foreign("The stack serves and does not train.")
VLLM = "integrations/vllm/layer.py"
SGLANG = "integrations/sglang/dispatcher.py"
OWN_GEMMS = foreign("The stack's own experts compute: what formats they take is the stack's.")
BY_HOST = foreign(
    "The stack ends all its ranks when one dies, and has no way to take a smaller group."
)
ONE_NODE = refused("training needs a group of one node", "training/exchange.py")
TABLE: dict[str, tuple[Cell, ...]] = {
    "serves": (
        yes(D + "test_exchange.py::test_agrees_with_the_dense_reference"),
        yes("stacks/test_vllm_engine.py::test_two_ranks_generate_the_tokens_of_one"),
        yes("stacks/test_sglang.py::test_a_batch_on_each_rank"),
        yes(
            D
            + "test_transformers.py::test_generation_from_different_prompts_equals_a_single_process"
        ),
        TRAINS,
        refused("epmoe takes part in training only", "integrations/megatron.py"),
    ),
    "trains": (
        yes("test_train_script.py::test_any_number_of_ranks_has_the_numbers_of_one_process"),
        SERVES,
        SERVES,
        yes(D + "test_transformers_training.py::test_the_trainer"),
        yes("stacks/test_torchtitan.py::test_a_hundred_steps_have_the_losses_of_all_to_all"),
        yes(
            "stacks/test_megatron.py::test_gradients_of_experts_and_router_are_those_of_all_to_all"
        ),
    ),
    "CUDA graphs": (
        yes(D + "test_graphs.py::test_ranks_that_replay_different_graphs"),
        missing(
            "A layer is captured by `benchmarks/vllm_layer.py`; an engine on GPUs has not been "
            "tried by a test."
        ),
        yes("stacks/test_sglang.py::test_a_captured_layer"),
        yes(D + "test_transformers_static.py::test_a_captured_forward_pass"),
        missing("`non_blocking_capacity_factor` admits them; no test captures one."),
        missing("Megatron captures whole layers, which has not been tried."),
    ),
    "CUDA graphs, while ranks come and go": (
        yes("test_outlive.py::test_graphs_go_on_while_ranks_come_and_go"),
        foreign(
            "vLLM fixes the number of ranks, and its settings have no key for `topology.max_ranks`."
        ),
        refused("the framework fixes the number of ranks", "integrations/session.py"),
        missing(
            "transformers' layers have experts that stay; `configure` has no key for "
            "`topology.max_ranks`."
        ),
        TRAINS,
        TRAINS,
    ),
    "torch.compile": (
        yes("test_compile.py::test_one_graph_serves_a_layer"),
        yes("stacks/test_vllm_engine.py::test_two_ranks_generate_the_tokens_of_one"),
        foreign("SGLang captures graphs without a compiler."),
        yes(D + "test_transformers_static.py::test_compiled_generation_with_a_static_cache"),
        missing("Its operators are opaque to compilers; no test compiles torchtitan's model."),
        foreign("Megatron compiles no whole layers."),
    ),
    "fp8 weights": (
        yes("test_grouped_gemm.py::test_deep_gemm_takes_fp8_rows"),
        yes("stacks/test_vllm_kernels.py::test_two_ranks_compute_what_one_computes"),
        yes("stacks/test_sglang.py::test_block_fp8"),
        yes(D + "test_transformers.py::test_an_fp8_checkpoint"),
        OWN_GEMMS,
        OWN_GEMMS,
    ),
    "MXFP4 weights, as they are": (
        yes(D + "test_layers.py::test_a_layer_in_mxfp4_is_that_of_its_values"),
        yes("stacks/test_vllm_engine.py::test_gpt_oss_in_mxfp4_as_it_is"),
        refused("MXFP8, or DeepGEMM on Blackwell", SGLANG),
        foreign(
            "transformers keeps MXFP4 in a module of its own, without `use_experts_implementation`."
        ),
        OWN_GEMMS,
        OWN_GEMMS,
    ),
    "NVFP4 weights, as they are": (
        yes(D + "test_layers.py::test_a_layer_in_nvfp4_is_that_of_its_values"),
        yes("stacks/test_vllm_engine.py::test_qwen3_in_nvfp4_as_it_is"),
        missing("epmoe's experts take SGLang's weights in bf16 and fp8."),
        foreign("transformers keeps NVFP4 in modules of compressed-tensors and modelopt."),
        OWN_GEMMS,
        OWN_GEMMS,
    ),
    "MXFP4 and NVFP4 weights over rows in fp8": (
        yes("test_mxfp4_by_fp8.py::test_a_layer_whose_rows_travel_as_fp8"),
        yes("stacks/test_vllm_engine.py::test_gpt_oss_in_mxfp4_over_rows_in_fp8"),
        refused("MXFP8, or DeepGEMM on Blackwell", SGLANG),
        foreign("transformers keeps such weights in modules of its own or of other libraries."),
        OWN_GEMMS,
        OWN_GEMMS,
    ),
    "biases and clamped SwiGLU (gpt-oss)": (
        yes("test_gpt_oss.py::test_a_layer_is_the_block_of_transformers"),
        yes("stacks/test_vllm_engine.py::test_gpt_oss_with_biases_and_a_limit"),
        OWN_GEMMS,
        yes(D + "test_transformers.py::test_one_layer_with_batches_of_any_length"),
        OWN_GEMMS,
        OWN_GEMMS,
    ),
    "tokens travel as fp8": (
        yes(D + "test_fp8_rows.py::test_every_bit_arrives"),
        yes("stacks/test_vllm_kernels.py::test_two_ranks_compute_what_one_computes"),
        yes("stacks/test_sglang.py::test_block_fp8"),
        yes("test_transformers.py::test_fp8_payload_reaches_the_experts_in_their_dtype"),
        missing(
            "Rounds of training take fp8 by `TrainingExchange(payload=…)`; the override has no key "
            "for it."
        ),
        missing(
            "Rounds of training take fp8 by `TrainingExchange(payload=…)`; Megatron has no setting "
            "for it."
        ),
    ),
    "more tokens than the windows hold": (
        missing("A call is one round: the caller splits it."),
        yes("stacks/test_vllm_engine.py::test_vllm_hands_out_the_experts_of_tokens"),
        refused("tokens on this rank: set", SGLANG),
        yes(D + "test_transformers.py::test_prompts_longer_than_the_limit_run_in_several_rounds"),
        foreign("The windows hold `num_max_tokens_per_rank`, which torchtitan computes."),
        refused("tokens on this rank: set", "integrations/megatron.py"),
    ),
    "LoRA of experts, served": (
        yes(D + "test_adapters.py::test_each_token_gets_its_adapter"),
        missing(
            "A warning, and vLLM's own exchange serves: what tells it the adapters is undeclared. "
            "`FusedMoEPrepareAndFinalizeModular` would have to declare `set_lora_context`, and "
            "`MoELoRAContext` to have the ids of the tokens as `token_lora_mapping`, int32 [T], "
            "beside `local_token_lora_mapping` of rows."
        ),
        foreign("SGLang would have to hand a dispatcher the adapters of the tokens."),
        yes("test_given.py::test_adapters_of_sequences_and_tokens"),
        TRAINS,
        TRAINS,
    ),
    "LoRA of experts, trained": (
        yes(D + "test_lora.py::test_steps_are_those_of_one_process"),
        SERVES,
        SERVES,
        yes("test_transformers.py::test_adapters_of_peft_train"),
        foreign("torchtitan has no adapters of experts."),
        foreign("Megatron-Core has no adapters of experts."),
    ),
    "experts that move": (
        yes(D + "test_moves.py::test_experts_move_while_rounds_go_on"),
        yes("stacks/test_vllm_engine.py::test_experts_move_while_prompts_drift"),
        yes("stacks/test_sglang_live.py::test_experts_move_while_prompts_drift"),
        foreign(
            "The stack's experts stay where the stack has loaded them; it would have to hand out "
            "their memory."
        ),
        refused("`placement.live` must be unset for training", "training/exchange.py"),
        refused("`placement.live` must be unset for training", "training/exchange.py"),
    ),
    "routes handed out": (
        yes("test_given.py::test_a_forward_pass_takes_the_routes_of_another"),
        yes("stacks/test_vllm_engine.py::test_vllm_hands_out_the_experts_of_tokens"),
        yes("stacks/test_sglang.py::test_routed_experts_are_those_of_the_tokens"),
        yes("test_given.py::test_generate"),
        foreign("torchtitan's router runs before epmoe."),
        yes("stacks/test_megatron.py::test_routes_of_megatron_are_replayed"),
    ),
    "routes replayed": (
        yes("test_given.py::test_a_forward_pass_takes_the_routes_of_another"),
        foreign("vLLM's router runs before epmoe, and vLLM replays nothing."),
        foreign("SGLang's router runs before epmoe, and SGLang replays nothing."),
        yes("test_given.py::test_generate"),
        foreign("torchtitan's router runs before epmoe."),
        yes("stacks/test_megatron.py::test_routes_of_megatron_are_replayed"),
    ),
    "weights handed over while it serves": (
        yes(D + "test_hand_over.py::test_a_token_meets_one_version"),
        yes("stacks/test_vllm_weights.py::test_weights_of_a_trainer_reach_the_engine"),
        missing(
            "A receiver takes `MoELayer`s; SGLang loads its own experts again, by calls of its own."
        ),
        yes("test_rl_script.py::test_few_steps"),
        missing("A sender takes `MoELayer`s; torchtitan's experts are a module of the model."),
        missing("A sender takes `MoELayer`s; Megatron's experts compute."),
    ),
    "batch invariance": (
        yes(D + "test_batch_invariance.py::test_y_of_a_token_depends_on_no_other_token"),
        yes("stacks/test_vllm_engine.py::test_log_probabilities_alone_and_together"),
        yes("stacks/test_sglang.py::test_deterministic_inference_is_kept"),
        missing("`configure` has no key for it, and attention is the model's."),
        TRAINS,
        TRAINS,
    ),
    "several machines": (
        yes(D + "test_two_machines.py::test_a_token_crosses_once_per_node"),
        missing("A group that spans machines is an error at the start."),
        missing("A group that spans machines is an error while the model is built."),
        yes(
            D
            + "test_transformers.py::test_generation_from_different_prompts_equals_a_single_process"
        ),
        ONE_NODE,
        ONE_NODE,
    ),
    "experts as a service (ranks without experts, idle ranks)": (
        yes("test_experts_service.py::test_one_dies_and_one_joins_under_load"),
        missing("vLLM gives experts to every rank of its group, and no setting names others."),
        missing("SGLang gives experts to every rank of its group, and no setting names others."),
        missing("transformers' own plan gives experts to every rank of its mesh."),
        TRAINS,
        TRAINS,
    ),
    "goes on after a death": (
        yes("test_recover.py::test_kill_recover_join"),
        BY_HOST,
        BY_HOST,
        BY_HOST,
        BY_HOST,
        BY_HOST,
    ),
    "grows and shrinks": (
        yes("test_resize.py::test_two_four_three_while_experts_move"),
        refused("elastic EP changes the group", VLLM),
        foreign("SGLang's elastic EP has exchanges of its own."),
        foreign("A model's meshes have one size."),
        foreign("torchtitan's meshes have one size."),
        foreign("Megatron's groups have one size."),
    ),
    "micro-batches that overlap": (
        yes(D + "test_phases.py::test_two_micro_batches_overlap"),
        refused("dual-batch overlap needs two rounds at the same time", VLLM),
        foreign("SGLang refuses two-batch overlap with `deepep_v2`."),
        foreign("transformers runs one batch at a time."),
        foreign("torchtitan runs a layer's exchange and experts one after the other."),
        refused(
            "its schedule cuts the graph between dispatch and combine", "integrations/megatron.py"
        ),
    ),
    "stages of a pipeline": (
        yes("test_pipeline.py::test_gradients_are_those_of_one_process"),
        SERVES,
        SERVES,
        foreign("transformers' own EP has no pipeline that trains."),
        missing(
            "The order of 1F1B is tried in one process; torchtitan's trainer, which makes stages, "
            "needs GPUs."
        ),
        yes("stacks/test_megatron.py::test_its_pipeline"),
    ),
    "activation checkpoints": (
        yes(D + "test_training_graphs.py::test_checkpoints_compute_the_same_bits"),
        SERVES,
        SERVES,
        yes(D + "test_transformers_training.py::test_gradient_checkpointing"),
        yes("stacks/test_torchtitan.py::test_selective_checkpoints_keep_the_rounds"),
        yes("stacks/test_megatron.py::test_recomputation_has_the_same_bits_in_three_rounds"),
    ),
    "epmoe's own experts": (
        yes("test_grouped_experts.py::test_gaps_and_rows_past_the_end_may_be_nan"),
        yes("stacks/test_vllm_engine.py::test_two_ranks_generate_the_tokens_of_one"),
        yes("stacks/test_sglang.py::test_experts_of_our_own"),
        yes(D + "test_transformers.py::test_one_layer_with_batches_of_any_length"),
        foreign(
            "The override takes torchtitan's dispatcher; its experts are a module of the model."
        ),
        foreign("Megatron's experts compute."),
    ),
    "replicas of experts (EP below DP)": (
        yes(D + "test_tools.py::test_replicas_of_experts"),
        SERVES,
        SERVES,
        missing("No test has a second group of EP."),
        yes("stacks/test_torchtitan_deepseek.py::test_two_micro_batches_are_in_flight"),
        yes("stacks/test_megatron.py::test_two_micro_batches_are_in_flight"),
    ),
    "saves and loads": (
        yes(D + "test_checkpoints.py::test_torchs_checkpoint_loads_on_any_number_of_ranks"),
        yes("stacks/test_vllm_reload.py::test_sleep_and_weights_that_are_loaded_again"),
        yes("stacks/test_sglang_live.py::test_weights_that_are_loaded_again_follow_the_experts"),
        yes(D + "test_trainer.py::test_the_experts_function_under_ddp"),
        yes("stacks/test_torchtitan_deepseek.py::test_a_checkpoint_of_torchtitan"),
        yes("stacks/test_megatron.py::test_a_checkpoint_of_megatron"),
    ),
    "sleeps, and wakes up": (
        yes("test_outlive.py::test_sleep_frees_all_and_graphs_go_on_after_wake"),
        yes("stacks/test_vllm_reload.py::test_sleep_and_weights_that_are_loaded_again"),
        foreign("SGLang frees its own memory; the windows stay. It has no call for an exchange."),
        foreign(
            "transformers has no sleep mode; `shared()[0].ep.sleep()` is for a loop of your own."
        ),
        TRAINS,
        TRAINS,
    ),
    "metrics for Prometheus": (
        yes("test_prometheus.py::test_every_count_is_exported"),
        yes("stacks/test_vllm_deaths.py::test_a_rank_dies"),
        missing(
            "`HealthCollector` takes any `ExpertParallel`; SGLang's own exporter is in another "
            "process."
        ),
        yes("test_transformers.py::test_metrics_of_a_model"),
        foreign("torchtitan has loggers of its own."),
        foreign("Megatron has loggers of its own."),
    ),
}

IN_README = (
    "serves",
    "trains",
    "CUDA graphs",
    "fp8 weights",
    "experts that move",
    "several machines",
    "goes on after a death",
)
"""Features that README shows, too."""

HEAD = """# Where it works

I use [vLLM](serving.md#vllm), [SGLang](serving.md#sglang), [transformers, its Trainer or
PEFT](serving.md#transformers), [torchtitan](training.md#in-torchtitan),
[Megatron-Core](training.md#in-megatron-core), or a loop of my own, the [library](start.md). The
column of transformers has its seat, and models of transformers whose blocks are
[`MoELayer`s](models.md). verl and slime train with Megatron-Core or FSDP and roll out with vLLM or
SGLang: each part is in its own column.

| sign | what it says |
|---|---|
| yes | a test holds it: the link leads there |
| no | epmoe does not do it there: it refuses with a message, or nobody has built or tried it |
| – | the stack has no such thing, or leaves no room for it |

The [reasons](#reasons) of each “no” and “–” stand below the table. `python tests/where.py` writes
this page and the table of README, and `tests/test_where.py` checks that tests and messages exist.
"""

REASONS = """## Reasons
"""

VERSIONS = """## Versions that were tried

Each line was written by the tests of its target, when they passed in this environment, on CPUs.
`make test` runs with the versions that `constraints.txt` pins.
"""


def table(columns: Mapping[str, str], features: Iterable[str], show: Callable[[Cell], str]) -> str:
    """A Markdown table of these features. `columns` has the head of each stack's column."""
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for feature in features:
        cells = (show(cell) for cell in TABLE[feature])
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def reasons() -> str:
    """For each feature why it lacks in a stack. Stacks with one reason stand together.

    That a stack does not serve, or does not train, is said once: in the rows of these two.
    """
    lines = []
    for feature, row in TABLE.items():
        stacks: dict[str, list[str]] = {}
        for stack, cell in zip(STACKS, row, strict=True):
            said = cell in (SERVES, TRAINS) and feature not in ("serves", "trains")
            if cell.sign != "yes" and not said:
                stacks.setdefault(cell.reason, []).append(stack)
        if stacks:
            told = (f"{', '.join(names)}: {reason}" for reason, names in stacks.items())
            lines.append(f"- **{feature}** " + " ".join(end_of(text) for text in told))
    return "\n".join(lines) + "\n"


def end_of(sentence: str) -> str:
    """The sentence with a full stop, also behind a message."""
    return sentence if sentence.endswith(".") else sentence + "."


def render() -> str:
    """The page: the table, the reasons, and the versions that were tried."""
    columns = dict(zip(STACKS, STACKS, strict=True))
    tested = "\n".join(f"- {line}" for line in tried.lines()) + "\n"
    return "\n".join(
        (HEAD, table(columns, TABLE, lambda cell: cell.shown), REASONS, reasons(), VERSIONS, tested)
    )


PAGES = {
    "library": "library",
    "vLLM": "[vLLM](docs/serving.md#vllm)",
    "SGLang": "[SGLang](docs/serving.md#sglang)",
    "transformers": "[transformers](docs/serving.md#transformers)",
    "torchtitan": "[torchtitan](docs/training.md#in-torchtitan)",
    "Megatron": "[Megatron](docs/training.md#in-megatron-core)",
}
"""The heads of README's columns lead to the page of each stack."""


def in_readme(readme: str) -> str:
    """README with its table of features as it should be: the one behind the heading."""
    shown = table(PAGES, IN_README, lambda cell: cell.sign)
    before, heading, behind = readme.partition("## [Where it works](docs/where.md)\n")
    old = r"\n\| \| library .*?\n\n"
    after = re.sub(old, lambda _: f"\n{shown}\n", behind, count=1, flags=re.DOTALL)
    return before + heading + after


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    README.write_text(in_readme(README.read_text(encoding="utf-8")), encoding="utf-8")
