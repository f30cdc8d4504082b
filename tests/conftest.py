"""For every test: no model hub, and one thread for torch (tiny models are fastest so)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

from .recordings import paced, stormy


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PDDRT_HOME."""
    folder = tmp_path / "home"
    monkeypatch.setenv("PDDRT_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `recordings.stormy`."""
    return stormy(tmp_path_factory.mktemp("runs") / "storm")


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `recordings.paced`."""
    return paced(tmp_path_factory.mktemp("runs") / "rounds")
