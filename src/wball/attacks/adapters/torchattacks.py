"""``atk = TorchAttack(model, attack); adversarial = atk(images, labels)``: the call that
torchattacks made common."""

from torch import Tensor

from wball.attacks.attack import Attack, AttackResult, attack_labels, check_attack
from wball.model import Model


class TorchAttack:
    """An attack bound to a model: images and labels in, adversarial images out.

    Attributes:
        result: what the last call found, with success, distances and status per image.

    >>> import torch
    >>> from wball import LinfBall, PGD
    >>> atk = TorchAttack(lambda z: z.flatten(1), PGD(LinfBall(0.2), steps=3))
    >>> atk(torch.tensor([[[[0.6, 0.4]]]]), torch.tensor([0])).argmax()
    tensor(1)
    """

    def __init__(self, model: Model, attack: Attack, seed: int = 0) -> None:
        check_attack(attack)
        self.model, self.attack, self.seed = model, attack, seed
        self.targeted = False
        self.result: AttackResult | None = None

    def set_mode_default(self) -> None:
        """Untargeted: ``labels`` are the true classes."""
        self.targeted = False

    def set_mode_targeted_by_label(self, quiet: bool = True) -> None:
        """Targeted: ``labels`` are the classes to reach."""
        self.targeted = True

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        self.result = attack_labels(
            self.attack, self.model, images, labels, self.targeted, self.seed
        )
        return self.result.images
