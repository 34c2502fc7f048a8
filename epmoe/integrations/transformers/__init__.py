"""epmoe in Hugging Face transformers: importing this module registers the name `"epmoe"` in two
ways.

As an EP implementation (transformers ≥ 5.23): each rank holds its share of the expert weights.

    import epmoe.integrations.transformers
    parallel = DistributedConfig(tp_size=1, fsdp_size=8, ep_size=8, ep_implementation="epmoe")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=parallel)

As an experts function (transformers ≥ 5.17): each rank holds all weights and computes its share of
the experts.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="epmoe")

Every rank may bring its own batch, of any length, also an empty one. A rank that finishes
`generate` early must keep stepping: the EP implementation does so by default, and the experts
function needs `synced_gpus=True`. Serve under `torch.no_grad()`, because torch's FSDP refuses
inference mode. With gradients both train: see docs/training.md. All layers share one
`ExpertParallel`; see `configure`, `close` and `shared`.

With `configure(static=True)` the host looks at no count, and forward passes can be compiled and
captured into CUDA graphs:

    configure(static=True, max_num_tokens_per_rank=128)
    model.generate(**inputs, cache_implementation="static")  # transformers compiles it

    settings.py           what users set, and the exchanges that layers share
    experts_function.py   the experts function
    ep_implementation.py  the EP implementation
    experts.py            a module's experts over expert-major rows, with gradients or without
    fp8.py                which experts in fp8 epmoe takes, and their scales
    graphs.py             a layer of experts as one operator, in static mode
"""

from __future__ import annotations

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "epmoe.integrations.transformers needs transformers: pip install 'epmoe[hf]'"
    ) from error
from packaging.version import Version

if Version(transformers.__version__) < Version("5.17"):
    raise ImportError(
        "epmoe.integrations.transformers needs transformers 5.17 or newer, got "
        f"{transformers.__version__}"
    )
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from epmoe.integrations.transformers.experts_function import experts_forward, warn_where_ignored
from epmoe.integrations.transformers.settings import close, configure, poll, shared

__all__ = ["close", "configure", "experts_forward", "poll", "shared"]

for _interface in (ExpertsInterface, FP8ExpertsInterface):
    _interface.register("epmoe", experts_forward)
warn_where_ignored()

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
except ImportError:  # transformers < 5.23 has the experts function only
    pass
else:
    from epmoe.integrations.transformers.ep_implementation import EpmoeEP

    EPImplementationInterface.register("epmoe", EpmoeEP)
    __all__ += ["EpmoeEP"]
