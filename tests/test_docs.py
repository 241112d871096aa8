"""What the documentation shows is what happens: its code runs, its commands print what they say.

``VKVMAP_UPDATE_DOCS=1 pytest tests/test_docs.py`` writes what commands print now into the pages.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vkvmap.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
UPDATE = os.environ.get("VKVMAP_UPDATE_DOCS") == "1"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, body) for language, body in found if language in languages]


def ids(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python", "pycon")], ids=ids)
def test_python_on_a_page_runs(page: Path) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    for number, (language, body) in enumerate(blocks(page, "python", "pycon")):
        where = f"{page.name}, block {number}"
        if language == "python":
            exec(compile(body, where, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(body, names, where, str(page), 0)
        runner = doctest.DocTestRunner()
        said: list[str] = []
        runner.run(test, out=said.append, clear_globs=False)
        assert not runner.failures, "".join(said)
        names.update(test.globs)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=ids)
def test_commands_on_a_page_print_what_it_shows(
    page: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    for _, body in blocks(page, "console"):
        command, _, shown = body.partition("\n")
        assert command.startswith("$ vkvmap "), command
        main(shlex.split(command)[2:])
        captured = capfd.readouterr()
        printed = "\n".join(
            line.rstrip() for line in (captured.out + captured.err).splitlines()
        ).strip("\n")
        if UPDATE and "..." not in shown.splitlines():
            text = text.replace(body, f"{command}\n{printed}\n")
            continue
        pattern = ".*".join(re.escape(part) for part in f"\n{shown.rstrip()}\n".split("\n...\n"))
        assert re.fullmatch(pattern, f"\n{printed}\n", re.DOTALL), f"{command}\n{printed}"
    if UPDATE:
        page.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=ids)
def test_examples_run(script: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"`[^`]+`", "", text)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


PICTURES = {
    "heads": "llama-3-8b --from tp=4,layout=split_nhd --to tp=2 --ranks 1",
    "tokens": "deepseek-v3 --from tp=4,dcp=4,interleave=2 --to tp=1,block=32 --ranks 0,1",
    "replicas": "llama-3-8b --from tp=16,dcp=2,layout=split_hnd --ranks 0,1",
    "state": "qwen3-next-80b-a3b --layer linear_attn --from tp=2 --to tp=4 --ranks 1",
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_show_draws(name: str, tmp_path: Path) -> None:
    kept = ROOT / "docs" / "pictures" / f"{name}.svg"
    drawn = kept if UPDATE else tmp_path / kept.name
    assert main(["show", *PICTURES[name].split(), "--out", str(drawn)]) == 0
    assert drawn.read_text() == kept.read_text()


def test_the_command_line_page_names_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`{name}" in page or f"## {name}" in page or f", {name}" in page, name


def test_the_readme_has_two_commands_near_the_top_and_both_exist() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [body.strip() for language, body in BLOCK.findall(page) if language == "sh"]
    assert commands[:2] == ["scripts/main-job.sh", "scripts/test.sh"]
    assert len(commands) == 2
    assert page.index("scripts/test.sh") < page.index("```python")
    for command in commands:
        assert os.access(ROOT / command, os.X_OK)
