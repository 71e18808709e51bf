"""Stop strings: neither text nor token records of a match leave, and both agree at every moment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openengine_adapters.core.stops import StopFilter, TextPieces
from openengine_adapters.engine import Delta, Finish, FinishKind, TokenScore

WORDS = ["a", "b", "ab", "ba", " a", "aab", "b b", "é", ""]
"""Token id is the position; the last token has no text, as a special token."""


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def run(tokens: Sequence[int], stops: Sequence[str], chunk: int = 1) -> tuple[str, list[Delta]]:
    """Do what an engine does: stream tokens until a stop string is complete, then cut behind it."""
    stop_filter, text, out = StopFilter(stops, decode), "", []
    pending: list[int] = []
    pending_text = ""
    finish: Finish | None = None
    for token_id in tokens:
        before = len(text)
        text += WORDS[token_id]
        pending.append(token_id)
        hits = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            at, stop = min(hits, key=lambda hit: hit[0] + len(hit[1]))
            text = text[: at + len(stop)]
            finish = Finish(FinishKind.STOP_TEXT, text=stop)
        pending_text += text[before:]
        if finish or len(pending) == chunk:
            out.append(stop_filter.push(Delta(0, pending, pending_text, finish=finish)))
            pending, pending_text = [], ""
        if finish:
            break
    if not finish:
        finish = Finish(FinishKind.LENGTH)
        out.append(stop_filter.push(Delta(0, pending, pending_text, finish=finish)))
    return text, out


def record_text(delta: Delta) -> str:
    own = delta.token_texts or [None] * len(delta.token_ids)
    return "".join(WORDS[i] if t is None else t for i, t in zip(delta.token_ids, own, strict=True))


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, len(WORDS) - 1), max_size=14),
    stops=st.lists(
        st.sampled_from(["ab", "b b", "aa", "bab", "é a", "ba"]), min_size=1, max_size=3, unique=True
    ),
    chunk=st.integers(1, 4),
)
def test_what_leaves_is_the_text_before_the_match_and_the_records_that_cover_it(
    tokens: list[int], stops: list[str], chunk: int
) -> None:
    """STOP-05, STOP-07, STREAM-03."""
    full, deltas = run(tokens, stops, chunk)
    finish = deltas[-1].finish
    assert finish is not None
    wanted = full
    if finish.kind is FinishKind.STOP_TEXT:
        wanted = full[: len(full) - len(finish.text)]
    sent_text, sent_records = "", ""
    for delta in deltas:
        sent_text += delta.text
        sent_records += record_text(delta)
        assert sent_records == sent_text, "records and text agree at every moment"
        assert wanted.startswith(sent_text), "nothing left that the match takes back"
    assert sent_text == wanted
    if finish.kind is FinishKind.LENGTH:
        assert [i for delta in deltas for i in delta.token_ids] == tokens


def test_text_is_held_only_while_it_can_become_a_stop() -> None:
    """A stop string costs no latency where it cannot match."""
    stop_filter = StopFilter(["b b"], decode)
    assert stop_filter.push(Delta(0, [0], "a")).text == "a"
    held = stop_filter.push(Delta(0, [1], "b"))
    assert (held.text, list(held.token_ids)) == ("", [])
    assert stop_filter.push(Delta(0, [0], "a")).text == "ba"


def test_a_token_that_straddles_the_match_keeps_its_record_and_loses_its_end() -> None:
    """The one rule for it, STOP-05."""
    stop_filter = StopFilter(["ba"], decode)
    first = stop_filter.push(Delta(0, [5], "aab", scores=[TokenScore(-1.0)]))
    assert first.text == ""
    last = stop_filter.push(
        Delta(0, [0], "a", scores=[TokenScore(-2.0)], finish=Finish(FinishKind.STOP_TEXT, text="ba"))
    )
    assert (last.text, list(last.token_ids), last.token_texts) == ("aa", [5], ["aa"])
    assert last.scores is not None and [s.logprob for s in last.scores] == [-1.0]


def test_a_stop_token_beside_stop_strings_loses_record_and_text() -> None:
    """STOP-05: the engine left its text in, because stop strings needed it to."""
    stop_filter = StopFilter(["zz"], decode)
    delta = stop_filter.push(Delta(0, [0, 6], "ab b", finish=Finish(FinishKind.STOP_TOKEN, token_id=6)))
    assert (delta.text, list(delta.token_ids)) == ("a", [0])


@pytest.mark.parametrize("ids", [[104, 195, 169, 33], [240, 159, 153, 130, 33]])
def test_a_character_split_over_tokens_counts_for_the_token_that_completes_it(ids: list[int]) -> None:
    """STOP-07."""
    pieces = TextPieces(lambda window: bytes(window).decode("utf-8", "replace"))
    widths = [pieces.push(i) for i in ids]
    assert "".join(widths) == bytes(ids).decode()
    assert widths[-1] == "!"


def test_an_early_stop_that_min_tokens_let_pass_stays_although_it_comes_with_the_last() -> None:
    """STOP-02, STOP-07: an engine may hand over several tokens at once; the stop ends within the last of them."""
    text = "a\nbcde\n"
    letters = StopFilter(["\n"], lambda ids: "".join(text[i] for i in ids))
    finish = Finish(FinishKind.STOP_TEXT, text="\n")
    out = letters.push(Delta(0, [*range(len(text))], text, finish=finish))
    assert (out.text, out.token_ids) == (text[:-1], [*range(len(text) - 1)])
