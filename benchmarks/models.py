"""The models of the benchmark. Each is built from its configuration: no weights, no network."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers  # reads the environment, so it comes after it

from examples.llama import Llama, LlamaSize, next_token_loss

BATCH, LENGTH = 2, 128


@dataclass(frozen=True)
class Workload:
    """A model, its inputs and its loss; the same code for every mode that it is run in."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]


def tokens(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (BATCH, LENGTH))


def tokens_and_labels(vocabulary: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"input_ids": tokens(vocabulary), "labels": tokens(vocabulary)}


def own_loss(output: Any, inputs: dict[str, Tensor]) -> Tensor:
    return output.loss


def ours() -> Workload:
    size = LlamaSize(layers=12, width=768, heads=12, kv_heads=12, hidden=2048, vocabulary=32_000)
    return Workload(
        "transformer",
        lambda: Llama(size),
        lambda: {"tokens": tokens(size.vocabulary)},
        lambda logits, inputs: next_token_loss(logits, inputs["tokens"]),
    )


def gpt2() -> Workload:
    config = transformers.GPT2Config(use_cache=False, attn_implementation="eager")
    return Workload(
        "gpt2",
        lambda: transformers.GPT2LMHeadModel(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


def llama() -> Workload:
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=4, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return Workload(
        "llama",
        lambda: transformers.LlamaForCausalLM(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


def bert() -> Workload:
    config = transformers.BertConfig(attn_implementation="eager")
    return Workload(
        "bert", lambda: transformers.BertForMaskedLM(config), tokens_and_labels(config.vocab_size), own_loss
    )


def t5() -> Workload:
    config = transformers.T5Config(use_cache=False, decoder_start_token_id=0)
    return Workload(
        "t5",
        lambda: transformers.T5ForConditionalGeneration(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


def resnet() -> Workload:
    config = transformers.ResNetConfig(num_labels=1000)
    return Workload(
        "resnet",
        lambda: transformers.ResNetForImageClassification(config),
        lambda: {"pixel_values": torch.randn(BATCH, 3, 224, 224)},
        lambda output, inputs: F.cross_entropy(output.logits, torch.randint(1000, (BATCH,))),
    )


def distilbert() -> Workload:
    config = transformers.DistilBertConfig()
    return Workload(
        "distilbert",
        lambda: transformers.DistilBertForMaskedLM(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


def roberta() -> Workload:
    config = transformers.RobertaConfig()
    return Workload(
        "roberta",
        lambda: transformers.RobertaForMaskedLM(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


def qwen2() -> Workload:
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    return Workload(
        "qwen2", lambda: transformers.Qwen2ForCausalLM(config), tokens_and_labels(config.vocab_size), own_loss
    )


def gpt_neox() -> Workload:
    config = transformers.GPTNeoXConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, use_cache=False
    )
    return Workload(
        "gpt_neox",
        lambda: transformers.GPTNeoXForCausalLM(config),
        tokens_and_labels(config.vocab_size),
        own_loss,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "transformer": ours,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "resnet": resnet,
    "distilbert": distilbert,
    "roberta": roberta,
    "qwen2": qwen2,
    "gpt_neox": gpt_neox,
}
