"""The training loop: :func:`train` goes from the data to the weights."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wball import inputs
from wball.certificates.smoothing import flow_noise
from wball.data import RandomAffine, RandomCropFlip, RandomCutout, to_tensors
from wball.model import as_found, ask, check_classes, other_images
from wball.progress import bar as progress_bar
from wball.provenance import describe_settings
from wball.storage.files import check_file, clear_parts, locked, write_tensors, write_whole
from wball.storage.weights import load_weights, save_weights
from wball.training.config import OWN, Optimisation, TrainConfig
from wball.training.losses import Objective, Opponent, Radii, Teacher, measure
from wball.training.state import (
    Average,
    MetricsLog,
    World,
    current,
    generator,
    load_state,
    pack_optimizer,
    unpack_optimizer,
)
from wball.zoo.architectures import build_model

Record = dict[str, Any]

CHECKPOINT_SHARE = 0.02
"""Largest share of the time spent on checkpoints, if ``checkpoint_every`` is ``None``."""
QUEUED = 8
"""Steps between synchronisations with the GPU under a time limit."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        model: in evaluation mode, with averaged weights if the run averages them.
        history: one record per epoch, as in ``metrics.jsonl``.
        card: the settings and the last measurements, as in ``NAME.json``.
    """

    model: nn.Module
    history: list[Record]
    card: dict[str, Any]


@torch.inference_mode(False)
@torch.enable_grad()
def train(
    config: TrainConfig,
    data: Any,
    test: Any = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    init: str | os.PathLike[str] | None = None,
    teacher: nn.Module | None = None,
    out: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    checkpoint_every: int | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
    on_epoch: Callable[[Record], None] | None = None,
) -> TrainResult:
    """Train a model, and resume an interrupted run with the same ``out``.

    Under ``torchrun`` (with an initialised process group) the processes share each batch. With a
    fixed seed on a CPU the weights are the same, bit for bit, wherever a run was interrupted,
    unless ``time_limit`` is set.

    Args:
        config: the settings; see :func:`~wball.training.preset`.
        data: training images and labels: ``(x, y)``, a ``Dataset`` or a ``DataLoader``. It is read
            once and kept on the device in the model's precision.
        test: test images and labels; without them nothing is measured.
        model: the network to train, in place, or a function that builds it, which is called with
            ``config.seed`` set (default: a fresh ``config.architecture``, seeded).
        init: file of weights to fine-tune; any file that :func:`wball.load_weights` reads.
        teacher: a trained network for soft labels (``config.loss.teacher``).
        out: folder for ``NAME.safetensors``, its card ``NAME.json``, ``metrics.jsonl`` and the
            checkpoint.
        device: the device to train on.
        checkpoint_every: steps between checkpoints; by default they take 2 % of the time.
        time_limit: seconds, not counting evaluation and the first step (which compiles kernels).
            Learning rate and ramps follow the clock if it is ahead of the steps, so that the
            schedule is complete when the time is over.
        progress: show bars on stderr (default: on a terminal).
        on_epoch: called with each epoch's record.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f'config must be a TrainConfig, such as wball.training.preset("mnist-standard"), got {config!r}'
        )
    world, device = current(), torch.device(device)
    folder = None if out is None else Path(out)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, but {folder} is a file")
    for name in (f"{config.name}.safetensors", f"{config.name}.json", "checkpoint.safetensors"):
        check_file(None if folder is None else folder / name)
    with torch.random.fork_rng(devices=[]):
        # A loader that shuffles yields the same order in each process and after each restart.
        torch.default_generator.manual_seed(config.seed)
        x, y = to_tensors(data, device=device)
        tests = None if test is None else to_tensors(test, device=device)

    options, network = config.optimisation, _start(config, model, init, device)
    x = _fitting("data", network, x, y)
    tests = None if tests is None else (_fitting("test", network, *tests), tests[1])
    if world.size > 1 and device.type == "cuda":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    run = _Run(config, network, len(x), folder, world, checkpoint_every, time_limit)
    average, optimizer, radii = run.average, run.optimizer, run.radii
    objective: nn.Module = Objective(network, config, x)
    if world.size > 1:
        objective = DistributedDataParallel(objective, find_unused_parameters=_idle(network, x))
    if (teacher is None) != (config.loss.teacher == 0):
        raise ValueError(
            f"loss.teacher is {config.loss.teacher:g}, and teacher is "
            f"{'missing' if teacher is None else 'given'}: give both, or none"
        )
    guide, opponent = None if teacher is None else Teacher(teacher, config, x, y), None
    if config.adversary is not None:
        opponent = Opponent(config.adversary, options, network, config.seed)
    augmentations, per_epoch = _augmentations(config), run.per_epoch
    # An attack that drops broken images changes the batch size, and each size is benchmarked anew.
    drops = config.adversary is not None and getattr(config.adversary.attack, "until_success", True)
    with (
        _products(device, "high", benchmark=not drops),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        run.opened(x, y, None if init is None else Path(init).name),
        run.stopping(),
        _bar(progress, world.main, config, per_epoch) as tick,
    ):
        while not run.finished:
            epoch, first = divmod(run.step, per_epoch)
            order = torch.randperm(len(x), generator=generator(config.seed, "order", epoch)).to(
                device
            )
            network.train()
            for batch in range(first, per_epoch):
                elapsed = run.progress()
                for group in optimizer.param_groups:
                    group["lr"] = options.lr_at(elapsed, config.epochs)

                _seed(
                    generator(config.seed, f"network-{world.rank}", run.step).initial_seed(), device
                )
                index = order[batch * config.batch_size : (batch + 1) * config.batch_size]
                images, labels = x[index], world.shard(y[index])
                if augmentations:
                    draws = generator(config.seed, "augment", run.step, device)
                    for augment in augmentations:
                        images = augment(images, draws)
                clean = trained = world.shard(images)
                if config.noise > 0:
                    noisy = flow_noise(
                        images, config.noise, generator(config.seed, "noise", run.step, device)
                    )
                    trained = world.shard(noisy)
                eps = 0.0 if radii is None else radii.batch(index, elapsed, world)
                broken = None
                if opponent is not None:
                    trained, broken = opponent(clean, labels, eps, run.step, world)

                targets = None if guide is None else guide.targets(clean, labels)
                loss, right, survived = objective(clean, trained, labels, elapsed, eps, targets)
                if radii is not None:
                    radii.follow(index, ~survived if broken is None else broken, world)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                if options.clip is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), options.clip)
                optimizer.step()
                average.update()

                run.count(loss.detach(), right, len(labels))
                tick(run.step)
                if run.finished:
                    break
                if batch + 1 < per_epoch:
                    run.checkpoint()
            run.end_epoch(epoch, tests, on_epoch)

    accuracy = run.history[-1]["train_accuracy"]
    if run.step < run.total and accuracy < 0.5:
        warnings.warn(
            f"time_limit ended training at step {run.step} of {run.total} with a training accuracy "
            f"of {100 * accuracy:.0f} %: raise time_limit",
            stacklevel=2,
        )
    average.model.eval()
    for mine, theirs in zip(average.model.parameters(), network.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)  # so that averages can be trained further
    card = run.card()
    if folder is not None and world.main:
        save_weights(average.model, folder / f"{config.name}.safetensors")
        write_whole(folder / f"{config.name}.json", (json.dumps(card, indent=2) + "\n").encode())
    world.wait()
    return TrainResult(average.model, run.history, card)


