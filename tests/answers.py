"""What every answer of a cluster of modelled engines must be, whatever befell it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pddrt.engine.tokens import ByteTokenizer
from pddrt.metrics import RequestRecord
from pddrt.workload import Session

from .cluster import oracle


def check_answers(
    records: Sequence[RequestRecord], asked: Sequence[Session], eos_ids: frozenset[int]
) -> None:
    """P, then R, then M, or all P's, once in each attempt; each answer that of the oracle, or its
    beginning where it was aborted.
    """
    tokenizer = ByteTokenizer()
    conversations: dict[int, list[int]] = {}
    for r in records:
        turn, history = asked[r.session].turns[r.turn], conversations.get(r.session, [])
        if history:
            ended = history[-1] in eos_ids
            ids = history + tokenizer.follow_up(turn.text, after_eos=ended)
        else:
            ids = tokenizer.chat(turn.text)
        conversations[r.session] = ids + r.ids
        wanted = oracle(ids, turn.max_tokens)
        ends = [at for at, token in enumerate(wanted, 1) if token in eos_ids]
        wanted = wanted[: ends[0]] if ends else wanted
        assert re.fullmatch(f"(P+|P?R*M*){{{1 + r.attempt}}}", r.sources)
        if r.finish_reason in ("length", "stop"):
            assert (r.ids, r.finish_reason) == (wanted, "stop" if ends else "length"), r.id
        else:
            assert r.ids == wanted[: len(r.ids)], r.id
