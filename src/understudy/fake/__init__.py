"""The skin: the tensor subclass, the mode, conversion from real tensors, determined values."""
