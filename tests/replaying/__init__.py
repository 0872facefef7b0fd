"""A recorded sample again."""
