"""transformers.Trainer: masked language modelling with a collator that masks."""

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

model = BertForMaskedLM(
    BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
)


def collate(examples):
    ids = torch.stack([example["input_ids"] for example in examples])
    labels = ids.clone()
    chosen = torch.bernoulli(torch.full(ids.shape, 0.15)).bool()
    labels[~chosen] = -100
    ids[chosen] = 3
    return {"input_ids": ids, "labels": labels}


examples = [{"input_ids": torch.randint(4, 100, (16,))} for _ in range(32)]
arguments = TrainingArguments(
    "out_mlm", per_device_train_batch_size=2, max_steps=5, logging_steps=1, report_to=[]
)
Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate).train()
