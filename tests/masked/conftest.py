"""Both paths of gradgate.masked: the native kernels, and what torch alone composes."""

import pytest
import torch

from gradgate import _kernels


@pytest.fixture(scope="module", params=["native", "torch"])
def both_paths(request):
    """Run a module once with the native kernels, if they are in force, and once without."""
    if request.param == "native" and _kernels.library is None:
        pytest.skip("the native kernels are not in force")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(_kernels, "library", None)
        yield request.param


@pytest.fixture(autouse=True, scope="package")
def _rows_in_one_graph():
    """Let torch 2.8 compile what depends on the number of rows, as later versions do by themselves."""
    if torch.__version__ < "2.9":
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            yield
    else:
        yield
