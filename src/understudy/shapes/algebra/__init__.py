"""A pure algebra of integer expressions, with a prover. Nothing here knows torch.

    polynomials  tables of terms
    intervals    interval arithmetic
    rewrites     the table of rewrites that keeps expressions canonical
    expr         interned expressions
    conditions   interned relations to zero, conjunctions, disjunctions
    floats       expressions with floating-point numbers
    knowledge    what is known about symbols, as rewrites and proofs read it
    learning     how a fact is taken in
    prover       proofs
    facts        the questions that knowledge answers
    writers      expressions and conditions in other languages: text, Python, torch
"""
