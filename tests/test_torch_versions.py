"""One file knows the private names of torch."""

import ast
from pathlib import Path

import pytest
import torch

import gradgate

PACKAGE = Path(gradgate.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_torch_private.py"]

# Private names of the standard library: nobody but Python can take them away.
STANDARD = {"_getframe", "_current_frames", "_exit", "_replace", "_fields", "_run", "_callback", "_get_running_loop"}
OF_OBJECTS = {"_orig_mod", "_fsdp_state"}.union(
    dir(torch.ones(1, requires_grad=True) * 1),
    dir(torch.nn.Linear(1, 1)),
    dir(torch.optim.SGD([torch.ones(1)])),
    dir(torch.nn.parallel.DistributedDataParallel),
    dir((torch.ones(1, requires_grad=True) * 1).grad_fn),
    dir(torch.autograd.Function),
    dir(torch.ops.aten.add.Tensor),
    dir(torch.ones(1).untyped_storage()),
)
"""Names that tensors, modules, optimizers and nodes of the graph have."""
FOREIGN_BASES = ("Module", "Tensor", "Function", "Optimizer")


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def own_names(tree):
    """Collect the private names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
OWN = {name for tree in TREES.values() for name in own_names(tree) if is_private(name)} | STANDARD


def private_torch_names(tree):
    """Find what a file uses of torch that is not public, by whatever syntax."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr == "__version__" and owner == "torch":
                yield "torch.__version__"
            elif is_private(node.attr) and (
                node.attr not in OWN
                or owner.split(".")[0] == "torch"
                or (owner not in ("self", "cls") and node.attr in OF_OBJECTS)
            ):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                parts = f"{module}.{alias.name}".split(".") if module else alias.name.split(".")
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield ".".join(parts)
        elif isinstance(node, ast.ClassDef):
            if any(word in ast.unparse(base) for base in node.bases for word in FOREIGN_BASES):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                yield from (f"{node.name}.{name}" for name in methods & OF_OBJECTS if is_private(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removesuffix(".")
            if name.startswith("torch._") or (is_private(name) and name in OF_OBJECTS):
                yield repr(name)
            call = parents.get(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
                yield from [repr(name)] if is_private(name) and name not in OWN else []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_a_private_name_of_torch(path):
    assert not list(private_torch_names(TREES[path]))


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._x()",
        "torch.nn.functional._pad(x)",
        "from torch._dynamo import y",
        "from torch.overrides import _get_current_function_mode",
        "import torch.utils._pytree",
        "torch.__version__",
        "x._version",
        "self.saved.tensor._base",
        "module._apply(fn)",
        "optimizer._optimizer_step_pre_hooks",
        "model._a_name_that_nobody_here_has",
        "getattr(module, '_forward_hooks')",
        "module.__dict__['_parameters']",
        "hasattr(state, '_fsdp_param_group')",
        "sys.modules.get('torch._dynamo')",
        "name.replace('_orig_mod.', '')",
        "class Own(torch.nn.Module):\n    def _apply(self, fn): ...",
    ],
)
def test_the_search_for_private_names_finds(line):
    assert list(private_torch_names(ast.parse(line)))


def test_the_names_of_objects_of_torch_are_known():
    assert {"_version", "_base", "_apply", "_parameters", "_optimizer_step_pre_hooks", "_sequence_nr"} <= OF_OBJECTS
