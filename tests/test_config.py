"""EPConfig: accepted values, rejected values, the error messages, and every file in configs/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from no_clock import NO_CLOCK

import epmoe
from epmoe.config import config_file
from epmoe.config.config import ConfigError, EPConfig
from epmoe.config.config_file import find_config

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
MODEL = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64}
TOPOLOGY = {"ep_size": 4}


def make(**sections: Any) -> EPConfig:
    """A small configuration; the keys of `sections` override its keys."""
    base: dict[str, Any] = {"model": MODEL, "topology": TOPOLOGY}
    return EPConfig(**base | {name: base.get(name, {}) | keys for name, keys in sections.items()})


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_defaults():
    config = make()
    assert config.model.torch_dtype is torch.bfloat16
    chosen = config.routing.scoring, config.placement.strategy, config.exchange.transport
    assert chosen == ("softmax", "linear", "auto")
    assert config.capacity.max_expert_rows is None
    assert config.num_physical_experts == 16
    # Experts as most models have them.
    swiglu = {"interleaved": False, "limit": None, "alpha": 1.0, "up_offset": 0.0}
    assert config.experts.options == swiglu | {"batch_invariant": False}
    assert not config.experts.biases and not config.experts.weights_on_input
    # A round gets its deadline, and the opening of a group five minutes at least.
    deadlines = [
        make(exchange={"timeout_s": seconds}).exchange.warmup_timeout_s for seconds in (9, 600)
    ]
    assert deadlines == [300, 600]


def test_equal_after_a_round_trip_and_frozen():
    config = make(placement={"num_redundant_experts": 2})
    assert EPConfig(**config.model_dump()) == config
    assert EPConfig(**json.loads(config.model_dump_json())) == config
    with pytest.raises(ValueError, match="frozen"):
        config.topology.ep_size = 8


YAML = """
model: {num_experts: 16, num_experts_per_tok: 4, hidden_size: 64}
topology: {ep_size: 4}
"""
TOML = """
model = {num_experts = 16, num_experts_per_tok = 4, hidden_size = 64}
[topology]
ep_size = 4
"""
FILES = {
    "c.yaml": YAML,
    "c.yml": YAML,
    "c.toml": TOML,
    "c.json": json.dumps({"model": MODEL, "topology": TOPOLOGY}),
}


@pytest.mark.parametrize("name", FILES)
def test_all_formats_load_the_same_config(tmp_path, name):
    """A byte order mark is no mistake."""
    assert EPConfig.load(write(tmp_path, FILES[name], name)) == make()
    assert EPConfig.load(write(tmp_path, "\ufeff" + FILES[name], name)) == make()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"topology": {"ep_size": True}}, "`topology.ep_size` must be a valid integer, got True"),
        ({"topology": {"ep_size": 4.0}}, "`topology.ep_size` must be a valid integer, got 4.0"),
        ({"topology": {"ep_size": "4"}}, "`topology.ep_size` must be a valid integer, got '4'"),
        (
            {"topology": {"ep_size": 1025}},
            "`topology.ep_size` must be less than or equal to 1024, got 1025",
        ),
        (
            {"exchange": {"timeout_s": True}},
            "`exchange.timeout_s` must be a valid number, got True",
        ),
        ({"exchange": {"timeout_s": float("inf")}}, "`exchange.timeout_s` must be a finite number"),
        (
            {"exchange": {"timeout_s": 9, "warmup_timeout_s": 8}},
            "`exchange.warmup_timeout_s` must be at least .* = 9",
        ),
        (
            {"exchange": {"payload": "fp8"}, "model": {"hidden_size": 72}},
            "`exchange.payload` must be auto where .* = 72 is no multiple of 16",
        ),
        (
            {"exchange": {"payload": "fp8"}, "topology": {"ep_size": 2, "ranks_per_node": 1}},
            "`exchange.payload` must be auto where .* = 64 is no multiple of 128",
        ),
        (
            {"exchange": {"combine_payload": "fp8"}},
            "`exchange.combine_payload` must be auto where .* no multiple of 128",
        ),
        ({"experts": {"limit": 0}}, "`experts.limit` must be greater than 0, got 0"),
        ({"experts": {"alpha": -1.0}}, "`experts.alpha` must be greater than 0, got -1.0"),
        ({"experts": {"up_offset": float("nan")}}, "`experts.up_offset` must be a finite number"),
        *(
            (
                {section: {key: value}},
                f"`{section}.{key}` must be 0 or a number that fp32 holds, from .*, got 1e",
            )
            for section, key in (
                ("experts", "limit"),
                ("experts", "alpha"),
                ("experts", "up_offset"),
                ("routing", "routed_scaling_factor"),
            )
            for value in (1e60, 1e-60)
        ),
        (
            {"routing": {"renormalize_epsilon": 1e-60}},
            "`routing.renormalize_epsilon` must be 0 or a number that fp32 holds",
        ),
        ({"experts": {"activation": "gelu"}}, "`experts.activation` is not a known key"),
        (
            {"routing": {"scoring": "relu"}},
            "`routing.scoring` must be 'softmax' or 'sigmoid', got 'relu'",
        ),
        (
            {"model": {"num_expert": 8}},
            "`model.num_expert` is not a known key; did you mean `num_experts`?",
        ),
        (
            {"hardware": {"put_us": 30.0}},
            "`hardware` is not a known key; use model, topology, .* exchange$",
        ),
        (
            {"model": {"num_experts_per_tok": 17}},
            "`model.num_experts_per_tok` must be .* = 16, got 17",
        ),
        (
            {"model": {"hidden_size": 60}},
            "`model.hidden_size` must be a multiple of 8, so that a bfloat16",
        ),
        (
            {"routing": {"num_expert_groups": 3}},
            "`routing.num_expert_groups` must be a divisor .* = 16",
        ),
        (
            {"routing": {"num_expert_groups": 8}},
            "`routing.top_groups` must be from 2 to 8, .* got 1",
        ),
        ({"routing": {"top_groups": 2}}, "`routing.top_groups` must be from 1 to 1"),
        (
            {"topology": {"ranks_per_node": 3}},
            "`topology.ranks_per_node` must be a divisor of .* = 4, got 3",
        ),
        (
            {"topology": {"ep_size": 65}},
            "`topology.ep_size` must be at most 64 on one node, got 65",
        ),
        (
            {"topology": {"ep_size": 32, "ranks_per_node": 2}},
            "`topology.ranks_per_node` .* every node owns an expert",
        ),
        (
            {"capacity": {"max_rows_per_node": 1025}},
            "`capacity.max_rows_per_node` must be at most M = 1024 rows",
        ),
        (
            {"placement": {"strategy": "explicit"}},
            "`placement.assignment` must be given .* 'explicit'.* none",
        ),
        (
            {"placement": {"assignment": [0] * 16}},
            "`placement.assignment` must be given .* got 'linear' with one",
        ),
        (
            {"placement": {"strategy": "explicit", "assignment": [0]}},
            "`placement.assignment` must be 16 .* 1",
        ),
        (
            {"placement": {"strategy": "explicit", "assignment": [0] * 15 + [4]}},
            r"`placement.assignment\[15\]` must be a rank from 0 to 3, got 4",
        ),
        (
            {"placement": {"strategy": "explicit", "assignment": [0, True]}},
            r"`placement.assignment\[1\]` must be a valid integer, got True",
        ),
        (
            {"model": {"num_experts": 4096, "num_experts_per_tok": 4096}}
            | {"capacity": {"max_num_tokens_per_rank": 2**20}},
            (
                "`capacity.max_num_tokens_per_rank` must be at most 131039, as R·M·K rows are "
                "numbered in int32"
            ),
        ),
        (
            {"capacity": {"alignment": 128, "max_expert_rows": 2**31 - 1}},
            (
                "`capacity.max_expert_rows` must be at most 2147483520, the largest .* alignment "
                "128, got 2147483647"
            ),
        ),
    ],
)
def test_a_wrong_value_is_named(sections, message):
    with pytest.raises(ConfigError, match=message):
        make(**sections)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-3", -3),
        ("0", 0),
        ("1_000", 1000),
        ("0x40", 64),
        ("0b11", 3),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e-20", 1e-20),
        ("2.5E+3", 2500.0),
        (".inf", float("inf")),
        ("1:04", "1:04"),
        ("1:04.5", "1:04.5"),
        ("010", "010"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_numbers_of_yaml_are_those_that_people_write(tmp_path, text, value):
    """YAML 1.1 takes 1:04 for 64 and 010 for 8."""
    assert config_file.read_config(write(tmp_path, f"model: {text}")) == {"model": value}


def test_every_wrong_key_is_listed():
    with pytest.raises(ConfigError) as caught:
        EPConfig(model={"num_experts": 0, "num_experts_per_tok": 1}, topology=None)
    assert str(caught.value).splitlines() == [
        "`model.num_experts` must be greater than or equal to 1, got 0",
        "`model.hidden_size` must be set",
        "`topology` must be a mapping of keys, got None",
    ]


def test_environment_overrides_the_file(tmp_path, monkeypatch):
    path = write(tmp_path, YAML)
    monkeypatch.setenv("EPMOE_TOPOLOGY__EP_SIZE", "2")
    monkeypatch.setenv("EPMOE_ROUTING__RENORMALIZE", "true")
    monkeypatch.setenv("EPMOE_PLACEMENT__STRATEGY", "explicit")
    monkeypatch.setenv("EPMOE_PLACEMENT__ASSIGNMENT", str([0, 1] * 8))
    # Variables without a section, which are of something else.
    for variable in (
        "EPMOE_CACHE",
        "EPMOE_CACHE_DIR",
        "EPMOE_LIBRARY",
        "EPMOE_MODELS",
        "EPMOE_HOME",
    ):
        monkeypatch.setenv(variable, "no override")
    config = EPConfig.load(path)
    assert (config.topology.ep_size, config.routing.renormalize) == (2, True)
    assert config.placement.assignment == [0, 1] * 8


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EPMOE_TOPOLOGY__SIZE", "2", "EPMOE_TOPOLOGY__SIZE: `topology` has no key `size`"),
        ("EPMOE_TOPOLGY__EP_SIZE", "2", "EPMOE_TOPOLGY__EP_SIZE: no section `topolgy`"),
        (
            "EPMOE_TOPOLOGY__EP_SIZE",
            "yes",
            "`topology.ep_size` .* environment sets EPMOE_TOPOLOGY__EP_SIZE",
        ),
        ("EPMOE_TOPOLOGY__EP_SIZE", "[", "EPMOE_TOPOLOGY__EP_SIZE: is not a YAML value: line 1: "),
        (
            "EPMOE_TOPOLOGY__EP_SIZE",
            "*four",
            "EPMOE_TOPOLOGY__EP_SIZE: is not a YAML value: .* undefined alias",
        ),
        (
            "EPMOE_TOPOLOGY_EP_SIZE",
            "2",
            "EPMOE_TOPOLOGY_EP_SIZE: .* did you mean EPMOE_TOPOLOGY__EP_SIZE, with two",
        ),
        (
            "EPMOE_EXCHANGE_TIMEOUTS",
            "2",
            "did you mean EPMOE_EXCHANGE__TIMEOUT_S, with two underscores",
        ),
        ("EPMOE_MODEL", "1", "EPMOE_MODEL: has no effect, .* section; .* EPMOE_MODEL__NUM_EXPERTS"),
        (
            "EPMOE_TOPOLOGY__EP_SIZE",
            "1:04",
            "`topology.ep_size` must be a valid integer, got '1:04'",
        ),
        ("EPMOE_TIMEOUT_S", "2", "did you mean EPMOE_EXCHANGE__TIMEOUT_S, with two underscores"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        EPConfig.load(write(tmp_path, YAML))


def test_a_ready_configuration_is_found_by_its_name(tmp_path, monkeypatch):
    """A file of this name comes first, and a folder does not."""
    # Beside a folder of the name, the ready configuration is found.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu_demo").mkdir()
    ready = CONFIGS / "cpu_demo.yaml"
    assert find_config("cpu_demo") == find_config("cpu_demo.yaml") == ready
    assert EPConfig.load("cpu_demo") == EPConfig.load(ready)
    assert find_config("other.yaml") == Path("other.yaml")  # reading it gives the error
    # A file of the name comes first.
    write(tmp_path, YAML, "cpu_demo.yaml")
    assert (find_config("cpu_demo"), find_config("cpu_demo.yaml")) == (ready, Path("cpu_demo.yaml"))
    # A name that is neither is refused wherever a configuration is taken.
    for load in (find_config, EPConfig.load, epmoe.ExpertParallel):
        with pytest.raises(
            ConfigError,
            match="cpu_dem: is neither a file nor a ready .*; there are cpu_bench, cpu_d",
        ):
            load("cpu_dem")
    monkeypatch.setenv("EPMOE_TOPOLOGY__EP_SIZE", "1")
    with epmoe.ExpertParallel("cpu_demo") as ep:
        assert ep.config == EPConfig.load("cpu_demo")


def test_ready_configs_are_those_of_the_package_if_it_has_some(tmp_path, monkeypatch):
    """In a wheel they lie inside the package; a folder `configs` next to an installed package is
    somebody else's.
    """
    monkeypatch.setattr(config_file, "_PACKAGE", tmp_path / "epmoe")
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs", YAML, "beside.yaml")
    assert config_file.ready_configs() == {}
    (tmp_path / "pyproject.toml").touch()
    assert [*config_file.ready_configs()] == ["beside"]
    (tmp_path / "epmoe" / "configs").mkdir(parents=True)
    inside = write(tmp_path / "epmoe" / "configs", YAML, "inside.yaml")
    assert config_file.ready_configs() == {"inside": inside}


def test_the_schema_documents_every_key():
    schema = EPConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    for section in schema["$defs"].values():
        assert section["description"] and section["additionalProperties"] is False
        assert all(key["description"] for key in section["properties"].values())


@NO_CLOCK
@given(
    experts=st.integers(1, 64),
    top_k=st.integers(1, 64),
    groups=st.integers(1, 16),
    top_groups=st.integers(1, 16),
)
def test_config_is_accepted_exactly_if_routing_is_possible(experts, top_k, groups, top_groups):
    sections = {
        "model": {"num_experts": experts, "num_experts_per_tok": top_k},
        "routing": {"num_expert_groups": groups, "top_groups": top_groups},
    }
    possible = (
        experts % groups == 0 and top_groups <= groups and top_k <= top_groups * (experts // groups)
    )
    if possible:
        make(**sections)
    else:
        with pytest.raises(ConfigError, match="^`(model|routing)[.]"):
            make(**sections)


SHAPES = {  # R, E, K, D
    "cpu_demo": (4, 16, 4, 256),
    "cpu_bench": (4, 64, 8, 1024),
    "h200x8_deepseek_v3": (8, 256, 8, 7168),
    "h200x8_qwen3_235b": (8, 128, 8, 4096),
    "h200x2_qwen3_30b": (2, 128, 8, 2048),
    "h200x4_gpt_oss_120b": (4, 128, 4, 2880),
    "h200x4_gpt_oss_120b_fp8": (4, 128, 4, 2880),
    "h200x8_mixtral": (8, 8, 2, 4096),
    "h200x8_llama4_maverick": (8, 128, 1, 5120),
    "h200x8_qwen3_next_80b": (8, 512, 10, 2048),
    "h200x8_deepseek_v4_flash": (8, 256, 6, 4096),
    "h200x8_kimi_k2": (8, 384, 8, 7168),
    "cpu_service": (4, 16, 4, 256),
    "h200x8_deepseek_service": (8, 256, 8, 7168),
}
SERVICES = {"cpu_service": [2, 3], "h200x8_deepseek_service": [6, 7]}
"""Ranks that hold experts, where others hold none."""


def test_no_configuration_is_missed():
    assert {path.stem for path in CONFIGS.iterdir()} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_ready_configuration_loads(name):
    """It gives each rank that holds experts the same number, and has its model's shape."""
    config = EPConfig.load(CONFIGS / f"{name}.yaml")
    model = config.model
    shape = (
        config.topology.ep_size,
        model.num_experts,
        model.num_experts_per_tok,
        model.hidden_size,
    )
    assert shape == SHAPES[name]
    # Those of a service have ranks without experts.
    placement = config.place_experts()
    holders = SERVICES.get(name, range(shape[0]))
    assert sorted(set(placement.owners)) == list(holders)
    assert {placement.num_local_experts(rank) for rank in holders} == {shape[1] // len(holders)}
    assert (config.exchange.idle == "wait") == (name in SERVICES)


def test_deepseek_routing():
    routing = EPConfig.load(CONFIGS / "h200x8_deepseek_v3.yaml").routing
    assert (routing.scoring, routing.renormalize, routing.routed_scaling_factor) == (
        "sigmoid",
        True,
        2.5,
    )
    assert (routing.num_expert_groups, routing.top_groups) == (8, 4)
    assert routing.selection_bias