class _Run:
    """The state of a run (step, clock, totals of the epoch, history) and its checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        images: int,
        folder: Path | None,
        world: World,
        checkpoint_every: int | None,
        time_limit: float | None,
    ) -> None:
        if checkpoint_every is not None:
            inputs.check_count("checkpoint_every", checkpoint_every)
        if time_limit is not None:
            inputs.check_positive("time_limit", time_limit)
        self.config, self.folder, self.world, self.model = config, folder, world, model
        self.checkpoint_every, self.time_limit = checkpoint_every, time_limit
        self.per_epoch = _batches_per_epoch(config, images, world.size)
        self.total = self.per_epoch * config.epochs
        device, schedule = next(model.parameters()).device, config.adversary or config.smooth
        self.average = Average(model, config.optimisation.ema)
        self.optimizer = _optimizer(model, config.optimisation)
        self.radii = None if schedule is None else Radii(schedule, images, device)
        self.step, self.images, self.seconds, self.stop = 0, 0, 0.0, False
        self.history: list[Record] = []
        self.data: dict[str, Any] = {}
        self.origin: str | None = None
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.log: MetricsLog | None = None
        self._progress, self._tick, self._next_save = 0.0, time.perf_counter(), 0.0
        self._first = True

    @property
    def finished(self) -> bool:
        return self.step >= self.total or self._progress >= 1.0

    def progress(self) -> float:
        """The completed share of the run, by steps or by the clock, whichever is ahead."""
        now = time.perf_counter()
        self.seconds, self._tick = self.seconds + now - self._tick, now
        progress = self.step / self.total
        if self.time_limit is not None:
            progress = self.world.agreed(max(progress, min(1.0, self.seconds / self.time_limit)))
        self._progress = progress
        return progress

    def count(self, loss: Tensor, right: Tensor, images: int) -> None:
        """Add a step of all processes to the totals, so that any number of them can resume.

        The totals stay on the device, because reading a value would stall a GPU. The GPU is
        synchronised after the first step, and every few steps under a time limit.
        """
        self.totals += self.world.sum(torch.stack([loss.double() * images, right.double()]))
        self.step, self.images = self.step + 1, self.images + images * self.world.size
        if self.totals.is_cuda and (
            self._first or (self.time_limit is not None and self.step % QUEUED == 0)
        ):
            torch.cuda.synchronize(self.totals.device)
        if self._first:
            self._first = False
            self._tick = time.perf_counter()

    def end_epoch(
        self,
        epoch: int,
        tests: tuple[Tensor, Tensor] | None,
        on_epoch: Callable[[Record], None] | None,
    ) -> None:
        """Evaluate the model, log the metrics and save a checkpoint."""
        (loss, right), images = self.totals.tolist(), self.images
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} in epoch {epoch + 1}: training diverged. Lower optimisation.lr (it is "
                f"{self.config.optimisation.lr:g}) or set optimisation.clip, and begin in another folder"
            )
        self.totals.zero_()
        self.images = 0
        self.progress()  # after reading the totals, which waits for the GPU
        # Statistics differ between processes: evaluate those that are saved.
        self.world.spread(self.average.model.buffers())
        record: Record = {
            "epoch": epoch + 1,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss": loss / images,
            "train_accuracy": right / images,
        }
        if tests is not None and (self.finished or (epoch + 1) % self.config.evaluation.every == 0):
            self.average.model.eval()
            with _products(tests[0].device, "highest"):  # measure the network that is saved
                record |= measure(self.config, self.average.model, *tests)
            self._tick = time.perf_counter()  # evaluation does not count
        if self.radii is not None and self.radii.values.numel():
            record["mean_radius"] = float(self.radii.values.mean())
        self.history.append(record)
        if self.log is not None:
            self.log.write(record)
        if on_epoch is not None and self.world.main:
            on_epoch(record)
        self.checkpoint(now=self.finished)

    # ---- checkpoints

    def checkpoint(self, *, now: bool = False) -> None:
        """Save a checkpoint if it is due, or ``now``; then stop if a signal requested it.

        The main process stops first: it could not finish its step without the others.
        """
        if self.checkpoint_every is not None:
            due = self.step % self.checkpoint_every == 0
        else:
            due = time.perf_counter() >= self._next_save
        if (due or now or self.stop) and self.folder is not None and self.world.main:
            begin = time.perf_counter()
            self._save(self.folder / "checkpoint.safetensors")
            end = time.perf_counter()
            self._next_save = end + (end - begin) / CHECKPOINT_SHARE
        if self.stop and self.world.main:
            raise KeyboardInterrupt(
                "stopped by a signal; the checkpoint is saved; repeat the call to resume"
            )

    def _save(self, path: Path) -> None:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.average.decay > 0:
            tensors |= {f"average.{k}": v for k, v in self.average.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in pack_optimizer(self.optimizer).items()}
        if self.radii is not None:
            tensors["radii"] = self.radii.values
        tensors["totals"] = self.totals
        header = {
            "config": describe_settings(self.config),
            "step": self.step,
            "images": self.images,
            "seconds": self.seconds,
            "averaged": self.average.count,
            "history": self.history,
            "data": self.data,
            "init": self.origin,
            "torch": torch.__version__,
        }
        write_tensors(path, tensors, header)

    def restore(self, x: Tensor, y: Tensor, init: str | None) -> None:
        """Resume from the checkpoint in the folder, if there is one; open the log."""
        # Labels identify the data: images are many bytes, and their last bits depend on the device.
        self.data = {
            "images": len(x),
            "shape": list(x.shape[1:]),
            "labels": zlib.crc32(y.cpu().numpy().tobytes()),
        }
        self.origin = init
        path = None if self.folder is None else self.folder / "checkpoint.safetensors"
        found: tuple[dict[str, Tensor], Any] | None = None
        if path is not None and self.world.main and path.is_file():
            found = load_state(path)
        found = self.world.agreed(found)
        if found is not None:
            self._resume(found[0], found[1], str(path))
        if self.folder is not None and self.world.main:
            clear_parts(self.folder)
            self.log = MetricsLog(self.folder, self.history)
        self._tick = time.perf_counter()
        self.progress()

    def _resume(self, tensors: dict[str, Tensor], header: Any, path: str) -> None:
        _check_same(header["config"], describe_settings(self.config), path)
        _check_same(header["data"], self.data, path, "data")
        _check_same(header["init"], self.origin or header["init"], path, "init")
        self.origin = header["init"]
        part = {prefix: _under(tensors, prefix) for prefix in ("model", "average", "optimizer")}
        theirs, ours = (
            {k: tuple(v.shape) for k, v in m.items()}
            for m in (part["model"], self.model.state_dict())
        )
        for key in {**ours, **theirs}:
            _check_same(theirs.get(key), ours.get(key), path, f"model's {key}")
        self.model.load_state_dict(part["model"])
        if self.average.decay > 0:
            self.average.model.load_state_dict(part["average"])
        unpack_optimizer(self.optimizer, part["optimizer"])
        if self.radii is not None:
            self.radii.values.copy_(tensors["radii"])
        self.totals.copy_(tensors["totals"])
        self.step, self.images, self.seconds = (header[k] for k in ("step", "images", "seconds"))
        self.average.count, self.history = header["averaged"], header["history"]

    def card(self) -> dict[str, Any]:
        """The model card: description, last measurements and training settings."""
        last = self.history[-1] if self.history else {}
        measured = {
            k: round(v, 6) for k, v in last.items() if k.endswith("accuracy") or "_accuracy_" in k
        }
        measured.pop("train_accuracy", None)
        settings = describe_settings(self.config)
        about = {k: settings.pop(k) for k in ("name", "architecture", "dataset", "summary")}
        settings.pop("type")
        return {
            **about,
            **measured,
            "training": {
                **settings,
                **({} if self.origin is None else {"init": self.origin}),
                "steps": self.step,
                "seconds": round(self.seconds, 1),
                "processes": self.world.size,
                "torch": torch.__version__,
            },
        }

    # ---- start and end

    @contextmanager
    def opened(self, x: Tensor, y: Tensor, init: str | None) -> Iterator[None]:
        """Lock the folder for this run and resume from it."""
        with locked(self.folder) if self.folder is not None and self.world.main else nullcontext():
            try:
                self.restore(x, y, init)
                yield
            finally:
                if self.log is not None:
                    self.log.close()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Context in which SIGTERM and Ctrl-C let the step finish and save first; a second Ctrl-C
        stops at once."""
        if self.folder is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stop and number == signal.SIGINT and self.world.size == 1:
                raise KeyboardInterrupt(
                    "stopped at once; repeat the call to resume from the last checkpoint"
                )
            self.stop = True

        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except RuntimeError as error:
            if self.stop and not self.world.main:
                raise KeyboardInterrupt("stopped by a signal, after the main process") from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _batches_per_epoch(config: TrainConfig, images: int, processes: int) -> int:
    if images < config.batch_size:
        raise ValueError(
            f"data has {images} images, less than one batch of {config.batch_size}: lower batch_size"
        )
    if config.batch_size % processes:
        raise ValueError(
            f"batch_size {config.batch_size} cannot be shared equally by {processes} processes: take a multiple of them"
        )
    return images // config.batch_size


