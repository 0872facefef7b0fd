"""`python -m gradgate` is `gradgate`."""

from gradgate.cli import main

main(prog_name="gradgate")
