"""The training loop: :func:`train` goes from the data to the weights."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from wball import inputs
from wball.display import Summarised
from wball.model import full_precision
from wball.progress import bar as progress_bar
from wball.provenance import Plain, describe_settings
from wball.storage.files import (
    PathLike,
    Tensors,
    check_file,
    clear_parts,
    locked,
    write_tensors,
    write_whole,
)
from wball.storage.weights import load_weights, save_weights
from wball.training.config import OWN, Optimisation, TrainConfig
from wball.training.losses import Loss, Radii, measure
from wball.training.source import TrainingImages
from wball.training.state import (
    Average,
    World,
    current,
    generator,
    load_state,
    pack_optimizer,
    unpack_optimizer,
    write_metrics,
)
from wball.training.step import Augmentation, TrainingStep
from wball.zoo.architectures import build_model

Record = Plain

SAVED = ("step", "images", "seconds", "history")
"""Attributes of a run in its checkpoint."""
IDENTITY = {"data": "data", "init": "init", "own": "optimizer, augmentations or loss"}
"""Those that must be the same in a run that resumes, and their names in messages."""

CHECKPOINT_SHARE = 0.02
"""Largest share of the time spent on checkpoints, if ``checkpoint_every`` is ``None``."""
QUEUED = 8
"""Steps between synchronisations with the GPU under a time limit."""


@dataclass(frozen=True, repr=False)
class TrainResult(Summarised):
    """The result of a training run.

    Attributes:
        model: in evaluation mode, with averaged weights if the run averages them.
        history: one record per epoch, as in ``metrics.jsonl``.
        card: the settings and the last measurements, as in ``NAME.json``.
    """

    model: nn.Module
    history: list[Record]
    card: Plain

    def headline(self) -> dict[str, str]:
        return {"model": type(self.model).__name__, "epochs": str(len(self.history))}


@torch.inference_mode(False)
@torch.enable_grad()
def train(
    config: TrainConfig,
    data: Any,
    test: Any = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    init: PathLike | None = None,
    teacher: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    augmentations: Sequence[Augmentation] = (),
    loss: Loss | None = None,
    out: PathLike | None = None,
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
        data: training images and labels: ``(x, y)``, a ``Dataset`` or a ``DataLoader``. A data set
            of more than a gigabyte is read batch by batch; anything else is read once and kept on
            the device in the model's precision.
        test: test images and labels; without them nothing is measured.
        model: the network to train, in place, or a function that builds it, which is called with
            ``config.seed`` set (default: a fresh ``config.architecture``, seeded).
        init: file of weights to fine-tune; any file that :func:`wball.load_weights` reads.
        teacher: a trained network for soft labels (``config.loss.teacher``).
        optimizer: a function from parameters to an optimizer, such as
            ``lambda p: torch.optim.Adam(p, 1e-3)``; its learning rates follow the schedule.
        augmentations: functions ``(images, generator) -> images``, after those of the settings.
        loss: a function ``(network, x, z, y, progress) -> (loss, logits)`` of clean and training
            images, their labels and the completed share of the run, such as TRADES.
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
    world, device, folder = current(), torch.device(device), _folder(config, out)
    with torch.random.fork_rng(devices=[]):
        # A loader that shuffles yields the same order in each process and after each restart.
        torch.default_generator.manual_seed(config.seed)
        images = TrainingImages(data, device)
        tests = None if test is None else TrainingImages(test, device)
    network = _start(config, model, init, device)
    images.fit("data", network)
    measured = None if tests is None else tests.fit("test", network).whole()
    if world.size > 1 and device.type == "cuda":
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    step = TrainingStep(config, network, images, teacher, augmentations, loss)
    run = _Run(config, network, len(images), folder, world, checkpoint_every, time_limit, optimizer)
    run.init = None if init is None else Path(init).name
    run.own = describe_settings([optimizer, list(augmentations), loss])
    with (
        _tf32(device),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        run.opened(images),
        run.stopping(),
        _bar(progress, world.main, config, run.per_epoch) as tick,
    ):
        while not run.finished:
            _epoch(run, step, tick)
            run.end_epoch(measured, on_epoch)
    return _finished(run)


def _folder(config: TrainConfig, out: PathLike | None) -> Path | None:
    """The folder ``out``, in which all files of a run can be written."""
    if out is None:
        return None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out must be a folder, but {folder} is a file")
    for name in (f"{config.name}.safetensors", f"{config.name}.json", "checkpoint.safetensors"):
        check_file(folder / name)
    return folder


def _epoch(run: _Run, step: TrainingStep, tick: Callable[[int], None]) -> None:
    """The steps of an epoch that are left."""
    size, seed, device = run.config.batch_size, run.config.seed, run.totals.device
    epoch, first = divmod(run.step, run.per_epoch)
    order = torch.randperm(len(step.images), generator=generator(seed, "order", epoch)).to(device)
    run.model.train()
    for batch in range(first, run.per_epoch):
        elapsed = run.progress()
        _seed(generator(seed, f"network-{run.world.rank}", run.step).initial_seed(), device)
        index = order[batch * size : (batch + 1) * size]
        loss, right, count = step(index, run.step, elapsed, run.radii)
        run.update(loss, elapsed)
        run.count(loss.detach(), right, count)
        tick(run.step)
        if run.finished:
            return
        if batch + 1 < run.per_epoch:
            run.checkpoint()


def _finished(run: _Run) -> TrainResult:
    """The result of a run that is over, after writing its files."""
    config, average = run.config, run.average
    accuracy = run.history[-1]["train_accuracy"]
    if run.step < run.total and accuracy < 0.5:
        warnings.warn(
            f"time_limit ended training at step {run.step} of {run.total} with a training accuracy "
            f"of {100 * accuracy:.0f} %: raise time_limit",
            stacklevel=5,
        )
    average.model.eval()
    for mine, theirs in zip(average.model.parameters(), run.model.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)  # so that averages can be trained further
    card = run.card()
    if run.folder is not None and run.world.main:
        save_weights(average.model, run.folder / f"{config.name}.safetensors")
        text = json.dumps(card, indent=2) + "\n"
        write_whole(run.folder / f"{config.name}.json", text.encode())
    run.world.wait()
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
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
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
        build = partial(_optimizer, options=config.optimisation) if optimizer is None else optimizer
        self.optimizer = build(model.parameters())
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.radii = None if schedule is None else Radii(schedule, images, device)
        self.step, self.images, self.seconds, self.stop = 0, 0, 0.0, False
        self.history: list[Record] = []
        self.data: Plain = {}
        self.init: str | None = None
        self.own: Any = None
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
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

    def update(self, loss: Tensor, elapsed: float) -> None:
        """Change the weights along the gradient of the loss, at the rate of the schedule."""
        options = self.config.optimisation
        share = options.lr_at(elapsed, self.config.epochs) / options.lr
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if options.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.average.update()

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
        self, tests: tuple[Tensor, Tensor] | None, on_epoch: Callable[[Record], None] | None
    ) -> None:
        """Evaluate the model, log the metrics and save a checkpoint."""
        (loss, right), images = self.totals.tolist(), self.images
        epoch = math.ceil(self.step / self.per_epoch)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} in epoch {epoch}: training diverged. Lower optimisation.lr (it is "
                f"{self.config.optimisation.lr:g}) or set optimisation.clip, and begin in another folder"
            )
        self.totals.zero_()
        self.images = 0
        self.progress()  # after reading the totals, which waits for the GPU
        # Statistics differ between processes: evaluate those that are saved.
        self.world.spread(self.average.model.buffers())
        record: Record = {
            "epoch": epoch,
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss": loss / images,
            "train_accuracy": right / images,
        }
        if tests is not None and (self.finished or epoch % self.config.evaluation.every == 0):
            self.average.model.eval()
            with full_precision():  # measure the network that is saved
                record |= measure(self.config, self.average.model, *tests)
            self._tick = time.perf_counter()  # evaluation does not count
        if self.radii is not None and self.radii.values.numel():
            record["mean_radius"] = float(self.radii.values.mean())
        self.history.append(record)
        if self.folder is not None and self.world.main:
            write_metrics(self.folder, self.history)
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
        header = {name: getattr(self, name) for name in (*SAVED, *IDENTITY)}
        header |= {"config": describe_settings(self.config), "torch": torch.__version__}
        write_tensors(path, tensors, {**header, "averaged": self.average.count})

    def restore(self, images: TrainingImages) -> None:
        """Resume from the checkpoint in the folder, if there is one; open the log."""
        # Labels identify the data: images are many bytes, and their last bits depend on the device.
        self.data = {
            "images": len(images),
            "shape": list(images.first.shape[1:]),
            "labels": zlib.crc32(images.labels.cpu().numpy().tobytes()),
        }
        path = None if self.folder is None else self.folder / "checkpoint.safetensors"
        found: tuple[Tensors, Any] | None = None
        if path is not None and self.world.main and path.is_file():
            found = load_state(path)
        found = self.world.agreed(found)
        if found is not None:
            self._resume(found[0], found[1], str(path))
        if self.folder is not None and self.world.main:
            clear_parts(self.folder)
            write_metrics(self.folder, self.history)
        self._tick = time.perf_counter()
        self.progress()

    def _resume(self, tensors: Tensors, header: Any, path: str) -> None:
        _check_same(header["config"], describe_settings(self.config), path)
        self.init = self.init or header["init"]
        for name, title in IDENTITY.items():
            _check_same(header[name], getattr(self, name), path, title)
        part: dict[str, Tensors] = {"model": {}, "average": {}, "optimizer": {}}
        for key, value in tensors.items():
            prefix, _, name = key.partition(".")
            part.setdefault(prefix, {})[name] = value
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
        self.average.count = header["averaged"]
        for name in SAVED:
            setattr(self, name, header[name])

    def card(self) -> Plain:
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
                **({} if self.init is None else {"init": self.init}),
                "steps": self.step,
                "seconds": round(self.seconds, 1),
                "processes": self.world.size,
                "torch": torch.__version__,
            },
        }

    # ---- start and end

    @contextmanager
    def opened(self, images: TrainingImages) -> Iterator[None]:
        """Lock the folder for this run and resume from it."""
        with locked(self.folder) if self.folder is not None and self.world.main else nullcontext():
            self.restore(images)
            yield

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
    init: PathLike | None,
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


def _seed(number: int, device: torch.device) -> None:
    """Seed random layers such as dropout, so that a repeated step draws the same numbers."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def _optimizer(parameters: Iterable[nn.Parameter], options: Optimisation) -> torch.optim.Optimizer:
    """The optimizer of the settings."""
    weights = list(parameters)
    shared: Plain = {"lr": options.lr, "weight_decay": options.weight_decay}
    shared["fused"] = weights[0].is_cuda  # one launch for all parameters
    if options.method == "adamw":
        return torch.optim.AdamW(weights, **shared)
    return torch.optim.SGD(weights, momentum=0.9, nesterov=options.nesterov, **shared)


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    """Context in which float32 products on a GPU may round to TF32."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn  # its own context manager would also switch it off
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


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
