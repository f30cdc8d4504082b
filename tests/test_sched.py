"""The scheduler: decode first, then extends, then prompts; admission that is fair to the large."""

from __future__ import annotations

from pddrt.sched import MAX_OVERTAKEN, Admission, Batch, Pace, Scheduler, SequenceState
from pddrt.types import MS, Drawn, Run, Sampling

GREEDY = Sampling()


def scheduler(chunk: int = 8, max_batch: int = 4) -> Scheduler:
    return Scheduler(chunk, max_batch, lambda _request, end: (Run(0, end),))


def prompt(name: str, length: int) -> SequenceState:
    return SequenceState(name, list(range(length)), 0, length, GREEDY)


def decoding(name: str, prompt_len: int, pending: int) -> SequenceState:
    return SequenceState(name, list(range(prompt_len + pending)), prompt_len, prompt_len, GREEDY)


def test_a_prompt_is_cut_into_chunks_and_only_the_last_draws() -> None:
    sched = scheduler(chunk=8)
    sched.add(prompt("a", 20))
    seen = []
    for _ in range(3):
        batch = sched.plan()
        assert batch is not None
        span = batch.spans[0]
        seen.append((span.start, span.end, span.sampling is not None))
        sched.apply(batch, [Drawn(7) if span.sampling else None])
    assert seen == [(0, 8, False), (8, 16, False), (16, 20, True)]
    assert sched.sequences["a"].ids[-1] == 7


def test_decodes_come_first_then_extends_then_prompts() -> None:
    sched = scheduler(chunk=8)
    sched.add(prompt("p", 30))
    sched.add(decoding("x", 10, 4))
    sched.add(decoding("d", 10, 1))
    batch = sched.plan()
    assert batch is not None
    assert [(s.request, len(s.tokens)) for s in batch.spans] == [("d", 1), ("x", 4), ("p", 3)]
    assert (batch.decode_tokens, batch.extend_tokens, batch.prefill_tokens) == (1, 4, 3)


def test_a_prompt_never_stops_decodes_even_where_they_fill_the_chunk() -> None:
    sched = scheduler(chunk=2, max_batch=8)
    sched.add(prompt("p", 30))
    for i in range(4):
        sched.add(decoding(f"d{i}", 5, 1))
    batch = sched.plan()
    assert batch is not None
    assert [s.request for s in batch.spans] == ["d0", "d1", "d2", "d3"]


def test_max_batch_bounds_the_step() -> None:
    sched = scheduler(max_batch=2)
    for i in range(4):
        sched.add(decoding(f"d{i}", 5, 1))
    batch = sched.plan()
    assert batch is not None
    assert len(batch.spans) == 2


def test_one_token_prompts_and_prompts_up_to_the_last_token_are_prefill() -> None:
    sched = scheduler()
    sched.add(prompt("a", 1))
    batch = sched.plan()
    assert batch is not None
    assert batch.prefill_tokens == 1
    assert batch.decode_tokens == 0


def test_inactive_sequences_are_not_stepped() -> None:
    sched = scheduler()
    sched.add(decoding("d", 5, 1))
    sched.sequences["d"].active = False
    assert sched.plan() is None


def test_an_extend_is_one_pass_unless_its_sequence_says_otherwise() -> None:
    sched = scheduler(chunk=4)
    sched.add(decoding("whole", 10, 9))
    sched.add(decoding("cut", 10, 9))
    sched.sequences["cut"].piece = 5
    taken, coming = [], []
    while batch := sched.plan():
        taken.append([(s.request, len(s.tokens)) for s in batch.spans])
        coming.append([s.coming for s in sched.sequences.values()])
        sched.apply(batch, [None for _ in batch.spans])
    assert taken == [[("whole", 9), ("cut", 5)], [("cut", 4)]]
    assert coming == [[True, False], [False, True]], "a step in the middle yields no id"
    assert not any(s.coming for s in sched.sequences.values())


