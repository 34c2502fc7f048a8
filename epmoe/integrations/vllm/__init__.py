"""epmoe in vLLM: a plugin that replaces the exchange around vLLM's own experts, and nothing else.

vLLM finds `register` by the entry point `vllm.general_plugins`. The plugin acts only where it is
chosen:

    vllm serve MODEL --data-parallel-size 2 --enable-expert-parallel \\
        --additional-config '{"epmoe": "rank"}'

or by the environment variable EPMOE_VLLM=rank, which `--additional-config` overrides.
`all2all_backend` stays at its default. Nothing is patched: vLLM offers a class to replace its layer
of experts, and an interface for the exchange.

    release.py           the releases of vLLM whose layer of experts is the seat
    choice.py            what the user chose
    layer.py             the layer of experts, with the exchange in the kernel of vLLM's method
    prepare_finalize.py  the exchange, as vLLM's modular kernel wants it
    sizes.py             the windows: an ExpertParallel for each power of two of tokens
    sleep.py             the windows in vLLM's sleep mode
    weights.py           versions of a trainer's weights, by vLLM's weight transfer
"""

from __future__ import annotations

from contextlib import suppress


def register() -> None:
    """Entry point of the plugin: vLLM calls it in each of its processes, possibly several times.

    Where this vLLM has no seat for epmoe, a warning says so. Raises RuntimeError then if EPMOE_VLLM
    chooses epmoe.
    """
    import vllm

    from epmoe.integrations.vllm.release import refuse

    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.custom_op import op_registry_oot

        from epmoe.integrations.vllm.layer import Seat, seats
    except (ImportError, AttributeError) as error:
        refuse(f"vLLM {vllm.__version__} has no layer of experts that epmoe knows ({error})")
        return
    for layer, seat in seats().items():
        taken = op_registry_oot.get(layer.__name__)
        if taken is None:
            layer.register_oot(seat)
        elif not issubclass(taken, Seat):
            refuse(f"another plugin has replaced {layer.__name__} by {taken.__qualname__}")
    # vLLM has the names already, if it has called this before.
    with suppress(ValueError):
        SleepModeBackendFactory.register_backend(
            "epmoe", "epmoe.integrations.vllm.sleep", "SleepWithWindows"
        )
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            "epmoe", "epmoe.integrations.vllm.weights", "VersionEngine"
        )
