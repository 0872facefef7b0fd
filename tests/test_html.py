"""What notebooks show: tables that escape everything, in the colours of the page."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import gradgate as gg
from gradgate import _text
from tests.ledger.made import ROOT, incident

COLOURS = (ROOT / "web" / "src" / "colours.css").read_text(encoding="utf-8").split("@media screen")
NASTY = "<script>alert(1)</script>\x1b[2J\u202e&\"'"


class Reader(HTMLParser):
    """Reads the cells; every tag must be closed, and none may load anything."""

    def __init__(self, html):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in {"style", "div", "b", "table", "tr", "th", "td"}
        assert {name for name, _ in attributes} <= {"class"}
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] != "style":
            self.texts.append(data)


def test_a_table():
    table = _text.html_table("one", ["id"], [["<b>"]]).partition("</style>")[2]
    assert table == (
        '<div class="gradgate"><b>one</b><table><tr><th>id</th></tr><tr><td>&lt;b&gt;</td></tr></table></div>'
    )


def objects(folder):
    """One of each that a notebook shows, with the text that must be there."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    ledger = gg.Ledger(folder / "run.ledger", payload=True)
    guard = gg.Guard(model, ledger=ledger, payload=True)
    batch = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [3.0, 4.0]])
    result = guard.backward(batch, lambda x: model(x).mean(), ids=["a", NASTY, "c"])
    yield result, "2 of 3 samples kept; exact"
    yield guard.backward(batch[:1], lambda x: model(x).mean()), "1 of 1 samples kept; exact"
    yield guard.summary(), "1 sample dropped in 1 step"
    yield ledger, "1 incidents, 1 samples are bad"
    yield ledger.incidents(), "1 incident"
    yield gg.replay(ledger, result.dropped[0].id, lambda x: model(x).mean()), "The same fault came again."
    yield gg.diagnose(lambda: model[1](model[0](torch.ones(4, 2)).detach()).mean(), model=model), "GG101"
    yield gg.doctor.Diagnosis(), "healthy: no problems found"
    schedule = gg.FreezeSchedule(model, {0: ["1.*"], 3: ["0.*"]})
    yield schedule, "epoch 3"
    yield gg.trainable(model), "3 of 9 elements learn"


def test_every_object_shows_itself(tmp_path):
    for thing, text in objects(tmp_path):
        said = " ".join(Reader(thing._repr_html_()).texts)
        assert text in said, (thing, said)
        assert "\x1b" not in said
        assert "\u202e" not in said


def test_many_incidents_are_counted_not_shown():
    many = _text.IncidentList(incident(f"img_{number}.png") for number in range(1000))
    texts = Reader(many._repr_html_()).texts
    assert texts[0] == "1,000 incidents"
    assert texts[-1] == "and 950 more"
    assert "img_49.png" in texts
    assert "img_50.png" not in texts
    assert isinstance(many, list)


@pytest.mark.parametrize(("ours", "page"), [(_text.LIGHT, COLOURS[0]), (_text.DARK, COLOURS[1])])
def test_the_colours_are_those_of_the_page(ours, page):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", page))
    assert all(colours[name] == value for name, value in re.findall(r"--(\w+):(#\w+)", ours))


SESSION = """
import gradgate as gg
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
def cell(text):
    shell.run_cell(text, store_history=True)
    return shell.user_ns.get("_")
cell("%load_ext gradgate")
cell('''import torch
import gradgate as gg
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
def forward(x):
    return model[1](model[0](x).detach())''')
cut = cell('''%%doctor
forward(torch.ones(3, 2)).mean().backward()''')
print(cut.findings[0].code, cut.findings[0].where)
raised = cell('''%%doctor model

forward(torch.ones(3, 2)).nope()''')
print(raised.findings[0].code, raised.findings[0].where, raised.findings[0].source)
show = shell.display_formatter.format
print("text/html" in show((gg.Incident(stage="load", cause="exception"),))[0], "text/html" in show((1, 2))[0])
"""


@pytest.mark.slow
def test_the_extension():
    """A new interpreter, because a shell is one for each process; the doctor names cells and their lines."""
    pytest.importorskip("IPython")
    command = [sys.executable, "-c", SESSION]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600)
    assert "GG101 Cell In[2]:5\n" in done.stdout, done.stdout + done.stderr
    assert "GG002 Cell In[4]:3 forward(torch.ones(3, 2)).nope()\n" in done.stdout
    assert "'Tensor' object has no attribute 'nope'" in done.stdout
    assert done.stdout.endswith("True False\n")
