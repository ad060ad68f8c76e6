"""Symbolic sizes: an integer algebra with a prover.

    polynomials   tables of terms
    intervals     interval arithmetic
    rewrites      the table of rewrites that keeps expressions canonical
    expr          Algebra and Expr: interned expressions
    conditions    interned relations and their combinations
    knowledge     what is known, in the form that proofs read
    learning      how a fact gets there
    prover        tactics
    facts         Facts: learn, prove, simplify, interval
    sympify       the way to sympy, on demand
"""
