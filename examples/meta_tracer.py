"""A Llama of Hugging Face as a graph of torch calls that runs at every batch size and length.

    python -m examples.meta_tracer

The model is traced once, on examples without data. The graph is printed in part, then run beside the model.
"""

from __future__ import annotations

from collections import Counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from understudy import Dim, symbolic_trace


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    example = torch.empty(2, 16, dtype=torch.int64, device="meta")
    sizes = {0: Dim("batch"), 1: Dim("seq", max=2048)}
    names = ("input_ids", "attention_mask")
    traced = symbolic_trace(model, dict.fromkeys(names, example), symbolic=dict.fromkeys(names, sizes))

    kinds = Counter(node.op for node in traced.graph.nodes)
    print(
        f"{len(traced.graph.nodes)} nodes:",
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
    )
    for node in traced.graph.nodes:
        if (node.op == "call_module" and "layers.0." in node.target) or node.name == "lm_head":
            print(f"  {node.target:40} {node.meta['val'].spec}")
    print("\nassumed:", *(map(str, traced.shape_env.guards) if traced.shape_env.guards else ["nothing"]))

    for batch, length in ((1, 5), (3, 16), (8, 100)):
        tokens = torch.randint(0, 1000, (batch, length))
        mask = torch.ones_like(tokens)
        mask[-1, : length // 4] = 0
        with torch.no_grad():
            real, given = model(tokens, attention_mask=mask), traced(input_ids=tokens, attention_mask=mask)
        same = torch.equal(real.logits, given.logits)
        print(
            f"batch {batch}, length {length}: {'the same to the bit' if same else 'DIFFERENT'}, {type(given).__name__}"
        )


if __name__ == "__main__":
    main()
