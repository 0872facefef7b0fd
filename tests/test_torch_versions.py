"""One file knows the private names of torch; which versions of torch are tested."""

import ast
import functools
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import gradgate
from gradgate import _torch_private
from gradgate.errors import GradgateError, GradgateWarning
from tests import compat

PACKAGE = Path(gradgate.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("_torch_")]

# Private names of the standard library: nobody but Python can take them away.
STANDARD = {
    *("_getframe", "_current_frames", "_exit", "_replace", "_fields", "_run", "_callback", "_get_running_loop"),
    "_is_protocol",
}
OF_OBJECTS = {"_orig_mod", "_fsdp_state"}.union(
    dir(torch.ones(1, requires_grad=True) * 1),
    dir(torch.nn.Linear(1, 1)),
    dir(torch.optim.SGD([torch.ones(1)])),
    dir(torch.nn.parallel.DistributedDataParallel),
    dir((torch.ones(1, requires_grad=True) * 1).grad_fn),
    dir(torch.autograd.Function),
    dir(torch.ops.aten.add.Tensor),
    dir(torch.ones(1).untyped_storage()),
    dir(torch.utils.data.DataLoader([1])),
).difference(STANDARD)
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


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def own():
    """Collect the private names that are none of torch's."""
    names = {name for path in SOURCES for name in own_names(tree_of(path)) if is_private(name)}
    # An integration uses private names of its framework too; those that objects of torch have are still found.
    of_frameworks = {
        node.attr if isinstance(node, ast.Attribute) else node.value
        for path in SOURCES
        if path.parent.name == "integrations"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }
    return names | STANDARD | of_frameworks


def private_torch_names(tree):
    """Find what a file uses of torch that is not public, by whatever syntax."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr == "__version__" and owner == "torch":
                yield "torch.__version__"
            elif is_private(node.attr) and (
                node.attr not in own()
                or owner.split(".")[0] == "torch"
                or (owner.split(".")[-1] not in ("self", "cls", "guard") and node.attr in OF_OBJECTS)
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
                of_self = {
                    each.attr for each in ast.walk(node) if ast.unparse(each) == f"self.{getattr(each, 'attr', '')}"
                }
                yield from (f"{node.name}.{name}" for name in (methods | of_self) & OF_OBJECTS if is_private(name))
        elif isinstance(node, ast.MatchClass):
            yield from (
                name for name in node.kwd_attrs if is_private(name) and (name in OF_OBJECTS or name not in own())
            )
        elif (text := literal_text(node)) is not None and re.fullmatch(r"[\w.:]+", text):
            parts = [part for part in re.split("[.:]", text) if is_private(part)]
            if parts and (text.startswith("torch") or not OF_OBJECTS.isdisjoint(parts)):
                yield repr(text)
            user = parents.get(node)
            looks_up = isinstance(user, ast.Call) and ast.unparse(user.func).rpartition(".")[2] in LOOKUPS
            if (looks_up or isinstance(user, ast.Subscript)) and not own().issuperset(parts):
                yield repr(text)


LOOKUPS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "__getattribute__", "resolve_name")


def literal_text(node):
    """Return a text that is written out, in one piece or added up; None for everything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal_text(node.left), literal_text(node.right)
        return left + right if left is not None and right is not None else None
    return None


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_uses_a_private_name_of_torch(path):
    assert not list(private_torch_names(tree_of(path)))


@pytest.mark.slow
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
        "class Own(torch.nn.Module):\n    def children(self): return self._modules",
        "from torch import _C",
        "import torch._C as core",
        "same = torch\nsame._C",
        "torch.__dict__['_C']",
        "vars(torch)['_C']",
        "super()._apply(fn)",
        "del x._backward_hooks",
        "getattr(x, f'_version')",
        "getattr(x, '_ver' + 'sion')",
        "NAME = '_version'\ngetattr(x, NAME)",
        "operator.attrgetter('grad_fn._sequence_nr')(x)",
        "operator.methodcaller('_a_name_that_nobody_here_has')(x)",
        "importlib.import_module('torch.utils._pytree')",
        "pkgutil.resolve_name('torch:Tensor._base')",
        "match x:\n    case torch.Tensor(_version=count): ...",
    ],
)
def test_the_search_for_private_names_finds(line):
    assert list(private_torch_names(ast.parse(line)))


