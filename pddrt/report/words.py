"""What a report says of itself: letters, names and words, each explained once."""

from __future__ import annotations

from collections.abc import Iterable

from pddrt.report.markup import table
from pddrt.report.slowness import ALL_PARTS, LETTERS, TITLES

MEANS = {
    "gateway": "from its sending until the gateway has routed it",
    "lost": "waiting for an attempt that came to nothing, until another was begun or another "
    "decoder had taken over; an instance was lost, a connection cut, a frame damaged",
    "prefill_queue": "waits for P to begin its prompt",
    "prefill": "P computes the prompt, and samples the first token",
    "decoder_queue": "the first decoder has no memory for it yet",
    "transfer": "waits for its KV to be whole at the first decoder: what prefill did not hide",
    "delivery": "the first token's way to the client",
    "relay_decode": "tokens of RLD come",
    "handoff_gap": "from the last token of RLD to the first of MD",
    "main_decode": "tokens of MD come",
    "prefill_decode": "tokens of P come, which decodes too where a policy lets it",
    "outage": "no token can come: a link on its way is down",
    "ending": "from the last token to the end of the stream",
    "no_token": "it ended before a token came",
}

WORDS = (
    ("P", "prefill instance: computes prompts"),
    ("RLD", "relay-decode instance, in P's datacenter: decodes at once, until MD takes over"),
    ("MD", "main-decode instance, in the other datacenter: decodes the rest"),
    ("KV", "keys and values of tokens, which a decoder needs of all tokens before; they cross a "
     "link, or are computed again"),
    ("ids", "numbers of tokens: all that RLD hands over, since MD recomputes their KV"),
    ("extend (X)", "one forward pass of MD over ids that were handed over"),
    ("TTFT", "time to the first token; TTST: from the first to the second; ITL: each gap between "
     "tokens; TPOT: their mean in one request; E2E: from sending to the end"),
    ("s9.1", "the second request (turn 1) of session 9"),
)  # fmt: skip


def glossary(used: Iterable[str]) -> str:
    """Closed, behind one line that everybody reads. `used`: parts of time on this page."""
    shown = set(used)
    letters = [
        [f'<span class="k c-{part}">{LETTERS[part]}</span>', TITLES[part], MEANS[part]]
        for part in ALL_PARTS
        if part in shown or part in ("lost", "outage", "decoder_queue")
    ]
    words = [[name, "", means] for name, means in WORDS]
    return (
        '<p class="dim">P computes prompts, RLD beside it decodes at once, MD in the other '
        "datacenter takes over. The time of a request falls into parts, each with a letter and a "
        'colour.</p><details id="words"><summary>All letters and words of this page</summary>'
        + table(["", "part of a request's time", "what it is"], letters, left=(0, 1), wrap=(2,))
        + table(["word", "", "what it is"], words, left=(0, 1), wrap=(2,))
        + "</details>"
    )
