"""Programs to read and to run. `python -m examples.demo` is the one to start with."""
