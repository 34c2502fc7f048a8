"""Times a round of `ExpertParallel` against the same work over gloo's `all_to_all_single`, in one run.

All sides get the same tokens and the same routing. A sample is a few rounds back to back after a barrier, with
the experts' output made beforehand, so that nothing but dispatch and combine is timed; samples of the sides
alternate. Times are microseconds a round on the slowest rank, medians over the samples.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe.bench.gloo import AllToAll
from epmoe.config import EPConfig
from epmoe.service import ExpertParallel
from epmoe.simulate import simulate_routing

TOKENS = (1, 16, 128, 1024)
_CAPTION = "µs a round on the slowest rank, median of samples; ratio: that pair / epmoe's pair"
_ROUNDS = 16  # in a sample, fewer of many tokens: enough that ranks which leave the barrier apart do not show


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds a round: dispatch with permute, finalize with combine, and both."""

    dispatch: float
    combine: float
    pair: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One number of tokens a rank, T, measured on all sides."""

    tokens: int
    epmoe: Times
    gloo: Times
    gloo_kept: Times
    """gloo with buffers kept from round to round"""

    @property
    def ratio(self) -> float:
        """How many of our rounds fit into one of gloo's."""
        return self.gloo.pair / self.epmoe.pair

    @property
    def ratio_kept(self) -> float:
        """Likewise where gloo's buffers are kept."""
        return self.gloo_kept.pair / self.epmoe.pair


