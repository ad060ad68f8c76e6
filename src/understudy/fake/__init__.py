"""fake: FakeTensor and FakeTensorMode, tensors without data.

tensor          FakeTensor
subclasses      stand-ins of classes with a __torch_function__ of their own
mode            FakeTensorMode: key → plan → tensors
misses          cache misses: handlers, shared plans, inference
hooks           the slow path of modes whose calls someone wants to see: overridden methods, switches
real_tensors    real tensors beside stand-ins: each operator also runs on them
services        the base of FakeTensorMode: values, copies and conversion of stand-ins
convert         from real tensors to fakes; dynamic sizes become symbols
realise         tensors from outcomes: all fakes are made here
native          devices that this machine lacks, and the indices of the meta device that stand for them
templates       fakes with symbolic sizes, made from one template for each spec
inputs          which tensors a call inside the mode accepts; handlers of calls that need tensors, not only specs
tensor_calls    the handlers: reading values, lifting literals, checks of views, zero tensors
collectives     operators of torch.distributed: what they fill is undetermined
fused_attention flex attention as the kernels of a compiled program
higher_order    cond, scan, while_loop, … run as plain code; merging the outputs of two branches
initial_values  normal_, uniform_, zero_, fill_ without a dispatch
copying         deepcopy, copy, pickle
checkpoints     torch.load and torch.save
torch_api       small functions under the names that torch's users know
values/         determined values, data-dependent answers
kernels/        our kernels on spare dispatch keys
patches/        functions of torch that are replaced while a mode is active
"""
