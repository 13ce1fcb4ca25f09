"""What nobody could predict is no fault; what the head is sure not to see is one."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from extractor.chat import ChatTokenizer
from extractor.states import doubt
from extractor.states.head import Head
from extractor.tensors import TensorPlace
from tests.extractor.states import planted
from tests.extractor.states.conftest import Verify, World
from tests.extractor.states.planted import LAYERS, Truth, capture, write


def test_surprise_is_cross_entropy_less_entropy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of the vocabulary as in one piece."""
    monkeypatch.setattr("extractor.states.head._VALUES", 16 * 20)
    random = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(100, 16, generator=random), torch.randn(20, 16, generator=random)
    save_file({"w": weight}, tmp_path / "w.safetensors")
    after = torch.randint(0, 100, (20,), generator=random)
    place = TensorPlace(file=tmp_path / "w.safetensors", name="w", shape=(100, 16))
    found = Head(weight=place, bias=None).predict(rows, after)
    log = torch.log_softmax(rows @ weight.T, dim=1)
    expected = -log[torch.arange(20), after] + (log.exp() * log).sum(dim=1)
    np.testing.assert_allclose(found.surprise, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert found.tokens.tolist() == log.argmax(dim=1).tolist()
    np.testing.assert_allclose(found.confidence, log.exp().max(dim=1).values.numpy(), rtol=1e-5)


def test_hopeless_needs_rate_likelihood_number_and_variety() -> None:
    """Each condition alone takes the verdict back."""
    after = np.arange(200) % 50
    none, far = np.zeros(200, bool), np.full(200, 6.0, np.float32)
    assert doubt.hopeless(none, far, after, 0.01)
    assert not doubt.hopeless(none, np.full(200, 1.6, np.float32), after, 0.01)
    assert not doubt.hopeless(after % 10 == 0, far, after, 0.01)
    assert not doubt.hopeless(none[:40], far[:40], after[:40], 0.01)
    assert not doubt.hopeless(none, far, after, 0.6)
    assert not doubt.hopeless(none, far, after % 4, 0.01)


@pytest.fixture(scope="module")
def hard(world: World) -> dict[str, list[Truth]]:
    """True states of what no model predicts."""
    tokenizer, model = ChatTokenizer.load(world.model), planted.load(world.model)
    random = np.random.default_rng(3)
    answers = {
        "digits": ["".join(map(str, random.integers(0, 10, 60))) for _ in range(3)],
        "identifiers": [str(uuid.UUID(bytes=random.bytes(16))) for _ in range(2)],
        "loop": ["the " * 60],
    }
    out = {}
    for name, texts in answers.items():
        chats = [[{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}] for text in texts]
        tokens = [tokenizer.encode_chat(chat) for chat in chats]
        out[name] = [planted.truth(model, t.ids.astype(np.int32), np.array(t.mask, np.uint8)) for t in tokens]
    return out


@pytest.mark.model
@pytest.mark.parametrize("name", ["digits", "identifiers", "loop"])
def test_sound_states_of_what_nobody_predicts(
    world: World, hard: dict[str, list[Truth]], name: str, tmp_path: Path, verify: Verify
) -> None:
    """Never damage: the forward decides, and without one nothing does, or the head itself says that they are right."""
    store = write(tmp_path / "s", hard[name], capture(world.model))
    found = verify(store, world.model)
    assert (found.code, found.damage()) == (0, {})
    alone = verify(store, world.model, "--head-only")
    assert alone.damage() == {}
    assert alone.code in (0, 4)


@pytest.mark.model
def test_a_hard_sample_among_others_is_no_damage(
    world: World, hard: dict[str, list[Truth]], tmp_path: Path, verify: Verify
) -> None:
    store = write(tmp_path / "s", [*world.samples, *hard["digits"][:1]], capture(world.model))
    found = verify(store, world.model, "--head-only")
    assert (found.code, found.damage()) == (0, {})


@pytest.mark.model
def test_second_halves_of_neighbours(world: World, tmp_path: Path, verify: Verify) -> None:
    """Rows from the middle on are another sample's: seen by the head alone, though each beginning is right."""
    wrong = []
    for i, s in enumerate(world.samples):
        other = world.samples[(i + 1) % len(world.samples)]
        n = min(len(s.ids), len(other.ids))
        states = {k: s.states[k][:n].copy() for k in LAYERS}
        from_here = int(np.median(np.flatnonzero(s.mask)))
        for name, rows in states.items():
            rows[from_here:] = other.states[name][from_here:n]
        wrong.append(Truth(s.ids[:n], s.mask[:n], states))
    found = verify(write(tmp_path / "s", wrong, capture(world.model)), world.model, "--head-only")
    assert found.code == 3
    assert set(found.damage()) <= {"sample", "agreement"}
    assert "from its middle on" in " ".join(found.damage().values())
