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

What users and torch see of it:

    contexts      which dimensions of an input are symbols, and their names and ranges
    state, env    ShapeEnv: symbols, decisions, guards
    arithmetic    operations on nodes; floats, the expressions that are no integers
    node          SymNode, what SymInt, SymFloat and SymBool hold
    layouts, packing, sizes    questions that specs and C++ ask of symbolic sizes
    guards        guards, specialisations, births
    checking      whether other inputs meet the guards
    undecidable   the error for decisions that depend on data
    bindings      where a result tells the symbols that data decides
    torch_side    what torch's shape functions ask of an environment
"""
