"""Keeping a caller's stop string out of text and token records (STOP-05, STOP-07).

The engine streams everything that it sampled, the matched stop included; this filter decides what may leave.
Text is held while it could still be the beginning of a stop string, and leaves in whole tokens, each with its
record. One rule for the token that straddles the match: its record leaves, because it covers text before the
match, and both its own text and the output end where the match begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from openengine_adapters.engine import Delta, FinishKind, TokenScore

_INCOMPLETE = "\ufffd"  # what a tokenizer shows for a character whose bytes have not all arrived


class TextPieces:
    """How much text each token adds, when ids are decoded in order.

    A character split over tokens counts for the token that completes it. Only a short window of ids is decoded
    for each token, so the cost does not grow with the output.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._complete = 0  # ids whose text is known to be final
        self._shown = ""  # their text, within the window

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` adds."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._shown) or text.endswith(_INCOMPLETE):
            return ""
        piece = text[len(self._shown) :]
        # The last complete group stays as context: some tokenizers join a token to the one before it.
        del self._ids[: self._complete]
        self._complete = len(self._ids)
        self._shown = self._decode(self._ids)
        return piece


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop among the tokens just pushed: the first `count` of them belong to the output, the last one ends it.

    `last` is the length of that token's own text up to the end of the output, and `behind` how much text of the
    pushed tokens comes after it. `text` is the stop string, None for a stop token.
    """

    count: int
    last: int
    behind: int
    text: str | None = None


class StopSeeker:
    """Finds the stops of one output for an engine that cannot look for them itself.

    The first `after` tokens are let pass, and a stop string must end behind them (STOP-02).
    """

    def __init__(
        self,
        texts: Sequence[str],
        token_ids: Container[int],
        after: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._texts = tuple(texts)
        self._token_ids = token_ids
        self._left = after
        self._pieces = TextPieces(decode)
        self._overlap = max(map(len, texts), default=1) - 1
        self._tail = ""  # the end of the text so far that a match could begin in

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Look at the output's next tokens."""
        for place, token_id in enumerate(token_ids):
            piece = self._pieces.push(token_id)
            self._left -= 1
            if self._left < 0:
                rest = token_ids[place + 1 :]
                if token_id in self._token_ids:
                    return StopMatch(place + 1, len(piece), self._length(rest))
                found = self._find(piece)
                if found is not None:
                    text, end = found
                    return StopMatch(place + 1, end, len(piece) - end + self._length(rest), text)
            seen = self._tail + piece
            self._tail = seen[max(0, len(seen) - self._overlap) :]
        return None

    def _find(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first within `piece`, and where."""
        seen, before = self._tail + piece, len(self._tail)
        ends = []
        for text in self._texts:
            at = seen.find(text, max(0, before - len(text) + 1))
            if at >= 0:
                ends.append((at + len(text) - before, text))
        if not ends:
            return None
        end, text = min(ends, key=lambda pair: pair[0])
        return text, end

    def _length(self, token_ids: Sequence[int]) -> int:
        return sum(len(self._pieces.push(token_id)) for token_id in token_ids)


@dataclass(slots=True)
class _Record:
    token_id: int
    start: int  # offsets of its text in the whole output
    end: int
    score: TokenScore | None


class StopFilter:
    """Filters the deltas of one output whose request has stop strings and does not want them in the output."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        self._pieces = TextPieces(decode)
        self._covered = 0  # length of the text of all records so far
        self._released = 0  # length of the text that has left
        self._held = ""
        self._records: deque[_Record] = deque()

    def push(self, delta: Delta) -> Delta:
        """Return what may leave after `delta`; its finish passes unchanged."""
        scores: Sequence[TokenScore | None] = delta.scores or (None,) * len(delta.token_ids)
        for token_id, score in zip(delta.token_ids, scores, strict=True):
            start, self._covered = self._covered, self._covered + len(self._pieces.push(token_id))
            self._records.append(_Record(token_id, start, self._covered, score))
        self._held += delta.text
        if delta.finish is None:
            return self._release_whole_tokens(delta)
        if delta.finish.kind is FinishKind.STOP_TEXT:
            return self._release_before_match(delta, delta.finish.text)
        if delta.finish.kind is FinishKind.STOP_TOKEN and self._records:
            stop = self._records.pop()
            self._held = self._held[: max(0, stop.start - self._released)]
        return self._release(delta, len(self._records), len(self._held))

    def _release_whole_tokens(self, delta: Delta) -> Delta:
        open_suffix = self._open_suffix()
        limit = self._released + len(self._held) - open_suffix
        count = 0
        for record in self._records:
            # A record without text belongs to a character that is still to come, so it waits with that.
            if record.end > limit or (record.start == record.end == limit and open_suffix):
                break
            count += 1
        boundary = limit if count == len(self._records) else self._records[count].start
        return self._release(delta, count, max(0, boundary - self._released))

    def _release_before_match(self, delta: Delta, stop: str) -> Delta:
        # The stop ends within the last token; one before that was let pass for `min_tokens`.
        last = self._records[-1].start - self._released if self._records else 0
        match = self._held.find(stop, max(0, last - len(stop) + 1))
        if match < 0:
            match = self._held.find(stop)
        if match < 0:
            return self._release(delta, len(self._records), len(self._held))
        cut = self._released + match
        before = [record for record in self._records if record.start < cut]
        out = self._release(delta, len(before), match)
        if before and before[-1].end > cut:
            own = out.text[len(out.text) - (cut - before[-1].start) :]
            out.token_texts = [None] * (len(before) - 1) + [own]
        return out

    def _open_suffix(self) -> int:
        """Length of the longest end of the held text that a stop string could still grow from."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            suffix = self._held[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0

    def _release(self, delta: Delta, count: int, length: int) -> Delta:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        records = [self._records.popleft() for _ in range(count)]
        return Delta(
            index=delta.index,
            token_ids=[record.token_id for record in records],
            text=text,
            scores=[r.score for r in records if r.score is not None] if delta.scores is not None else None,
            finish=delta.finish,
        )
