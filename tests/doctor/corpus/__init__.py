"""Programs in the shapes of real projects: healthy ones, and the same with bugs that people make."""
