"""The adversary at work: radii for a batch, and the attack on the network as it is now."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wball.training.config import Adversary, Optimisation
from wball.training.distributed import World
from wball.training.state import generator


class Victim(nn.Module):
    """The network as an attack sees it: in its training precision and layout, replayed as a CUDA graph if asked.

    Attacks put it into evaluation mode with frozen parameters. A graph is captured in that state at the first batch; it
    reads the parameters where they lie, so later updates count. Batches of another size take the usual path.
    """

    def __init__(self, model: nn.Module, options: Optimisation) -> None:
        super().__init__()
        self.model, self.options = model, options
        self._graphed: Any = None
        self._shape: torch.Size | None = None

    def forward(self, z: Tensor) -> Tensor:
        if self.options.cuda_graph and z.is_cuda:
            if self._graphed is None:
                self._shape = z.shape
                sample = torch.zeros_like(z, requires_grad=True)
                with torch.enable_grad():
                    self._graphed = torch.cuda.make_graphed_callables(self._logits, (sample,))
            if z.shape == self._shape:
                logits: Tensor = self._graphed(z)
                return logits
        return self._logits(z)

    def _logits(self, z: Tensor) -> Tensor:
        if self.options.channels_last:
            z = z.contiguous(memory_format=torch.channels_last)
        with torch.autocast(z.device.type, torch.bfloat16, enabled=self.options.bf16, cache_enabled=False):
            logits: Tensor = self.model(z)
        return logits.float()


class Opponent:
    """Makes training images. Holds one radius per training image where the rule asks for it.

    Attributes:
        radii: float64, one per training image (empty unless the rule is ``"per-image"``).
    """

    def __init__(self, settings: Adversary, options: Optimisation, model: nn.Module, count: int, seed: int) -> None:
        device = next(model.parameters()).device
        self.settings, self.seed = settings, seed
        self.victim = Victim(model, options)
        first = min(max(settings.low, settings.start), settings.eps)
        shape = (count if settings.radius == "per-image" else 0,)
        self.radii = torch.full(shape, first, dtype=torch.float64, device=device)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, step: int, progress: float, world: World) -> Tensor:
        """What the attack makes of this process's shard ``x, y`` of the batch of training images ``index``."""
        settings = self.settings
        scale = min(1.0, progress / settings.ramp) if settings.ramp > 0 else 1.0
        draws = generator(self.seed, f"attack-{world.rank}", step, x.device)
        if settings.radius == "fixed":
            attack = settings.attack.at(scale * settings.eps)
            return attack(self.victim, x, y, generator=draws).images
        if settings.radius == "uniform":
            for_all = generator(self.seed, "radius", step, x.device)
            u = torch.rand(index.shape[0], dtype=torch.float64, device=x.device, generator=for_all)
            eps = settings.low + u * (settings.eps - settings.low)
            return settings.attack.at(scale * world.shard(eps))(self.victim, x, y, generator=draws).images
        eps = self.radii[index]
        result = settings.attack.at(scale * world.shard(eps))(self.victim, x, y, generator=draws)
        fell = world.gather(result.success.to(eps.dtype))
        eps = eps + settings.grow * (1 - fell) - settings.shrink * fell
        self.radii[index] = eps.clamp(settings.low, settings.eps)
        return result.images
