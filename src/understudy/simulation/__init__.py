"""simulation: hardware that is not here.

    allocator        the caching allocator of CUDA devices: addresses, segments, counters, out of memory
    allocator_parts  its settings (PYTORCH_CUDA_ALLOC_CONF), counters and lists of free blocks
    block_history    its trace and blocks, as torch's memory snapshots have them
    catalogue        the cards that can be simulated, each figure with its source
    snapshots        memory snapshots of real runs: read, walked through, replayed under other settings
    events           records of memory, listeners, and the queue of births and deaths for them
    storages         every storage from birth to death, and every operator: a mode that notifies listeners
    plain_writes     what autograd writes in place where no mode is active
    sharding         DTensor in such a mode
    shard_hints      the sharded module in which a program has failed over a size
    memory           listeners that allocate: simulated cards, and the memory of the machine
    scripts          a script as `python script.py` runs it, ended after some steps
    interrupts       Ctrl-C, which callbacks must not lose
    parsers          the options that a script offers, read from its parser
    batches          batches of data loaders: the longest, and whether they are as large as asked for
    run_notes        what the report has to say of a run
    pinned_torch     the release of torch that a project asks for
    started_ranks    programs that start their ranks themselves
    steps            steps of a run, counted over all of its optimizers
    least_memory     what training needs at least, by formula
    sandbox          what keeps a script from changing files: namespaces, Landlock
    write_log        what a script did not do to the disk and to other machines, with its lines
    overlay          files that a script writes, kept away from the disk in Python where no namespaces do
    processes        programs that a script starts, where no namespaces hold them
    nvidia_smi       the program, answered for the simulated machine
    connections      other machines, which a rehearsal does not reach
    libraries        transformers, safetensors, trackers, while a script is rehearsed
    library_kernels/ kernels of flash_attn, xformers and Triton
    absent_weights   weights of torch.hub, torchvision, timm and open_clip, which are not needed
    offline/         data sets, tokenizers and metrics that are not here
    quantised        weights in 4 and 8 bits, by bitsandbytes
    workspaces       memory besides that of tensors: workspaces of cuBLAS, scratch memory of kernels
    machine          a simulated machine: its devices and streams
    cuda_objects     streams, events, generators, properties
    cuda_patches     torch.cuda and torch.accelerator, answered for that machine
    program_patches  real modules, gradient scaling, several devices
    network          process groups, the log of collectives, values that travel between processes
    network_patches  torch.distributed, answered by that network
    simulator        understudy.simulate

The first five do not import torch: the command line answers without it.
"""
