"""Why a foreign sample is not in the store: the closed list of reasons, and how one travels.

`Rejected` never leaves `importing`: it is counted by reason and listed with the file's name. It is no error: a
directory with bad files is still imported.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hsstore import plainfile
from hsstore.errors import DamagedError
from hsstore.reading import raise_if_ours

REASONS = {
    "unreadable": "the system cannot read the file",
    "no_plain_file": "under the file's name there is a directory, a FIFO or a device",
    "damaged": "the file is cut short, or its own checksum does not match its contents",
    "unsafe": "the file holds more than plain tensors; nothing of it was run",
    "missing_tensor": "a tensor of the format is not in the file",
    "wrong_type": "an entry is no plain tensor",
    "wrong_shape": "a tensor has another number of dimensions than the format, or claims more rows than it holds",
    "wrong_dtype": "the states are not bfloat16 (see --cast), or the ids are no integers",
    "wrong_width": "the states have another width, or another number of layers, than the others or the model",
    "length_mismatch": "ids, mask and states differ in length",
    "too_short": "fewer than 2 tokens: nothing follows the first",
    "ids_outside_vocabulary": "an id is negative or not below the vocabulary size",
    "bad_mask": "the loss mask holds something else than 0 and 1",
    "no_mask": "there is no loss mask (see --mask-missing)",
    "norm_differs": "the file says that its final state is on the other side of the norm than the import takes",
    "ids_differ": "the ids beside the states are not those of the dataset row",
    "no_states": "the dataset row has no file with states",
    "no_row": "the file with states has no dataset row",
    "duplicate": "another file has the same number",
    "label_differs": "the file names another sample than the manifest does",
    "bad_line": "the line of manifest.jsonl is no record of a sample",
    "not_finite": "a state is NaN or infinite",
    "changed": "the file changed while it was imported",
}


class Rejected(Exception):
    """This input gives no sample, because of `reason` (a key of `REASONS`)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        super().__init__(reason)
        self.reason = reason
        self.detail = detail[:200]


def unreadable(error: OSError) -> Rejected:
    """The rejection of a file that the system cannot read.

    Raises the error of `hsstore.errors` for what is no fault of the file (too many open files, no memory): counting it
    would leave the sample out for ever, because the layout is fixed when the import begins.
    """
    raise_if_ours(error)
    return Rejected("unreadable", (error.strerror or str(error)).lower())


def refuse_exhausted(text: str) -> None:
    """The same for libraries that put the errno into words, such as torch: raises what the words mean."""
    for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        if os.strerror(code) in text:
            raise_if_ours(OSError(code, os.strerror(code)))


def refuse_strange(path: Path) -> None:
    """Raise `Rejected` for what no library may be given to open: reading a FIFO would wait for ever."""
    try:
        plainfile.check_plain(path)
    except DamagedError:
        raise Rejected("no_plain_file") from None
    except OSError as error:
        raise unreadable(error) from None
