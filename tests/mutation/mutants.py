"""All small wrong versions of a module: one operator, constant, condition or check at a time.

A mutant is made on the syntax tree, so it always parses. Left alone is what no test should depend
on: annotations, messages, docstrings, decorators.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One wrong version: the statement `before` and `after`, its line, and the whole module."""

    line: int
    before: str
    after: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    for statement in _statements(tree):
        parts = list(_parts(statement))
        for index, part in enumerate(parts):
            for change in _changes(part):
                yield _mutant(tree, statement, index, change)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            yield node


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The statement and the expressions of its own, without the statements inside it."""
    yield statement
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "args", "type_params"):
                if not (isinstance(node, ast.Call) and field == "args"):
                    continue
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, (ast.stmt, ast.ExceptHandler, ast.JoinedStr)):
                    continue
                if isinstance(node, ast.Raise) or not isinstance(inner, ast.AST):
                    continue
                if isinstance(inner, ast.keyword) and inner.arg == "strict":
                    continue  # of zip: it only ever turns a wrong program into an error
                yield inner
                waiting.append(inner)


Change = Callable[[ast.AST], ast.AST]


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, (ast.Compare,)):
        for at, op in enumerate(node.ops):
            other = OPERATORS.get(type(op))
            if other:
                yield lambda n, at=at, to=other: _set_op(n, at, to)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        yield lambda n, to=other: _set(n, "op", to())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield lambda n: n.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda n: _set(n, "value", not n.value)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield lambda n: _set(n, "value", n.value + 1)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in CALLS:
        yield lambda n: _set(n, "func", ast.Name(CALLS[n.func.id]))  # type: ignore[attr-defined]
    elif isinstance(node, (ast.Raise, ast.Continue, ast.Break)):
        yield lambda n: ast.Pass()
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and isinstance(
        node.test, (ast.Name, ast.Call, ast.Attribute)
    ):
        yield lambda n: _set(n, "test", ast.UnaryOp(ast.Not(), n.test))  # type: ignore[attr-defined]


def _set(node: ast.AST, field: str, value: object) -> ast.AST:
    setattr(node, field, value)
    return node


def _set_op(node: ast.AST, at: int, to: type) -> ast.AST:
    node.ops[at] = to()  # type: ignore[attr-defined]
    return node


def _mutant(tree: ast.Module, statement: ast.stmt, index: int, change: Change) -> Mutant:
    before = _head(statement)
    places = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    fresh = copy.deepcopy(tree)
    twin = [node for node in ast.walk(fresh) if isinstance(node, ast.stmt)][places.index(statement)]
    part = list(_parts(twin))[index]
    replacement = change(part)
    if replacement is not part:
        _Replace(part, replacement).visit(fresh)
        if part is twin:
            return Mutant(statement.lineno, before, "pass", ast.unparse(_fixed(fresh)))
    return Mutant(statement.lineno, before, _head(twin), ast.unparse(_fixed(fresh)))


def _fixed(tree: ast.Module) -> ast.Module:
    ast.fix_missing_locations(tree)
    return tree


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _head(statement: ast.stmt) -> str:
    """The statement's own text: of a compound one, its first line."""
    return " ".join(ast.unparse(ast.fix_missing_locations(statement)).split("\n")[:1])
