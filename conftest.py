"""Settings that hold for every test, docstring example and documentation example."""

import logging
import os
import random
import re
import signal
import sys
from importlib.util import find_spec

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
# The examples of an integration run where its framework is installed.
FRAMEWORKS = ("accelerate", "lightning", "transformers")
collect_ignore = [f"src/gradgate/integrations/{name}.py" for name in FRAMEWORKS if find_spec(name) is None]
# What a test sees does not hang on the terminal or the shell that it was started from.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PYTHONWARNINGS", "PYTHONIOENCODING"):
    os.environ.pop(name, None)
# Containers have these, people do not; without bytecode, every process that a test starts compiles the library again.
for name in ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(name, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, and whatever it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: machines are noisy. `--quick` draws few examples; `--hypothesis-profile thorough` draws many.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("quick", parent=hypothesis.settings.get_profile("default"), max_examples=5)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=2000)
hypothesis.settings.load_profile("default")


LEFT_OUT = ("slow", "distributed", "browser")  # by --quick
CASES = 3  # of one test function with --quick


def pytest_addoption(parser):
    """Add the option of `make quick`."""
    parser.addoption("--quick", action="store_true", help=f"a sample of the tests that are not {' or '.join(LEFT_OUT)}")


def pytest_configure(config):
    """Draw few examples with --quick, unless another profile is asked for."""
    if config.getoption("quick") and not config.getoption("hypothesis_profile", None):
        hypothesis.settings.load_profile("quick")


def pytest_ignore_collect(collection_path, config):
    """Import neither a file that is left out as a whole with --quick, nor a framework, which takes seconds."""
    if not config.getoption("quick") or collection_path.suffix != ".py":
        return None
    whole = rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(LEFT_OUT)})\b"
    framework = collection_path.parent.name == "integrations" and collection_path.stem in FRAMEWORKS
    return framework or bool(re.search(whole, collection_path.read_text(encoding="utf-8"), re.MULTILINE)) or None


def pytest_collection_modifyitems(config, items):
    """Run a part with --quick: of each test function the first case, the last one and one drawn between them."""
    if not config.getoption("quick"):
        return
    functions = {}
    for item in items:
        if not any(map(item.get_closest_marker, LEFT_OUT)):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for name, cases in functions.items():
        between = cases[1:-1]
        drawn = random.Random(name).sample(between, min(len(between), CASES - 2))  # the same ones in every run
        kept.update([cases[0], *drawn, cases[-1]])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def seed():
    """Do what `torch.manual_seed(0)` does, without the three stack traces that it formats where no device is there."""
    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)


def pytest_collectstart(collector):
    """Let each file that draws random data when it is imported draw the same, whatever was imported before."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.fixture(autouse=True)
def _same_start(doctest_namespace):
    """Give every test the same random state, and make sure that none leaves something switched on or off."""
    import gradgate

    doctest_namespace.update(torch=torch, gg=gradgate)
    seed()
    random.seed(0)
    if "accelerate.state" in sys.modules:  # one for the process: whoever asks first has its precision
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
    yield
    logging.getLogger("gradgate").setLevel(logging.NOTSET)  # long tests of the law keep quiet
    assert torch.get_default_dtype() is torch.float32, "this test left another default dtype"
    assert torch.is_grad_enabled(), "this test left gradient recording switched off"
    assert not torch.nn.modules.module._has_any_global_hook(), "this test left hooks on all modules"