def _start(
    config: TrainConfig,
    model: nn.Module | Callable[[], nn.Module] | None,
    init: str | os.PathLike[str] | None,
    device: torch.device,
) -> nn.Module:
    """The initial network of the training. What builds one draws from a seeded generator."""
    if model is None and config.architecture == OWN:
        raise ValueError(
            f'model is missing: config.architecture is "{OWN}", so the network must be passed to train'
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if model is None:
            model = build_model(config.architecture)
        elif callable(model) and not isinstance(model, nn.Module):
            model = model()
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise TypeError(f"model must be a torch.nn.Module with parameters to train, got {model!r}")
    if init is not None:
        load_weights(model, init)
    layout = torch.channels_last if config.optimisation.channels_last else torch.preserve_format
    return model.to(device, memory_format=layout)  # type: ignore[call-overload]


def _fitting(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Validate images and labels before training; return the images in the model's precision."""
    if len(x) == 0:
        raise ValueError(f"{name} has no images")
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"model has parameters of {dtype}: train it with model.float(), and bf16 in its Optimisation"
        )
    x = x.to(dtype)
    try:
        with as_found(model, x.device), torch.no_grad():
            logits = ask(model, x[:2])
    except RuntimeError as error:
        with as_found(model, x.device), torch.no_grad():
            instead = other_images(model, x[:2])
        raise ValueError(
            f"the model cannot take images of shape {tuple(x.shape[1:])}, as in {name}{instead}: {error}"
        ) from error
    check_classes(name, y, logits)
    return x


def _idle(model: nn.Module, x: Tensor) -> bool:
    """Whether some parameters do not affect the logits and so have no gradients to synchronise."""
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.enable_grad():
        logits = ask(model.eval(), x[:2])
        return any(g is None for g in torch.autograd.grad(logits.sum(), trained, allow_unused=True))


def _seed(number: int, device: torch.device) -> None:
    """Seed random layers such as dropout, so that a repeated step draws the same numbers."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def _optimizer(model: nn.Module, options: Optimisation) -> torch.optim.Optimizer:
    fused = next(model.parameters()).is_cuda  # one launch for all parameters
    if options.method == "adamw":
        return torch.optim.AdamW(
            model.parameters(), lr=options.lr, weight_decay=options.weight_decay, fused=fused
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=options.lr,
        momentum=0.9,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay,
        fused=fused,
    )


def _augmentations(config: TrainConfig) -> list[Callable[[Tensor, torch.Generator], Tensor]]:
    chosen: list[Callable[[Tensor, torch.Generator], Tensor]] = []
    if config.affine > 0:
        chosen.append(RandomAffine(config.affine))
    if config.augment or config.flip:
        chosen.append(RandomCropFlip(config.augment, config.flip))
    if config.cutout:
        chosen.append(RandomCutout(config.cutout))
    return chosen


@contextmanager
def _products(device: torch.device, precision: str, *, benchmark: bool = False) -> Iterator[None]:
    """Context that sets the precision of float32 products on a GPU, and whether convolution
    algorithms are benchmarked."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn  # its own context manager would also switch it off
    before = torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.allow_tf32 = benchmark, precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.benchmark, cudnn.allow_tf32 = before[1:]


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without the prefix."""
    return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


def _check_same(saved: Any, wanted: Any, path: str, where: str = "") -> None:
    if isinstance(saved, dict) and isinstance(wanted, dict) and saved.keys() == wanted.keys():
        for key in saved:
            _check_same(saved[key], wanted[key], path, f"{where}.{key}" if where else key)
    elif saved != wanted:
        raise ValueError(
            f"{path} belongs to another run: its {where or 'config'} is {saved!r}, this run's is {wanted!r}; "
            "use another folder, or delete the checkpoint to start over"
        )


@contextmanager
def _bar(
    show: bool | None, main: bool, config: TrainConfig, per_epoch: int
) -> Iterator[Callable[[int], None]]:
    """A progress bar for the run: a function that moves it to a step."""
    wanted = main and (sys.stderr.isatty() if show is None else show)
    with progress_bar(config.name, per_epoch * config.epochs, show=wanted) as bar:

        def tick(step: int) -> None:
            bar.stage(1, f"{config.name}, epoch {min(config.epochs, (step - 1) // per_epoch + 1)}")
            bar.move_to(step)

        yield tick
