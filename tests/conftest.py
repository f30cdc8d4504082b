"""For every test: no model hub, and one thread for torch (tiny models are fastest so)."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PDDRT_HOME."""
    folder = tmp_path / "home"
    monkeypatch.setenv("PDDRT_HOME", str(folder))
    return folder
