from __future__ import annotations

from pathlib import Path

import pytest

from hsstore.errors import DamagedError, FormatError, NotFoundError
from hsstore.records import SampleEntry, StoreHeader, canonical, load_sealed, sealed
from hsstore.store import Store


def test_a_sealed_record_reads_back_equal(shared_store: Store) -> None:
    path = shared_store.root / "store.json"
    assert load_sealed(path, StoreHeader) == shared_store.header
    assert canonical(shared_store.header) == path.read_bytes()


def test_canonical_json_is_sorted_at_every_level() -> None:
    assert canonical({"b": {"d": 1, "c": 2}, "a": "é"}) == '{"a":"é","b":{"c":2,"d":1}}'.encode()
    assert canonical(SampleEntry("ab", 1, 2, 3)) == b'["ab",1,2,3,0]'


@pytest.mark.parametrize("edit", [(b'"C', b'"c'), (b"}", b"} "), (b'"created":"2', b'"created":"3')])
def test_any_change_of_a_sealed_record_shows(shared_store: Store, tmp_path: Path, edit: tuple[bytes, bytes]) -> None:
    """Without the comparison of the bytes themselves, white space and field order could be changed unseen."""
    data = (shared_store.root / "store.json").read_bytes().replace(*edit)
    assert data != (shared_store.root / "store.json").read_bytes() or edit[0] == b'"C'
    path = tmp_path / "store.json"
    path.write_bytes(data if edit[0] != b'"C' else data[:-1])
    with pytest.raises(DamagedError):
        load_sealed(path, StoreHeader)


def test_another_format_is_refused_before_its_fields(shared_store: Store, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(b'{"format":2,"anything":"else"}')
    with pytest.raises(FormatError, match="format 2"):
        load_sealed(path, StoreHeader)


def test_a_missing_record_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        load_sealed(tmp_path / "none.json", StoreHeader)


def test_sealing_twice_changes_nothing(shared_store: Store) -> None:
    assert sealed(shared_store.header) == shared_store.header
