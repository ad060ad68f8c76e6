"""A pure algebra of integer expressions, with a prover. Independent of torch.

polynomials  tables of terms
intervals    interval arithmetic
rewrites     the table of rewrites that keeps expressions canonical
expr         interned expressions
conditions   interned relations to zero, conjunctions, disjunctions
floats       expressions with floating-point numbers
knowledge    the store of facts about symbols, as rewrites and proofs read it
learning     adds a fact to the store, with its consequences
prover       proofs
facts        Facts: learning, proving and simplifying
writers      expressions and conditions in other languages: text, Python, torch
"""
