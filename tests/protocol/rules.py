"""The rules of docs/protocol.md by name, and the protocols that break without each."""

from __future__ import annotations

CPU = "CPU"
LL = "LL"
COPIED = "Simple"
FINAL_ROWS = "Simple with final rows"
RANK_MAJOR = "Simple with combine_partial"
"""CUDA's Simple protocol three times: rows that the receiver copies from their slots, rows that
senders write to their final places, and rows that lie in their slots until combine has sent them
back (`combine_partial` of `recv.x`).
"""
SIMPLE = (COPIED, FINAL_ROWS, RANK_MAJOR)
CUDA = (*SIMPLE, LL)
PROTOCOLS = (CPU, *CUDA)
MAIL = "mail"
"""The protocol of moves, which run at the same time as rounds."""
MEETINGS = "meetings"
SENDS = "sends"
HOLDS = "holds"
REPLAYS = "replays"
LOBBY = "lobby"
"""Those of hosts: the board, versions that a trainer sends and that a server holds, replays of
graphs while the group changes, and idle ranks.
"""

RULES = {
    "open-all": PROTOCOLS,
    "dispatch-awaits-all": CUDA,  # the CPU's headers hold the counts of two rounds
    "combine-awaits-all": PROTOCOLS,
    "finish-first": PROTOCOLS,
    "own-slab": PROTOCOLS,
    "final-rows": (FINAL_ROWS,),
    "release": (CPU, *SIMPLE),
    "one-access": (LL,),
    "epoch": PROTOCOLS,
    "re-arm": (LL,),
    "drain": (LL,),
    "deadline": PROTOCOLS,
    "report": PROTOCOLS,
    "latch": PROTOCOLS,
    "abort-opens": PROTOCOLS,
    "no-rows": PROTOCOLS,
    "abort-receives": (LL,),
    "abort-waits": (CPU,),
    "two-counts": (CPU,),
    "later-epoch": (CPU,),
    "post-releases": (MAIL,),
    "look-acquires": (MAIL,),
    "staging-free": (MAIL,),
    "first-decides": (MEETINGS,),
    "last-call": (MEETINGS,),
    "one-outcome": (MEETINGS,),
    "ready-first": (MEETINGS,),
    "there-while-loading": (MEETINGS,),
    "nobody-stays": (MEETINGS,),
    "keep-whole": (SENDS,),
    "tell-failures": (SENDS,),
    "compare-held": (HOLDS,),
    "compare-joined": (HOLDS,),
    "doubt-loaded": (HOLDS,),
    "unknown-while-flipping": (HOLDS,),
    "name-trainer": (HOLDS,),
    "all-staged": (HOLDS,),
    "flip-first": (HOLDS,),
    "behind-two-rounds": (HOLDS,),
    "latch-first": (REPLAYS,),
    "ends-again": (REPLAYS,),
    "begins-anew": (REPLAYS,),
    "clear-last": (REPLAYS,),
    "scratch-of-its-own": (REPLAYS,),
    "tables-first": (REPLAYS,),
    "ends-between": (REPLAYS,),
    "mark-empty": (REPLAYS,),
    "marks-go": (REPLAYS,),
    "come-first": (LOBBY,),
    "await-begin": (LOBBY,),
    "owe-skip": (LOBBY,),
}