def test_the_names_of_objects_of_torch_are_known():
    assert {"_version", "_base", "_apply", "_parameters", "_optimizer_step_pre_hooks", "_sequence_nr"} <= OF_OBJECTS


# --- versions --------------------------------------------------------------------------------------------------------


def looked_up(without=()):
    """Load `_torch_private.py` once more, as if torch did not have some names; give it, and what it looked for."""
    sought, resolve = [], pkgutil.resolve_name

    def resolve_all_but(name):
        sought.append(name)
        if name in without:
            raise AttributeError(name)
        return resolve(name)

    spec = importlib.util.spec_from_file_location("gradgate._another_torch", _torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pkgutil, "resolve_name", resolve_all_but)
        spec.loader.exec_module(module)
    return module, sought


NAMES = looked_up()[1]


def test_nothing_is_missing_on_a_tested_version():
    assert _torch_private.MISSING == {}
    assert len(NAMES) == len(set(NAMES)) > 30


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_is_noted_and_nothing_else_is(name):
    module, _ = looked_up([name])
    assert list(module.MISSING) == [name]
    with pytest.warns(GradgateWarning, match="Not all that it needs is there:") as said:
        module._warn_of_version("2.99.0")
    assert f"\n- {name} is missing: {module.MISSING[name]}" in str(said[0].message)


def test_an_untested_version_is_said_in_words():
    with pytest.warns(GradgateWarning) as said:
        _torch_private._warn_of_version("2.16.0.dev20261101+cpu")
    assert str(said[0].message) == (
        "gradgate is tested on torch 2.8 to 2.15, and this is 2.16.0.dev20261101+cpu. "
        "All that gradgate needs of torch is there."
    )
    with pytest.warns(GradgateWarning, match=re.escape("tested on torch 2.8 to 2.15, and this is 2.7.1")):
        _torch_private._warn_of_version("2.7.1")


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.15.1"])
def test_a_tested_version_is_not(version):
    _torch_private._warn_of_version(version)


def test_a_name_that_nothing_replaces_is_an_error_where_it_is_used():
    module, _ = looked_up(["torch._C._DisableTorchDispatch"])
    with pytest.raises(GradgateError) as caught:
        module.undispatched()
    assert str(caught.value) == (
        f"torch {torch.__version__} has no torch._C._DisableTorchDispatch.\n"
        "Why: without it, the doctor cannot trace a step.\n"
        "Fix: pip install 'torch<2.16'"
    )
    tables, _ = looked_up(["torch.optim.optimizer._global_optimizer_pre_hooks"])
    for use in (len, list, lambda table: 1 in table, lambda table: table.items()):
        with pytest.raises(GradgateError, match="without it, nothing can be frozen"):
            use(tables.OPTIMIZER_HOOKS[0])


ON_A_TORCH_THAT_LACKS_MUCH = """
import pkgutil, sys, warnings
import torch
import yaml
resolve, replaced = pkgutil.resolve_name, sys.argv[1].split()
def resolve_all_but(name):
    if name in replaced:
        raise AttributeError(name)
    return resolve(name)
pkgutil.resolve_name = resolve_all_but
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import gradgate as gg
    from gradgate import masked
    x = torch.tensor([1.0, float("nan"), 3.0, 4.0], requires_grad=True)
    keep = torch.tensor([True, False, True, True])
    masked.mean(x, keep=keep).backward()
    assert torch.equal(x.grad, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3])), x.grad
    y = torch.ones(4, requires_grad=True)
    (gg.gate(y * 2, keep) * 3 + gg.at(y)[1].set(7.0)).sum().backward()
    assert torch.equal(y.grad, torch.tensor([7.0, 0, 7, 7])), y.grad
    assert masked.median(x.detach(), exclude=float("nan")) == 3
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    gg.freeze(model, "0.*")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = gg.Guard(model)
    data = torch.tensor([[1.0], [2.0], [float("nan")], [4.0]])
    weight = model[0].weight.detach().clone()
    result = guard.backward(data, lambda batch: model(batch).pow(2).mean())
    optimizer.step()
    assert [incident.row for incident in result.dropped] == [2], result
    assert torch.equal(weight, model[0].weight)
    with gg.grad_mode(False):
        assert not (y * 1).requires_grad
about = [message for each in said if "2.99" in (message := str(each.message))]
assert len(about) == 1 and all(name in about[0] for name in replaced), said
print("done")
"""