def test_the_pace_is_that_of_decodes_and_of_what_each_further_token_adds() -> None:
    pace = Pace()
    pace.note(Batch((), 0, 40, 1), 9 * MS)
    assert (pace.step, pace.token) == (0, 0), "nobody knows which part of it is which"
    pace.note(Batch((), 0, 0, 3), 4 * MS)
    pace.note(Batch((), 0, 0, 1), 8 * MS)
    assert pace.step == 5 * MS, "a quarter of each new value"
    pace.note(Batch((), 10, 10, 1), 25 * MS)
    assert (pace.step, pace.token) == (5 * MS, 1 * MS)
    pace.note(Batch((), 0, 10, 0), 3 * MS)
    assert pace.token == 750_000, "never less than nothing"


def test_a_sequence_dropped_during_a_step_has_no_outcome() -> None:
    sched = scheduler()
    sched.add(decoding("gone", 5, 1))
    sched.add(decoding("here", 5, 1))
    batch = sched.plan()
    assert batch is not None
    sched.drop("gone")
    outcomes = sched.apply(batch, [Drawn(1), Drawn(2)])
    assert [(o.request, o.drawn) for o in outcomes] == [("here", Drawn(2))]


def test_a_later_request_of_the_same_id_is_not_booked_for_the_old_step() -> None:
    sched = scheduler()
    sched.add(decoding("a", 5, 1))
    batch = sched.plan()
    assert batch is not None
    sched.drop("a")
    sched.add(decoding("a", 9, 1))
    assert sched.apply(batch, [Drawn(1)]) == []
    assert sched.sequences["a"].computed == 9


def test_admission_is_in_order_and_lets_small_ones_pass_only_so_often() -> None:
    free = 10

    def reserve(request: str) -> bool:
        nonlocal free
        pages = 11 if request == "large" else 0
        if pages > free:
            return False
        free -= pages
        return True

    admission = Admission(reserve)
    admission.add("large")
    for i in range(MAX_OVERTAKEN + 5):
        admission.add(f"small{i}")
    admitted = admission.admit()
    assert len(admitted) == MAX_OVERTAKEN
    assert admission.admit() == [], "nobody passes the starved head any more"
    free = 11
    assert admission.admit()[0] == "large"


def test_what_runs_in_the_background_waits_until_nothing_else_can_be_stepped() -> None:
    sched = scheduler()
    lesson = prompt("lesson", 30)
    lesson.background, lesson.sampling = True, None
    sched.add(lesson)
    sched.add(prompt("p", 10))
    asked = []
    while batch := sched.plan():
        asked.append([s.request for s in batch.spans])
        sched.apply(batch, [Drawn(7) if s.sampling else None for s in batch.spans])
        if sched.sequences.get("p") and sched.sequences["p"].computed == 10:
            sched.drop("p")
    assert asked[:3] == [["p"], ["p"], ["lesson"]]
    assert lesson.pending == 0, "its last chunk draws nothing"


def test_a_waiting_request_can_be_dropped() -> None:
    admission = Admission(lambda _r: False)
    admission.add("a")
    admission.admit()
    assert admission.drop("a")
    assert not admission.drop("a")
    assert len(admission) == 0


def test_who_finds_no_room_gives_its_turn_to_the_next() -> None:
    """Else nothing steps any more where the batch is small and decodes, which come first, are the
    youngest: those give way, and the older ones' extends were never asked.
    """
    dropped = []

    def room(request: str, _end: int) -> bool:
        if request.startswith("young"):
            dropped.append(request)
            sched.drop(request)
        return not request.startswith("young")

    sched = Scheduler(8, 1, lambda _request, end: (Run(0, end),), room)
    sched.add(decoding("old", 10, 3))
    sched.add(decoding("young1", 10, 1))
    sched.add(decoding("young2", 10, 1))
    batch = sched.plan()
    assert batch is not None
    assert [s.request for s in batch.spans] == ["old"]
    assert dropped == ["young1", "young2"]
