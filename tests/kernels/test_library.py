"""The library of native kernels: how it is built, found and refused."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
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


@pytest.mark.slow
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
        (f"int gg_version(void) {{ return {_native.sources_version()}; }}", "is not the library of gradgate"),
        ("int gg_version(void) { return 7; }", "was built from other sources"),
    ],
)
def test_a_foreign_library_is_refused(tmp_path, text, said):
    (tmp_path / "foreign.c").write_text(text)
    made = tmp_path / "kernels.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "foreign.c"), "-o", str(made)], check=True)
    with pytest.warns(RuntimeWarning, match=said):
        assert _native.load(made)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["cc", "clang"])
def test_the_sources_compile_without_a_warning(compiler, tmp_path, monkeypatch):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    monkeypatch.setenv("CC", compiler)
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
def test_sdist_wheel_and_a_fresh_environment(compiler, tmp_path):
    """The sdist builds the wheel, which installs and runs; without a compiler it is for any machine, on torch alone."""
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    pytest.importorskip("hatchling")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CC": compiler, "GRADGATE_NATIVE": "1"}

    def run(*command, cwd=tmp_path):
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not list(source.rglob("*.so"))
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith("py3-none-any") == (compiler == "false")

    run(sys.executable, "-m", "venv", "--without-pip", "fresh")
    fresh, packages = tmp_path / "fresh" / "bin", sysconfig.get_path("purelib", vars={"base": tmp_path / "fresh"})
    # torch and the rest are those of this environment, and gradgate is not: it comes first, or not at all.
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(sys.executable, "-m", "pip", "--python", fresh / "python", "install", "--no-deps", "--no-index", "-q", wheel)
    code = "import torch, gradgate; from gradgate import masked\n"
    code += "print(gradgate.__file__, masked.sum(torch.ones(5), exclude=2).item())"
    assert run(fresh / "python", "-c", code) == f"{packages}/gradgate/__init__.py 5.0\n"
    expected = "torch kernels (the native ones were not built" if compiler == "false" else "native kernels ("
    assert expected in run(fresh / "gradgate", "--version")
    assert Path(packages, "gradgate", "py.typed").exists()
