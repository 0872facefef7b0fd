"""What pytest does not look into: a page for the type checker, and scripts that other programs start."""

collect_ignore = ["typing_user.py", "losses/exact_mean_ranks.py"]
