"""Every model class of three libraries that can be made small, through every entry point of ours, beside eager.

classes    which classes there are, their small configurations and their inputs
columns    what is tried with each, and what it is compared with
sweep      `python -m tests.models.sweep`: each class in a process of its own, a line of JSON for each, the table
"""
