"""Incidents to record, and a process to record them in."""

import subprocess
import sys
from pathlib import Path

from gradgate.records import Incident

ROOT = Path(__file__).parents[2]


def incident(sample_id="img_17.png", **more):
    """An incident with everything filled in that a test does not care about."""
    return Incident(**{"stage": "forward", "cause": "exception", "sample_id": sample_id, **more})


def start(code, *arguments, **options):
    """Start a new interpreter that knows `Ledger`, `Incident`, `sys.argv[1:]` and little else."""
    head = "import os, signal, sys, time\nfrom gradgate.ledger import Ledger\nfrom gradgate.records import Incident\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def finish(process):
    """Wait for a process that must end well, and give what it printed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()
