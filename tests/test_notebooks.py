"""Every notebook of examples/notebooks shows what is stored in it; `python -m tests.test_notebooks` stores it."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
LARGEST = 40_000


def executed(path, folder):
    """Run a notebook in an empty folder, and give it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata.pop("language_info", None)
    return notebook


def shown(notebook):
    """Give what the cells show as text, without numbers, names of incidents, and addresses."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            texts.append(output.get("text") or data.get("text/html") or data.get("text/plain"))
        texts.append("\n\n")  # Whether lines come in one output or in several depends on the time.
    return re.sub(r"<style>.*?</style>|\b[\da-f]{32}\b|[\d.,e+-]*\d", "0", "".join(texts), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client: what the kernel warns of is in the outputs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored(path, tmp_path):
    assert path.stat().st_size < LARGEST
    stored = shown(nbformat.read(path, as_version=4))
    assert 'class="gradgate"' in stored, "no object of gradgate shows itself"
    assert shown(executed(path, tmp_path)) == stored, "run: python -m tests.test_notebooks"


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["bad_samples", "freezing", "where_was_the_nan_born"]


if __name__ == "__main__":
    for one in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(executed(one, scratch), one)
        sys.stdout.write(f"{one.name}: {one.stat().st_size:,} bytes\n")
