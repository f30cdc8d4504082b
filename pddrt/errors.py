"""Every exception of pddrt, in one tree.

    PddrtError
    |- BadInput        the user's scenario, option or file is wrong           exit 2
    |- CannotRun       the machine cannot do it (model, device, memory, port) exit 3
    |- RunFailed       the run ended, but not as it must                      exit 1
    |- EngineFailed    a step did not return what it should; scoped to what was in it
    |- Interrupted     Ctrl-C; what was measured is saved                     exit 130
    |- PeerError       the other side broke the protocol or went away; scoped to what it served
       |- ConnectionLost   the stream ended or was aborted
       |- BadFrame         bytes that are no frame

Our own mistakes are `assert`; these are the world's.
"""

from __future__ import annotations

from collections.abc import Sequence


class PddrtError(Exception):
    """Root of the tree. `str()` is one message, fit to be shown to the user."""

    exit_code = 1


class BadInput(PddrtError):
    """Wrong input. Holds every problem found, one line each, with file, line and field where
    known.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("\n".join(self.problems))


class CannotRun(PddrtError):
    """This machine cannot do it: no such model, no such device, out of memory, port taken."""

    exit_code = 3


class RunFailed(PddrtError):
    """A request was lost, or a check that must hold did not."""


class EngineFailed(PddrtError):
    """A step of an engine failed: its KV and its ids are not to be used. The engine goes on."""


class Interrupted(PddrtError):
    """The user stopped the run."""

    exit_code = 130


class PeerError(PddrtError):
    """A failure that came over the net. It ends one request or one connection, never the
    instance.
    """


class ConnectionLost(PeerError):
    """The stream to the peer has ended, was aborted or could not be opened."""


class BadFrame(PeerError):
    """The bytes received are not a frame: magic, length, checksum or header is wrong."""
