"""Places, columns and digests of chunks, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from extractor.sglang_plugin.capture import Capture, state_bytes
from extractor.sglang_plugin.protocol import FINAL, KEY, Target
from extractor.sglang_plugin.writer import Rows
from hsstore.digest import crc32c

HIDDEN = 8
FILES = {"after_2": "/a", "after_5": "/b", "final": "/f"}
COLUMNS = {"after_2": 0, "after_5": 1, "final": FINAL}


def target(n_tokens: int, row: int = 10) -> Target:
    return Target(3, n_tokens, row, FILES, COLUMNS)


def states(n_rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n_rows)
    aux = torch.randn(n_rows, 2 * HIDDEN, generator=generator, dtype=dtype)
    return aux, torch.randn(n_rows, HIDDEN, generator=generator, dtype=dtype)


@pytest.mark.parametrize("sizes", [[30], [1, 29], [10, 10, 10], [13, 7, 9, 1]])
def test_chunks_lie_one_behind_the_other(sizes: list[int]) -> None:
    """SGLang itself keeps only the last chunk; however the prompt is cut, the same bytes go to the same places."""
    aux, last = states(30)
    capture, written, start = Capture(target(30)), {path: bytearray(100 * HIDDEN * 2) for path in FILES.values()}, 0

    def put(rows: Rows) -> None:
        assert rows.request == 3
        written[rows.path][rows.offset : rows.offset + rows.data.nbytes] = rows.data.tobytes()

    for size in sizes:
        capture.add(aux[start : start + size], last[start : start + size], put)
        start += size
    receipt = capture.receipt(prompt_tokens=30, cached_tokens=0, points=(2, 5))
    assert (receipt.n_rows, receipt.error, receipt.capture_points) == (30, "", (2, 5))
    expected = {"after_2": aux[:, :HIDDEN], "after_5": aux[:, HIDDEN:], "final": last}
    for name, path in FILES.items():
        rows = expected[name].to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        place = slice(10 * HIDDEN * 2, 40 * HIDDEN * 2)
        assert bytes(written[path][place]) == rows
        assert not any(written[path][: place.start])
        assert not any(written[path][place.stop :])
        assert receipt.crc32c[name] == crc32c(rows)


@pytest.mark.parametrize(
    ("sizes", "prompt_tokens", "cached", "message"),
    [
        ([10, 10], 30, 0, "captured 20 rows"),
        ([10, 25], 30, 0, "captured 35 rows"),  # a chunk that came twice
        ([30], 29, 0, "of 29 tokens, expected 30"),
        ([30], 30, 4, "prefix cache"),
        ([26], 30, 4, "prefix cache"),
    ],
)
def test_missing_repeated_and_cached_rows_are_an_error(
    sizes: list[int], prompt_tokens: int, cached: int, message: str
) -> None:
    """Rows shorter than the ids train without an error."""
    capture, end = Capture(target(30)), 0
    for size in sizes:

        def put(rows: Rows) -> None:
            nonlocal end
            end = max(end, rows.offset + rows.data.nbytes)

        capture.add(*states(size), put)
    receipt = capture.receipt(prompt_tokens=prompt_tokens, cached_tokens=cached, points=())
    assert message in receipt.error
    assert receipt.crc32c == {}
    assert end <= 40 * HIDDEN * 2, "rows of the next sample were overwritten"


def test_rows_are_a_copy_rounded_as_torch_rounds() -> None:
    """SGLang reuses its tensors while the writer still waits for the disk."""
    aux, last = states(6)
    for column, source in ((0, aux[:, :HIDDEN]), (1, aux[:, HIDDEN:]), (FINAL, last)):
        expected = source.to(torch.bfloat16).clone()
        found = state_bytes(aux, last, column)
        before = found.tobytes()
        assert before == expected.view(torch.uint8).numpy().tobytes()
        source.zero_()
        assert found.tobytes() == before


def test_bfloat16_rows_are_a_copy_too() -> None:
    aux, last = states(6, torch.bfloat16)
    found = state_bytes(aux, last, FINAL)
    before = found.tobytes()
    last.zero_()
    assert found.tobytes() == before
    assert np.any(found)


def test_shapes_that_do_not_fit_are_refused() -> None:
    aux, last = states(6)
    with pytest.raises(ValueError, match="do not fit"):
        state_bytes(aux[:5], last, 0)
    with pytest.raises(ValueError, match="do not fit"):
        state_bytes(aux[:, :-1], last, 0)
    with pytest.raises(ValueError, match="no state 2"):
        state_bytes(aux, last, 2)


def test_a_target_travels_as_plain_values() -> None:
    import msgspec

    params = {KEY: msgspec.to_builtins(target(5))}
    assert Target.from_params(params) == target(5)
    assert Target.from_params({"other": 1}) is None
    assert Target.from_params(None) is None
