"""Lightning's Trainer with its progress bar, early stopping and checkpoints."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(8, 64)

    def training_step(self, batch, index):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = torch.utils.data.TensorDataset(torch.randn(64, 64))
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
trainer = lightning.Trainer(
    max_epochs=2,
    log_every_n_steps=1,
    callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")],
)
trainer.fit(Autoencoder(), loader, loader)
