from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore.digest import crc32c, decode_blocks, digest_file, encode_blocks, sample_uid


def test_crc32c_has_the_value_of_the_rfc() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720 B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@given(st.binary(max_size=100), st.integers(0, 100))
def test_crc32c_continues(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)
    assert crc32c(memoryview(bytearray(data))) == crc32c(data)


def test_uid_is_the_documented_hash() -> None:
    ids, mask = np.array([1, 70000], np.int32), np.array([0, 1], np.uint8)
    assert sample_uid(ids, mask) == hashlib.sha256(b"\1\0\0\0\x70\x11\1\0" + b"\0\1").hexdigest()[:32]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_blocks_round_trip(crcs: list[int]) -> None:
    assert decode_blocks(encode_blocks(crcs)).tolist() == crcs


@pytest.mark.parametrize("size", [0, 5, 64, 70])
def test_digest_file_sees_every_byte_once(tmp_path: Path, size: int) -> None:
    data = bytes(range(size))
    (tmp_path / "f").write_bytes(data)
    seen: list[bytes] = []
    digest = digest_file(tmp_path / "f", block_bytes=32, n_blocks=2, visit=lambda _, view: seen.append(bytes(view)))
    assert digest.sha256 == hashlib.sha256(data).hexdigest()
    assert digest.n_bytes == size
    assert b"".join(seen) + digest.footer == data
    assert digest.blocks == [crc32c(data[:32]), crc32c(data[32:64])]
