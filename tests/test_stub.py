"""The native module's stub says what the module has: names and parameters, generated and compared.

The committed stub has the better types; this keeps it from drifting from the module itself.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from vkvmap import _C

STUB = Path(__file__).parents[1] / "vkvmap" / "_C.pyi"


def signatures(body: list[ast.stmt], prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Qualified name -> parameter names (with ``=`` where there is a default)."""
    found: dict[str, tuple[str, ...]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[prefix + node.name] = ()
            found |= signatures(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = parameters(node.args)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id != "__all__":
                found[prefix + node.target.id] = ()
    return found


def parameters(args: ast.arguments) -> tuple[str, ...]:
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    named = [a.arg + ("=" if index >= without else "") for index, a in enumerate(positional)] + [
        a.arg + ("=" if d else "") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    # Unnamed parameters are arg0, arg1 in the module; the stub may call them as it likes.
    unnamed = {a.arg for a in args.posonlyargs}
    return tuple(
        "_" if name in unnamed or name.startswith("arg") else name
        for name in named
        if name != "self"
    )


def test_the_stub_and_the_module_have_the_same_names_and_parameters(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pybind11_stubgen", "vkvmap._C", "-o", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    generated: dict[str, tuple[str, ...]] = {}
    folder = tmp_path / "vkvmap" / "_C"
    for path in sorted(folder.glob("*.pyi")):
        prefix = "" if path.stem == "__init__" else f"{path.stem}."
        generated |= signatures(ast.parse(path.read_text(encoding="utf-8")).body, prefix)
    written = signatures(ast.parse(STUB.read_text(encoding="utf-8")).body)
    submodules = {path.stem for path in folder.glob("*.pyi")} - {"__init__"}
    written = {name: value for name, value in written.items() if name not in submodules}
    if not _C.cuda.BUILT:  # a build without CUDA has only the head of that submodule
        written = {n: v for n, v in written.items() if not n.startswith("cuda.") or n in generated}
    assert {n: v for n, v in written.items() if generated.get(n) != v} == {}
    assert sorted(set(generated) - set(written)) == []
