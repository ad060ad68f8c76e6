"""plans: the best way to train a script on given cards, found by rehearsals.

    axes         names and values that are varied, and what a name stands for
    constraints  `tp*pp*dp=8`: arithmetic and comparisons over names, never `eval`
    candidates   all combinations that the constraints allow
    results      the stored part of a rehearsal: memory, time, bytes on the wire
    estimates    lower bounds and predictions from the rehearsals so far
    search       which candidate is rehearsed next, which are ruled out, and when the answer is decided
    store        results by content, in a folder: an interrupted search continues
    answer       the plan as data, with its JSON and schema
    text         the plan as a table
    page         the plan as one HTML page, with the Pareto front

Nothing here runs a rehearsal: the command line gives a function that does (`cli/plans.py`). Nothing here imports torch.
"""
