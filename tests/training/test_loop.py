"""The loop: it learns, repeats itself, follows clock and signals, and refuses what cannot work."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from training.worker import small_config, small_data, small_model
from wball import PGD, DualAveraging, FrankWolfe, LinfBall, StandardAttack, WassersteinBall
from wball.attacks import GrowingRadius
from wball.evaluation import FolderInUse
from wball.provenance import describe_settings
from wball.storage.weights import save_weights
from wball.training import (
    Adversary,
    Optimisation,
    Smooth,
    Validation,
    accuracy,
    robust_accuracy,
    source,
    state,
    train,
)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_standard_training_learns_and_the_files_agree(tmp_path: Path) -> None:
    data = small_data(512)
    config = small_config(
        epochs=8, adversary=None, augment=0, optimisation=Optimisation(schedule="one-cycle")
    )
    result = train(config, data, data, model=small_model(), out=tmp_path)
    assert result.history[-1]["clean_accuracy"] > 0.9
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.history and [r["epoch"] for r in lines] == list(range(1, 9))
    card = json.loads((tmp_path / "small.json").read_text())
    assert card["clean_accuracy"] == pytest.approx(result.history[-1]["clean_accuracy"], abs=1e-6)
    assert card["training"]["batch_size"] == 16 and card["training"]["steps"] == 8 * 32
    assert "train_accuracy" not in card  # it says nothing about the model
    saved = load_file(tmp_path / "small.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in result.model.state_dict().items())
    assert not result.model.training


def test_adversarial_training_raises_robust_accuracy() -> None:
    data = small_data(512)
    ball = WassersteinBall(0.3)
    options = Optimisation("adamw", lr=5e-3, weight_decay=0.0, schedule="one-cycle")
    plain = small_config(epochs=10, batch_size=32, adversary=None, augment=0, optimisation=options)
    attack = DualAveraging(ball, steps=5, until_success=False, sweeps=1)
    hard = dataclasses.replace(plain, adversary=Adversary(attack, radius="per-image", start=0.15))
    some = tuple(v[:128] for v in data)
    test = DualAveraging(ball, steps=15, objective="margin")
    accuracies = [
        robust_accuracy(train(c, data, model=small_model()).model, *some, test)
        for c in (plain, hard)
    ]
    assert accuracies[1] > accuracies[0] + 0.1


@pytest.mark.parametrize(
    "attack",
    [
        PGD.paper(
            "mnist", ball=WassersteinBall(0.1), steps=4, growth=GrowingRadius(1.4, 2), max_iter=5
        ),
        FrankWolfe(WassersteinBall(0.1), steps=2),
        PGD(LinfBall(0.1), steps=2, random_start=True),
        StandardAttack(WassersteinBall(0.05), version="fast"),
    ],
    ids=["paper", "frank-wolfe", "linf", "ensemble"],
)
def test_any_attack_can_be_the_adversary(attack: PGD) -> None:
    config = small_config(epochs=1, adversary=Adversary(attack))
    before = weights(small_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an ensemble does not check the model at each step
        after = weights(train(config, small_data(16), model=small_model()).model)
    assert after.isfinite().all() and not torch.equal(before, after)


def test_noise_is_for_training_only() -> None:
    data, options = small_data(64), Optimisation(lr=1e-9, schedule="constant")
    settings = {"epochs": 1, "adversary": None, "augment": 0, "optimisation": options}
    quiet, noisy = (
        train(small_config(**settings, noise=s), data, data, model=small_model())
        for s in (0.0, 0.1)
    )
    assert noisy.history[0]["loss"] != pytest.approx(quiet.history[0]["loss"], rel=1e-3)
    assert noisy.history[0]["clean_accuracy"] == quiet.history[0]["clean_accuracy"]


def test_a_clock_ends_the_run_with_the_learning_rate_down() -> None:
    config = small_config(
        epochs=100_000, adversary=None, optimisation=Optimisation(schedule="one-cycle")
    )
    result = train(config, small_data(), model=small_model(), time_limit=0.5)
    assert 0.4 < result.history[-1]["seconds"] < 3
    assert result.history[-1]["lr"] < 0.03 < max(r["lr"] for r in result.history)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    data, seen = small_data(32), []
    first = train(small_config(epochs=1), data, data, model=small_model(), out=tmp_path)
    second = train(
        small_config(epochs=1), data, data, model=small_model(), out=tmp_path, on_epoch=seen.append
    )
    assert not seen and torch.equal(weights(first.model), weights(second.model))
    assert first.card["clean_accuracy"] == second.card["clean_accuracy"]


def test_training_starts_from_given_weights_unless_it_goes_on(tmp_path: Path) -> None:
    data, options = small_data(32), Optimisation(lr=1e-9, weight_decay=0.0, schedule="constant")
    config = small_config(epochs=1, adversary=None, augment=0, optimisation=options)
    given = small_model()
    with torch.no_grad():
        for p in given.parameters():
            p.mul_(2)
    save_weights(given, tmp_path / "given.safetensors")
    start = {
        "model": small_model(),
        "init": tmp_path / "given.safetensors",
        "out": tmp_path / "run",
    }
    result = train(config, data, **start)
    assert torch.allclose(weights(result.model), weights(given), atol=1e-6)
    assert result.card["training"]["init"] == "given.safetensors"
    save_weights(small_model(), tmp_path / "given.safetensors")
    again = train(config, data, **{**start, "model": small_model()})
    assert torch.equal(weights(again.model), weights(result.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": small_data(64)}, "data.images is 32, this run's is 64"),
        ({"data": (small_data(32)[0], small_data(64)[1][32:])}, "data.labels is"),
        (
            {"model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(196, 10))},
            "model's 1.weight is None",
        ),
        ({"config": small_config(epochs=1, adversary=None, seed=1)}, "seed is 0, this run's is 1"),
        ({"init": "given.safetensors"}, "init is None, this run's is 'given.safetensors'"),
    ],
)
def test_other_data_model_or_start_in_the_same_folder_are_refused(
    tmp_path: Path, settings, message: str
) -> None:  # type: ignore[no-untyped-def]
    config = small_config(epochs=1, adversary=None)
    train(config, small_data(32), model=small_model(), out=tmp_path)
    if "init" in settings:
        settings = {"init": tmp_path / settings["init"]}
        save_weights(small_model(), settings["init"])
    given = {"config": config, "data": small_data(32), "model": small_model(), "out": tmp_path}
    with pytest.raises(ValueError, match=rf"belongs to another run: its {message}"):
        train(**{**given, **settings})


def test_averaged_weights_can_be_trained_further() -> None:
    config = small_config(epochs=1, adversary=None)
    model = small_model()
    next(model.parameters()).requires_grad_(False)
    result = train(config, small_data(32), model=model)
    assert [p.requires_grad for p in result.model.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    before = weights(result.model)
    assert not torch.equal(weights(train(config, small_data(32), model=result.model).model), before)


def test_one_run_at_a_time_in_a_folder(tmp_path: Path) -> None:
    def second(record: dict[str, object]) -> None:
        with pytest.raises(FolderInUse, match="in use"):
            train(small_config(), small_data(32), model=small_model(), out=tmp_path)
        seen.append(record)

    seen: list[dict[str, object]] = []
    train(
        small_config(epochs=2), small_data(32), model=small_model(), out=tmp_path, on_epoch=second
    )
    assert len(seen) == len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def dropping_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (
        torch.nn.Flatten(),
        torch.nn.Linear(196, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
    )
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.5), torch.nn.Linear(16, 10))


@pytest.mark.parametrize("kind", ["plain", "shuffled", "dropout"])
def test_sigterm_saves_and_the_next_call_resumes(tmp_path: Path, kind: str) -> None:
    make = dropping_model if kind == "dropout" else small_model
    data: Any = small_data()
    if kind == "shuffled":
        data = DataLoader(TensorDataset(*data), batch_size=10, shuffle=True)
    plain = train(small_config(), data, model=make())

    def stop(record: dict[str, object]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # batch systems repeat signals

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="checkpoint is saved"):
        train(small_config(), data, model=make(), out=tmp_path, on_epoch=stop)
    assert signal.getsignal(signal.SIGTERM) is handler
    model = make()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    resumed = train(small_config(), data, model=model, out=tmp_path)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is untouched
    assert torch.equal(weights(plain.model), weights(resumed.model))
    assert [r["step"] for r in resumed.history] == [6, 12, 18]
    other = train(small_config(seed=1), data, model=make())
    assert not torch.equal(weights(plain.model), weights(other.model))


def test_images_come_in_the_precision_of_the_model() -> None:
    x, y = small_data(32)
    config = small_config(epochs=1)
    single = train(config, (x, y), model=small_model())
    wide = train(config, (x.double(), y), (x.half(), y), model=small_model())
    assert torch.equal(weights(single.model), weights(wide.model))
    double = train(
        small_config(epochs=1, batch_size=32), (x, y), (x, y), model=small_model().double()
    )
    assert weights(double.model).dtype == torch.float64
    loss = torch.tensor(double.history[0]["loss"], dtype=torch.float64)
    assert loss != loss.float()  # not by way of float32
    assert accuracy(small_model(), x.double(), y) == accuracy(small_model().double(), x, y)
    with pytest.raises(TypeError, match=r"bfloat16: train it with model.float\(\), and bf16"):
        train(config, (x, y), model=small_model().bfloat16())


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    config = small_config(adversary=None, optimisation=Optimisation(lr=1e9))
    with pytest.raises(
        ValueError, match=r"loss is (nan|inf) in epoch 1.*optimisation.lr \(it is 1e\+09\)"
    ):
        train(config, small_data(), small_data(), model=small_model(), out=tmp_path)
    assert not (tmp_path / "small.safetensors").exists()


def test_what_does_not_fit_the_model_is_found_before_training() -> None:
    x, y = small_data(32)
    config, seen = small_config(epochs=1), []  # type: ignore[var-annotated]
    for data, test, message in [
        ((x, y + 1), None, "data has labels from 1 to 10, but the model has 10 classes"),
        ((x, y), (x, y + 1), "test has labels"),
        ((x, y), (x[..., 2:], y), r"\(1, 14, 12\), as in test"),
        ((x, y), (x[:0], y[:0]), "test has no images"),
        ((x.permute(0, 2, 3, 1), y), None, r"\(14, 14, 1\), as in data, but with channels first"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(config, data, test, model=small_model(), on_epoch=seen.append)
    assert not seen
    for model in ("mnist-cnn", torch.nn.Flatten(), small_model().requires_grad_(False)):
        with pytest.raises(TypeError, match="with parameters to train"):
            train(config, (x, y), model=model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a TrainConfig"):
        train("mnist-standard", (x, y))  # type: ignore[arg-type]


def test_measurements_take_any_model_and_leave_it_as_it_was() -> None:
    model, (x, y) = small_model(), small_data(40)
    attack = DualAveraging(WassersteinBall(0.1), steps=1)
    model.train()
    model[0].eval()  # as when the statistics of a part are frozen
    assert accuracy(lambda z: model(z), x, y) == accuracy(model, x, y)
    assert robust_accuracy(lambda z: model(z), x, y, attack) == robust_accuracy(model, x, y, attack)
    assert [m.training for m in model] == [False, True, True, True, True, True]

    def silent(z: torch.Tensor) -> torch.Tensor:
        return torch.full((len(z), 10), torch.nan) * z.flatten(1).sum(1)[:, None]

    zero = torch.zeros_like(y)  # where argmax finds NaN
    assert accuracy(silent, x, zero) == robust_accuracy(silent, x, zero, attack) == 0.0


def test_descriptions_are_json() -> None:
    text = json.dumps(
        describe_settings(small_config(adversary=Adversary(PGD.paper("mnist")))), allow_nan=False
    )
    assert "0x" not in describe_settings(partial(small_data, count=3))
    assert json.loads(text)["adversary"]["attack"]["growth"] == {
        "type": "GrowingRadius",
        "factor": 1.1,
        "every": 10,
    }


ATTACK = DualAveraging(WassersteinBall(0.1))
MODEL, (X, Y) = small_model(), small_data(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: train(small_config(), small_data(8), model=MODEL), "less than one batch"),
        (lambda: train(small_config(), small_data(), model=MODEL, out=__file__), "is a file"),
        (lambda: small_config(architecture="resnet-1000"), "unknown architecture"),
        (lambda: small_config(name="a/b"), "name must be a file name"),
        (lambda: small_config(name="checkpoint"), "name must be a file name"),
        (lambda: small_config(seed=-1), "seed must be"),
        (lambda: small_config(seed=1.5), "seed must be"),
        (lambda: small_config(adversary=ATTACK), r"must be a wball.training.Adversary, got Dual"),
        (lambda: small_config(noise=0.1), "is not used with adversary"),
        (lambda: Adversary(ATTACK, low=0.2), "low must be"),
        (lambda: Adversary("pgd"), "attack must be"),  # type: ignore[arg-type]
        (lambda: Validation(every=0), "every must be"),
        (lambda: Validation(eps=(0.1,)), "needs an attack"),
        (lambda: Validation(attack=ATTACK, eps=0.3), r"tuple of radii such as \(0.1, 0.3\)"),  # type: ignore[arg-type]
        (lambda: Optimisation(clip=-1.0), "clip must be > 0"),
        (lambda: Optimisation(weight_decay=-1.0), "weight_decay must be"),
        (lambda: Optimisation(drop_epochs=-1), "drop_epochs must be"),
        (lambda: accuracy(MODEL, (X * 255).int(), Y), r"use x.float\(\) / 255"),
        (lambda: accuracy(MODEL, X, Y[:2]), "give one label per image, and some images"),
        (lambda: accuracy(MODEL, X[:0], Y[:0]), "give one label per image, and some images"),
        (lambda: robust_accuracy(MODEL, X, Y, "pgd"), "attack must be"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, NotADirectoryError), match=message):
        make()


def trades(
    network: torch.nn.Module,
    x: torch.Tensor,
    z: torch.Tensor,
    y: torch.Tensor,
    progress: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert 0 <= progress < 1
    clean, hard = network(x), network(z)
    apart = F.kl_div(hard.log_softmax(1), clean.softmax(1), reduction="batchmean")
    return F.cross_entropy(clean, y) + 2 * apart, hard


def darker(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    assert images.shape[1:] == (1, 14, 14)
    return images * torch.rand((), generator=generator)


def slower(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    weights = list(parameters)
    groups = [{"params": weights[:2], "lr": 0.01}, {"params": weights[2:]}]
    return torch.optim.SGD(groups, lr=0.1)  # type: ignore[arg-type]


def test_one_step_is_that_of_a_loop_of_ones_own() -> None:
    """Optimizer, augmentation, loss and attack, in this order, against the same by hand."""
    (x, y), model = small_data(16), small_model()
    attack = DualAveraging(WassersteinBall(0.3), steps=2, until_success=False)
    config = small_config(
        epochs=1, augment=0, adversary=Adversary(attack), optimisation=Optimisation(lr=3.0)
    )
    by_hand = small_model()
    order = torch.randperm(16, generator=state.generator(0, "order", 0))
    clean = darker(x[order], state.generator(0, "augment", 0))
    images = attack(by_hand.eval(), clean, y[order]).images
    loss, logits = trades(by_hand.train(), clean, images, y[order], 0.0)
    optimizer = slower(by_hand.parameters())
    loss.backward()
    optimizer.step()
    result = train(
        config, (x, y), model=model, optimizer=slower, augmentations=[darker], loss=trades
    )
    assert result.history[0]["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert result.history[0]["train_accuracy"] == float(
        (logits.argmax(1) == y[order]).float().mean()
    )
    torch.testing.assert_close(weights(result.model), weights(by_hand), rtol=1e-6, atol=1e-7)


def test_rates_of_your_own_optimizer_follow_the_schedule() -> None:
    seen = list[list[float]]()

    def watched(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = slower(parameters)
        optimizer.register_step_post_hook(
            lambda made, *_: seen.append([group["lr"] for group in made.param_groups])
        )
        return optimizer

    options = Optimisation(lr=3.0, schedule="step", drop_epochs=1)
    config = small_config(epochs=2, adversary=None, optimisation=options)
    train(config, small_data(32), model=small_model(), optimizer=watched)
    assert seen == [[0.01, 0.1]] * 2 + [[pytest.approx(0.001), pytest.approx(0.01)]] * 2


def test_parts_of_your_own_resume_and_are_part_of_the_run(tmp_path: Path) -> None:
    own: dict[str, Any] = {"optimizer": slower, "augmentations": [darker], "loss": trades}
    whole = train(small_config(), small_data(32), model=small_model(), **own)

    def stop(record: dict[str, object]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(
            small_config(), small_data(32), model=small_model(), out=tmp_path, on_epoch=stop, **own
        )
    for name in own:
        with pytest.raises(ValueError, match="its optimizer, augmentations or loss"):
            train(
                small_config(), small_data(32), model=small_model(), out=tmp_path,
                **{key: value for key, value in own.items() if key != name},
            )  # fmt: skip
    resumed = train(small_config(), small_data(32), model=small_model(), out=tmp_path, **own)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    config = small_config(adversary=None, smooth=Smooth(WassersteinBall(0.1)))
    with pytest.raises(ValueError, match="loss replaces the losses of smooth"):
        train(config, small_data(32), model=small_model(), loss=trades)


def test_large_data_sets_are_read_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same weights as from memory, and no more items at a time than a batch has."""
    data = TensorDataset(*small_data(48))
    asked = list[int]()

    class Watched(TensorDataset):
        def __getitem__(self, k: int) -> Any:
            asked.append(k)
            return super().__getitem__(k)

    expected = train(small_config(epochs=2), data, model=small_model())
    monkeypatch.setattr(source, "IN_MEMORY", 100)
    watched = Watched(*data.tensors)
    found = train(small_config(epochs=2), watched, model=small_model())
    assert torch.equal(weights(found.model), weights(expected.model))
    assert asked.count(47) == 3 and set(asked) == set(range(48))  # its label, and two epochs
    monkeypatch.setattr(source, "IN_MEMORY", 10**9)
    asked.clear()
    train(small_config(epochs=2), watched, model=small_model())
    assert asked.count(47) == 1


@pytest.mark.parametrize("name", ["small.safetensors", "small.json", "checkpoint.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_found_before_training(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match=f"{name} is a folder, where a file is written"):
        train(small_config(), small_data(), model=small_model(), out=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def stop(record: dict[str, object]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal came too late")

    with pytest.raises(KeyboardInterrupt, match="stopped at once"):
        train(small_config(), small_data(), model=small_model(), out=tmp_path, on_epoch=stop)
    plain, resumed = (
        train(small_config(), small_data(), model=small_model(), out=out)
        for out in (None, tmp_path)
    )
    assert torch.equal(weights(plain.model), weights(resumed.model))


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    for name in ("checkpoint.safetensors", "small.safetensors", "small.json"):
        (tmp_path / f".{name}.123.part").write_bytes(b"half")
    train(small_config(epochs=1, adversary=None), small_data(32), model=small_model(), out=tmp_path)
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob(".*.part"))
