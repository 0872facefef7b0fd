"""What people read: the terminal page, the JSON, the HTML, as wholes."""

import io
import json
import linecache

import pytest
import torch
from rich.console import Console
from torch import nn

import gradgate as gg
from gradgate.doctor import Diagnosis
from gradgate.records import Finding
from tests.report.reading import data_of

FINDING = Finding(
    code="GG401",
    severity="error",
    title="NaN produced in `x.log()`",
    where="train.py:12",
    source="y = x.log()  # <b>",
    module="net.0",
    reason="The loss is NaN.\nReally.",
    fix="masked.safe_log(x)\nfrom gradgate import masked",
    samples=(3, 4),
    also=("train.py:9",),
)
NOTE = Finding(code="GG104", severity="info", title="a is frozen", module="a", reason="requires_grad is False.")
TEXT = """
error GG401: NaN produced in `x.log()`
  --> train.py:12   in net.0
      y = x.log()  # <b>
      see also train.py:9
  samples: 3, 4
  why: The loss is NaN.
       Really.
  fix: masked.safe_log(x)
       from gradgate import masked

info GG104: a is frozen
  --> in a
  why: requires_grad is False."""


def test_the_text():
    assert str(Diagnosis((FINDING, NOTE))) == TEXT
    assert str(Diagnosis((NOTE,))).startswith("healthy: no problems found, 1 note\n\ninfo GG104")
    assert repr(Diagnosis((FINDING, NOTE))) == "Diagnosis(GG401, GG104)"
    assert repr(Diagnosis()) == "Diagnosis(healthy)"


def test_rich_shows_the_same_text():
    stream = io.StringIO()
    Console(file=stream, width=200).print(Diagnosis((FINDING, NOTE)))
    assert stream.getvalue() == TEXT + "\n"


def test_the_json_has_the_documented_schema():
    error = ValueError("no")
    assert json.loads(Diagnosis((FINDING,), error).to_json()) == {
        "version": 1,
        "healthy": False,
        "exception": {"type": "ValueError", "message": "no"},
        "findings": [{**FINDING.to_dict(), "samples": [3, 4], "also": ["train.py:9"], "consequences": []}],
        "graph": None,
        "layers": [],
    }


def test_the_page_holds_all_of_it_and_needs_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    diagnosis = Diagnosis((FINDING, NOTE), ValueError("<no>"))
    diagnosis.to_html(path)
    assert data_of(path.read_text())["diagnosis"] == json.loads(diagnosis.to_json())
    assert "default-src 'none'" in path.read_text()
    Diagnosis().to_html(str(path))
    assert data_of(path.read_text())["diagnosis"]["healthy"]


def test_at_least():
    both = Diagnosis((FINDING, NOTE))
    assert both.at_least("error") == (FINDING,)
    assert both.at_least("info") == (FINDING, NOTE)
    with pytest.raises(ValueError, match=r"`severity` is .fatal."):
        both.at_least("fatal")


def test_healthy_means_no_error_no_warning_and_no_exception():
    assert Diagnosis((NOTE,)).healthy
    assert not Diagnosis((FINDING,)).healthy
    assert not Diagnosis((), ValueError()).healthy


def test_a_cell_of_a_notebook():
    """Executed text with lines in linecache, as IPython keeps its cells."""
    cell = "layer = nn.Linear(3, 1)\ndef step():\n    return layer(x).detach().sum()\n"
    name = "<ipython-input-7-abc>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    space = {"nn": nn, "x": torch.ones(2, 3)}
    exec(compile(cell, name, "exec"), space)
    finding = gg.diagnose(space["step"], model=space["layer"]).findings[0]
    assert (finding.where, finding.source) == (f"{name}:3", "return layer(x).detach().sum()")


def test_code_without_source():
    space = {"layer": nn.Linear(3, 1), "x": torch.ones(2, 3)}
    exec(compile("def step():\n    return layer(x).detach().sum()\n", "<generated>", "exec"), space)
    finding = gg.diagnose(space["step"], model=space["layer"]).findings[0]
    assert finding.where == "<generated>:2"
    assert finding.source == ""


def test_what_the_step_raises_is_never_raised():
    diagnosis = gg.diagnose(lambda: 1 / 0)
    assert isinstance(diagnosis.exception, ZeroDivisionError)
    assert diagnosis.findings[0].title == "the step raised ZeroDivisionError: division by zero"
    assert "GG004" in str(gg.diagnose(lambda: nn.Linear(2, 1)(torch.ones(3, 2))))


def test_an_interrupt_is_no_finding():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gg.diagnose(interrupted)
    assert torch.overrides._get_current_function_mode() is None


def test_a_step_without_backward_says_so():
    layer = nn.Linear(2, 1)
    assert "GG003" in str(gg.diagnose(lambda: layer(torch.ones(3, 2)).sum().item(), model=layer))
