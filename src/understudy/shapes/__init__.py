"""shapes: symbolic sizes, and the environment that records guards on them.

env                ShapeEnv: the data of an environment, composed of the next four parts
symbols            backed and unbacked symbols, and how they are made
arithmetic         arithmetic and comparisons of nodes
decisions          decisions on conditions, their guards, and the error for data-dependent ones
checking           whether other inputs satisfy the guards; constraints of dimensions
node               SymNode: a symbolic number, as torch and rules use it
sizes              comparisons of plain and symbolic sizes
layouts            whether strides are dense
guards             guards with the line that made them; the sizes of the inputs
bindings           symbols in values; where unbacked symbols can be read
input_dims         how each dimension of an input becomes a size
patterns           expressions and facts in a form that environments share
sympy_writer       expressions as sympy objects
sympy_reader       sympy objects as expressions
algebra/           the pure algebra, its prover, and the fold with its writers
torch_api/         the names that torch gives to these things
"""
