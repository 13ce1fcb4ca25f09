"""Files of torch.save, opened so that nothing in them can run, and checked against their own checksums.

Only `torch.load(weights_only=True)`, never a plain unpickler. torch does not compare the CRC-32 that the file carries
for each tensor (tried with 2.14, mapped or not: a flipped bit comes through), so `check_archive` does.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

from extractor.foreign.reasons import Rejected, refuse_exhausted, refuse_strange, unreadable
from hsstore.errors import MissingExtraError, extra_hint

LARGEST_UNPACKED = 16 << 30
"""Bytes that one .gz file may become: it has to lie in memory, and a small one can claim any size."""

_TAIL_BYTES = (1 << 16) + 22  # where an archive's directory ends: its longest comment and the record before it

# What torch's reader raises on arbitrary bytes; found by the damage tests, not by its documentation.
_DAMAGE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    MemoryError,
    ImportError,
    struct.error,
    zipfile.BadZipFile,
)


def need_torch() -> Any:
    """torch, or the sentence that says how to get it."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("the formats of other projects need torch", hint=extra_hint("hf")) from None
    return torch


def load(path: Path, *, whole: bool) -> tuple[dict[str, Any], bool, bool]:
    """The file's dictionary, whether its tensors are maps of the file, and whether it carries no checksums.

    With `whole` every checksum in it is compared. Raises `Rejected`.
    """
    torch = need_torch()
    refuse_strange(path)
    try:
        if path.name.endswith(".gz"):
            data = _unpack(path)
            unchecked = check_archive(io.BytesIO(data)) if whole else False
            return _dictionary(_load(torch, io.BytesIO(data))), False, unchecked
        if not _is_archive(path):  # torch before 1.6, or cut short: the archive's directory lies at its end
            _refuse_cut_archive(path)
            return _dictionary(_load(torch, path)), False, True
        unchecked = check_archive(path) if whole else False
        return _dictionary(_load(torch, path, mmap=True)), True, unchecked
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise Rejected("damaged", str(error)) from None
        raise unreadable(error) from None


def _load(torch: Any, source: Path | io.BytesIO, *, mmap: bool = False) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd protocols and sparse tensors: such a file is rejected or equal
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        text = str(error)
        unsafe = "GLOBAL" in text or "Unsupported" in text  # a class or function, or an instruction that would get one
        raise Rejected("unsafe" if unsafe else "damaged", _short(text)) from None
    except _DAMAGE as error:
        refuse_exhausted(str(error))
        raise Rejected("damaged", _short(str(error))) from None


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        # is_zipfile calls what it cannot read no archive; this read raises instead.
        file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        file.read(_TAIL_BYTES)
        try:
            return zipfile.is_zipfile(file)
        except zipfile.BadZipFile as error:
            raise Rejected("damaged", str(error)) from None


def _short(text: str) -> str:
    """The telling line of torch's long messages."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line or "operand" in line), lines[0] if lines else "")[:160]


def _dictionary(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Rejected("wrong_type", f"the file holds a {type(value).__name__}, expected a dictionary")
    return value


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(LARGEST_UNPACKED + 1)
    except (EOFError, zlib.error) as error:
        raise Rejected("damaged", str(error)) from None
    if len(data) > LARGEST_UNPACKED:
        raise Rejected("damaged", f"unpacks to more than {LARGEST_UNPACKED} bytes")
    return data


def _refuse_cut_archive(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(2) in (b"", b"PK"):
            raise Rejected("damaged", "cut short")


def check_archive(source: Path | io.BytesIO) -> bool:
    """Compare the CRC-32 of every member. Returns whether the archive carries none (torch can be told to write zeros).

    Raises `Rejected` naming the member that does not match.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            if not any(member.CRC for member in archive.infolist()):
                return True
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, struct.error) as error:
        raise Rejected("damaged", str(error)) from None
    if bad is not None:
        raise Rejected("damaged", f"the checksum of {bad} does not match")
    return False
