"""The problems that users reported, in our own words, each run as a script of its own: the right line is named."""

import pytest

import gradgate as gg

STORIES = {
    "07 a cache made in inference mode": (
        "GG804",
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.mix, self.table = torch.nn.Linear(2, 2), None
            def forward(self, x):
                if self.table is None:
                    self.table = torch.linspace(0, 1, 2)          # HERE
                return self.mix(x) * self.table
        net = Net()
        with torch.inference_mode():
            net(torch.ones(3, 2))
        net(torch.ones(3, 2)).sum().backward()
        """,
    ),
    "08 no_grad as a statement": (
        "GG802",
        """
        layer = torch.nn.Linear(2, 1)
        torch.no_grad()                                           # HERE
        layer(torch.ones(3, 2)).sum().backward()
        """,
    ),
    "19 a checkpoint after frozen layers": (
        "GG201",
        """
        from torch.utils.checkpoint import checkpoint
        words = torch.nn.Embedding(5, 2).requires_grad_(False)
        adapter = torch.nn.Linear(2, 2)
        out = checkpoint(adapter, words(torch.tensor([0, 4])), use_reentrant=True)   # HERE
        out.sum().backward()
        """,
    ),
    "21 where does not stop the gradient": (
        "GG502",
        """
        x = torch.tensor([9.0, 0.0, -1.0], requires_grad=True)
        root = x.sqrt()                                           # HERE
        torch.where(x > 0, root, x).sum().backward()
        """,
    ),
    "21 dividing first, masking later": (
        "GG502",
        """
        x = torch.ones(2, requires_grad=True)
        count = torch.tensor([0.0, 2.0])
        mean = x / count                                          # HERE
        mean[count == 0] = 0
        mean.sum().backward()
        """,
    ),
    "22 taking one element of a logarithm": (
        "GG502",
        """
        x = torch.arange(3.0, requires_grad=True)
        logs = x.log()                                            # HERE
        logs[2].backward()
        """,
    ),
    "26 the norm by hand": (
        "GG403",
        """
        x = torch.zeros(4, requires_grad=True)
        length = (x * x).sum().sqrt()                             # HERE
        length.backward()
        """,
    ),
    "36 writing to a weight": (
        "GG603",
        """
        w = torch.zeros(3, requires_grad=True)
        w[1] = 5.0                                                # HERE
        w.sum().backward()
        """,
    ),
    "39 a write through data": (
        "GG602",
        """
        x = torch.tensor([0.5, 1.5], requires_grad=True)
        y = x.sigmoid()
        y.data.mul_(0)                                            # HERE
        y.sum().backward()
        """,
    ),
    "40 and 61 the culprit of an in-place error": (
        "GG601",
        """
        def gate(x, w):
            h = torch.sigmoid(x @ w)
            before = h
            h += 1                                                # HERE
            return (h * before).sum()
        w = torch.ones(2, 2, requires_grad=True)
        gate(torch.ones(1, 2), w).backward()
        """,
    ),
    "62 a NaN in forward that anomaly mode does not see": (
        "GG401",
        """
        x = torch.tensor([-2.0], requires_grad=True)
        y = torch.log(x)                                          # HERE
        (y * 0 + x).sum().backward()
        """,
    ),
    "62 an infinite gradient that anomaly mode does not see": (
        "GG403",
        """
        w = torch.tensor([0.0], requires_grad=True)
        torch.sqrt(w).sum().backward()                            # HERE
        """,
    ),
    "65 a cut without a word": (
        "GG101",
        """
        encoder, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        h = encoder(torch.ones(1, 2))
        h = torch.tensor(h.tolist())                              # HERE
        head(h).sum().backward()
        """,
    ),
    "65 a loss that is no longer one": (
        "GG201",
        """
        layer = torch.nn.Linear(2, 1)
        loss = layer(torch.ones(1, 2)).sum()
        total = torch.tensor(0.0)
        total += loss.item()                                      # HERE
        total.backward()
        """,
    ),
}


def indent(text):
    return "\n".join(line[8:] for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_the_right_line_is_named(story, tmp_path, capfd):
    code, source = STORIES[story]
    path = tmp_path / "story.py"
    path.write_text("import torch, warnings\nwarnings.simplefilter('ignore')\n" + indent(source))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "# HERE" in text)
    diagnosis = gg.doctor.examine_script(path).diagnosis
    assert (code, f"{path}:{line}") in [(finding.code, finding.where) for finding in diagnosis.findings], str(diagnosis)


def test_63_watching_needs_no_second_engine():
    """The watch is timed in the benchmarks; here: on a healthy step it runs nothing of the tracer."""
    import torch

    layer = torch.nn.Linear(2, 1)
    with gg.watch(layer) as watch:
        watch.step(lambda: layer(torch.ones(3, 2)).sum().backward())
        assert torch.overrides._get_current_function_mode() is None
    assert watch.diagnosis is None
