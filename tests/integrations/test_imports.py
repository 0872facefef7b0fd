"""What holds for all integrations: who imports a framework, and which names the pages have."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTEGRATIONS = sorted((ROOT / "src" / "gradgate" / "integrations").glob("[!_]*.py"))
FRAMEWORKS = {
    "IPython",
    "accelerate",
    "lightning",
    "mlflow",
    "peft",
    "tensorboard",
    "tensordict",
    "torch_geometric",
    "transformers",
    "wandb",
}


@pytest.mark.slow
def test_no_public_name_imports_a_framework():
    code = (
        "import sys, gradgate, gradgate.integrations\n"
        "for name in gradgate.__all__: getattr(gradgate, name)\n"
        f"print(sorted({FRAMEWORKS} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_name_of_an_integration_has_an_entry():
    """Read, not imported: a framework may be missing."""
    names = set()
    for path in INTEGRATIONS:
        (names_of,) = [
            ast.literal_eval(node.value)
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        names |= {f"gradgate.integrations.{path.stem}.{name}" for name in names_of}
    pages = (ROOT / "docs" / "frameworks").glob("*.md")
    assert names == {
        name for page in pages for name in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
