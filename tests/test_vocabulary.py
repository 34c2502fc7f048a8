"""The words of the sources: none of the old private vocabulary comes back. And their size: no file grows too long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import ROOT

MOST_LINES = 300
FOLDERS = ("csrc", "epmoe", "tests")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp") and path != Path(__file__)
]

# Today's word, then the old ones, which no source may have as whole words.
OLD_WORDS = r"""
LL protocol: few_rows few_row few_pairs few_sums few_sum few_tokens few_ticket few_stride few_stride_bytes
    few_sum_stride few_sum_stride_bytes FEW_TOKENS FewRows LINE_WORDS is_few of_few most_few longest_few sends_few
    choose_of_few kFew kFewBits kFewParts kFewRanks kFewSlots kFewWord kFewest kMostFew kMostUnflagged
signal: Mail mail send_mail mail_offset dispatch_mail combine_mail error_mail MAIL_BYTES raise_flag raise_flags
notify block: teller tellers told tells await_told
work queue: Units kTogether blocks_together kStretches draw_ticket ticket tickets
warp team: Team
TMA, row pipeline: Ring Pieces kPieces kMaxPieceBytes kPiecesARelease EPMOE_BULK piece pieces piece_bytes row_pieces
    fetch_piece send_piece quantize_piece
chunk of a row: Part Parts parts_of SlotPart first_part send_part send_parts send_parts_too move_part move_parts
    move_parts_too sum_part sum_parts move_row move_rows move_rows_too
offset, slot, final row: place_segments place_token kInPlace in_place in_place_rows sends_in_place
outgoing chunk, outgoing sum, routed pair: Leaving leaving Owed owed owe owes owing owed_slot Given
template parameter: kMoved kWide kStays kNotHere kAtOnce kBoth lines_to_move lines_to_send share_sending
phase: kHalf SharedHalf half_bits of_half blocks_of_half halves _half
round template, descriptor: Form _checked_form _new_form Words Fp8Words words_for words_of for_words from_words WORDS
re-arm: kUnset kAlmostUnset settable make_settable unsets
launch policy: threads_of tokens_a_release unflagged unflagged_slots
"""
# Words that mean something else outside csrc.
OLD_WORDS_OF_KERNELS = r"""
work queue: draw
re-arm: unset
phase: (?<!ScalarType::)Half
"""
OLD_FILES = r"""
mail.cuh mail.h headers.cuh lines.cuh units.cuh team.cuh bulk.cuh launch_kernel.cuh exchange_launch.h dispatch.cuh
dispatch_send.cuh dispatch_receive.cuh dispatch_few_send.cuh dispatch_few_receive.cuh dispatch_pieces.cuh
dispatch_counts.cuh dispatch_places.cuh dispatch_tokens.cuh combine.cuh combine_few.cuh combine_rows.cuh
combine_forward.cuh test_halves.py
"""


def pattern_of(table: str) -> str:
    words = re.sub(r"^\w[^:]*: ", "", table, flags=re.MULTILINE).split()
    return "|".join(rf"\b{word}\b" for word in words)


def hits(pattern: str, sources: list[Path]) -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}:{n}: {match[0]}"
        for path in sources
        for n, line in enumerate(path.read_text().splitlines(), start=1)
        for match in re.finditer(pattern, line)
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_old_word_is_left(folder):
    sources = [path for path in SOURCES if path.is_relative_to(ROOT / folder)]
    assert sources
    assert not (left := hits(pattern_of(OLD_WORDS), sources)), left


def test_no_old_word_of_the_kernels_is_left():
    sources = [path for path in SOURCES if path.is_relative_to(ROOT / "csrc")]
    assert not (left := hits(pattern_of(OLD_WORDS_OF_KERNELS), sources)), left


def test_no_old_file_is_left_or_named():
    names = OLD_FILES.split()
    assert not [path for path in SOURCES if path.name in names]
    assert not (left := hits("|".join(rf"(?<!\w){re.escape(name)}\b" for name in names), SOURCES)), left


def test_kernels_lie_in_folders_by_role():
    folders = {path.name for path in (ROOT / "csrc/cuda").iterdir() if path.is_dir()}
    assert folders == {"device", "exchange", "dispatch", "combine", "local", "rail"}
    assert not list((ROOT / "csrc/cuda").glob("*.cu*"))


def test_no_source_file_is_long():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {path: count for path, count in lines.items() if count > MOST_LINES}


def test_words_are_matched_whole():
    pattern = pattern_of(OLD_WORDS + OLD_WORDS_OF_KERNELS)
    for word in ("tellers", "few_rows", "kWide", "Half", "x = Words(y)"):
        assert re.search(pattern, word)
    for word in ("storytellers", "few_rows_of_text", "kWider", "ScalarType::Half", "Keywords"):
        assert not re.search(pattern, word)
