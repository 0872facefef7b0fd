"""What people expect in a repository: one version everywhere, types that a user's checker reads, files that parse."""

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import gradgate

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version_everywhere():
    version = gradgate.__version__
    assert PROJECT["version"] == version
    assert f"\nversion: {version}\n" in text("CITATION.cff")
    assert f'version = "{version}"' in text("conda/meta.yaml")
    released, date = re.search(r"^## ([\d.]+) - ([\d-]+)$", text("CHANGELOG.md"), re.MULTILINE).groups()
    assert released == version
    assert f"\ndate-released: {date}\n" in text("CITATION.cff")


def test_the_conda_recipe_has_the_requirements_and_the_files_of_the_project():
    """Rendered as conda-build renders it, with names for what only conda knows."""
    jinja2, yaml = pytest.importorskip("jinja2"), pytest.importorskip("yaml")
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text("conda/meta.yaml"))
    recipe = yaml.safe_load(template.render(PYTHON="python", compiler="{}_compiler".format, stdlib="{}_stdlib".format))

    def needed(part):
        return {line.replace("pytorch ", "torch ").replace(" ", "") for line in recipe["requirements"][part]}

    python = f"python{PROJECT['requires-python']}"
    assert needed("run") == {*PROJECT["dependencies"], python}
    assert needed("host") == {*tomllib.loads(text("pyproject.toml"))["build-system"]["requires"], python, "pip"}
    assert needed("build") == {"c_compiler", "c_stdlib"}
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    assert recipe["build"]["entry_points"] == [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert recipe["about"]["home"] == PROJECT["urls"]["Homepage"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()
    assert (ROOT / "conda" / recipe["source"]["path"] / "pyproject.toml").resolve() == ROOT / "pyproject.toml"


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob(".github/**/*.yml"), *ROOT.glob(".*.yaml")])
)
def test_files_that_a_service_reads_can_be_parsed(name):
    assert isinstance(pytest.importorskip("yaml").safe_load(text(name)), dict)


def test_the_files_that_security_names_are_there():
    named = re.findall(r"`((?:src|tests)/[\w/.]+)`", text("SECURITY.md"))
    assert len(named) == 3
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright_reads_the_types_in_a_users_file(tmp_path):
    """In strict mode the users' file has no error, and a wrong argument has one."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import gradgate as gg\n\nguard = gg.Guard(3)\nname: str = gg.Ledger('a').incidents()\n")
    settings = {
        "include": [str(ROOT / "tests" / "typing_user.py"), str(wrong)],
        # Not asked of a Python: on a loaded machine pyright does not wait long enough for its answer.
        "extraPaths": [str(ROOT / "src"), sysconfig.get_path("purelib")],
        "typeCheckingMode": "strict",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = [(Path(one["file"]).name, one.get("rule")) for one in json.loads(done.stdout)["generalDiagnostics"]]
    assert sorted(found) == [("wrong.py", "reportArgumentType"), ("wrong.py", "reportAssignmentType")], done.stdout
