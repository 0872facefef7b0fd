"""The library of native kernels: how it is built, found and refused."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gradgate import _native

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
hatch_build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hatch_build)

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def version_of(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "gradgate", "--version"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_library_is_in_force_where_it_was_built():
    built = (Path(_native.__file__).parent / "kernels.so").exists()
    off = os.environ.get("GRADGATE_NATIVE") == "0"
    assert (_native.library is not None) == (built and not off)


def test_the_version_says_which_kernels_are_in_force():
    assert re.search(r", torch kernels \(GRADGATE_NATIVE=0\)$", version_of(GRADGATE_NATIVE="0"))
    assert _native.status in version_of()


def test_nothing_built_is_no_reason_to_warn(tmp_path):
    library, status = _native.load(tmp_path / "kernels.so")
    assert library is None
    assert "were not built" in status


def test_a_damaged_library_is_said_once(tmp_path):
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(b"\x7fELF" + bytes(64))
    with pytest.warns(RuntimeWarning, match=r"without its native kernels: .*kernels\.so.*GRADGATE_NATIVE=0"):
        library, status = _native.load(damaged)
    assert library is None
    assert status.startswith("torch kernels (")


@needs_compiler
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int unrelated;", "is not the library of gradgate"),
        ("int gg_version(void) { return 1; } int gg_level(void) { return 0; }", "is not the library of gradgate"),
    ],
)
def test_a_foreign_library_is_refused(tmp_path, text, said):
    (tmp_path / "foreign.c").write_text(text)
    made = tmp_path / "kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "foreign.c"), "-o", str(made)], check=True)
    with pytest.warns(RuntimeWarning, match=said):
        assert _native.load(made)[0] is None


@needs_compiler
def test_the_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    made = tmp_path / "kernels.so"
    monkeypatch.setattr(hatch_build, "sources_version", lambda: 7)
    monkeypatch.setattr(hatch_build, "LEVELS", hatch_build.LEVELS)
    assert hatch_build.build(made) is None
    with pytest.warns(RuntimeWarning, match="built from other sources"):
        assert _native.load(made)[0] is None


@needs_compiler
def test_the_sources_compile_without_a_warning(tmp_path):
    made = tmp_path / "kernels.so"
    assert hatch_build.build(made, ("-Wall", "-Wextra", "-Werror")) is None
    library, status = _native.load(made) if os.environ.get("GRADGATE_NATIVE") != "0" else (True, "native kernels (")
    assert library is not None
    assert status.startswith("native kernels (")


def test_without_a_compiler_there_is_a_reason_and_no_library(tmp_path, monkeypatch):
    for compiler, reason in (("false", "false failed"), ("no-such-compiler", "cannot be run")):
        monkeypatch.setenv("CC", compiler)
        assert reason in hatch_build.build(tmp_path / "kernels.so")
        assert not (tmp_path / "kernels.so").exists()


def test_both_sides_number_the_sources_alike():
    assert hatch_build.sources_version() == _native.sources_version()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_a_wheel_with_and_without_a_compiler(compiler, tmp_path):
    """Without one the wheel is for any machine, and the package runs on torch alone."""
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    wanted = ("src/gradgate", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
    for name in wanted:
        path = ROOT / name
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(path, source / name)
    environment = {**os.environ, "CC": compiler, "GRADGATE_NATIVE": "1"}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith("py3-none-any") == (compiler == "false")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "import torch; from gradgate import _native, masked\n"
    code += "print(_native.status, masked.sum(torch.ones(5), exclude=2).item())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = "torch kernels (the native ones were not built" if compiler == "false" else "native kernels ("
    assert done.stdout.startswith(expected)
    assert done.stdout.endswith(" 5.0\n")
