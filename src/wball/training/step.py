"""What happens to a batch: augmentation, noise or the adversary, and the loss."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wball.certificates.smoothing import flow_noise
from wball.data import RandomAffine, RandomCropFlip, RandomCutout
from wball.training.config import TrainConfig
from wball.training.losses import Loss, Objective, Opponent, Radii, Teacher
from wball.training.source import TrainingImages
from wball.training.state import current, generator

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


class TrainingStep:
    """From the numbers of images to the loss of a batch, in each process on its shard."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        images: TrainingImages,
        teacher: nn.Module | None,
        augmentations: Sequence[Augmentation],
        loss: Loss | None,
    ) -> None:
        self.config, self.images, self.world = config, images, current()
        self.augmentations = [*_augmentations(config), *augmentations]
        self.objective: nn.Module = Objective(model, config, loss)
        if self.world.size > 1:
            self.objective = DistributedDataParallel(self.objective, find_unused_parameters=True)
        if (teacher is None) != (config.loss.teacher == 0):
            raise ValueError(
                f"loss.teacher is {config.loss.teacher:g}, and teacher is "
                f"{'missing' if teacher is None else 'given'}: give both, or none"
            )
        self.teacher = (
            None if teacher is None else Teacher(teacher, config, images.first, images.labels)
        )
        self.opponent: Opponent | None = None
        if config.adversary is not None:
            self.opponent = Opponent(config.adversary, config.optimisation, model, config.seed)

    def __call__(
        self, index: Tensor, step: int, elapsed: float, radii: Radii | None
    ) -> tuple[Tensor, Tensor, int]:
        """The loss of this process's shard, and how many of its images are predicted correctly, of
        how many. The radii follow."""
        world = self.world
        clean, noisy, labels = self._batch(index, step)
        eps = 0.0 if radii is None else radii.batch(index, elapsed, world)
        trained, broken = noisy, None
        if self.opponent is not None:
            trained, broken = self.opponent(clean, labels, eps, step, world)
        targets = None if self.teacher is None else self.teacher.targets(clean, labels)
        loss, right, survived = self.objective(clean, trained, labels, elapsed, eps, targets)
        if radii is not None:
            radii.follow(index, ~survived if broken is None else broken, world)
        return loss, right, len(labels)

    def _batch(self, index: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Augmented images, the same with noise, and their labels: this process's shard."""
        seed, images = self.config.seed, self.images.batch(index)
        x, shard = images[0], self.world.shard
        draws = generator(seed, "augment", step, x.device)
        for augment in self.augmentations:
            x = augment(x, draws)
        noisy = x
        if self.config.noise > 0:
            noisy = flow_noise(x, self.config.noise, generator(seed, "noise", step, x.device))
        return shard(x), shard(noisy), shard(images[1])


def _augmentations(config: TrainConfig) -> list[Augmentation]:
    """Those of the settings."""
    chosen = list[Augmentation]()
    if config.affine > 0:
        chosen.append(RandomAffine(config.affine))
    if config.augment or config.flip:
        chosen.append(RandomCropFlip(config.augment, config.flip))
    if config.cutout:
        chosen.append(RandomCutout(config.cutout))
    return chosen
