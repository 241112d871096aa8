"""The shared vectors hold, and a wrong answer to one of them would be seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vkvmap.conformance import check_case, check_cases, read_cases
from vkvmap.errors import FormatError

CASES = Path(__file__).parent / "cases"


@pytest.mark.parametrize(("name", "count"), [("golden.jsonl", 75), ("golden_beyond.jsonl", 49)])
def test_every_binding_row_holds(name: str, count: int) -> None:
    verdicts = check_cases(read_cases(CASES / name))
    assert len(verdicts) == count
    assert [v for v in verdicts if v.binding and v.differences] == []


def test_the_declaration_decides_where_a_stride_test_cannot() -> None:
    quirk = next(c for c in read_cases(CASES / "golden.jsonl") if "quirk" in c)
    verdict = check_case(quirk)
    assert not verdict.binding
    assert any("byte_map_sha256" in difference for difference in verdict.differences)


@pytest.mark.parametrize("field", ["byte_map_sha256", "num_writers", "canonical_page_size"])
def test_a_falsified_row_is_reported(field: str) -> None:
    case = next(read_cases(CASES / "golden.jsonl"))
    case[field] = "0" * 64 if field == "byte_map_sha256" else case[field] + 1
    assert [d for d in check_case(case).differences if d.startswith(field)]


@pytest.mark.parametrize(
    "line", ["not json", "[1]", '{"kind": "full"}', '{"kind": "full", "tp": true}']
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps(next(read_cases(CASES / "golden.jsonl")))
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(FormatError, match="line 2"):
        list(read_cases(path))
