"""shapes: symbolic sizes, and the environment that knows what was assumed about them.

    env                ShapeEnv
    arithmetic         the state of an environment; arithmetic and comparisons of nodes
    checking           whether other inputs meet what a run assumed; constraints of dimensions
    node               SymNode: a symbolic number, as torch and rules use it
    sizes              questions that specs ask of plain and symbolic sizes alike
    layouts            whether strides leave no gaps
    guards             what a run has assumed, with the line that made it
    bindings           symbols in values; where unbacked ones can be read off
    input_dims         how each dimension of an input becomes a size
    patterns           what two environments have in common
    autograd_formulas  branches of autograd's formulas, each asked as one question
    undecidable        the error for a decision that depends on data
    sympy_writer       expressions as sympy objects
    sympy_reader       sympy objects as expressions
    algebra/           the pure algebra and its prover
    torch_api/         the names that torch gives to these things
"""
