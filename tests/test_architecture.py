"""The one-way street: a room imports only from rooms below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vkvmap"

#: Lowest first. Rooms of one level may import each other; a room not listed fails the test.
STREET: list[set[str]] = [
    {"_version", "_C"},
    {"errors", "boxes", "nearest", "foreign", "native"},
    {"spec", "grid"},
    {"layout", "cache", "recognise", "holding"},
    {"mapping"},
    {"certify", "opaque", "writers"},
    {"derive"},
    {"plan", "pack", "chunk", "sections", "region", "ledger", "cuda"},
    {"format", "identity", "keys"},
    {"transfer", "calibrate", "metrics"},
    {"store"},
    {"configuration", "paged", "sharing"},
    {"describe", "models", "conformance", "roundtrip", "convert"},
    {"integrations"},
    {"cli", "__main__"},
]


def level_of(module: str) -> int:
    """Level of a room; siblings like ``region_memory`` belong to the room they are named after."""
    for level, rooms in enumerate(STREET):
        if any(module == room or module.startswith(f"{room}_") for room in rooms):
            return level
    raise AssertionError(f"vkvmap/{module} has no place in the street; give it one")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[tuple[str, int]]:
    """Rooms that a file imports, with the line, wherever in the file the import stands."""
    rooms = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "vkvmap" and len(parts) > 1 and not parts[1].startswith("__"):
                rooms.add((parts[1], node.lineno))
    return rooms


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_from_below(path: Path) -> None:
    here = room_of(path)
    upward = [
        f"{path.name}:{line} imports vkvmap.{room}"
        for room, line in imported_rooms(path)
        if (PACKAGE / f"{room}.py").exists() or (PACKAGE / room).is_dir()
        if level_of(room) > level_of(here)
    ]
    assert upward == []


def test_nobody_imports_the_integrations() -> None:
    importers = [
        str(path)
        for path in modules()
        if room_of(path) not in ("integrations", "cli")
        and any(room == "integrations" for room, _ in imported_rooms(path))
    ]
    assert importers == []


def test_the_library_neither_asserts_nor_prints() -> None:
    found = []
    for path in modules():
        if room_of(path) in ("cli", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                found.append(f"{path.name}:{node.lineno} asserts")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                found.append(f"{path.name}:{node.lineno} prints")
    assert found == []


def test_native_code_knows_neither_torch_nor_parallelism() -> None:
    words = re.compile(
        r"#include\s*[<\"](torch|ATen|c10)|\b(tp_rank|dcp|pcp|num_kv_heads|head_size)\b"
    )
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "csrc").iterdir())
        if path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []
