"""The nearest right value, for messages that answer a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.4) -> str:
    """The choice that `word` was meant to be, or an empty string.

    A choice of the same letters comes first (``dpc`` is ``dcp``), then the most similar.
    """
    known = list(choices)
    same = [choice for choice in known if sorted(choice) == sorted(word)]
    if same:
        return max(same, key=lambda choice: sum(map(str.__eq__, choice, word)))
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return close[0] if close else ""
