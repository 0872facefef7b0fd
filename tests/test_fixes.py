"""Every fix that an error gives is code: it can be pasted as a statement or as the arguments of the call."""

import ast
import re
from pathlib import Path

import pytest

import gradgate

PACKAGE = Path(gradgate.__file__).parent
PACKAGES = ["gates", "modes", "losses", "freezing", "edits", "masked"]
FILES = [PACKAGE / "_checks.py", *(path for name in PACKAGES for path in sorted((PACKAGE / name).rglob("*.py")))]


def texts(node):
    """Give the texts that an expression may be; a value that is filled in is written as a name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "value" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.BinOp):
        return [a + b for a in texts(node.left) for b in texts(node.right)]
    return []


def fixes(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "fix":
            yield from ((node.value.lineno, text) for text in texts(node.value))
        if isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] in (["fix"], ["_FIX"]):
            yield from ((node.lineno, text) for text in texts(node.value))


def pasted(text):
    """Say what is wrong with a fix as code; None if nothing is."""
    for form in (text, f"f(\n{text}\n)", f"def f():\n {text}", f"{text}\ndef f(): pass"):
        try:
            tree = ast.parse(form)
        except SyntaxError:
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        left_out = [a for call in calls for a in call.args if isinstance(a, ast.Constant) and a.value is Ellipsis]
        left_out += [k for call in calls for k in call.keywords if getattr(k.value, "value", None) is Ellipsis]
        return "it has `...` in a call" if left_out else None
    return "it is no Python"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_fix_is_code(path):
    wrong = {f"{path.name}:{line}: {text}": why for line, text in fixes(path) if text and (why := pasted(text))}
    assert not wrong


def test_the_search_for_what_cannot_be_pasted_can_fail():
    assert pasted("keep=keep != 0") is None
    assert pasted("gg.at(x)[idx].set(v)   # once") is None
    assert pasted("@gg.grad_mode(False)") is None
    assert re.search("no Python", pasted("put it on each method"))
    assert re.search(r"\.\.\.", pasted("masked.mean(x, ...)"))
    assert re.search(r"\.\.\.", pasted("gg.train_rows(model, rows=...)"))
