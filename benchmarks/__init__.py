"""Side by side with torch's own stand-in tensors: `python -m benchmarks.run`."""
