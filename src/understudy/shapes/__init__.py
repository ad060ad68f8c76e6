"""shapes: symbolic sizes, and the environment that knows what was assumed about them.

    env                ShapeEnv: the data of an environment, composed of the next four parts
    symbols            backed and unbacked symbols, and how they are made
    arithmetic         arithmetic and comparisons of nodes
    decisions          answers to conditions, the guards that they leave, the error for a data-dependent one
    checking           whether other inputs meet the guards; constraints of dimensions
    node               SymNode: a symbolic number, as torch and rules use it
    sizes              questions that specs ask of plain and symbolic sizes alike
    layouts            whether strides leave no gaps
    guards             guards with the line that made them; the sizes of the inputs
    bindings           symbols in values; where unbacked ones can be read off
    input_dims         how each dimension of an input becomes a size
    patterns           what two environments have in common
    autograd_formulas  branches of autograd's formulas, each asked as one question
    sympy_writer       expressions as sympy objects
    sympy_reader       sympy objects as expressions
    algebra/           the pure algebra, its prover, and the fold with its writers
    torch_api/         the names that torch gives to these things
"""
