"""The examples say what they promise."""

from __future__ import annotations

import pytest

from examples import meta_tracer, symbolic


def test_one_run_of_a_transformer_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    symbolic.main()
    said = capsys.readouterr().out
    for line in (
        "input:   i64[batch, seq]@cpu",
        "output:  f32[batch*seq//8, 1000]@cpu",
        "batch*seq % 8 == 0    because examples/symbolic.py:",
        "seq <= 2048    because examples/symbolic.py:",
        ": windows = logits.view(-1, WINDOW, logits.shape[-1])",
        "tokens of shape (16, 100): fine",
        "but batch = 3 (tokens.size(0)), seq = 100 (tokens.size(1))",
    ):
        assert line in said


def test_a_llama_as_a_graph_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    meta_tracer.main()
    said = capsys.readouterr().out
    for line in (
        "30 call_module",
        "model.layers.0.self_attn.k_proj          f32[batch, seq, 32]@cpu",
        "lm_head                                  f32[batch, seq, 1000]@cpu",
        "assumed: nothing",
        "batch 8, length 100: the same to the bit, CausalLMOutputWithPast",
    ):
        assert line in said
