"""What a run shows while it learns: TensorBoard, Weights and Biases, means of what is logged, progress bars."""

import contextlib
import functools
import sys
import threading
import time
from dataclasses import asdict

import torch
from tqdm import tqdm

from training import files
from training.files import print_safely

RETRY = 60.0  # seconds until a file that could not be written is tried again
BAR_INTERVAL, LINE_INTERVAL = 0.1, 3.0  # seconds between two states of a progress bar, and between lines in a file


class Metrics:
    """Means of named values over the updates since the last log, kept on the device so that nothing waits for them."""

    def __init__(self, device):
        self.device = device
        self.shapes = {}

    def add(self, values):
        """Adds a dictionary of tensors, always of the same names; returns whether all are finite (a tensor).

        Values of an update that is not finite are not counted.
        """
        if not self.shapes:
            self.shapes = {name: value.shape for name, value in values.items()}
            self.one = torch.ones(1, device=self.device)  # sums up to the number of updates
            size = sum(shape.numel() for shape in self.shapes.values())
            self.sums = torch.zeros(size + 1, device=self.device)
            self.errors = torch.zeros(size, device=self.device)
        flat = torch.cat([*(value.detach().flatten() for value in values.values()), self.one])
        errors = flat - flat  # nan where a value is not finite, else 0
        self.errors += errors[:-1]
        finite = (errors == 0).all()
        self.sums += torch.where(finite, flat, 0.0)
        return finite

    def check_finite(self):
        """Raises a FloatingPointError if a value was not finite."""
        if not self.shapes:
            return
        for name, errors in self._split(self.errors.cpu()).items():
            if errors.isnan().any():
                raise FloatingPointError(f"{name} was not finite")

    def pop(self):
        """The means since the last call: name -> number, or a tensor where it has several."""
        self.check_finite()
        *sums, count = self.sums.tolist() if self.shapes else [0]
        if not count:
            return {}
        self.sums.zero_()
        means = self._split(torch.tensor(sums) / count)
        return {name: value if value.dim() else value.item() for name, value in means.items()}

    def _split(self, flat):
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}


