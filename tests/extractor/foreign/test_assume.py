"""Layer ids and the side of the norm: translated by each project's convention, refused where a guess could be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from extractor.foreign.conventions import CONVENTIONS
from extractor.foreign.settings import FORMATS
from hsstore.cli import run
from hsstore.errors import UsageError
from hsstore.store import Store
from tests.extractor.foreign import data

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

SERVED = [2, 30, 58]


def test_every_format_has_a_convention() -> None:
    assert set(CONVENTIONS) == set(FORMATS)


@pytest.mark.parametrize(
    ("name", "norm", "ks"),
    [
        ("specforge", "post", SERVED),
        ("speculators", "pre", SERVED),
        ("speculators-0.4", "pre", [3, 31, 59]),
        ("torchspec", "post", SERVED),
        ("modelopt", "post", SERVED),
    ],
)
def test_default_layers_of_a_model_of_61(name: str, norm: str, ks: list[int]) -> None:
    """The origin's model: vLLM ids [2, 30, 58] and SGLang ids [1, 29, 57] are the same states."""
    assert CONVENTIONS[name].default_layers(61, norm) == ks  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "norm"), [("torchspec", "pre"), ("modelopt", "pre")])
def test_no_default_where_several_programs_differ(name: str, norm: str) -> None:
    with pytest.raises(UsageError, match="more than one program"):
        CONVENTIONS[name].default_layers(61, norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 4, 5, 6])
def test_models_too_small_for_the_default_are_refused(n: int) -> None:
    with pytest.raises(UsageError, match="ascending"):
        CONVENTIONS["specforge"].default_layers(n, "post")


@pytest.mark.parametrize(
    ("name", "ids", "layers"),
    [
        ("specforge", "0,3,6", ("after_1", "after_4", "after_7", "final")),
        ("speculators-0.4", "0,3,6", ("after_1", "after_4", "after_7", "final")),
    ],
)
def test_layer_ids_are_translated(tmp_path: Path, name: str, ids: str, layers: tuple[str, ...]) -> None:
    samples = data.make_samples()
    write = {"specforge": data.write_specforge, "speculators-0.4": data.write_speculators_pt}[name]
    write(tmp_path / "x", samples)
    arguments = ["import", name, str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL, "--layer-ids", ids]
    assert run(arguments) == 0
    with Store.open(tmp_path / "b") as store:
        data.assert_same(store, samples, layers)
        assert store.capture.flags["import.layers"] == f"given as ids {ids} of {name}"


REFUSED = [
    ((), "do not say which model"),
    (("--n-layers", "8"), "do not say which model"),
    ((*data.MODEL, "--layers", "2,4,5", "--layer-ids", "1,3,4"), "two numberings"),
    ((*data.MODEL, "--layers", "5,4,2"), "not ascending"),
    ((*data.MODEL, "--layers", "2,2,4"), "not ascending"),
    ((*data.MODEL, "--layers", "2,4,8"), "beyond"),
    ((*data.MODEL, "--layer-ids", "1,3,7"), "beyond"),
    ((*data.MODEL, "--layers", "two"), "takes numbers"),
    ((*data.MODEL, "--layers", "2,4"), "expected 2"),
    ((*data.MODEL, "--hidden-states", "."), "is for speculators"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    data.write_specforge(tmp_path / "x", data.make_samples([9, 9]))
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_modelopt_asks_for_the_norm_and_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of its HF program say neither; with both said they are taken, and what was assumed is recorded."""
    samples = data.make_samples()
    data.write_modelopt(tmp_path / "x", samples, mask=False)
    arguments = ["import", "modelopt", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]
    assert run(arguments) == 2
    assert "give --norm post" in capsys.readouterr().err
    assert run([*arguments, "--norm", "post"]) == 2
    assert "no_mask 6" in capsys.readouterr().err
    assert run([*arguments, "--norm", "post", "--mask-missing", "ones"]) == 0
    with Store.open(tmp_path / "b") as store:
        assert all(store.loss_mask(i).all() for i in range(len(samples)))
        flags = store.capture.flags
        assert (flags["import.norm"], flags["import.mask"]) == ("given", "ones where there is none")


def test_files_of_both_sides_of_the_norm_are_not_mixed(tmp_path: Path) -> None:
    """The first readable file decides; the others are named."""
    samples = data.make_samples()
    data.write_modelopt(tmp_path / "x", samples, prenorm=False)
    data.write_modelopt(tmp_path / "y", samples, prenorm=True)
    data.write_modelopt(tmp_path / "z", samples)
    for place, name in (("y", "chat-3.pt"), ("z", "chat-4.pt")):
        (tmp_path / place / name).replace(tmp_path / "x" / name)
    assert run(["import", "modelopt", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 4
    assert [(row["file"], row["reason"]) for row in data.failures(tmp_path / "b")] == [
        ("chat-3.pt", "norm_differs"),
        ("chat-4.pt", "norm_differs"),
    ]


def test_torchspec_that_does_not_say_the_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_torchspec(tmp_path / "x", data.make_samples(), prenorm=None)
    arguments = ["import", "torchspec", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]
    assert run(arguments) == 2
    assert "--norm" in capsys.readouterr().err
    assert run([*arguments, "--norm", "post"]) == 0


def test_options_that_contradict_what_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.write_torchspec(tmp_path / "x", data.make_samples(), prenorm=False)
    arguments = ["import", "torchspec", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]
    assert run([*arguments, "--norm", "pre"]) == 2
    assert "dataset.json says post" in capsys.readouterr().err
    data.make_store(tmp_path / "a", "post", data.make_samples()).close()
    assert run(["export", "specforge", str(tmp_path / "a"), "--out", str(tmp_path / "y")]) == 0
    arguments = ["import", "specforge", str(tmp_path / "y"), "--out", str(tmp_path / "b")]
    for option in (("--layers", "2,4,6"), ("--layer-ids", "0,3,4"), ("--n-layers", "9"), ("--norm", "pre")):
        assert run([*arguments, *option]) == 2, option
        assert "hsstore-export.json says" in capsys.readouterr().err
    assert run(["import", "modelopt", str(tmp_path / "y"), "--out", str(tmp_path / "b")]) == 2
    assert "import it as specforge" in capsys.readouterr().err
    assert run(arguments) == 0
