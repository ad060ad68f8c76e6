"""Data, tokenizers and metrics that are not on this machine: named in an error, or made up with `--offline-data`.

    switch        whether missing data is made up; notes for the report
    columns       one row of a made-up data set, from the descriptions of its columns
    data_sets     `datasets.load_dataset`: the public data sets of `data_sets.toml`
    open_columns  columns that a program reads and a made-up data set lacks
    arrays        data sets of keras and scikit-learn
    graphs        data sets of PyTorch Geometric
    vision        `torchvision.datasets`: images with labels
    models        configurations of the public models of `models.toml`
    pipelines     diffusers: models without weights, and the parts of the public pipelines of `pipelines.toml`
    processors    image processors and feature extractors of transformers
    tokenizers    tokenizers of transformers and tiktoken
    labels        files of labels on the hub
    nltk_data     data of nltk
    metrics       `evaluate.load`

A rehearsal downloads nothing. What it needs of a data set are its columns, and rows as long as real ones; of a tokenizer,
that long texts fill the length to which the script cuts them.
"""
