"""The property tests, long: `python -m tests.long [--cases N] [TEST ...]`.

Runs every hypothesis test of the mapping algebra and its proof with N random cases each (25,000 by
default: more than 100,000 in all), new ones each time, and prints how many ran and how long it
took. Generated are layers, grids, layouts, block sizes and kernel blocks over their whole product,
perturbed strides, coinciding shapes, surplus heads and corrupted runs; the answer must be exact, or
a refusal.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

import pytest

#: Oracle-checked properties; each file says what its oracle is.
TESTS = (
    "tests/test_boxes.py",
    "tests/test_certify.py",
    "tests/test_coincidence.py",
    "tests/test_derive.py",
    "tests/test_memory.py",
    "tests/test_opaque.py",
    "tests/test_recurrent.py",
    "tests/test_writers.py",
)


class Count:
    """Adds up what hypothesis reports for each test."""

    def __init__(self) -> None:
        self.passing = self.invalid = self.failing = 0

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
        yield
        said = getattr(item, "hypothesis_statistics", "")
        if call.when == "call" and said:
            for word in ("passing", "invalid", "failing"):
                found = sum(int(n) for n in re.findall(rf"(\d+) {word}", said))
                setattr(self, word, getattr(self, word) + found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=25_000, help="per test, default %(default)s")
    parser.add_argument("tests", nargs="*", default=TESTS)
    arguments = parser.parse_args()
    os.environ["VKVMAP_HYPOTHESIS"] = "long"
    os.environ["VKVMAP_CASES"] = str(arguments.cases)
    count, start = Count(), time.monotonic()
    tests = [path for path in arguments.tests if "::" in path or os.path.exists(path)]
    status = pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[count])
    print(
        f"{count.passing} generated cases passed, {count.failing} failed, {count.invalid} were "
        f"outside the question, in {time.monotonic() - start:.0f} s"
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
