"""The dense oracle: what every stage must compute, in plain torch and fp64, as short as the
contract allows. Nothing here is fast, and nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epmoe.local.permute import Permuted
from epmoe.local.route import Routing

ExpertFn = Callable[[Tensor, int], Tensor]
"""(rows [n, D], expert id) -> rows [n, D]"""


def route_reference(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    renormalize: bool = False,
    renormalize_epsilon: float = 0.0,
    num_expert_groups: int = 1,
    top_groups: int = 1,
    scores_per_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    num_tokens: int | Tensor | None = None,
    id_dtype: torch.dtype = torch.int32,
) -> Routing:
    """Compute `epmoe.route` in plain torch: ids [T, K] of `id_dtype` and weights [T, K] in fp64."""
    T, E = logits.shape
    logits_TE = logits.double()
    scores_TE = logits_TE.softmax(-1) if scoring == "softmax" else logits_TE.sigmoid()
    # Under softmax whole rows, under sigmoid single experts.
    undefined_TE = ~scores_TE.isfinite()
    scores_TE = scores_TE.masked_fill(undefined_TE, 0.0)

    # Both scoring functions are monotonic. Without a bias the exact logits therefore decide the
    # order, and an undefined score counts as the lowest logit. With a bias the fp32 sum of score
    # and bias decides.
    keys_TE = logits_TE.masked_fill(undefined_TE, -torch.inf)
    if bias is not None:
        keys_TE = (scores_TE.float() + bias).double()
    keys_TE = keys_TE.masked_fill(keys_TE.isnan(), -torch.inf)

    order_TE = _best_first(keys_TE)
    if num_expert_groups > 1:
        # The value of a group: its best score, or the sum of several.
        size = E // num_expert_groups
        keys_TGs = keys_TE.view(T, num_expert_groups, size)
        best_TGs = keys_TGs.sort(dim=-1, descending=True).values
        count = scores_per_group or (1 if bias is None else 2)
        group_TG = best_TGs[..., 0]
        if count > 1:
            # A sum of scores is an fp32 sum, like that of a score and its bias.
            if bias is None:
                best_TGs = scores_TE.view_as(best_TGs).sort(dim=-1, descending=True).values
            group_TG = best_TGs[..., :count].float().sum(-1).double()
        group_TG = group_TG.masked_fill(group_TG.isnan(), -torch.inf)

        # The best groups.
        chosen_TG = torch.zeros_like(group_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, _best_first(group_TG)[:, :top_groups], True)
        out_TE = ~chosen_TG.repeat_interleave(size, dim=1)
        # A stable partition: experts of groups that were not chosen come last, also after experts
        # whose key is −Inf.
        order_TE = order_TE.gather(1, out_TE.gather(1, order_TE).sort(dim=-1, stable=True).indices)

    # Weights are unbiased.
    ids_TK = order_TE[:, :top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        total_T1 = weights_TK.sum(-1, keepdim=True) + renormalize_epsilon
        weights_TK = weights_TK / total_T1.masked_fill(total_T1 == 0, 1.0)
    weights_TK = weights_TK * routed_scaling_factor

    # Padding has no experts.
    if num_tokens is not None:
        real = min(max(int(num_tokens), 0), T)
        ids_TK[real:] = E
        weights_TK[real:] = 0.0
    return Routing(ids_TK.to(id_dtype), weights_TK)


def permute_reference(
    x_SD: Tensor,
    ids_SK: Tensor,
    expert_map_P: Tensor,
    num_local_experts: int,
    *,
    counts_R: Tensor | None = None,
    alignment: int = 1,
    max_rows: int | None = None,
) -> Permuted:
    """Compute `epmoe.permute` in plain torch. Its rows end with the last expert's segment, at most
    at `max_rows`.
    """
    S, K = ids_SK.shape
    P = expert_map_P.numel()

    # The local expert of each pair, or −1.
    known_SK = (ids_SK >= 0) & (ids_SK < P)
    local_SK = expert_map_P.long()[ids_SK.long().where(known_SK, 0)].where(known_SK, -1)
    if counts_R is not None:
        slot = torch.arange(S, device=ids_SK.device) % (S // counts_R.numel())
        local_SK[slot >= counts_R.repeat_interleave(S // counts_R.numel())] = -1

    # Pairs by expert, and within an expert by slot.
    local, pair = local_SK.flatten().sort(stable=True)
    is_local = local >= 0
    local = local[is_local]
    pair = pair[is_local]

    # Where each segment starts, with its gap and without, and so the row of each pair.
    tokens = torch.bincount(local, minlength=num_local_experts)
    with_gaps = (tokens + alignment - 1) // alignment * alignment
    offsets = torch.nn.functional.pad(with_gaps.cumsum(0), (1, 0))
    first = torch.nn.functional.pad(tokens.cumsum(0), (1, 0))
    row = offsets[local] + torch.arange(local.numel(), device=local.device) - first[local]
    if max_rows is not None:
        # Pairs without room are dropped.
        has_room = row < max_rows
        local = local[has_room]
        pair = pair[has_room]
        row = row[has_room]
        tokens = torch.bincount(local, minlength=num_local_experts)
        offsets = offsets.clamp(max=max_rows)

    row_of_pair = torch.full((S * K,), -1, dtype=torch.int32, device=x_SD.device)
    row_of_pair[pair] = row.int()
    rows_ND = x_SD.new_zeros(int(offsets[-1]), x_SD.shape[1])
    rows_ND[row] = x_SD[pair // K]
    return Permuted(rows_ND, offsets.int(), tokens.int(), row_of_pair.view(S, K), counts_R)


def finalize_reference(expert_rows_ND: Tensor, permuted: Permuted, weights_SK: Tensor) -> Tensor:
    """Compute `epmoe.finalize` in plain torch, in fp64: partial [S, D]. Slots past the counts are
    zeros here.
    """
    N = expert_rows_ND.shape[0]
    row_SK = permuted.row_of_pair.long()
    partial_SD = expert_rows_ND.new_zeros(
        row_SK.shape[0], expert_rows_ND.shape[1], dtype=torch.float64
    )
    for k in range(row_SK.shape[1]):
        weight_S = weights_SK[:, k].double()
        used = ((row_SK[:, k] >= 0) & (row_SK[:, k] < N) & (weight_S != 0)).nonzero()[:, 0]
        partial_SD[used] += weight_S[used, None] * expert_rows_ND[row_SK[used, k]].double()
    return partial_SD


def swiglu_reference(w_gate_up: Tensor, w_down: Tensor) -> ExpertFn:
    """Experts of `w_gate_up` [E, 2F, D] and `w_down` [E, D, F] in fp64: down(silu(gate(x)) ·
    up(x)).
    """

    def expert(rows_nD: Tensor, expert_id: int) -> Tensor:
        gate, up = (rows_nD.double() @ w_gate_up[expert_id].double().T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w_down[expert_id].double().T

    return expert


def moe_reference(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertFn | tuple[Tensor, Tensor],
    *,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """Compute the whole layer on one rank, in fp64.

    y [T, D]: y[t] = Σ_k weights[t, k] · f(ids[t, k], x[t]), where f(i, x) is the output of expert
    i. With `apply_router_weight_on_input`, y[t] = Σ_k f(ids[t, k], weights[t, k] · x[t]), and the
    product is computed in fp32 and rounded to x's dtype.

    `experts` is a callable on (rows, expert id), or the pair (w_gate_up [E, 2F, D], w_down [E, D,
    F]). Pairs whose weight is 0, NaN or Inf contribute nothing, nor do pairs with a negative id.
    `experts` must know all other ids.
    """
    expert = experts if callable(experts) else swiglu_reference(*experts)
    # One expert after another, for the pairs that count.
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.float64)
    weights_TK = weights_TK.double()
    live_TK = (ids_TK >= 0) & weights_TK.isfinite() & (weights_TK != 0)
    for expert_id in ids_TK[live_TK].unique().tolist():
        token, k = ((ids_TK == expert_id) & live_TK).nonzero(as_tuple=True)
        weight_n1 = weights_TK[token, k, None]
        if apply_router_weight_on_input:
            weighted_nD = (weight_n1.float() * x_TD[token].float()).to(x_TD.dtype)
            rows_nD = expert(weighted_nD.double(), expert_id)
        else:
            rows_nD = weight_n1 * expert(x_TD[token].double(), expert_id)
        y_TD.index_add_(0, token, rows_nD.double())
    return y_TD


def _best_first(keys: Tensor) -> Tensor:
    """Indices by descending key, ties to the lower index; −0.0 equals 0.0."""
    return keys.sort(dim=-1, descending=True, stable=True).indices
