"""The stages in a profile of torch: every operator shows under its own name, at no cost while no profiler runs."""

from __future__ import annotations

import torch
from test_poll import IDS, WEIGHTS, X, make_ep
from torch.profiler import ProfilerActivity, profile


def test_every_stage_has_a_name():
    with make_ep() as ep:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            ep.route(torch.randn(4, 8))
            d = ep.dispatch(X, IDS, WEIGHTS)
            ep.combine(d.rows, d)
            d = ep.dispatch_recv(ep.dispatch_send(X, IDS, WEIGHTS))
            ep.combine_send(d.rows, d)
            ep.combine_recv(d)
        counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("epmoe::")}
    phases = [f"{stage}{phase}" for stage in ("dispatch", "combine") for phase in ("", "_send", "_recv")]
    assert counts == dict.fromkeys((f"epmoe::{name}" for name in ("route", *phases)), 1)
