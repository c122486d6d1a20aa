"""A number that was formatted for people is never parsed again: a thousands comma or a unit would end the program."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import loadgen.base.quantities as quantities

ROOT = Path(__file__).resolve().parents[3]
FORMATTERS = {
    name
    for name, function in vars(quantities).items()
    if getattr(function, "__module__", "") == quantities.__name__
    and getattr(function, "__annotations__", {}).get("return") == "str"
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


def is_formatted(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a text with a formatted number, also by a variable of these names or a method."""
    match node:
        case ast.JoinedStr():
            return any(isinstance(part, ast.FormattedValue) for part in node.values)
        case ast.Name():
            return node.id in names
        case ast.Call(func=ast.Name(id=name)):
            return name in FORMATTERS
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner):
            return is_formatted(inner, names)
        case ast.BinOp(left=first, right=second) | ast.IfExp(body=first, orelse=second):
            return is_formatted(first, names) or is_formatted(second, names)
    return False


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, FUNCTION):
            yield from own_nodes(child)


def parsed_again(text: str) -> list[str]:
    """Every call of float() or int() with a text that its function has formatted."""
    found = []
    for function in [one for one in ast.walk(ast.parse(text)) if isinstance(one, FUNCTION)]:
        nodes, names = list(own_nodes(function)), set[str]()
        for one in nodes:
            if isinstance(one, ast.Assign) and is_formatted(one.value, names):
                names |= {inner.id for to in one.targets for inner in ast.walk(to) if isinstance(inner, ast.Name)}
        found += [
            ast.unparse(one)
            for one in nodes
            if isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in ("float", "int")
            and any(is_formatted(argument, names) for argument in one.args)
        ]
    return found


def test_nothing_formatted_is_parsed_again() -> None:
    found = {path: parsed_again(path.read_text()) for path in sorted((ROOT / "loadgen").rglob("*.py"))}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_what_is_parsed_again_is_found() -> None:
    assert {"number", "ratio", "share"} <= FORMATTERS
    for text in (
        'float(f"{value:.6g}")',
        'def f(v):\n    text = f"{v:,.2f}"\n    return float(text.replace(",", ""))',
        'def f(v):\n    factor = ratio(v, None)\n    if v and float(factor.removesuffix("×")) > 1.0:\n        return 1',
        "int(number(value))",
        'float(f"{mantissa}e{decade}")',
    ):
        assert parsed_again(text), text
    assert parsed_again("def f(v):\n    text = share(v)\n    return text, float(v)") == []