class _Side(Protocol):
    """Something that has rounds: ours or the yardstick."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any: ...

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor: ...


def run(
    config: EPConfig,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[Result]:
    """One result for each T of `tokens`, the same on all ranks of `group` (default: the world), who all call it.

    `repeats` samples are taken of each side; `advance` is called after each set of them. Raises RuntimeError where
    the output of a side is not the weighted sum that it has to be, ValueError with an fp8 payload.
    """
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows")
    with ExpertParallel(config, group) as ep:
        return [_measure(ep, T, repeats, advance) for T in tokens]


def _measure(ep: ExpertParallel, tokens: int, repeats: int, advance: Callable[[], object]) -> Result:
    assert ep.group is not None  # torchrun's world, or what the caller gave
    gloo = [AllToAll(ep.placement, ep.group, keep_buffers=keep) for keep in (False, True)]
    rivals: tuple[_Side, ...] = (ep, *gloo)
    sides = [_Bench(side, ep, tokens) for side in rivals]
    rounds = max(2, min(_ROUNDS, 1024 // max(tokens, 1)))
    micros = torch.zeros(repeats, len(sides), 3, dtype=torch.float64)
    for sample in range(repeats):
        for index, side in enumerate(sides):
            dist.barrier(ep.group)
            micros[sample, index] = side.timed_rounds(rounds)
        advance()
    for side in sides:
        side.checked_round()
    dist.all_reduce(micros, dist.ReduceOp.MAX, group=ep.group)
    return Result(tokens, *(Times(*row.tolist()) for row in micros.median(dim=0).values))


class _Bench:
    """One side with its tokens, routing and expected output; expert i multiplies a row by its own factor."""

    def __init__(self, side: _Side, ep: ExpertParallel, tokens: int) -> None:
        model = ep.config.model
        generator = torch.Generator().manual_seed(ep.rank)
        self.side, self.name = side, type(side).__name__
        self.x_TD = torch.randn(tokens, model.hidden_size, generator=generator).to(model.torch_dtype)
        self.ids_TK, self.weights_TK = simulate_routing(
            "uniform", tokens, model.num_experts, model.num_experts_per_tok, seed=ep.rank, id_dtype=torch.int64
        )
        factors_E = torch.linspace(0.5, 1.5, model.num_experts)
        weights_T1 = (self.weights_TK * factors_E[self.ids_TK]).sum(dim=1, keepdim=True)
        self.expected_TD = (self.x_TD.float() * weights_T1).to(model.torch_dtype)
        local = [ep.placement.logical(p) for p in ep.placement.local_experts(ep.rank)]
        self.factors_e1 = factors_E[local].unsqueeze(1).to(model.torch_dtype)
        self.rows_ND = self.checked_round()

    def checked_round(self) -> torch.Tensor:
        """A whole round, experts included; leaves NaN where rows arrive, so that the next round must write each.

        Returns the experts' output [N, D].
        """
        handle = self.side.dispatch(self.x_TD, self.ids_TK, self.weights_TK)
        offsets = handle.expert_offsets
        expert_N = torch.searchsorted(offsets[1:].contiguous(), torch.arange(int(offsets[-1])), right=True)
        arrived_ND = handle.rows[: len(expert_N)]
        rows_ND = arrived_ND * self.factors_e1[expert_N]
        arrived_ND.fill_(torch.nan)
        self._check(self.side.combine(rows_ND, handle))
        return rows_ND

    def timed_rounds(self, rounds: int) -> torch.Tensor:
        """Microseconds a round [3], of dispatch, of combine and of both."""
        dispatch = combine = 0.0
        for _ in range(rounds):
            start = time.perf_counter()
            handle = self.side.dispatch(self.x_TD, self.ids_TK, self.weights_TK)
            middle = time.perf_counter()
            y_TD = self.side.combine(self.rows_ND, handle)
            combine += time.perf_counter() - middle
            dispatch += middle - start
        self._check(y_TD)
        return torch.tensor([dispatch, combine, dispatch + combine], dtype=torch.float64) * 1e6 / rounds

    def _check(self, y_TD: torch.Tensor) -> None:
        limit = 16 * torch.finfo(y_TD.dtype).eps
        if not torch.allclose(y_TD, self.expected_TD, rtol=limit, atol=limit):
            raise RuntimeError(f"{self.name}: the round's output is not the weighted sum over its experts")


def table(results: Sequence[Result], title: str = "") -> Table:
    """Microseconds each way and both ways, ours and gloo's, and their ratio."""
    view = Table(title=title, caption=_CAPTION)
    for column in ("T", "side", "dispatch", "combine", "pair", "ratio"):
        view.add_column(column, justify="left" if column == "side" else "right")
    for result in results:
        for name, times, ratio in (
            ("epmoe", result.epmoe, ""),
            ("gloo", result.gloo, f"[bold]{result.ratio:.1f}x[/]"),
            ("gloo, kept buffers", result.gloo_kept, f"{result.ratio_kept:.1f}x"),
        ):
            tokens = f"{result.tokens}" if name == "epmoe" else ""
            view.add_row(tokens, name, *(f"{value:,.0f}" for value in dataclasses.astuple(times)), ratio)
        view.add_section()
    return view


def write_json(results: Sequence[Result], path: Path) -> None:
    """A list of one object for each T: `tokens`, the sides with their µs, and the ratios."""
    ratios = ({"ratio": result.ratio, "ratio_kept": result.ratio_kept} for result in results)
    rows = [dataclasses.asdict(result) | ratio for result, ratio in zip(results, ratios, strict=True)]
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def plot(results: Sequence[Result], path: Path) -> None:
    """Every side's time of a pair over T, in the format of the file's suffix (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [result.tokens for result in results]
    for label, colour, times in (
        ("gloo all_to_all", "tab:grey", [result.gloo for result in results]),
        ("gloo all_to_all, kept buffers", "silver", [result.gloo_kept for result in results]),
        ("epmoe", "tab:blue", [result.epmoe for result in results]),
    ):
        axes.loglog(tokens, [side.pair for side in times], "o-", color=colour, label=label)
    for result in results:
        at = (result.tokens, result.epmoe.pair)
        axes.annotate(f"{result.ratio:.1f}x", at, (0, -14), textcoords="offset points", ha="center")
    axes.set(xlabel="tokens per rank", ylabel="dispatch + combine, µs")
    axes.set_xticks(tokens, [str(T) for T in tokens])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
