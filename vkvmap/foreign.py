"""JSON that somebody else wrote.

The standard parser raises RecursionError for text that nests without end, takes numbers that JSON
does not have, and yields numbers that are not finite. Whoever reads a stranger's text reads it
here, so that all of it is one ValueError.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any


def read_json(text: str | bytes) -> Any:
    """The value that `text` spells.

    Raises:
        ValueError: it is not JSON, nests too deeply, or holds a number that is not finite.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