# ---- progress ----
class Progress:
    """How far something is, in steps, updates, ...: a bar in a terminal, elsewhere a line every few seconds."""

    started = time.monotonic()  # of the command; a resumed run sets it back by what it has run before

    def __init__(self, what, total, unit, done=0):
        self.what, self.total, self.unit, self.first, self.done, self.numbers = what, total, unit, done, done, ""
        self.began = self.shown_at = self.reached_at = time.monotonic()
        form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} " + unit + " [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(total=total, initial=done, desc=what, unit_scale=True, bar_format=form, leave=False,
                        disable=not sys.stderr.isatty(), mininterval=0)  # fmt: skip
        self.in_terminal, self.close = not self.bar.disable, self.bar.close

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()
        if kind is None and self.done > self.first:
            seconds = time.monotonic() - self.began
            print_safely(
                f"{self.what}{self.total:,} {self.unit}, {duration(seconds)}{self.numbers and ': '}{self.numbers}"
            )

    def show(self, done, numbers=None, now=False):
        """Shows that so much is done, and some numbers: `now`, or if that was some time ago."""
        if done > self.done:
            self.reached_at = time.monotonic()
        self.done, self.numbers = min(done, self.total), self.numbers if numbers is None else numbers
        if time.monotonic() - self.shown_at < (BAR_INTERVAL if self.in_terminal else LINE_INTERVAL) and not now:
            return
        self.shown_at = time.monotonic()
        if not self.in_terminal:
            print_safely(f"{time.monotonic() - self.started:7.1f} s  {self.line()}")
        else:
            self.bar.n = self.done
            self.bar.set_postfix_str(self.numbers)

    def line(self):
        text = f"{self.what}{int(self.done):,} of {self.total:,} {self.unit} ({self.done / self.total:.0%})"
        if self.done > self.first:
            left = (self.total - self.done) * (self.reached_at - self.began) / (self.done - self.first)
            text += f", {duration(max(left - (time.monotonic() - self.reached_at), 0))} left"
        return f"{text}: {self.numbers}" if self.numbers else text


def monotonic(started):
    """When it was by the monotonic clock, which nobody sets, that time.time() was `started`."""
    return time.monotonic() - max(time.time() - started, 0.0)


def duration(seconds):
    """Roughly, in the largest unit that fits: 42 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class Log:
    """TensorBoard's writer, mirrored by Weights and Biases with --track. What cannot be written is left out."""

    wandb = None

    def __init__(self, args, folder, purge_step=None, rows_before=0):
        if args.track:
            import wandb

            self.wandb = wandb
            names = {"name": folder.name, "id": folder.name, "resume": "allow"}
            project = {"project": args.wandb_project_name, "entity": args.wandb_entity, "group": args.wandb_group}
            run = wandb.init(**names, **project, config=asdict(args), save_code=True)
            run.define_metric("*", step_metric="steps")
            run.define_metric("pretrain/*", step_metric="pretrain/update")
            for key in ("eval/win_rate", "eval/episodic_return"):
                run.define_metric(key, step_metric="steps", summary="max")
        self.folder = folder
        self.rows_before = rows_before  # the first step: rows of pre-training
        self.writer = None
        self.failed = False
        self.retry_at = 0.0
        threading.excepthook = functools.partial(_ignore_log_threads, default=threading.excepthook)
        rows = "\n".join(f"|{key}|{value}|" for key, value in asdict(args).items())
        text = f"|param|value|\n|-|-|\n{rows}"
        self._write(lambda writer: writer.add_text("hyperparameters", text), purge_step)

    def add_scalar(self, key, value, step):
        self._write(lambda writer: writer.add_scalar(key, value, step))
        self._mirror(key, step, lambda wandb: float(value))

    def add_histogram(self, key, values, step):
        self._write(lambda writer: writer.add_histogram(key, values, step))
        self._mirror(key, step, lambda wandb: wandb.Histogram(values.tolist()))

    def add_image(self, key, image, step):
        """A picture (height, width, 3)."""
        self._write(lambda writer: writer.add_image(key, image, step, dataformats="HWC"))
        self._mirror(key, step, lambda wandb: wandb.Image(image))

    def add_gif(self, key, path, step):
        """The file as it is: TensorBoard shows it among the images, moving."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(colorspace=3, encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag=key, image=image)])
        self._write(lambda writer: writer.file_writer.add_summary(summary, step))
        self._mirror(key, step, lambda wandb: wandb.Video(str(path), format="gif"))

    def add_hparams(self, args, keys):
        """The arguments beside the last values of these keys, for TensorBoard's HParams; wandb has both anyway."""
        from torch.utils.tensorboard.summary import hparams

        plain = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in args.items()}
        summaries = hparams(plain, dict.fromkeys(keys, 0.0))
        self._write(lambda writer: [writer.file_writer.add_summary(summary) for summary in summaries])

    def _mirror(self, key, step, content):
        """Rows have numbers of ours: wandb's own would start at 0 again in a run that goes on offline."""
        if self.wandb is None:
            return
        pretraining = key.startswith("pretrain/")
        place = {"pretrain/update": step} if pretraining else {"steps": step}
        row = step if pretraining else self.rows_before + step
        self.wandb.log({key: content(self.wandb), **place}, step=row)

    def _write(self, write, purge_step=None):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        if time.monotonic() < self.retry_at:
            return
        try:
            if self.writer is None:
                self.writer = SummaryWriter(self.folder, purge_step=purge_step)
            write(self.writer)
            self.failed = False
        except OSError as error:
            self.writer = None  # its thread has ended; a later call opens a new file
            self.retry_at = time.monotonic() + RETRY
            if not self.failed:
                files.warn(f"{files.reason(error)}: the log is not written; the run goes on")
            self.failed = True
            for path in self.folder.glob("events.out.*"):
                if path.stat().st_size == 0:
                    path.unlink()

    def close(self):
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()


def _ignore_log_threads(args, default):
    """TensorBoard writes in a thread; its error is reported by the next call."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        default(args)
