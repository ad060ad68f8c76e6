"""transformers.Trainer: a causal language model, as its documentation teaches."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = LlamaForCausalLM(config)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 128, (32,))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "out", per_device_train_batch_size=4, num_train_epochs=1,
    gradient_accumulation_steps=2, logging_steps=1, save_steps=1, report_to=[], disable_tqdm=False,
    gradient_checkpointing=True,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
trainer.train()
print(trainer.evaluate())
