"""Every family that is claimed, on the real engine with a tiny random checkpoint, against transformers in float32.

The table of what came out stands at the end of a test run, and in docs/models.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from extractor.sglang_plugin.group import shared_memory
from hsstore.errors import UsageError
from tests.extractor.sglang import page, table
from tests.extractor.sglang.families import FAMILIES, GPT_OSS, N_LAYERS, Family, routing_margin
from tests.extractor.sglang.table import BOUND, DP, LAYERS, RESULTS, TP, TRAP_LAYERS, WAYS, Cell, Reference, Start
from tests.extractor.sglang.zygote import PATCH_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

Models = Callable[[Family], tuple[Path, Reference]]
LLAMA = FAMILIES[0]
MIXTURES = [family for family in FAMILIES if "num_experts_per_tok" in family.config]


def named(family: Family) -> str:
    return family.name


def judge(cell: Cell) -> None:
    RESULTS.append(cell)
    assert cell.rows > 0
    assert len(cell.errors) == 1 + len(LAYERS)
    assert max(cell.worst, *cell.errors.values()) <= BOUND, table.lines([cell])[1]


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_states_equal_transformers(family: Family, start: Start, models: Models) -> None:
    """By every way in which prompts reach the engine; none is left out."""
    judged = []
    for cell in table.cells(family, start, *models(family)):
        judge(cell)
        judged.append(cell.way)
    assert judged == list(WAYS)


@pytest.mark.parametrize("layers", TRAP_LAYERS, ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.trap], ids=named)
def test_the_layers_asked_for_are_the_layers_that_come(
    family: Family, layers: tuple[int, ...], start: Start, models: Models
) -> None:
    """DeepSeek's code adds 1 to EAGLE3 layer ids only when the first of them is 1."""
    judge(table.trap_cell(family, start, *models(family), layers))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.trap][:1], ids=named)
def test_the_trap_is_there_and_is_found(
    family: Family, start: Start, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by EAGLE3's ids, SGLang takes other layers; the probe compares where it really takes them."""
    monkeypatch.setenv(PATCH_VARIABLE, "ask_by_eagle3")
    start(models(family)[0], (2, 3, 5)).close()
    with pytest.raises(UsageError, match=r"after layers \(2, 3, 5\), expected \(3, 4, 6\)"):
        start(models(family)[0], (3, 4, 6))


def test_what_does_not_run_on_a_cpu_says_so(start: Start, models: Models) -> None:
    """On the day on which one of these runs, this fails, and it is to be compared like the others."""
    gpt_oss = table.gpt_oss_cell(start, models(GPT_OSS)[0])
    assert "GptOssForCausalLM requires one of" in gpt_oss.reason
    attention = table.dp_attention_cell(start, models(LLAMA)[0])
    assert "needs CUDA" in attention.reason
    RESULTS.extend([gpt_oss, attention])


def test_the_page_has_every_line() -> None:
    """docs/models.md is made by the same code; a family, a way or a reason that is new is missing there at first."""
    lines = page.table_lines((page.PAGE).read_text())
    found = {(cells[0], cells[4]): cells for cells in lines}
    expected = {(family.name, way) for family in FAMILIES for way in WAYS}
    expected |= {(f.name, table.way_of(layers)) for f in FAMILIES if f.trap for layers in TRAP_LAYERS}
    assert set(found) == expected | {(GPT_OSS.name, "every way"), (table.ANY, "data-parallel attention")}
    for key in expected:
        errors = [float(error) for error in re.findall(r"\d\.\d+", found[key][6])]
        assert len(errors) == 1 + len(LAYERS)
        assert max(errors) <= BOUND


@pytest.mark.parametrize(("way", "writers"), [(TP, 1), (DP, 2)])
def test_ranks_write_once_and_leave_nothing(
    way: str, writers: int, start: Start, models: Models, tmp_path: Path
) -> None:
    """Tensor-parallel ranks all hold the same rows, data-parallel ones each their own samples."""
    engine = start(models(LLAMA)[0], **table.options(way))
    staged = table.Staged(tmp_path, table.prompts(way), table.names(LAYERS), table.HIDDEN)
    table.assert_true(list(engine.capture(staged.jobs)), staged)
    assert len(writing(engine._process.pid, staged.files["final"])) == writers
    shared = shared_memory(engine._process.pid)
    assert shared
    engine.close()
    assert not any(path.exists() for path in shared)


def writing(group: int, path: str) -> set[int]:
    """Processes of a group that have a file open."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                found |= {int(entry.name) for fd in (entry / "fd").iterdir() if os.readlink(fd) == path}
        except OSError:  # a process, or a descriptor, that has just gone
            continue
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_a_state_of_another_layer_would_be_far_off(family: Family, models: Models) -> None:
    """What makes the bound mean something: neighbouring layers differ by a hundred times as much."""
    states = models(family)[1].states(table.prompts(TP)[0])
    for k in range(N_LAYERS - 1):
        assert table.error_of(states[k + 1], states[k]) > 100 * BOUND


@pytest.mark.parametrize("family", MIXTURES, ids=named)
def test_no_expert_is_chosen_by_rounding(family: Family, models: Models) -> None:
    """A row between two experts would go to another one in another batch, and no bound would hold for it."""
    network = models(family)[1].network
    fresh = Reference(network)
    prompts = [ids for way in WAYS for ids in table.prompts(way)]
    assert routing_margin(network, lambda: [fresh.states(ids) for ids in prompts]) > 1e-5
