"""examples/serve.py on GPUs: a step of a rank is a replay of a CUDA graph."""

from __future__ import annotations

import os

import serve
import serve_front
import serve_rank
import torch
from torch import Tensor

import epmoe

SIZES = (1, 2, serve_rank.BATCH)  # of batches with a graph
original_configured = serve_rank.configured
original_run_rank = serve_rank.run_rank


class Experts(epmoe.GroupedExperts):
    """In fp32 for graphs: every row meets every expert. Tokens then agree with those of a CPU."""

    def forward(
        self, rows_ND: Tensor, expert_offsets: Tensor, scales: Tensor | None = None, **_: object
    ) -> Tensor:
        row = torch.arange(len(rows_ND), device=rows_ND.device)
        expert = torch.searchsorted(expert_offsets[1:].long(), row, right=True).clamp(
            max=len(self.w_down) - 1
        )
        gate, up = torch.einsum("nd,efd->enf", rows_ND, self.w_gate_up).chunk(2, dim=-1)
        all_outputs = torch.einsum("enf,edf->end", torch.nn.functional.silu(gate) * up, self.w_down)
        return all_outputs[expert, row]


class Graph:
    """The captured step of a batch of up to `size` requests."""

    def __init__(self, model: Model, size: int, tokens: Tensor, ends: Tensor) -> None:
        self.size = size
        self.device = model.ep.device
        self.tokens = tokens
        self.ends = ends
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.next = model.compute(self.tokens, self.ends)

    def replay(self, batch: list[list[int]]) -> Tensor:
        rows = [[*tokens, *[0] * serve_rank.LENGTH][: serve_rank.LENGTH] for tokens in batch]
        ends = [len(tokens) - 1 for tokens in batch]
        self.tokens[: len(rows)] = (
            torch.tensor(rows, dtype=torch.int64).view(-1, serve_rank.LENGTH).to(self.device)
        )
        self.ends[: len(rows)] = torch.tensor(ends, dtype=torch.int64).to(self.device)
        self.graph.replay()
        return self.next[: len(rows)]


class Model(serve_rank.Model):
    def __init__(self, ep: epmoe.ExpertParallel) -> None:
        super().__init__(ep)
        self.to(ep.device)
        self.kept: dict[int, list[Graph]] = {}  # by the generation that has captured them
        self.load(())

    @torch.inference_mode()
    def forward(self, batch: list[list[int]]) -> list[int]:
        # In a new group: graphs of an equal one before, or new captures.
        generation = self.ep.generation
        if generation not in self.kept:
            good = next(
                (graphs for group, graphs in self.kept.items() if self.ep.capture_is_valid(group)),
                None,
            )
            # Some ranks may have graphs of a group like this one. The others' captures begin with
            # rounds, so all play.
            rounds = [self.run(size) for size in SIZES]
            self.kept[generation] = good or [Graph(self, *one) for one in rounds]
            if good is None:
                print(f"process {os.getpid()} captured in generation {generation}", flush=True)

        # The smallest graph that holds the batch.
        graph = next(graph for graph in self.kept[generation] if graph.size >= len(batch))
        tokens = graph.replay(batch)
        self.ep.check()
        return tokens.tolist()

    def run(self, size: int) -> tuple[int, Tensor, Tensor]:
        """A step of `size` requests, and its inputs."""
        tokens = torch.zeros(size, serve_rank.LENGTH, dtype=torch.int64, device=self.ep.device)
        ends = torch.zeros(size, dtype=torch.int64, device=self.ep.device)
        self.compute(tokens, ends)
        self.ep.check()
        return size, tokens, ends

    def compute(self, tokens: Tensor, ends: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[torch.arange(len(ends), device=ends.device), ends])).argmax(1)

    @torch.no_grad()
    def load(self, moves: tuple[epmoe.Move, ...]) -> None:
        """In place where the slots are as many as before: graphs hold the addresses of
        the weights.
        """
        for block, (_, gate_up, down) in zip(self.blocks, self.full, strict=True):
            held = self.ep.logical_experts(block.moe.tag)
            device = self.ep.device
            experts = block.moe.experts
            if not isinstance(experts, Experts) or len(held) != len(experts.w_down):
                block.moe.experts = Experts(gate_up[held].to(device), down[held].to(device))
            elif moves:
                experts.w_gate_up.copy_(gate_up[held])
                experts.w_down.copy_(down[held])


def configured(size: int, served: serve_rank.Served = serve_rank.SMALL) -> epmoe.EPConfig:
    deadlines = {"timeout_s": serve_rank.DEADLINE_S, "warmup_timeout_s": serve_rank.DEADLINE_S}
    config = original_configured(size, served).model_dump()
    config["topology"]["max_ranks"] = size

    # Groups of up to this size keep their graphs, so slots are as many with a rank less.
    fewest = max(1, size - 1)  # slots are as many with a rank less
    config["placement"]["slots_per_rank"] = max(
        config["placement"]["slots_per_rank"], -(-served.experts // fewest)
    )
    return epmoe.EPConfig(**config | {"exchange": {"transport": "nvlink", **deadlines}})


def run_rank(pipe, folder: str, rank: int | None, size: int, *options: object) -> None:
    # The server of the examples, with this config and model.
    serve_rank.configured = configured
    serve_rank.Model = Model
    original_run_rank(pipe, folder, rank, size, *options)


if __name__ == "__main__":
    serve_front.run_rank = run_rank
    serve.main()
