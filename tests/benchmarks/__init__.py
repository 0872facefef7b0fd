"""The benchmarks themselves: that they run, and that their page tells what they gave. No test asserts a time."""