def has_error(module):
    """Tell whether a name of the module is an error when it is used, alone or in a table."""
    values = [each for value in vars(module).values() for each in (value if type(value) is tuple else [value])]
    return any(type(value) is module._Missing for value in values)


@pytest.mark.slow
def test_the_library_works_as_far_as_it_can():
    """One process without every name that something replaces: the same results, and one warning."""
    replaced = [name for name in NAMES if not has_error(looked_up([name])[0])]
    command = [sys.executable, "-c", ON_A_TORCH_THAT_LACKS_MUCH, " ".join(replaced)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr
    assert len(replaced) > 10


# --- the table of runs -----------------------------------------------------------------------------------------------


def test_a_run_replaces_the_row_of_the_same_versions():
    page = f"before\n\n{compat.HEAD}"
    for torch_version, python, passed in (("2.9.0", "3.11.7", 1), ("2.15.0", "3.11.7", 2), ("2.9.0", "3.11.7", 3)):
        outcomes = dict.fromkeys(range(passed), "passed") | {"a": "skipped", "b": "failed", "c": "not run"}
        page = compat.with_row(page, compat.row(torch_version, python, "2026-11-16", "c0ffee", outcomes))
    assert page == (
        f"before\n\n{compat.HEAD}"
        "| 2.15.0 | 3.11.7 | 2026-11-16 | c0ffee | 2 | 1 | 1 | 1 |\n"
        "| 2.9.0 | 3.11.7 | 2026-11-16 | c0ffee | 3 | 1 | 1 | 1 |\n"
    )


def test_the_pages_and_the_package_say_the_same_versions():
    oldest, newest = (f"{major}.{minor}" for major, minor in (_torch_private.OLDEST, _torch_private.NEWEST))
    root = PACKAGE.parents[1]
    assert f'"torch>={oldest},<3"' in (root / "pyproject.toml").read_text(encoding="utf-8")
    for page in ("README.md", "docs/compatibility.md"):
        assert re.search(rf"torch {oldest} to {newest}", (root / page).read_text(encoding="utf-8"), re.IGNORECASE)
    rows = compat.TABLE.search((root / "docs/compatibility.md").read_text(encoding="utf-8"))[1].splitlines()
    for row in rows:
        version = tuple(map(int, row.split("|")[1].split(".")[:2]))
        assert _torch_private.OLDEST <= version <= _torch_private.NEWEST


def test_the_workflow_tests_the_oldest_the_pinned_and_the_newest_torch():
    root = PACKAGE.parents[1]
    text = (root / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    jobs, makefile = yaml.safe_load(text)["jobs"], (root / "Makefile").read_text(encoding="utf-8")
    runs = jobs["linux"]["strategy"]["matrix"]["include"]
    oldest, newest = (f"{major}.{minor}.0" for major, minor in (_torch_private.OLDEST, _torch_private.NEWEST))
    assert [run["torch"] for run in runs] == [oldest, compat.PINNED, newest]
    classifiers = re.findall(r"Python :: (3\.\d+)", (root / "pyproject.toml").read_text(encoding="utf-8"))
    assert [run["python"] for run in runs] == classifiers
    assert f"pip install torch=={compat.PINNED}" in text
    for targets in re.findall(r"make ([a-z ]+)", text):
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets.split())
    folders = re.findall(r"(?<= )tests/\w+", text)
    assert len(folders) == 6
    assert all((root / folder).is_dir() for folder in folders)
    assert jobs["nightly"]["continue-on-error"] is True


TRACED = ("masked", "edits", "gates", "losses")
"""The packages that torch.compile looks into."""


def untraceable(tree):
    """Find what Dynamo of torch 2.8 does not know: unions in isinstance, zip(strict=False), properties of tuples."""
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if (called == "isinstance" and isinstance(node.args[1], ast.BinOp)) or (
            called == "zip" and any(ast.unparse(word) == "strict=False" for word in node.keywords)
        ):
            yield ast.unparse(node)
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            yield from (one.name for one in functions if "property" in map(ast.unparse, one.decorator_list))


def test_compiled_packages_use_what_the_oldest_dynamo_knows():
    traced = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in TRACED]
    found = [line for path in traced for line in untraceable(tree_of(path))]
    assert found == []
    lines = (
        "isinstance(x, int | str)\nzip(a, b, strict=False)\nclass A(NamedTuple):\n    @property\n    def b(self): ..."
    )
    assert len(list(untraceable(ast.parse(lines)))) == 3
