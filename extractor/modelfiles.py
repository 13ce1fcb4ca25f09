"""The JSON files of a model directory, read with bounds: they were written by others and can hold anything.

One place turns whatever is wrong with them into one sentence that names the file and the field. Leaves to
`extractor.verifier` and `extractor.weights` which fields there are and what they mean.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hsstore import plainfile
from hsstore.errors import DamagedError, NotFoundError, UsageError

COMPLETE = "download the model completely"


def read(path: Path, missing: str = "") -> bytes:
    """The whole file. Raises `NotFoundError` with the words of `missing`, `UsageError` when it cannot be read."""
    try:
        with open(plainfile.open_plain(path), "rb") as file:
            return file.read()
    except DamagedError as error:
        raise UsageError(error.message, hint=COMPLETE) from None
    except FileNotFoundError:
        hint = "give the directory with config.json and *.safetensors"
        raise NotFoundError(missing or f"{path} is missing", hint=hint) from None
    except OSError as error:
        hint = "give a model directory whose files this user may read"
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from None


def json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """The one object that a file consists of. Raises `UsageError`."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8 and endless numbers, too
        found = "it is empty" if not raw.strip() else str(error).partition("\n")[0][:120]
        raise UsageError(f"{path} is not JSON: {found}", hint=COMPLETE) from None
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds a {type(document).__name__}, expected an object", hint=COMPLETE)
    return document


def wrong_field(path: Path, name: str, value: object, expected: str) -> NoReturn:
    """Raise the `UsageError` of a field."""
    hint = f"correct {path.name}, or download it again"
    raise UsageError(f"{path}: {name} is {reprlib.repr(value)}, expected {expected}", hint=hint)


def whole_number(config: Mapping[str, Any], path: Path, names: tuple[str, ...], maximum: int) -> int | None:
    """The first of the fields that is there and not null, 1 to `maximum`; None without any. Raises `UsageError`."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 1 <= value <= maximum:
            wrong_field(path, name, value, f"a whole number from 1 to {maximum}")
        return value
    return None
