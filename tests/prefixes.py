"""The ideal that hit rates are measured against: a cache of every prefix there ever was, by ids.

Shares no code with the planner, and none with the caches of the runtime.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pddrt.engine.tokens import ByteTokenizer
from pddrt.workload import Session, Turn

TOKENIZER = ByteTokenizer()


class EndlessCache:
    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}

    def match(self, ids: Sequence[int]) -> int:
        node = 0
        for length, token in enumerate(ids):
            child = self._next.get((node, token))
            if child is None:
                return length
            node = child
        return len(ids)

    def insert(self, ids: Sequence[int]) -> None:
        node = 0
        for token in ids:
            node = self._next.setdefault((node, token), len(self._next) + 1)


class Played:
    """A request as a client would have sent it: the turn, the ids of its prompt, how many hit."""

    def __init__(self, turn: Turn, ids: list[int], hit: int) -> None:
        self.turn, self.ids, self.hit = turn, ids, hit

    @property
    def rate(self) -> float:
        return self.hit / len(self.ids)


def play(sessions: Sequence[Session], answer_seed: int = 1) -> list[Played]:
    """Session after session, with a model that uses up its budget and says nothing in ASCII."""
    cache, rng, played = EndlessCache(), random.Random(answer_seed), []
    for session in sessions:
        history: list[int] = []
        for turn in session.turns:
            ids = _prompt(session.system, history, turn)
            hit = min(cache.match(ids), len(ids) - 1)  # the last position is always computed
            played.append(Played(turn, ids, hit))
            answer = [rng.randrange(128, 256) for _ in range(turn.max_tokens)]
            cache.insert(ids + answer[:-1])  # no step has written the KV of the last one
            if turn.context != "aside":
                scripted = turn.answer
                history = ids + (answer if scripted is None else TOKENIZER.encode(scripted))
    return played


def _prompt(system: str, history: list[int], turn: Turn) -> list[int]:
    if turn.ids is not None:
        return list(turn.ids)
    if history and turn.context == "follow":
        return history + TOKENIZER.follow_up(turn.text, after_eos=False)
    begin = [{"role": "system", "content": system}] if system else []
    return TOKENIZER.chat([*begin, {"role": "user", "content": turn.text}])
