"""The acts of storms, by name."""

from __future__ import annotations

from storm.acts import Act
from storm.moving import Moving
from storm.served import Served

KINDS: dict[str, type[Act]] = {act.kind: act for act in (Served, Moving)}
