"""The network in the precision of its training, for its loss and its adversary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wball.training.config import Optimisation


class AsTrained(nn.Module):
    """``model`` in the precision and layout of its training, with logits in float32 or better."""

    def __init__(self, model: nn.Module, options: Optimisation) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Tensor:
        if self.options.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.options.bf16):
            logits: Tensor = self.model(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
