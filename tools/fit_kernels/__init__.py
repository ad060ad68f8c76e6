"""Fits the curves of `understudy.timing` from figures that others have measured and published.

python -m tools.fit_kernels ../shared/truth         fit, write timing/curves.toml and the table of docs/accuracy.md

programs    the program behind each row of step times: a vision model of timm, a decoder
streams     the calls of such a program, rehearsed once and kept in a temporary folder
kernels     tables of measured kernels: products, attention
collectives links between cards
fitting     parameters from rows; error on rows that were not fitted, and on cards that were left out
clusters    sharded training: llm-foundry's tables, by examples/decoder.py
layouts     layouts over many cards: vTrain's and nanotron's tables
parts       steps of such tables from rehearsals of one or two layers
tables      what is written
"""
