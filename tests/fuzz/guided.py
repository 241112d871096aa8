"""Coverage-guided fuzzing of one target: `python -m tests.fuzz.guided TARGET [OPTION ...]`.

Needs atheris, which watches this package's own functions and nothing else; OPTIONs are libFuzzer's.
`tests/fuzz/run.sh` runs all targets.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["vkvmap"]):
    from tests.fuzz.targets import TARGETS


def main(words: list[str]) -> int:
    if not words or words[0] not in TARGETS:
        print(f"targets: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    target = TARGETS[words[0]]

    def once(raw: bytes) -> None:
        target(raw)

    atheris.Setup([sys.argv[0], *words[1:]], once)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
