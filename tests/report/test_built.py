"""What is built into the package is what the sources in `web` say."""

import hashlib
import json
import shutil
import subprocess

import pytest

from gradgate.report import _page
from tests.ledger.made import ROOT

WEB = ROOT / "web"
BUILT = json.loads((_page._FOLDER / "built.json").read_text(encoding="utf-8"))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources_hash():
    """The same list and the same order as in web/build.mjs."""
    files = [WEB / name for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")]
    files += [path for path in (WEB / "src").rglob("*") if path.is_file()]
    lines = sorted((path.relative_to(WEB).as_posix(), sha256(path)) for path in files)
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in lines).encode()).hexdigest()


def test_the_page_is_built_from_these_sources():
    assert sources_hash() == BUILT["sources"], "web/ has changed: make page"


@pytest.mark.parametrize("name", ["page.js", "page.css"])
def test_nobody_has_changed_what_was_built(name):
    assert sha256(_page._FOLDER / name) == BUILT[name], f"{name} is not what `make page` wrote"


def test_building_again_gives_the_same(tmp_path):
    node = shutil.which("node")
    if node is None or not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("node or web/node_modules is not there: `make page` brings them; the hashes above were compared")
    subprocess.run([node, str(WEB / "build.mjs"), str(tmp_path)], check=True, cwd=WEB)
    for name in ("built.json", "page.js", "page.css"):
        assert (tmp_path / name).read_bytes() == (_page._FOLDER / name).read_bytes()


def test_the_licences_are_in_it():
    script = (_page._FOLDER / "page.js").read_text(encoding="utf-8")
    for library in ("uplot", "@dagrejs/dagre", "@dagrejs/graphlib"):
        assert library in script
    assert script.count("Permission is hereby granted") == 3


def test_the_lock_names_no_host():
    lock = (WEB / "package-lock.json").read_text(encoding="utf-8")
    assert "://" not in lock
    packages = json.loads(lock)["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)


def test_the_script_makes_no_markup_from_text():
    for path in (WEB / "src").rglob("*.ts"):
        text = path.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{word} in {path.name}"
