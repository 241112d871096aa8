"""The fault table of docs/testing.md: every known fault is in it, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE.parent / "docs" / "testing.md").read_text(encoding="utf-8").split("## Fault table")[1]
ROWS = re.findall(r"^\| ([\d, -]+): .*? \| (.*) \|$", TABLE, re.M)
LAST_FAULT = 62


def numbers(listed: str) -> set[int]:
    found: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def sources() -> str:
    kinds = ("*.py", "*.cpp", "*.cu")
    files = [path for kind in kinds for path in sorted(HERE.rglob(kind))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_every_fault_is_kept_away_somewhere() -> None:
    assert set().union(*(numbers(listed) for listed, _ in ROWS)) == set(range(1, LAST_FAULT + 1))


def test_what_the_table_names_exists() -> None:
    everything = sources()
    named = {name for _, where in ROWS for name in re.findall(r"`([^`]+)`", where)}
    assert len(named) > 30
    for name in named:
        if "/" in name:
            assert (HERE.parent / name).exists(), name
        else:
            assert re.search(rf"\b{name}\b", everything), name


def test_every_fault_of_the_mapping_has_a_test_under_its_number() -> None:
    text = (HERE / "test_faults_mapping.py").read_text(encoding="utf-8")
    tested = {
        int(n)
        for said in re.findall(r"Faults? ([\d, and]+)", text)
        for n in re.findall(r"\d+", said)
    }
    mapping = next(listed for listed, where in ROWS if "test_faults_mapping" in where)
    assert numbers(mapping) - tested == set()
