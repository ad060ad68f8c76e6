"""fake: FakeTensor and FakeTensorMode, tensors without data.

    tensor          FakeTensor
    mode            FakeTensorMode: key → plan → tensors
    convert         from real tensors to fakes, with symbolic sizes where they are open
    realise         tensors from outcomes: the only place where fakes are made
    native          devices that are not here, and the indices of the meta device that stand for them
    templates       fakes with symbolic sizes, made from one template for each spec
    inputs          which tensors a call inside the mode may be given, which calls need tensors and not only specs
    tensor_calls    those calls: reading values, lifting literals, taking over storages, zero tensors
    higher_order    cond, scan, while_loop, … run as plain code; what comes out of two branches
    initial_values  normal_, uniform_, zero_, fill_ and detach without a dispatch
    copying         deepcopy, copy, pickle
    checkpoints     torch.load and torch.save
    torch_api       small functions under the names that torch's users know
    values/         determined values, data-dependent answers
    kernels/        kernels of ours on spare dispatch keys
    patches/        what torch answers otherwise while a mode is active
"""
