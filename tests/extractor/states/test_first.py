"""The first samples of an extraction: sound ones pass in silence, wrong ones stop the run, nothing stays in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from extractor.states import first, reference
from extractor.states.first import FirstSamples
from tests.extractor.states.conftest import World
from tests.extractor.states.planted import LAYERS, Truth, capture
from tests.extractor.tiny import write_tiny_model


def collect(world: World, samples: list[Truth], **options: int) -> FirstSamples:
    found = FirstSamples(world.model, capture(world.model), threads=1, **options)
    for i, s in enumerate(samples):
        assert found.add(i, s.ids, s.mask, {name: s.states[name] for name in LAYERS}) == (i >= 3)
    return found


@pytest.mark.model
def test_sound_samples_pass(world: World) -> None:
    """Cut to their first tokens they are judged as well, and a second check has nothing left."""
    found = collect(world, world.samples, max_tokens=60)
    outcome = found.check()
    assert (outcome.damage, outcome.notes) == ((), ())
    assert outcome.summary.startswith("4 samples, 240 tokens; ")
    assert found.check().summary == "no sample to check"


@pytest.mark.model
@pytest.mark.parametrize("fits", [True, False])
def test_wrong_samples_stop_the_run(world: World, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States before the norm, declared post: found with a forward, and by the head where no forward is possible."""
    if not fits:
        monkeypatch.setattr(first, "_PARAMETERS_A_CORE", 1000)
    outcome = collect(world, [s.with_states(final=s.states["after_30"]) for s in world.samples]).check()
    assert [f.kind for f in outcome.damage] == ["norm"]
    assert ["0.13 billion parameters are too many" in str(f) for f in outcome.notes] == ([] if fits else [True])


@pytest.mark.model
def test_no_memory_is_a_note(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "free_bytes", lambda _device: 1_000_000_000)
    outcome = collect(world, world.samples).check()
    assert not outcome.damage
    assert "in float32, 500 MB of memory may be used on cpu" in str(outcome.notes[0])


def test_samples_without_assistant_tokens_give_way(tmp_path: Path) -> None:
    """They are taken only when there is nothing else; what was added is a copy."""
    model = write_tiny_model(tmp_path / "tiny")
    found = FirstSamples(model, capture(model, layers=("final",)), samples=2)
    ids = np.arange(10, dtype=np.int32)
    rows = np.zeros((10, 64), np.uint16)
    silent, speaking = np.zeros(10, np.uint8), np.ones(10, np.uint8)
    assert not found.add(0, ids, silent, {"final": rows})
    assert not found.add(1, ids, silent, {"final": rows})
    assert not found.add(2, ids, speaking, {"final": rows})
    assert found.add(3, ids, speaking, {"final": rows})
    rows[:] = 1
    assert [(s.source_index, int(s.states["final"].max())) for s in found._kept] == [(2, 0), (3, 0)]
    other = FirstSamples(model, capture(model, layers=("final",)), samples=2)
    assert [other.add(i, ids, silent, {"final": rows}) for i in range(17)].index(True) == 15
