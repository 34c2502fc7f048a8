"""From a Hugging Face checkpoint to text: MoELayers take the place of the MoE blocks, over any
number of ranks.

Run: torchrun --standalone --nproc-per-node 4 examples/generate.py FOLDER [save SAVED | load SAVED]
FOLDER is a local checkpoint, with its tokenizer, of Qwen3-MoE, DeepSeek-V3 or another model whose
MoE blocks have a router, experts and perhaps `shared_experts`. Each rank reads its own experts
only, and has a prompt of its own. SAVED is a folder of torch.distributed.checkpoint: any number of
ranks loads what any other number has saved. Prints, on rank 0: the device, the prompt and what
follows it.
"""

import sys

import torch
import torch.distributed as dist
from devices import meet
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import epmoe

PROMPTS = [
    "Why is the sky blue?",
    "A fox",
    "To bake good bread you need",
    "Once upon a time, in a village",
]


def load_model(path, ep, dtype=None):
    """The model of a checkpoint, with the experts of this rank."""
    return with_layers(load_dense(path), path, ep, dtype)


def load_dense(path):
    """The model without its routers and experts, which stay on the meta device."""
    folder = epmoe.SafetensorsFolder(path)
    config = AutoConfig.from_pretrained(path)

    # The meta device makes the modules without memory for their weights.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)

    # Load what is no expert. MoELayers load the experts later, each rank its own.
    dense = {}
    for name in model.state_dict():
        if name in folder and ".experts." not in name:
            dense[name] = folder[name]
    model.load_state_dict(dense, strict=False, assign=True)
    model.tie_weights()

    # Rotary embeddings compute their buffers, which are in no checkpoint.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def scores_too(layer, inputs, y):
    """A hook: blocks of gpt-oss return scores, too, which nobody reads here."""
    return y, None


def with_layers(model, path, ep, dtype=None):
    """Put a MoELayer in place of each MoE block, with experts in `dtype`, by default that of the
    checkpoint.
    """
    folder = epmoe.SafetensorsFolder(path)
    for name, block in list(model.named_modules()):
        if not hasattr(block, "experts"):
            continue
        # Every rank has the shared experts whole.
        shared = getattr(block, "shared_experts", None)
        # The layer reads the router and this rank's experts from the folder.
        layer = epmoe.MoELayer.from_safetensors(ep, folder, name, shared=shared, dtype=dtype)
        if model.config.model_type == "gpt_oss":
            layer.register_forward_hook(scores_too)
        model.set_submodule(name, layer)
    return model.to(ep.device).eval()


def main(device, path, action=None, saved=None):
    # Sizes, routing and the formula of the experts come from the checkpoint.
    config = epmoe.EPConfig.from_hf(
        path, ep_size=dist.get_world_size(), capacity={"max_num_tokens_per_rank": 256}
    )
    with epmoe.ExpertParallel(config, device=device) as ep, torch.inference_mode():
        model = load_model(path, ep)
        if action == "save":
            epmoe.checkpoint.save(model, saved)
        elif action == "load":
            epmoe.checkpoint.load(model, saved)
        elif action is not None:
            raise SystemExit(f"expected save or load, got {action}")

        # Each rank has a prompt of its own.
        tokenizer = AutoTokenizer.from_pretrained(path)
        prompt = tokenizer(PROMPTS[ep.rank % len(PROMPTS)], return_tensors="pt").to(ep.device)

        # All ranks run as many steps as the longest answer has: a layer needs all ranks.
        tokens = model.generate(
            **prompt, max_new_tokens=16, do_sample=False, synced_gpus=ep.size > 1
        )
        if ep.rank == 0:
            print(tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    main(meet(), *sys.argv[1:])
    dist.destroy_process_group()
