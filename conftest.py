"""Settings that hold for every test, docstring example and documentation example."""

import logging
import os
import random
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

# No deadline: machines are noisy. `make quick` draws few examples; `--hypothesis-profile thorough` draws many.
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


def pytest_collectstart(collector):
    """Let each file that draws random data when it is imported draw the same, whatever was imported before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_start(doctest_namespace):
    """Give every test the same random state, and make sure that none leaves something switched on or off."""
    import gradgate

    doctest_namespace.update(torch=torch, gg=gradgate)
    torch.manual_seed(0)
    random.seed(0)
    if "accelerate.state" in sys.modules:  # one for the process: whoever asks first has its precision
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
    yield
    logging.getLogger("gradgate").setLevel(logging.NOTSET)  # long tests of the law keep quiet
    assert torch.get_default_dtype() is torch.float32, "this test left another default dtype"
    assert torch.is_grad_enabled(), "this test left gradient recording switched off"
    assert not torch.nn.modules.module._has_any_global_hook(), "this test left hooks on all modules"
