"""One request's answer as the gateway sees it grow: ids by position, whoever made them, each once.

Ids may come early, twice, or from two decoders at once; they leave in order. An id is passed on
only where it follows exactly what has been passed on before it (`messages.chain`), so that the
answer is one, and not woven from two. Where both decoders decode, whichever comes first counts, and
ids that follow something else are dropped; otherwise they are a mistake.

Text is made here and nowhere else, so stop strings are looked for here: where ids were cut into
frames, or who made them, makes no difference.

Owns the ids, the text and the end. Leaves out who is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pddrt.engine.tokens import Detokenizer, Tokenizer
from pddrt.errors import BadFrame
from pddrt.messages import Limits, chain, finish
from pddrt.types import Drawn, FinishReason, Logprobs


@dataclass(frozen=True, slots=True)
class Passed:
    """An id whose turn has come, and the text that can be shown with it."""

    position: int
    token: int
    source: str
    text: str
    reason: FinishReason | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class _Early:
    """An id, and the digests of the answer before it and with it."""

    drawn: Drawn
    source: str
    after: int
    with_it: int


class Answer:
    def __init__(
        self,
        limits: Limits,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
    ) -> None:
        """`stop`: strings that end the answer."""
        self.limits = limits
        self.ids = list(prompt)
        """The prompt's, and those passed on."""
        self.begun = limits.prompt_len
        """Where this attempt's own ids begin: what is before is its prompt."""
        self.last_maker = ""
        self.both_decode = False
        self.sole = ""
        """Where both did: whose ids alone are passed on from now on."""
        self._chain = 0
        self._text = Detokenizer(tokenizer)
        self._shown = StopText(stop)
        self._early: dict[int, list[_Early]] = {}

    @property
    def next(self) -> int:
        """Absolute position of the id that is passed on next."""
        return len(self.ids)

    @property
    def made(self) -> list[int]:
        """The ids so far of this attempt at the answer."""
        return self.ids[self.begun :]

    @property
    def longest(self) -> int:
        """Where the longest answer ends."""
        return self.limits.prompt_len + self.limits.max_tokens

    def begin_again(self) -> None:
        """Somebody else goes on: what has been passed on is its prompt."""
        self.begun, self._chain = len(self.ids), 0
        self.both_decode, self.sole = False, ""
        self._early.clear()

    def forget(self, source: str) -> None:
        """Of `source` nothing more will come; what came too early of it is forgotten."""
        for position, early in list(self._early.items()):
            left = [one for one in early if one.source != source]
            if left:
                self._early[position] = left
            else:
                del self._early[position]

    def take(self, start: int, drawn: Sequence[Drawn], source: str, after: int) -> Iterator[Passed]:
        """Ids from `start` on, made by `source` behind ids with the digest `after`. Yields what can
        be passed on now, to the end of the answer at most. Raises BadFrame.
        """
        for position, one in enumerate(drawn, start):
            with_it = chain([one.token], after)
            if self.next <= position < self.longest:
                early = _Early(one, source, after, with_it)
                self._early.setdefault(position, []).append(early)
            after = with_it
        while self.next in self._early:
            found = self._choose(self._early.pop(self.next))
            if found is None:
                return
            passed = self._pass_on(found)
            yield passed
            if passed.reason:
                return

    def _choose(self, candidates: list[_Early]) -> _Early | None:
        """The first that came of those that follow what has been passed on."""
        for candidate in candidates:
            if candidate.after == self._chain and self.sole in ("", candidate.source):
                return candidate
            if not self.both_decode:
                raise BadFrame(f"an id of {candidate.source} at {self.next} follows other ids")
        return None

    def _pass_on(self, found: _Early) -> Passed:
        position, token = self.next, found.drawn.token
        self.ids.append(token)
        self._chain = found.with_it
        self.last_maker = found.source
        reason = finish(self.limits, position, token)
        text = "" if reason == "stop" else self._text.push(token)
        if reason:
            text += self._text.finish()
        counts = len(self.ids) - self.limits.prompt_len > self.limits.min_tokens
        text = self._shown.push(text, counts)
        if self._shown.stopped:
            reason = "stop"
        elif reason:
            text += self._shown.finish()
        return Passed(position, token, found.source, text, reason, found.drawn.logprobs)


class StopText:
    """A text as it comes, up to the first stop string and without it; what may become the beginning
    of one is held back.

    First is the one that is complete first; of several that are complete at the same character, the
    one that begins first. So what is shown depends on the text alone, not on how it was cut.

    For each stop string it is known how much of its beginning the text ends with (Knuth, Morris,
    Pratt 1977).
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = [(string, _borders(string)) for string in stop]
        self._matched = [0] * len(self._stop)
        self._held = ""

    def push(self, text: str, counts: bool = True) -> str:
        """What can be shown after `text`. A stop string that is completed here ends it, but only if
        it `counts`.
        """
        if not self._stop:
            return text
        before, self._held = len(self._held), self._held + text
        for at, character in enumerate(text, before + 1):
            complete = max(self._advance(n, character) for n in range(len(self._stop)))
            if complete and counts:
                self.stopped = True
                shown, self._held = self._held[: at - complete], ""
                return shown
        settled = len(self._held) - max(self._matched)
        shown, self._held = self._held[:settled], self._held[settled:]
        return shown

    def finish(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text

    def _advance(self, n: int, character: str) -> int:
        """The length of stop string `n` where `character` completes it, else 0."""
        string, borders = self._stop[n]
        matched = self._matched[n]
        while matched and string[matched] != character:
            matched = borders[matched]
        matched += string[matched] == character
        complete = len(string) if matched == len(string) else 0
        self._matched[n] = borders[matched] if complete else matched
        return complete


def _borders(string: str) -> list[int]:
    """For each n: how long the longest beginning of `string`, shorter than n, is with which its
    first n characters end.
    """
    borders = [0, 0]
    for character in string[1:]:
        length = borders[-1]
        while length and string[length] != character:
            length = borders[length]
        borders.append(length + (string[length] == character))
    return borders
