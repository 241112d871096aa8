"""What those share who take chunks from a folder of files, or make files of them.

A folder of files has no lock that its users agree on. What holds there: a file appears whole, under
its name, or not at all, whoever else writes the same one at the same time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vkvmap.errors import StoreError
from vkvmap.store_job import StoreJob


def write_whole(path: Path, pieces: Iterable[Any]) -> None:
    """Make `path`, and the folders above it, a file of `pieces` (bytes, or buffers), or nothing.

    A file that is there is replaced.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A process id would not do: threads share one, and so do processes of different namespaces.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    with open(temporary, "xb") as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def not_moved(keys: Sequence[bytes], job: StoreJob) -> list[tuple[bytes, str]]:
    """The keys of a job that is done whose chunks it did not move, each with the reason.

    Raises:
        StoreError: the store is full; going on would move no more.
    """
    if "full" in job.outcomes:
        raise StoreError(f"the store is full: {job.reasons}")
    return [
        (key, job.reasons.get(index, "it is not in the store"))
        for index, (key, good) in enumerate(zip(keys, job.good.tolist(), strict=True))
        if not good
    ]
